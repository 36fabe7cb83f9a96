"""What one worker knows when it answers for all: which workers there are, and the keys of each.

It takes the store's place in the ctx: steps that would ask other ranks ask it instead.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

Made = TypeVar("Made")


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

    def gather(self, numbers: Mapping[int, int]) -> None:
        """Set the number of each remaining rank; forget earlier results."""
        self._numbers = numbers
        self._made = {}

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
            "the answer must depend on the ctx alone"
        )
