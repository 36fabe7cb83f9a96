"""The restart loop inside the user's training process. Standard library, torch and core only.

`Wrapper` is the door; the other names are what the reference's `inprocess` offers. Importing this imports no torch.
"""

from unbroken.inprocess import (
    abort,
    attribution,
    completion,
    exception,
    finalize,
    health_check,
    initialize,
    nested_restarter,
    rank_assignment,
    state,
    store,
    terminate,
)
from unbroken.inprocess.compose import Compose
from unbroken.inprocess.interruption.gate import RankShouldRestart
from unbroken.inprocess.loop.call import CallWrapper
from unbroken.inprocess.state import FrozenState, Mode, State
from unbroken.inprocess.wrap import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "RankShouldRestart",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "state",
    "store",
    "terminate",
]
