"""Where every thread of the script stands, for people who ask why a rank hangs."""

import logging
import sys
import threading
from types import FrameType

from unbroken_core.messages import Leave
from unbroken_core.reasons import Cause

logger = logging.getLogger(__name__)

MAX_FRAMES = 24
"""Innermost frames of each thread that are shown."""
_OWN_THREADS = "unbroken-"
_HANGS = (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT)


def log_hang(leave: Leave | None, iteration: int) -> None:
    """Log all stacks when a hang ends this iteration; they reach the rank's log before anything is freed."""
    if leave is None or leave.iteration != iteration or leave.cause not in _HANGS:
        return
    cause, culprit, stacks = leave.cause.value, leave.rank, describe_threads()
    logger.warning("hang: cause=%s culprit=%s iteration=%d; this rank stands at\n%s", cause, culprit, iteration, stacks)


def describe_threads() -> str:
    """Return the Python stacks of all threads but the library's own, the main thread's first; from any thread.

    Reads no file: what hangs may be the file system. Needs the GIL: while it is held for good, this waits.
    """
    frame_by_thread = sys._current_frames()
    main = threading.main_thread()
    parts = []
    for thread in (main, *(thread for thread in threading.enumerate() if thread is not main)):
        frame = frame_by_thread.get(thread.ident or 0)
        if frame is not None and not thread.name.startswith(_OWN_THREADS):
            parts += [f"thread {thread.name}, innermost last:", *_frames(frame)]
    return "\n".join(parts)


def _frames(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]
