"""The lock that shows the agent at once when this process's main thread ends; see unbroken_core.pod.stamps."""

import ctypes
import mmap
import sys
import threading
from typing import Any

from unbroken_core.pod import stamps

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_ATTRIBUTES_BYTES = 64
"""More than sizeof(pthread_mutexattr_t)."""


class DeathLock:
    """Holds the lock of one slot, by the C library's own robust mutex: that it ends well is the kernel's work.

    All methods belong to the main thread. Where anything is not as on Linux with glibc, nothing is held.
    """

    def __init__(self) -> None:
        self._word: ctypes.c_uint32 | None = None
        """First word of the held lock; keeps its page mapped, which the kernel accesses when the thread ends."""
        self._page: mmap.mmap | None = None

    def hold(self, page: mmap.mmap, local_rank: int, num_slots: int) -> None:
        """Take the lock in this page, unless it is held already; release one in an earlier page."""
        offset = stamps.lock_offset(local_rank, num_slots)
        if page is self._page or sys.platform != "linux" or len(page) < offset + stamps.LOCK_BYTES:
            return
        self.release()
        self._page = page
        # The slot's previous process is dead, and so is its lock.
        page[offset : offset + stamps.LOCK_BYTES] = bytes(stamps.LOCK_BYTES)
        word = ctypes.c_uint32.from_buffer(page, offset)
        if not _lock(word):
            return
        if word.value & stamps.LOCK_OWNER != threading.get_native_id():
            # Another C library, with the futex elsewhere.
            _call("pthread_mutex_unlock", word)
            word.value = 0
            return
        # The kernel wakes waiters only if this bit is set. No other thread writes here while this one lives.
        word.value |= stamps.LOCK_HAS_WAITER
        self._word = word

    def release(self) -> None:
        """Release the lock: from now on the end of this process shows nothing."""
        word, self._word, self._page = self._word, None, None
        if word is not None:
            _call("pthread_mutex_unlock", word)

    def forget(self) -> None:
        """Leave the parent's lock alone in a forked child, which does not hold it."""
        self._word = self._page = None


def _lock(word: ctypes.c_uint32) -> bool:
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    return (
        _call("pthread_mutexattr_init", attributes)
        and _call("pthread_mutexattr_setpshared", attributes, ctypes.c_int(_PTHREAD_PROCESS_SHARED))
        and _call("pthread_mutexattr_setrobust", attributes, ctypes.c_int(_PTHREAD_MUTEX_ROBUST))
        and _call("pthread_mutex_init", word, attributes)
        and _call("pthread_mutex_trylock", word)
    )


def _call(name: str, first: Any, *others: Any) -> bool:
    function = getattr(ctypes.CDLL(None), name, None)
    return function is not None and function(ctypes.byref(first), *others) == 0
