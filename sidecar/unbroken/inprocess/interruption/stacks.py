"""Where every thread of the script stands, for people who ask why a rank hangs."""

import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from unbroken.inprocess.exception import InternalError
from unbroken.inprocess.interruption.signals import unused_signal
from unbroken_core.pod.pod_messages import Leave
from unbroken_core.pod.stacks import stack_path
from unbroken_core.vocabulary.reasons import Cause

logger = logging.getLogger(__name__)

MAX_FRAMES = 24
"""Innermost frames of each thread that are shown."""
_OWN_THREADS = "unbroken-"
_HANGS = (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT)


def is_hang(leave: Leave | None, iteration: int) -> bool:
    """Return whether this order ends the iteration because somebody made no progress."""
    return leave is not None and leave.iteration == iteration and leave.cause in _HANGS


def log_hang(leave: Leave | None, iteration: int) -> None:
    """Log all stacks when a hang ends this iteration; they reach the rank's log before anything is freed."""
    if leave is None or not is_hang(leave, iteration):
        return
    text = "hang: cause=%s iteration=%d; this rank stands at\n%s"
    logger.warning(text, leave.cause.value, iteration, describe_threads())


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


class StackSignal:
    """A signal at which the main thread's stack is written to a file, also while a C call holds the GIL."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        """Take an unused signal. If there is none, `number` stays 0 and no stack is written."""
        self.number = 0
        self._descriptor = -1
        try:
            number = unused_signal()
            # The launcher empties it before it asks; the agent that reads it may be another user.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(stack_path(folder, local_rank), flags, 0o644)
            # The main thread takes the signal and walks its own frames: other threads' frames change meanwhile.
            faulthandler.register(number, file=self._descriptor, all_threads=False)
        except (InternalError, OSError, RuntimeError, ValueError) as error:
            logger.warning("no stack can be written: folder=%s error=%s", folder, error)
            self.close()
            return
        self.number = number

    def close(self) -> None:
        """Give the signal back; harmless when repeated."""
        if self.number:
            faulthandler.unregister(self.number)
            self.number = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
