"""Gets the main thread out of the training function, wherever it is.

A real-time signal is sent to the main thread, whose handler raises RankShouldRestart. This has three advantages over
PyThreadState_SetAsyncExc. It also ends system calls that block inside Python (time.sleep, Queue.get, a lock) or that a
library retries until something interrupts them (the connect loop of TCPStore). The main thread decides to raise at the
instant of raising, so nothing is raised after the gate was closed. And the handler sees whether an earlier raise is
still on its way through `finally` blocks, which it spares.
"""

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from unbroken.inprocess.interruption.signals import give_back, unused_signal
from unbroken.inprocess.torch_state.device import wait_for_device

FIRST_INTERVAL_S = 0.02
"""Pause between two signals; doubled each time, up to LONGEST_INTERVAL_S."""
LONGEST_INTERVAL_S = 0.5
MAX_POLITE_RAISES = 3
"""A function that swallows this many is interrupted in its exception handlers as well."""
CLEAN_UP_S = 5.0
"""How long handlers of errors that the abort itself causes are left alone. They may be `finally` blocks; but they may
also be a script's own retry loop, which never ends."""
HOLD_S = 5.0
"""How long a main thread that is interrupted waits for the abort. It may have what an abort needs: a lock of logging's,
say."""
IMPORT_S = 10.0
"""How long an import is left alone. What is half imported stays so for good: each later import of it fails. But the
whole training may run in one."""
_IMPORT_INTERVAL_S = 0.1
"""Pause between two signals meanwhile."""
_IMPORT = "<frozen importlib._bootstrap>"
_UNRAISABLE = frozenset({"__del__"})
"""Functions that no exception can leave: Python prints and drops it."""


class RankShouldRestart(BaseException):
    """Raised in the main thread, anywhere in the wrapped function, when the iteration is over. Let it pass."""


@dataclass(frozen=True)
class FunctionOutcome:
    """How the function was left."""

    value: Any = None
    error: BaseException | None = None


