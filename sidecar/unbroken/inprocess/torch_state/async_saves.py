"""Checkpoints that torch's async_save still writes, in threads and processes, when the iteration is over.

A writer that hangs, on a disk that does not answer, or waiting for one on another rank, is never over. Its thread is
one that Python waits for when the process ends: so a job whose training is complete would never end. A process that is
just being started would be taken for that of the next iteration, on this rank alone.

    fault ──> processes that write are killed; their threads see that, and end with an error
          ──> threads that write go on, and Python does not wait for them

Only what belongs to a function that was left: a save that is in flight when all ranks have returned is completed.
"""

import concurrent.futures.thread as executor_threads
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_PROCESS = ("torch.distributed.checkpoint._async_process_executor", "_execute_save_impl")
_THREAD = ("torch.distributed.checkpoint._async_thread_executor", "save_wrapper")
"""What torch's executors call in a thread of theirs, which waits for a process or writes itself: module and name."""
END_TIMEOUT_S = 2.0
"""For threads to see that their process has ended; beyond it nobody waits for them."""
_POLL_S = 0.01


def end_all(holder: Any, name: str) -> object:
    """Kill all processes that write checkpoints, and let Python not wait for threads that do.

    Belongs between two iterations: what the function started next would be killed as well. Returns the writer that
    torch's module kept, if any: dropping it may wait for its process.
    """
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while True:
        saving = _saving()
        kept = getattr(holder, name)
        writers = [kept, *(one for frames in saving.values() for one in _writers(holder, frames))]
        for one in writers:
            _kill(one)
        # A thread whose process has ended gets an error. One that starts a process would put it in the next one's way.
        if not any(map(_has_process, saving.values())) or time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    setattr(holder, name, None)
    for thread in _saving():
        logger.warning("async_save of an iteration that has ended still writes; nobody waits for it: %s", thread.name)
        _leave_behind(thread)
    return kept


def _saving() -> dict[threading.Thread, list[FrameType]]:
    """Return the threads that stand in a save of torch's executors, with their frames, innermost first."""
    threads = {one.ident: one for one in threading.enumerate()}
    found = {ident: list(_outwards(frame)) for ident, frame in sys._current_frames().items() if ident in threads}
    return {
        threads[ident]: frames for ident, frames in found.items() if _has_process(frames) or _calls(frames, _THREAD)
    }


def _has_process(frames: list[FrameType]) -> bool:
    return _calls(frames, _PROCESS)


def _calls(frames: list[FrameType], function: tuple[str, str]) -> bool:
    return any((str(one.f_globals.get("__name__")), one.f_code.co_name) == function for one in frames)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _writers(module: Any, frames: list[FrameType]) -> Iterator[Any]:
    """Yield the writers, begun or not, in whose methods these frames are."""
    for frame in frames:
        one = frame.f_locals.get("self")
        if isinstance(one, module._AsyncCheckpointProcess):
            yield one


def _kill(writer: Any) -> None:
    # None, or not yet set, where it is being started.
    process = getattr(writer, "_save_process", None)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if process is not None and process.is_alive():
            process.kill()


def _leave_behind(thread: threading.Thread) -> None:
    """Let Python end without this thread. It has no way to say so of one that runs."""
    executor_threads._threads_queues.pop(thread, None)  # type: ignore[attr-defined]  # not public
    handle, lock = getattr(thread, "_handle", None), getattr(thread, "_tstate_lock", None)
    if handle is not None:  # Python 3.13
        with contextlib.suppress(Exception):
            handle._set_done()
    elif lock is not None:
        locks: set[Any] = getattr(threading, "_shutdown_locks", set())
        locks.discard(lock)
