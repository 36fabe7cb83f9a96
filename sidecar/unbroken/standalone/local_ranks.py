"""Local ranks of one host's workers. Pure."""

from collections.abc import Mapping


def local_places(local_ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the local rank of each worker of one host, by its rank in the environment.

    `local_ranks` is what the environment says, -1 where it says nothing. It is kept where it tells the workers apart
    (a script has chosen its device by it); else the workers are counted in the order of their ranks.
    """
    waiting_for = list(local_ranks.values())
    if min(waiting_for, default=0) >= 0 and len(set(waiting_for)) == len(waiting_for):
        return dict(local_ranks)
    return {rank: index for index, rank in enumerate(sorted(local_ranks))}
