"""Tests of this pod with others: what the launcher says of them, and what it is told. Pure."""

from dataclasses import replace

from unbroken.agent.decisions.events import SendToLauncher
from unbroken_core.pod.pod_messages import EndPairs
from unbroken_core.protocol.messages import PairOrder, PairState


class PairTests:
    """One pod's, as its agent knows them."""

    def __init__(self, host: str) -> None:
        """`host` is the address at which this pod's ports are reached."""
        self._host = host
        self._order: PairOrder | None = None
        """The newest one."""
        self._is_order_due = False
        self._is_end_told = False
        self.state: PairState | None = None
        """What the rendezvous is told; None: this pod knows of no tests."""

    def attach(self) -> None:
        """There is a launcher, which was told nothing by this agent."""
        self._is_end_told = False

    def lose(self) -> None:
        """The launcher has ended."""
        if self.state is not None:
            self.state = replace(self.state, port=0)

    def take(self, said: PairState) -> None:
        """Take what the launcher says. It answers nothing but the order that it was given."""
        order = self._order
        if order is not None and (said.term, said.number) != (order.term, order.number):
            said = PairState(said.port, gpus=said.gpus)
        self.state = replace(said, host=self._host)

    def receive(self, order: PairOrder) -> None:
        """Take an order; one that is not newer than the last changes nothing."""
        last = self._order
        if last is None or (order.term, order.number) > (last.term, last.number):
            self._order, self._is_order_due = order, True

    def settle(self, *, has_launcher: bool, has_ranks: bool) -> list[SendToLauncher]:
        """Return what to tell the launcher. A pod that has ranks tests with nobody, and never again."""
        if self.state is None or not has_launcher:
            return []
        if has_ranks:
            self._is_order_due = False
            if self._is_end_told:
                return []
            self._is_end_told = True
            return [SendToLauncher(EndPairs())]
        if not self._is_order_due or self._order is None:
            return []
        self._is_order_due = False
        return [SendToLauncher(self._order)]
