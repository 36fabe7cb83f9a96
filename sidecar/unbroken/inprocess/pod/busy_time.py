"""How busy this worker is: the time of a step in which it does not wait for other ranks.

In a synchronous job the steps of all ranks take equally long, since the fast ones wait for the slowest. So a step is
split, by what Linux knows of the main thread:

    on a core, or waiting for one    busy: exact, by the thread's CPU clock and its schedstat
    asleep                           busy in the script's own code, in a data loader or in I/O; waiting in a collective
                                     or a call that may wait for other ranks (item, backward): by looking at its frames
                                     ten times a second, only where it has slept meanwhile

With a GPU this says nothing: the main thread launches, and sleeps or spins until the device has done its work, which
may be to wait for others. Then a window is told only if the script says itself how busy it was (`ping(busy_s=)`).

Blocks of steps end at a ping, at least BLOCK_NS apart. A window tells the median of its blocks, so that one that was
held up once does not count.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

logger = logging.getLogger(__name__)

BLOCK_NS = 500_000_000
SAMPLE_S = 0.1
NEVER_NS = 1 << 62
_MOST_S = 1e9
_SCHEDSTAT = "/proc/thread-self/schedstat"


class Window(NamedTuple):
    """Medians of one window."""

    num_windows: int
    """With this one; those of which nothing is known count as well."""
    busy_ns: int
    step_ns: int


class _Reading(NamedTuple):
    at_ns: int
    awake_ns: int
    """On a core, or waiting for one."""
    asleep_ns: int
    """In the script's own code, as far as it was seen."""
    told_s: float


class _Block(NamedTuple):
    step: int
    reading: _Reading


class BusyTime:
    """One worker's. `sample` runs in the library's thread, all else in the main thread; each writes its own fields."""

    def __init__(
        self, is_waiting: Callable[[], bool] = lambda: True, has_device: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_waiting`: whether the main thread, which sleeps, may wait for other ranks. `has_device`: whether the
        script uses a GPU or its like."""
        self._is_waiting, self._has_device = is_waiting, has_device
        self.due_ns = NEVER_NS
        """When the next ping is to be noted."""
        self._thread = 0
        self._clock = 0
        self._schedstat = -1
        self._window_ns = 0
        self._began_ns = 0
        self._number = 0
        self._block: _Block | None = None
        self._told_s = 0.0
        """What the script itself has said in this iteration."""
        self._blocks: list[tuple[float, float]] = []
        """(busy, all) nanoseconds of a step, of each block of the window."""
        self._asleep_ns = 0
        self._seen: tuple[int, int] | None = None
        """(time, time awake) at the last sample."""

    @property
    def is_on(self) -> bool:
        """Whether this iteration is measured."""
        return self.due_ns != NEVER_NS

    def begin(self, window_s: float, now_ns: int) -> None:
        """Begin an iteration; 0: nothing is measured. All times are CLOCK_MONOTONIC."""
        self.end()
        if window_s <= 0 or not self._open():
            return
        self._window_ns, self._began_ns = int(window_s * 1e9), now_ns
        self._number, self._block, self._blocks, self._told_s = 0, None, [], 0.0
        self.due_ns = self._began_ns

    def end(self) -> None:
        """End the iteration."""
        self.due_ns = NEVER_NS

    def tell(self, busy_s: float) -> None:
        """Note what the script says of the time since its last ping; what no time can be is passed over."""
        if 0 <= busy_s <= _MOST_S:
            self._told_s += busy_s

    def note(self, step: int, now_ns: int) -> Window | None:
        """Note a ping after this step; return a window that has ended before."""
        if threading.get_ident() != self._thread:
            return None
        reading = _Reading(now_ns, self._awake_ns(), self._asleep_ns, self._told_s)
        block, self._block = self._block, _Block(step, reading)
        self.due_ns = now_ns + min(BLOCK_NS, self._window_ns // 4)
        number = (now_ns - self._began_ns) // self._window_ns
        ended = self._end_window(number) if number > self._number else None
        if block is not None and step > block.step:
            busy_ns = self._busy_ns(block.reading, reading)
            if busy_ns is not None:
                steps = step - block.step
                self._blocks.append((busy_ns / steps, (now_ns - block.reading.at_ns) / steps))
        return ended

    def sample(self, now_ns: int) -> None:
        """Look where the main thread stands, if it has slept since the last sample."""
        if not self.is_on:
            self._seen = None
            return
        awake_ns = self._awake_ns()
        seen, self._seen = self._seen, (now_ns, awake_ns)
        if seen is None:
            return
        slept_ns = (now_ns - seen[0]) - (awake_ns - seen[1])
        # Readings of two clocks are never quite of the same instant.
        if slept_ns > (now_ns - seen[0]) // 20 and not self._is_waiting():
            self._asleep_ns += slept_ns

    def close(self) -> None:
        """Release what was opened; also in a forked child."""
        self.end()
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _open(self) -> bool:
        """Open what Linux knows of this thread; return whether it does."""
        if self._schedstat >= 0 and self._thread == threading.get_ident():
            return True
        try:
            self._thread = threading.get_ident()
            self._clock = time.pthread_getcpuclockid(self._thread)
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            self._awake_ns()
        except (AttributeError, OSError, ValueError, IndexError) as error:
            logger.debug("busy time not measured: error=%s", error)
            return False
        return True

    def _awake_ns(self) -> int:
        """Return for how long the main thread was on a core or waited for one; from any thread."""
        waited = os.pread(self._schedstat, 128, 0).split()[1]
        return time.clock_gettime_ns(self._clock) + int(waited)

    def _end_window(self, number: int) -> Window | None:
        """Begin another window; return the one that ends, if it is the last one and something is known of it."""
        blocks, self._blocks = self._blocks, []
        is_last, self._number = number == self._number + 1, number
        if not blocks or not is_last:
            return None
        busy_ns = median(busy for busy, _step in blocks)
        return Window(number, int(busy_ns), int(median(step for _busy, step in blocks)))

    def _busy_ns(self, first: _Reading, last: _Reading) -> float | None:
        """Return the busy time between two readings; None where nobody knows."""
        limit_ns = last.at_ns - first.at_ns
        if last.told_s > first.told_s:
            return min((last.told_s - first.told_s) * 1e9, limit_ns)
        if last.told_s > 0.0 or self._has_device():
            return None
        return min(last.awake_ns - first.awake_ns + last.asleep_ns - first.asleep_ns, limit_ns)
