"""All ranks of a job, each with a policy and a thread of its own, on one store: as the reference runs them."""

import datetime
import threading
from collections.abc import Callable, Set
from typing import Any

from unbroken.inprocess.rank_assignment import RankAssignmentCtx
from unbroken.inprocess.state import State


class MemoryStore:
    """A store as torch.distributed has them, in memory; `num_reads` counts what it was asked for."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self.num_reads = 0

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self._changed:
            self.num_reads += 1
            return self._values[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])

    def check(self, keys: list[str], /) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")


class Job:
    """All ranks of a job, each with a policy and a thread of its own, on one store."""

    def __init__(self, num_ranks: int, policy: Callable[[], Callable[[RankAssignmentCtx], RankAssignmentCtx]]) -> None:
        self.states: dict[int, State] = {rank: State(rank, num_ranks) for rank in range(num_ranks)}
        self.policies = {rank: policy() for rank in range(num_ranks)}
        self.errors: dict[int, BaseException] = {}
        self.store: Any = MemoryStore()

    def step(self, terminated: Set[int], absent: Set[int] = frozenset()) -> dict[int, RankAssignmentCtx]:
        """Let every rank that is not absent call its policy; those that were discarded leave."""
        done: dict[int, RankAssignmentCtx] = {}

        def call(initial_rank: int) -> None:
            context = RankAssignmentCtx(self.states[initial_rank], self.store, set(terminated))
            try:
                done[initial_rank] = self.policies[initial_rank](context)
            except BaseException as error:
                self.errors[initial_rank] = error

        self.errors = {}
        threads = [threading.Thread(target=call, args=(rank,)) for rank in self.states if rank not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.states = {rank: context.state for rank, context in done.items()}
        return done

    def active_ranks(self, num_ranks: int) -> list[int | None]:
        return [self.states[rank].active_rank if rank in self.states else None for rank in range(num_ranks)]
