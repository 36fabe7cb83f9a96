"""Exchange between ranks through a store, for steps of rank assignment. Uses only set, get, add, check and wait."""

import datetime
import json
from collections.abc import Collection
from typing import Protocol

from unbroken.inprocess.exception import TimeoutError  # noqa: A004 - the reference's name


class ExchangeStore(Protocol):
    """Any store of torch.distributed, and everything that behaves like one."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits while it is missing."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, 0 at first; return the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        """Wait until all keys are there; raise some error after the timeout."""


class Exchange:
    """Counters, lists and barriers below one prefix of a store."""

    def __init__(self, store: ExchangeStore, prefix: str, timeout: datetime.timedelta) -> None:
        self._store = store
        self._prefix = prefix
        self._timeout = timeout

    def add(self, name: str) -> int:
        """Count one more; return how many there are now."""
        return self._store.add(self._key(name), 1)

    def count(self, name: str) -> int:
        """Return how many were counted."""
        return self._store.add(self._key(name), 0)

    def append(self, name: str, item: str) -> None:
        """Add an item to a list."""
        index = self.add(f"{name}/count")
        self.put(f"{name}/{index}", item)

    def items(self, name: str) -> list[str]:
        """Return the items of a list that are there by now."""
        keys = [f"{name}/{index}" for index in range(1, self.count(f"{name}/count") + 1)]
        return [self.read(key) for key in keys if self.has(key)]

    def put(self, name: str, value: str) -> None:
        """Write a value."""
        self._store.set(self._key(name), value)

    def has(self, name: str) -> bool:
        """Return whether a value is there."""
        return self._store.check([self._key(name)])

    def read(self, name: str) -> str:
        """Return a value that is there."""
        return self._store.get(self._key(name)).decode()

    def wait_for(self, name: str) -> bool:
        """Wait for a value; return whether it came in time."""
        try:
            self._store.wait([self._key(name)], self._timeout)
        except Exception:  # Each kind of store raises a class of its own.
            return self.has(name)
        return True

    def barrier(self, name: str, num_ranks: int) -> None:
        """Wait until so many ranks have come. Raises TimeoutError."""
        if self.add(f"{name}/came") >= num_ranks:
            self.put(f"{name}/open", "1")
        if not self.wait_for(f"{name}/open"):
            seen, seconds = self.count(f"{name}/came"), self._timeout.total_seconds()
            raise TimeoutError(f"barrier {self._prefix}/{name}: want {num_ranks} ranks in {seconds:g} s, got {seen}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def exchange_keys(
    exchange: Exchange, rank: int, keys: list[str], world_size: int, terminated: Collection[int]
) -> dict[int, list[str]]:
    """Publish this rank's keys and return those of all ranks, in ascending order of the ranks.

    The last to come, or the first whose patience ends, reads all keys and publishes them as one value: N ranks cost
    O(N) reads together. A rank that died before it published does not block: it is missing in the result, on all ranks
    alike. Terminated ranks publish if they still run, but no rank waits for them. Raises TimeoutError when the store
    does not answer.
    """
    exchange.put(f"keys/{rank}", json.dumps(keys))
    num_healthy = world_size - len(terminated)
    is_last = rank not in terminated and exchange.add("came") == num_healthy
    if is_last or (not exchange.wait_for("all") and exchange.add("late") == 1):
        names = {other: f"keys/{other}" for other in range(world_size)}
        found = {other: json.loads(exchange.read(name)) for other, name in names.items() if exchange.has(name)}
        # Only one may publish: all ranks must read the same.
        if exchange.add("published") == 1:
            exchange.put("all", json.dumps(found))
    if not exchange.wait_for("all"):
        raise TimeoutError(f"rank {rank}: want the keys of {num_healthy} ranks, got no answer from the store")
    return {int(other): keys for other, keys in json.loads(exchange.read("all")).items()}
