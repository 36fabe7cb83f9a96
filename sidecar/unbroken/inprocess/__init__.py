"""The restart loop inside the user's training process. Standard library, torch and core only.

Here: what scripts import, under the reference's names: `Wrapper`, and a module for each kind of plug-in. How a call
runs is in the folders below; nothing in them is for users. Importing this package imports no torch.
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
from unbroken.inprocess.loop.call_wrapper import CallWrapper
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
