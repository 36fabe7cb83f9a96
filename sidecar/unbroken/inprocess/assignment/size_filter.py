"""A script's world size filter, tabulated so that the coordinator can look it up."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_RANKS = 1 << 17
"""Largest size for which the filter is called; its result for this size holds for larger worlds."""
MAX_STEPS = 1024


@dataclass(frozen=True)
class SizeTable:
    """A filter's results: the largest multiple of `divisible_by` up to `max_ranks`, or else steps as in `Policy`."""

    max_ranks: int | None = None
    divisible_by: int = 1
    steps: tuple[tuple[int, int], ...] = ()


NO_FILTER = SizeTable()


def tabulate(size_filter: Callable[[int], int], max_ranks: int = MAX_RANKS) -> SizeTable:
    """Call the filter for each size from 1 to `max_ranks`; takes some 10 ms.

    Raises ValueError that says for which size it raised, or returned more than it got or no number at all, or that it
    has more than MAX_STEPS steps and is not a multiple under a limit.
    """
    sizes = [0, *(_ask(size_filter, size) for size in range(1, max_ranks + 1))]
    largest = max(sizes)
    divisor = next((size for size in range(1, max_ranks + 1) if sizes[size]), 1)
    if largest and all(size == _multiple(number, largest, divisor) for number, size in enumerate(sizes)):
        return SizeTable(None if largest > max_ranks - divisor else largest, divisor)
    steps = tuple((number, sizes[number]) for number in range(1, max_ranks + 1) if sizes[number] != sizes[number - 1])
    if len(steps) > MAX_STEPS:
        raise ValueError(
            f"rank_assignment: Tree: world_size_filter: want the multiples of a number, with or without a limit, or at "
            f"most {MAX_STEPS} different sizes in a row up to {max_ranks} ranks, got {len(steps)}: "
            f"{', '.join(f'{number} -> {size}' for number, size in steps[:4])}, ..."
        )
    # A result of 0 throughout is a step as well: without any step there would be no filter.
    return SizeTable(steps=steps or ((1, 0),))


def _multiple(number: int, limit: int, divisor: int) -> int:
    size = min(number, limit)
    return size - size % divisor


def _ask(size_filter: Callable[[int], int], number: int) -> int:
    where = f"rank_assignment: Tree: world_size_filter({number})"
    try:
        size = size_filter(number)
    except Exception as error:
        raise ValueError(f"{where}: want a size, got {type(error).__name__}: {error}") from error
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= number:
        raise ValueError(f"{where}: want 0 to {number}, got {size!r}")
    return size
