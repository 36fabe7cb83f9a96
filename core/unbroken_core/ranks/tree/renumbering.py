"""Renumbering without a tree: what the steps of `unbroken.inprocess.rank_assignment` but `Tree` compute.

Each worker can evaluate them for itself: the result depends on the arguments only, never on the order of a set.
"""

from bisect import bisect_left
from collections.abc import Collection


def shift_rank(rank: int, terminated: Collection[int]) -> int | None:
    """Return the rank after all terminated ranks have left: the order is kept, gaps are closed; None if it left itself.

    ShiftRanks: 8 ranks that lose {1, 4, 5} become 0, None, 1, 2, None, None, 3, 4.
    """
    if rank in terminated:
        return None
    return rank - bisect_left(sorted(set(terminated)), rank)


def fill_gap_rank(rank: int, world_size: int, terminated: Collection[int]) -> int | None:
    """Return the rank after all terminated ranks have left: the highest fill the gaps; None if it left itself.

    FillGaps: survivors at or above the new world size move, in ascending order, into the gaps below it: 8 ranks that
    lose {1, 4, 5} become 0, None, 2, 3, None, None, 1, 4.
    """
    if rank in terminated:
        return None
    lost = sorted(set(terminated))
    new_size = world_size - len(lost)
    if rank < new_size:
        return rank
    # There are as many gaps below the new size as survivors at or above it, which this one is the n-th of.
    num_lost_between = bisect_left(lost, rank) - bisect_left(lost, new_size)
    return lost[rank - new_size - num_lost_between]


def shifted_ranks(world_size: int, terminated: Collection[int]) -> list[int]:
    """Return the previous rank of each rank after `shift_rank` of all."""
    lost = set(terminated)
    return [rank for rank in range(world_size) if rank not in lost]


def filled_ranks(world_size: int, terminated: Collection[int]) -> list[int]:
    """Return the previous rank of each rank after `fill_gap_rank` of all."""
    lost = set(terminated)
    new_size = world_size - len(lost)
    movers = (rank for rank in range(new_size, world_size) if rank not in lost)
    return [next(movers) if rank in lost else rank for rank in range(new_size)]


def max_active_world_size(world_size: int, active_world_size: int | None, limit: int | None) -> int:
    """Return the number of active ranks under a limit (None: without limit); never more than were active before."""
    base = _base(world_size, active_world_size)
    return base if limit is None else min(base, limit)


def divisible_active_world_size(world_size: int, active_world_size: int | None, divisor: int) -> int:
    """Return the largest multiple of `divisor` (at least 1) that is no more than were active before; 0 is possible."""
    base = _base(world_size, active_world_size)
    return base - base % divisor


def active_rank(rank: int, active_world_size: int) -> int | None:
    """Return what the rank is for the training function; None for a spare."""
    return rank if rank < active_world_size else None


def _base(world_size: int, active_world_size: int | None) -> int:
    return world_size if active_world_size is None else min(active_world_size, world_size)
