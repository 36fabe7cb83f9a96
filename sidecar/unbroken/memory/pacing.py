"""Which save may take the place of the newest one while the one before it has to stay. Pure.

In a job with copies a worker has one slot left beside that with the protected step. If each save went into it, that of
one rank would be copied while those of others are gone already. So saves of round numbers stay for longer, on all ranks
the same ones, whenever each of them began: 5 is overwritten by 6, 6 by 8, and 8 by 16.
"""

LONGEST = 8
"""Saves after which even the roundest number gives way."""


def may_replace(present: int, step: int, distance: int) -> bool:
    """Return whether a checkpoint of `step` may overwrite the one that is present, with saves so many steps apart.

    `distance` 0: always, for a step that all ranks are told to save.
    """
    return _roundness(step) >= _roundness(present) or step - present >= LONGEST * distance or step <= present


def _roundness(step: int) -> int:
    """Return how often 2 divides it."""
    return (step & -step).bit_length()
