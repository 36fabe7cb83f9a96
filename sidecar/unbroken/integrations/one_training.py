"""One training for each job: checkpoints in memory are known by their step alone."""

import weakref

from unbroken import inprocess

_begun: weakref.WeakKeyDictionary[inprocess.CallWrapper, int] = weakref.WeakKeyDictionary()


def claim(call: inprocess.CallWrapper) -> None:
    """Let a training begin in this iteration. Raises ValueError for a second one, with what to change."""
    if _begun.get(call) == call.iteration:
        raise ValueError(
            "training: want one in each job, got a second one in the same call: it would go on from the checkpoints of "
            "the first, and after a fault the first from those of the second; start another job for it"
        )
    _begun[call] = call.iteration
