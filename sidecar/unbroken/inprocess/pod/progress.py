"""This worker's slot in the pod's page of stamps (unbroken_core.pod.stamps)."""

import contextlib
import ctypes
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from unbroken.inprocess.exception import InternalError
from unbroken.inprocess.pod.busy_time import BusyTime, Window
from unbroken.inprocess.pod.death_lock import DeathLock
from unbroken.standstill import standstill
from unbroken_core.pod import stamps
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD

logger = logging.getLogger(__name__)

_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class ProgressSlot:
    """Writes the stamps. Without a page (before the first `attach`, in a forked child) every method does nothing."""

    def __init__(self, local_rank: int, incarnation: int, busy_time: BusyTime | None = None) -> None:
        self._first = stamps.slot_offset(local_rank) // 8
        self._local_rank = local_rank
        self._incarnation = incarnation
        self._flags = 0
        self._iteration = -1
        self._checkpoint_ns = 0
        self._window = Window(0, 0, 0)
        self._busy_time = busy_time or BusyTime()
        self._inode = -1
        self._does_stamp_main = False
        self._needs_care = False
        """Whether the next ping must do more than stamp: it is the first, or the worker may have to halt."""
        self._words: memoryview | None = None
        self._page: tuple[mmap.mmap, int] | None = None
        """The mapped file and its number of slots."""
        self._death_lock = DeathLock()
        # One object throughout: the interpreter may still hold a pending call when the next is added.
        self._callback = _PENDING_CALL(self._stamp_main)

    def attach(self, path: Path) -> None:
        """Map the page, again when the agent made a new one. Raises InternalError when it is not one."""
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            if status.st_ino == self._inode:
                return
            if status.st_size < stamps.HEADER_BYTES:
                raise InternalError(f"{path}: want a page of stamps, got {status.st_size} bytes")
            page = mmap.mmap(file.fileno(), status.st_size)
        magic, num_slots = struct.unpack_from("<2Q", page, 0)
        is_whole = magic == stamps.MAGIC and len(page) >= stamps.page_bytes(min(num_slots, MAX_RANKS_PER_POD))
        if not is_whole or not 0 <= self._local_rank < num_slots:
            raise InternalError(
                f"{path}: want a page of stamps with slot {self._local_rank}, "
                f"got magic {magic:#x} and {num_slots} slots"
            )
        # Native 64-bit items: each write is one store, never half a value.
        words = memoryview(page).cast("q")
        self._inode, self._words, self._page = status.st_ino, words, (page, num_slots)
        first = self._first
        words[first + stamps.PID] = os.getpid()
        words[first + stamps.INCARNATION] = self._incarnation
        words[first + stamps.ITERATION] = self._iteration
        words[first + stamps.STEP] = -1
        words[first + stamps.CHECKPOINT] = self._checkpoint_ns
        self._tell_window(self._window)
        words[first + stamps.FLAGS] = self._flags
        self._stamp(stamps.ALIVE)
        self._stamp(stamps.MAIN)

    def detach(self) -> None:
        """Stop writing for good; the slot shows that no timeout applies."""
        self._set_flags(0)
        self._words = self._page = None
        self._busy_time.close()
        self._death_lock.release()

    def forget(self) -> None:
        """Stop writing in a forked child, whose parent goes on with the slot."""
        self._words = self._page = None
        self._busy_time.close()
        self._death_lock.forget()

    def hold(self) -> None:
        """Show the agent at once when the main thread ends, until `detach`; call it in that thread."""
        if self._page is not None:
            page, num_slots = self._page
            self._death_lock.hold(page, self._local_rank, num_slots)

    def begin(self, iteration: int, window_s: float = 0.0) -> None:
        """Begin an iteration, in the main thread: from now on timeouts apply. `window_s`: as in Enter."""
        self._iteration = iteration
        # Before the number of the iteration: no window counts for another one.
        self._tell_window(Window(0, 0, 0))
        self._busy_time.begin(window_s, time.monotonic_ns())
        self._write(stamps.ITERATION, iteration)
        self._write(stamps.STEP, -1)
        self._checkpoint_ns = 0
        self._write(stamps.CHECKPOINT, 0)
        self._stamp(stamps.ALIVE)
        self._stamp(stamps.MAIN)
        self._does_stamp_main = self._needs_care = True
        standstill.begin(self._add_checkpoint)
        self._set_flags(stamps.FLAG_IN_FUNCTION)

    def stop_main(self) -> None:
        """Let MAIN grow stale: the signals that end a function would keep even a sleeping thread fresh."""
        self._does_stamp_main = False

    def end(self) -> None:
        """End the iteration: no timeout applies."""
        self._does_stamp_main = self._needs_care = False
        self._busy_time.end()
        standstill.end()
        self._set_flags(0)

    @property
    def step(self) -> int:
        """Last step reported in this iteration; -1: none."""
        return -1 if self._words is None else self._words[self._first + stamps.STEP]

    def want_care(self) -> None:
        """Let the next ping return True; from any thread."""
        self._needs_care = True

    def ping(self, step: int | None) -> bool:
        """Stamp progress; return whether there is more to do."""
        words = self._words
        if words is None:
            return False
        first = self._first
        words[first + stamps.PING] = now_ns = time.monotonic_ns()
        if step is not None:
            words[first + stamps.STEP] = step
            if now_ns >= self._busy_time.due_ns:
                self._note_busy(step, now_ns)
        # After the step was noted: a thread that sets the flag and then reads an older step knows that the next ping
        # will see it.
        return self._needs_care

    def tell_busy(self, busy_s: float) -> None:
        """Note how long the script says that it was busy since the last ping."""
        self._busy_time.tell(busy_s)

    @property
    def is_measured(self) -> bool:
        """Whether `sample` is to be called every busy_time.SAMPLE_S; from any thread."""
        return self._busy_time.is_on

    def sample(self) -> None:
        """Look where the main thread stands; from the library's thread."""
        try:
            self._busy_time.sample(time.monotonic_ns())
        except (OSError, ValueError, IndexError) as error:
            # It was detached meanwhile.
            logger.debug("busy time not measured: error=%s", error)

    def arm(self) -> bool:
        """Count silence as a hang from now on; return whether this is new. Clears the flag of `want_care`."""
        self._needs_care = False
        if self._flags & (stamps.FLAG_PING_ARMED | stamps.FLAG_IN_FUNCTION) != stamps.FLAG_IN_FUNCTION:
            return False
        self._set_flags(self._flags | stamps.FLAG_PING_ARMED)
        return True

    @contextlib.contextmanager
    def unprotected(self) -> Iterator[None]:
        """Hold off all timeouts inside; it may be nested."""
        was_on = not self._flags & stamps.FLAG_PROTECTION_OFF
        self.set_protection(is_on=False)
        try:
            yield
        finally:
            self.set_protection(is_on=was_on)

    def set_protection(self, is_on: bool) -> None:
        """Let timeouts apply, or not, until the iteration ends."""
        self._stamp(stamps.MAIN)
        self._stamp(stamps.PING)
        flags = self._flags & ~stamps.FLAG_PROTECTION_OFF
        self._set_flags(flags if is_on else flags | stamps.FLAG_PROTECTION_OFF)

    def beat(self) -> None:
        """Stamp ALIVE, and ask the main thread to stamp MAIN; from the library's thread."""
        self._stamp(stamps.ALIVE)
        if self._does_stamp_main:
            # A full queue means that the main thread has not run for long, which a stale stamp is to show.
            ctypes.pythonapi.Py_AddPendingCall(self._callback, None)

    def _stamp_main(self, _: object) -> int:
        if self._does_stamp_main:
            self._stamp(stamps.MAIN)
        return 0

    def _stamp(self, field: int) -> None:
        self._write(field, time.monotonic_ns())

    def _add_checkpoint(self, nanoseconds: int) -> None:
        """Note for how long this iteration has just stood still; in the main thread."""
        self._checkpoint_ns += nanoseconds
        self._write(stamps.CHECKPOINT, self._checkpoint_ns)

    def _note_busy(self, step: int, now_ns: int) -> None:
        ended = self._busy_time.note(step, now_ns)
        if ended is not None:
            self._tell_window(ended)

    def _tell_window(self, window: Window) -> None:
        self._window = window
        if not window.num_windows:
            self._write(stamps.NUM_WINDOWS, 0)
        self._write(stamps.BUSY, window.busy_ns)
        self._write(stamps.PACE, window.step_ns)
        self._write(stamps.NUM_WINDOWS, window.num_windows)

    def _write(self, field: int, value: int) -> None:
        if self._words is not None:
            self._words[self._first + field] = value

    def _set_flags(self, flags: int) -> None:
        self._flags = flags
        self._write(stamps.FLAGS, flags)
