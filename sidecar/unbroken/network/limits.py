"""Limits on peers: rates of messages and of wrong tokens, and connections that show no token."""

from collections.abc import Callable, Collection
from typing import Protocol

from unbroken.network.refusals import Refusal, Refusals

MESSAGES_PER_S = 200.0
"""Per agent, on average: 64 workers that all change three times a second."""
MESSAGES_AT_ONCE = 1000.0
FAILURES_PER_S = 5.0
"""Answers to one address with a wrong token; beyond them the connection is cut without an answer."""
FAILURES_AT_ONCE = 50.0
TOKEN_TIMEOUT_S = 15.0
"""A connection that shows no token in this time is closed. A loaded rendezvous may take seconds to look at it."""
_MAX_ADDRESSES = 1024


class Budget:
    """A token bucket: so many at once, and so many per second on average."""

    __slots__ = ("_at_s", "_burst", "_left", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one; return the seconds to wait for it, 0 for none."""
        self._left = min(self._left + (now_s - self._at_s) * self._rate_per_s, self._burst) - 1.0
        self._at_s = now_s
        return 0.0 if self._left >= 0 else -self._left / self._rate_per_s

    def give_back(self) -> None:
        """Give the last one back."""
        self._left += 1.0


class FailureRate:
    """Decides which addresses still get an answer to a wrong token. Remembers a limited number of them."""

    def __init__(self) -> None:
        self._budgets: dict[str, Budget] = {}

    def may_answer(self, address: str, now_s: float) -> bool:
        """Return whether this failure is answered."""
        budget = self._budgets.get(address)
        if budget is None:
            if len(self._budgets) >= _MAX_ADDRESSES:
                self._budgets.clear()
            budget = self._budgets[address] = Budget(FAILURES_PER_S, FAILURES_AT_ONCE, now_s)
        if budget.take(now_s) == 0:
            return True
        budget.give_back()  # Who goes on does not have to wait ever longer.
        return False


class HttpConnection(Protocol):
    """A connection of the HTTP server."""

    def force_close(self) -> None:
        """Close it at once."""


class UnauthenticatedConnections:
    """Closes connections that show no token in time, the oldest first when there are too many."""

    def __init__(self, connections: Callable[[], Collection[HttpConnection]], refusals: Refusals, limit: int) -> None:
        """`connections` returns those that are open; at most `limit` of them may be without a token."""
        self._connections = connections
        self._refusals = refusals
        self._limit = limit
        self._known: set[HttpConnection] = set()
        self._came_s: dict[HttpConnection, float] = {}

    def admit(self, connection: HttpConnection) -> None:
        """Note that a connection has shown the token."""
        self._known.add(connection)

    def sweep(self, now_s: float) -> None:
        """Check all connections; call it every second."""
        connections = self._connections()
        self._known.intersection_update(connections)
        self._came_s = {one: self._came_s.get(one, now_s) for one in connections if one not in self._known}
        num_excess = len(self._came_s) - self._limit
        for number, (one, came_s) in enumerate(sorted(self._came_s.items(), key=lambda item: item[1])):
            if number < num_excess:
                self._refusals.note(Refusal.TOO_MANY, "strangers", f"want {self._limit} at most", now_s)
            elif now_s - came_s >= TOKEN_TIMEOUT_S:
                self._refusals.note(Refusal.SILENT, "a stranger", f"want a token within {TOKEN_TIMEOUT_S:g} s", now_s)
            else:
                break
            one.force_close()
