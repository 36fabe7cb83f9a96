"""Pure: which connections without a token may stay. An address that holds most loses first, so that none can fill all.

newcomer ──room left──────────────────────────────> stays
    │ full
    ├──another address holds more than its own────> stays; the oldest of that address goes
    ├──the oldest of its own address is past YOUNG_S, or of all if it has none──> stays; that one goes
    └──otherwise──────────────────────────────────> is refused
"""

from typing import Generic, TypeVar

K = TypeVar("K")
YOUNG_S = 1.0
"""An honest connection shows its token in less: displacing younger ones would let a rush of agents end each other."""


class Strangers(Generic[K]):
    """Connections that have not shown a token yet, by address; at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._came: dict[K, tuple[str, float]] = {}
        """Address and time of arrival, oldest first."""
        self._by_address: dict[str, dict[K, None]] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._came)

    def add(self, newcomer: K, address: str, now_s: float) -> K | None:
        """Take a newcomer; return which connection must go for it: another one, itself, or None for none."""
        loser = self._loser(newcomer, address, now_s) if len(self._came) >= self._limit else None
        if loser is not None:
            self.remove(loser)
        if loser != newcomer:
            self._came[newcomer] = (address, now_s)
            self._by_address.setdefault(address, {})[newcomer] = None
        return loser

    def remove(self, one: K) -> None:
        """Forget one that has ended or shown its token; harmless when repeated."""
        address, _ = self._came.pop(one, ("", 0.0))
        own = self._by_address.get(address)
        if own is not None:
            own.pop(one, None)
            if not own:
                del self._by_address[address]

    def oldest(self) -> K | None:
        """Return the oldest one of the address that holds most; None if there is none."""
        return next(iter(self._heaviest()), None)

    def _heaviest(self) -> dict[K, None]:
        return max(self._by_address.values(), key=len, default={})

    def _loser(self, newcomer: K, address: str, now_s: float) -> K:
        own = self._by_address.get(address, {})
        heaviest = self._heaviest()
        if len(heaviest) > max(len(own), 1):
            return next(iter(heaviest))
        oldest = next(iter(own or self._came), newcomer)
        is_old = oldest in self._came and now_s - self._came[oldest][1] >= YOUNG_S
        return oldest if is_old else newcomer
