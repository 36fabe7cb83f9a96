"""What `nvidia_resiliency_ext.inprocess` has: our wrapper with the options, defaults and ways of the extension."""

from unbroken.inprocess import (
    attribution,
    completion,
    exception,
    finalize,
    initialize,
    rank_assignment,
    state,
    terminate,
)
from unbroken.inprocess.compose import Compose
from unbroken.inprocess.loop.call_wrapper import CallWrapper
from unbroken.inprocess.state import FrozenState, Mode, State
from unbroken.nvrx.inprocess import abort, health_check, monitor_thread, nested_restarter, store
from unbroken.nvrx.inprocess.wrap import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "state",
    "store",
    "terminate",
]
