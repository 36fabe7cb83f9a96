"""What one worker knows when it answers for all: which workers there are, and the keys of each.

It takes the store's place in the ctx: steps that would ask other ranks ask it instead.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from unbroken.inprocess.state import FrozenState, State

Made = TypeVar("Made")


class NotSentError(BaseException):
    """A rank's state is wanted that its own steps have not sent yet: they are taken again when all have had a turn.

    No Exception: a policy's own handler must not take it for a store that fails.
    """


def refuse_other_than_state(state: object) -> None:
    """Raises TypeError for what is sent as a state and is none."""
    if not isinstance(state, (State, FrozenState)):
        raise TypeError(f"send_state: want a State, such as ctx.state, got {type(state).__name__}: {state!r:.60}")


class RollCall:
    """Stands in for a store. Workers are numbered; `gather` sets the present rank of each."""

    def __init__(
        self, num_active: int, said: Mapping[int, tuple[str, ...]], num_keys: Sequence[tuple[object, int]]
    ) -> None:
        """`said`: by worker, the keys of all steps in a row.

        `num_keys` says how many are whose, in that order. Those of a lost worker may be missing.
        """
        self.num_active = num_active
        """Workers 0 to num_active - 1 were active, each as the rank of its number."""
        self._said = said
        self._columns: dict[int, slice] = {}
        self._num_keys = 0
        for step, count in num_keys:
            self._columns[id(step)] = slice(self._num_keys, self._num_keys + count)
            self._num_keys += count
        self._numbers: Mapping[int, int] = {}
        self._made: dict[tuple[int, frozenset[int]], Any] = {}
        self._states: dict[int, State] = {}
        self.step: object = None
        """The step that is being evaluated."""

    def gather(self, numbers: Mapping[int, int]) -> None:
        """Set the number of each remaining rank; forget earlier results."""
        self._numbers = numbers
        self._made = {}
        self._states = {}

    @property
    def num_sent(self) -> int:
        """Number of ranks whose state was sent since the last `gather`."""
        return len(self._states)

    def send_state(self, state: State, rank: int) -> None:
        """Publish the state of a rank, as it is now. Raises TypeError for what is no state."""
        refuse_other_than_state(state)
        self._states[rank] = replace(state, fn_exception=None)

    def get_states(self, ranks: Iterable[int]) -> list[State]:
        """Return copies of the states that these ranks have sent."""
        wanted = list(ranks)
        missing = [rank for rank in wanted if rank not in self._states]
        if missing:
            raise NotSentError(f"get_states: want the states of all, got none from ranks {missing[:20]}")
        return [replace(self._states[rank]) for rank in wanted]

    def send_key(self, key: object, rank: int) -> None:
        """Do nothing: each worker has sent its own key before the first plan, where it runs."""

    def get_keys(self, ranks: Iterable[int]) -> list[Any]:
        """Return the keys that these ranks have sent by `send_key` in the present step."""
        column = self._column_of(self.step)
        wanted = list(ranks)
        unknown = [rank for rank in wanted if rank not in self._numbers]
        if unknown:
            raise ValueError(f"get_keys: want ranks that are left, got {unknown[:20]}")
        return [json.loads(self._said_by(self._numbers[rank], column)[0]) for rank in wanted]

    def keys_of_healthy(self, step: object, terminated: Collection[int]) -> dict[int, tuple[str, ...]]:
        """Return the keys of a step by rank, without the terminated ranks. Raises ValueError where one is missing."""
        column = self._column_of(step)
        return {rank: self._said_by(number, column) for rank, number in self._numbers.items() if rank not in terminated}

    def keys_of_all(
        self, step: object, num_workers: int, terminated: Collection[int]
    ) -> dict[int, tuple[str, ...] | None]:
        """Return the keys of a step by worker; None for a terminated worker whose keys are unknown.

        Raises ValueError where those of a healthy one are missing.
        """
        column = self._column_of(step)
        return {
            number: None if number in terminated and not self._said.get(number) else self._said_by(number, column)
            for number in range(num_workers)
        }

    def once(self, step: object, terminated: Collection[int], make: Callable[[], Made]) -> Made:
        """Return a step's result for all ranks: computed for the first caller, the same for all others."""
        place = (id(step), frozenset(terminated))
        if place not in self._made:
            self._made[place] = make()
        made: Made = self._made[place]
        return made

    def _column_of(self, step: object) -> slice:
        column = self._columns.get(id(step))
        if column is None:
            raise ValueError(
                f"{type(step).__name__} must be a step of rank_assignment itself, so that each worker can send its "
                "keys at the start; it is inside another step"
            )
        return column

    def _said_by(self, number: int, column: slice) -> tuple[str, ...]:
        said = self._said.get(number, ())
        if len(said) != self._num_keys:
            raise ValueError(f"want {self._num_keys} keys from each worker, got {list(said)} from worker {number}")
        return said[column]

    def __getattr__(self, name: str) -> NoReturn:
        """Explain to a step that wants to reach other ranks why there is no store."""
        raise AttributeError(
            f"ctx.store.{name}: one worker answers for all, so there is no store; "
            "the answer must depend on the ctx alone, on states (send_state, get_states) and keys (send_key, get_keys)"
        )
