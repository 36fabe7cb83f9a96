"""The listening socket that a worker binds before it reports READY, and the store that active rank 0 serves from it."""

import datetime
import socket
from typing import Any

BACKLOG = 4096
"""Backlog for ranks that connect before rank 0 serves; the kernel caps it at net.core.somaxconn."""

NUM_ABOVE = 2
"""Ports above the endpoint's that are kept free: scripts make stores of their own on MASTER_PORT + 1 and + 2."""

_ATTEMPTS = 20

STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Endpoint:
    """A socket on a port that the system chose: iterations and workers cannot collide."""

    def __init__(self, host: str) -> None:
        """Bind and listen. Raises OSError when the address is not this host's."""
        self._socket, self._above = _bind_with_room(host)
        try:
            self._socket.listen(BACKLOG)
        except OSError:
            self.forget()
            raise
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._store: Any = None

    def serve(self, timeout: datetime.timedelta = STORE_TIMEOUT) -> None:
        """Start a TCPStore on the socket, which it owns from now on; harmless when repeated."""
        if self._store is not None:
            return
        import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

        self._store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not export it by name
            self.host,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> list[Any]:
        """Close the socket, or hand over the store that owns it: dropping a store waits for its thread.

        From now on the script may bind the ports above.
        """
        self.forget()
        store, self._store = self._store, None
        return [] if store is None else [store]

    def forget(self) -> None:
        """Close the socket in a forked child; a store is kept, as its thread does not exist there to be joined."""
        self._socket.close()
        for kept in self._above:
            kept.close()


def _bind_with_room(host: str) -> tuple[socket.socket, list[socket.socket]]:
    """Return a bound socket, and those that keep the ports above it from others until the script takes them.

    Where the system has no such ports, none are kept. Raises OSError when the address is not this host's.
    """
    found = _bind(host, 0)
    for _ in range(_ATTEMPTS):
        above: list[socket.socket] = []
        try:
            for number in range(1, NUM_ABOVE + 1):
                above.append(_bind(host, int(found.getsockname()[1]) + number))
            return found, above
        except (OSError, OverflowError):
            for kept in above:
                kept.close()
        # The next one is bound first: the system would choose the same port again.
        other = _bind(host, 0)
        found.close()
        found = other
    return found, []


def _bind(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind((host, port))
    except (OSError, OverflowError):
        made.close()
        raise
    return made
