"""Waits for the ends of workers' main threads; see the locks of unbroken_core.pod.stamps.

One thread for each worker sleeps in the kernel until the worker's lock changes. Where there is no such lock (another
system than Linux, another C library than the worker's check knows) the launcher's word on the process has to do.

The lock is in a file that the trainer may truncate, and a look at a mapping of what is missing would kill the agent. So
the mapping only gives the kernel its addresses, and the words are read from the file.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from unbroken_core.pod.stamps import LOCK_OWNER, LOCK_OWNER_DIED, lock_offset, page_bytes

logger = logging.getLogger(__name__)

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFF_FFFF
_LONGEST_WAIT_S = 60
_GOODBYE_S = 2.0
_PAUSE_S = 0.01
_FLICKER_S = 0.002
"""Pause after a wait that ended for nothing: whoever writes nonsense into the lock must not keep the agent busy."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class DeathWatch:
    """One pod's watchers. All methods belong to one thread; `on_death` is called in a watcher's."""

    def __init__(self, path: Path, num_slots: int, on_death: Callable[[int, int], None]) -> None:
        """`on_death` gets local rank and incarnation. Raises OSError when there is no page."""
        self._on_death = on_death
        self._is_closing = False
        self._watchers: dict[int, threading.Thread] = {}
        self._words: list[ctypes.c_uint32] = []
        self._descriptor, self._num_slots = -1, num_slots
        self._call = _FUTEX_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
        if not self._call:
            return
        self._libc = ctypes.CDLL(None)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            page = mmap.mmap(self._descriptor, page_bytes(num_slots))
        except (OSError, ValueError):
            return  # It was truncated this very moment.
        # Each word keeps the page mapped for as long as a thread may wait at it. Nobody reads it there.
        self._words = [ctypes.c_uint32.from_buffer(page, lock_offset(rank, num_slots)) for rank in range(num_slots)]

    def watch(self, local_rank: int, incarnation: int) -> None:
        """Wait for the end of the main thread that has taken this worker's lock; harmless when repeated."""
        if self._is_closing or not self._words or not self._word(local_rank):
            return
        earlier = self._watchers.get(local_rank)
        if earlier is not None and earlier.is_alive():
            return
        watcher = threading.Thread(
            target=self._wait, args=(local_rank, incarnation), name=f"death-watch-{local_rank}", daemon=True
        )
        self._watchers[local_rank] = watcher
        watcher.start()

    def close(self) -> None:
        """End the threads."""
        self._is_closing = True
        until_s = time.monotonic() + _GOODBYE_S
        for local_rank, watcher in self._watchers.items():
            # Repeat: a thread may be just about to sleep.
            while watcher.is_alive() and time.monotonic() < until_s:
                self._futex(self._words[local_rank], _FUTEX_WAKE, _EVERYBODY, None)
                watcher.join(_PAUSE_S)
        self._watchers.clear()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _wait(self, local_rank: int, incarnation: int) -> None:
        try:
            self._wait_for_word(self._words[local_rank], local_rank, incarnation)
        except Exception:
            # The launcher reports the end as well, a little later.
            logger.exception("watch on a worker's death failed: local_rank=%d", local_rank)

    def _wait_for_word(self, word: ctypes.c_uint32, local_rank: int, incarnation: int) -> None:
        longest = _Timespec(_LONGEST_WAIT_S, 0)
        while (seen := self._word(local_rank)) & LOCK_OWNER and not self._is_closing:
            before_s = time.monotonic()
            self._futex(word, _FUTEX_WAIT, seen, ctypes.byref(longest))
            if time.monotonic() - before_s < _FLICKER_S and self._word(local_rank) & LOCK_OWNER:
                time.sleep(_FLICKER_S)
        if seen & LOCK_OWNER_DIED and not self._is_closing:
            # The agent's loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                self._on_death(local_rank, incarnation)

    def _word(self, local_rank: int) -> int:
        """Return the word that Linux marks; 0 where the file has none any more."""
        try:
            found = os.pread(self._descriptor, 4, lock_offset(local_rank, self._num_slots))
        except OSError:
            return 0
        return int.from_bytes(found, sys.byteorder) if len(found) == 4 else 0

    def _futex(self, word: ctypes.c_uint32, operation: int, value: int, timeout: object) -> None:
        """Not a private futex: the two ends are different processes."""
        self._libc.syscall(
            ctypes.c_long(self._call),
            ctypes.byref(word),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            ctypes.c_int(0),
        )
