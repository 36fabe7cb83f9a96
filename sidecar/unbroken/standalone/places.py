"""Which place in its pod a worker gets. Pure."""

from collections.abc import Mapping


def local_places(local_ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the local rank by rank of the environment, of the workers of one host.

    `local_ranks` is what the environment says, -1 where it says nothing. It is kept where it tells the workers apart
    (a script has chosen its device by it); else the workers are counted in the order of their ranks.
    """
    said = list(local_ranks.values())
    if min(said, default=0) >= 0 and len(set(said)) == len(said):
        return dict(local_ranks)
    return {rank: index for index, rank in enumerate(sorted(local_ranks))}
