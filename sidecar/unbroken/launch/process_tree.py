"""Ties children to their parent, adopts orphans, signals process groups. Partly Linux only."""

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded before any fork: the child must not import or allocate more than it has to.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Get SIGKILL when this process, the caller's parent, ends; end at once if it has ended already."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent() -> Callable[[], None]:
    """Return what a child runs between fork and exec, so that it gets SIGKILL when the calling process ends."""
    parent = os.getpid()

    return functools.partial(die_with, parent)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_group(leader_pid: int, number: int) -> None:
    """Signal a process group; an empty group is no error."""
    try:
        os.killpg(leader_pid, number)
    except (ProcessLookupError, PermissionError):
        return
