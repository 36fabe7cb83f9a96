"""Places for calls to the API server, shared by namespaces: who asks for many waits for its own calls.

A place that gets free goes to the namespace that has the fewest, and among equals to the one that was served least
recently. The principle is that of fair queuing in the API server itself (API Priority and Fairness, KEP-1040).
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator


class FairGate:
    """Of one event loop."""

    def __init__(self, num_places: int, most_of_one: int) -> None:
        """At most `most_of_one` of the places are given to one tenant at a time."""
        self._free = num_places
        self._most = most_of_one
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the one that was served least recently first."""

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place."""
        await self._enter(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _enter(self, tenant: str) -> None:
        if self._free and self._held[tenant] < self._most and tenant not in self._waiting:
            return self._give(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave(tenant)  # The place came at the same moment.
            raise

    def _give(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _leave(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        while self._free:
            able = [name for name in self._waiting if self._held[name] < self._most]
            if not able:
                return
            chosen = min(able, key=self._held.__getitem__)
            queue = self._waiting.pop(chosen)
            turn = queue.popleft()
            if queue:
                self._waiting[chosen] = queue
            if not turn.cancelled():
                self._give(chosen)
                turn.set_result(None)