class Gate:
    """Whether the main thread is inside the function. That thread's alone, but for `hold`, `force_out` and `leave`."""

    def __init__(self) -> None:
        self.atomic_lock = threading.RLock()
        self.left = threading.Event()
        """Set while the main thread is outside the function."""
        self.left.set()
        self.is_leaving = False
        self.num_atomic = 0
        """Atomic sections around the main thread."""
        self.swallowed_at = ""
        """Where the function stood when it had to be interrupted again, since it went on after the first time."""
        self._is_open = False
        self._num_raised = 0
        self._reason = ""
        self._leaving_since_s = 0.0
        self._handled_before = 0
        """id() of the exception that the function was handling when the iteration ended."""
        self._previous_trace: Any = None
        self._does_trace = False
        self._signal_number = 0
        self._is_freed = threading.Event()
        """Not set during an abort."""
        self._is_freed.set()
        self._freeing_lock = threading.Lock()
        """Around a signal sent during an abort, so that none is sent after it."""
        self.is_held = False
        """Whether the main thread waits for the end of an abort."""
        self._held_until_s = 0.0
        self._is_importing = False
        """Whether the last signal came into an import."""
        self._atomic = AtomicSection(self)

    def install(self) -> None:
        """Take an unused real-time signal. Raises InternalError when there is none."""
        self._signal_number = unused_signal()
        signal.signal(self._signal_number, self._on_signal)

    def uninstall(self) -> None:
        """Give the signal back. The thread that calls `force_out` must have ended."""
        if self._signal_number:
            give_back(self._signal_number)
            self._signal_number = 0

    def forget(self) -> None:
        """Make the gate harmless in a forked child."""
        self._is_open = False
        self.atomic_lock = threading.RLock()
        # Other threads, which the child does not have, may have held their locks.
        self._freeing_lock, self._is_freed = threading.Lock(), threading.Event()
        self._is_freed.set()
        self.is_leaving = False

    @property
    def is_inside(self) -> bool:
        """Whether the main thread is inside the function, and nothing has ended the iteration."""
        return self._is_open and not self.is_leaving

    def reset(self) -> None:
        """Begin an iteration."""
        self.is_leaving = False
        self.num_atomic = 0
        self._num_raised = 0
        self._does_trace = False
        self.swallowed_at = ""
        self._is_importing = False

    def run(self, function: Callable[[], Any]) -> FunctionOutcome:
        """Call the function with the gate open."""
        value: Any = None
        error: BaseException | None = None
        # An interruption can strike between any two instructions before _is_open is False, also in the inner handler.
        try:
            try:
                self.left.clear()
                self._is_open = True
                value = function()
            except BaseException as caught:
                error = caught
            self._is_open = False
        except BaseException as late:
            self._is_open = False
            error = error or late
        finally:
            if self._does_trace:
                sys.settrace(self._previous_trace)
            self.left.set()
        return FunctionOutcome(value, error)

    def leave(self, reason: str) -> None:
        """Declare the iteration over, from any thread: what the function raises from now on is a consequence."""
        self._reason = reason
        self._leaving_since_s = time.monotonic()
        self._handled_before = id(_handled_by_main_thread())
        self.is_leaving = True

    def hold(self) -> None:
        """Stop the main thread where it is, or where it comes to when it is freed; from another thread.

        For the time of an abort, until `force_out`. NCCL's raises nothing: a thread that waits for its device goes on
        at once, with what half a collective has left, and the abort may take half a second more. A checkpoint that the
        function wrote in that time would be wrong. Nor shall it clean up meanwhile: destroying a group may wait for
        what only the abort ends.
        """
        self._is_freed.clear()
        main_thread = threading.main_thread().ident
        if main_thread is not None and not self.left.is_set():
            signal.pthread_kill(main_thread, self._signal_number)
            # Not threading's: to start one it takes a lock that the main thread may have. Without one, as where a
            # container may have no more, the abort goes on.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self.keep_signalling, (main_thread,))

    def keep_signalling(self, main_thread: int) -> None:
        """Signal the main thread during an abort until it has left; in a thread of its own.

        A signal that comes between the interpreter's last look and a call that blocks is seen only when that call
        returns. Where the call waits with a lock that the abort waits for, it never does.
        """
        interval_s = FIRST_INTERVAL_S
        while not self._is_freed.wait(interval_s):
            with self._freeing_lock:
                if self._is_freed.is_set() or self.left.is_set():
                    return
                if not self._stands_still():
                    signal.pthread_kill(main_thread, self._signal_number)
            interval_s = min(interval_s * 2, LONGEST_INTERVAL_S)

    def force_out(self, free: Callable[[], bool]) -> None:
        """Signal the main thread until it has left; from another thread.

        `free` is called before every further signal: what blocked the main thread may have begun after the abort. It
        returns whether that thread was still inside; a late check may find it inside again, in the next iteration.
        """
        interval_s = FIRST_INTERVAL_S
        main_thread = threading.main_thread().ident
        with self._freeing_lock:
            self._is_freed.set()
        if self.is_held and self.left.wait(interval_s):
            return
        while not self.left.is_set() and main_thread is not None:
            signal.pthread_kill(main_thread, self._signal_number)
            if self.left.wait(interval_s):
                return
            if not free():
                return
            is_swallowed = self._num_raised >= MAX_POLITE_RAISES
            longest_s = _IMPORT_INTERVAL_S if self._is_importing else LONGEST_INTERVAL_S
            interval_s = FIRST_INTERVAL_S if is_swallowed else min(interval_s * 2, longest_s)

    def atomic(self) -> "AtomicSection":
        """Hold off the end of the iteration; entering raises RankShouldRestart if it has begun."""
        return self._atomic

    def begin_atomic(self) -> None:
        """Enter a section. Raises RankShouldRestart.

        What the device has yet to do may wait for other ranks, and no abort comes into a section: it is done before.
        """
        if not self.num_atomic:
            wait_for_device()
        while not self.atomic_lock.acquire(blocking=False):
            if self.is_leaving:
                self._wait_for_abort()
                raise RankShouldRestart(self._reason)
            time.sleep(0.0005)
        self.num_atomic += 1

    def end_atomic(self) -> None:
        """Leave a section."""
        self.num_atomic -= 1
        self.atomic_lock.release()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not (self._is_open and self.is_leaving) or self._stands_still() or is_unraisable(frame):
            return
        is_swallowed = self._num_raised >= MAX_POLITE_RAISES
        if not is_swallowed and self._is_cleaning_up(sys.exc_info()[1]):
            return
        if not (self._is_importing and is_importing(frame)):  # An import stands still once.
            self._wait_for_abort()
        self._is_importing = time.monotonic() - self._leaving_since_s < IMPORT_S and is_importing(frame)
        if self._is_importing:
            return
        if is_swallowed:
            self._strike_again_in_handlers(frame)
        if self._num_raised == 1 and frame is not None:
            self.swallowed_at = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        self._num_raised += 1
        raise RankShouldRestart(self._reason)

    def _wait_for_abort(self) -> None:
        if self._is_freed.is_set():
            return
        self._held_until_s = time.monotonic() + HOLD_S
        self.is_held = True
        try:
            self._is_freed.wait(HOLD_S)
        finally:
            self.is_held = False

    def _stands_still(self) -> bool:
        """Return whether the main thread waits for the end of an abort, which is not there.

        A handler of the script's may run meanwhile: for longer than it waits it is not left alone.
        """
        return self.is_held and not self._is_freed.is_set() and time.monotonic() < self._held_until_s

    def _is_cleaning_up(self, handled: BaseException | None) -> bool:
        """Return whether the handler or `finally` block that runs now belongs to the end of the iteration."""
        if handled is None or id(handled) == self._handled_before:
            return False
        if _is_on_its_way(handled):
            return True
        return time.monotonic() - self._leaving_since_s < CLEAN_UP_S

    def _strike_again_in_handlers(self, frame: FrameType | None) -> None:
        """Raise once more at the next line that runs: in the handler that swallows, outside its `try`."""
        if not self._does_trace:
            self._does_trace, self._previous_trace = True, sys.gettrace()
        while frame is not None and frame.f_code is not Gate.run.__code__:
            frame.f_trace = self._on_line
            frame = frame.f_back
        # Last: the interpreter forgets the trace function as soon as it has raised.
        sys.settrace(self._on_line)

    def _on_line(self, _frame: FrameType, event: str, _argument: object) -> Any:
        if self._is_open and event == "line":
            raise RankShouldRestart(self._reason)
        return self._on_line


class AtomicSection(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """A context of `Gate.atomic`, for all sections of a gate: steps enter one each, so it is not made anew."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.begin_atomic()

    def __exit__(self, *_: object) -> None:
        self._gate.end_atomic()


def _handled_by_main_thread() -> BaseException | None:
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # A tuple like sys.exc_info() before Python 3.12.
    error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled
    return error


def _is_on_its_way(handled: BaseException | None) -> bool:
    """Return whether the chain of a handled exception begins with an earlier raise."""
    seen: set[int] = set()
    while handled is not None and id(handled) not in seen:
        if isinstance(handled, RankShouldRestart):
            return True
        seen.add(id(handled))
        handled = handled.__context__
    return False


def is_importing(frame: FrameType | None) -> bool:
    """Return whether an import is under way in the function."""
    while frame is not None and frame.f_code is not Gate.run.__code__:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def is_unraisable(frame: FrameType | None) -> bool:
    """Return whether an exception from this frame would only be printed."""
    while frame is not None:
        if frame.f_code.co_name in _UNRAISABLE:
            return True
        frame = frame.f_back
    return False
