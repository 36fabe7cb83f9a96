"""FillGaps: the highest ranks move into the gaps; everyone else stays."""

from collections.abc import Collection


def fill_gap_rank(rank: int, world_size: int, terminated: Collection[int]) -> int | None:
    """Return the rank after all terminated ranks have left; None if it left itself.

    Survivors at or above the new world size move, in ascending order, into the gaps below it: 8 ranks that lose
    {1, 4, 5} become 0, None, 2, 3, None, None, 1, 4.
    """
    if rank in terminated:
        return None
    lost = sorted(set(terminated))
    new_size = world_size - len(lost)
    if rank < new_size:
        return rank
    # There are as many gaps below the new size as survivors at or above it, which this one is the n-th of.
    nth = sum(1 for other in range(new_size, rank) if other not in terminated)
    return lost[nth]
