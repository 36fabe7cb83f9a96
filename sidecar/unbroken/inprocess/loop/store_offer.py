"""The address that a worker offers for the next iteration's store, and the store that it serves there."""

from typing import Any

from unbroken.inprocess.connections.endpoint import Endpoint
from unbroken.inprocess.exception import InternalError
from unbroken.inprocess.torch_state.leftovers import Leftovers

_served: list[Any] = []
"""The iteration's store, if this worker serves it. It lives until the next plan, when all ranks have left: a client
that finds no server retries for long. After the last iteration it outlives the call: other ranks may shut down late."""


class StoreOffer:
    """Belongs to one call and its main thread."""

    def __init__(self, address: str, leftovers: Leftovers) -> None:
        """`address`: the numeric address at which other pods reach this one; `leftovers` destroys what was used."""
        self._address = address
        self._leftovers = leftovers
        self.endpoint: Endpoint | None = None
        """None before the first offer, and from the begin of an iteration on."""

    def make(self) -> None:
        """Bind an endpoint, unless there is one."""
        if self.endpoint is None:
            self.endpoint = Endpoint(self._address)

    def renew(self) -> None:
        """Bind another endpoint: other ranks may have sent data of an iteration that is over to this one."""
        self.drop()
        self.make()

    def serve_early(self) -> None:
        """Serve the store before the plan is there."""
        if self.endpoint is not None:
            self.endpoint.serve()

    def enter(self, host: str, port: int) -> None:
        """Serve the store if this worker's endpoint is the one in the plan, and drop the previous one."""
        endpoint = self.endpoint
        if endpoint is None:
            raise InternalError("endpoint: want one that was bound before READY, got none")
        # There is a plan: all ranks have left the previous iteration.
        previous = _served[:]
        _served.clear()
        if (endpoint.host, endpoint.port) == (host, port):
            # First of all: the others wait for it.
            endpoint.serve()
            _served[:] = endpoint.close()
        self.drop()
        self._leftovers.destroy(previous)

    def drop(self) -> None:
        """Close the endpoint, if there is one."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            self._leftovers.destroy(endpoint.close())

    def forget(self) -> None:
        """Leave the parent's endpoint alone in a forked child."""
        if self.endpoint is not None:
            self.endpoint.forget()
