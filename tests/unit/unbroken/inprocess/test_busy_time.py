"""How busy a worker says that it was: what counts, and what nobody knows."""

import math
import threading

import pytest

from unbroken.inprocess.pod.busy_time import BLOCK_NS, NEVER_NS, BusyTime, Window

SECOND = 10**9
WINDOW_S = 10.0


class Thread(BusyTime):
    """The main thread of a script, as Linux would show it."""

    def __init__(self, is_waiting: bool = True, has_device: bool = False) -> None:
        super().__init__(lambda: is_waiting, lambda: has_device)
        self.now_ns = self.awake = 0
        self.step = 0
        self.begin(WINDOW_S, 0)

    def _open(self) -> bool:
        self._thread = threading.get_ident()
        return True

    def _awake_ns(self) -> int:
        return self.awake

    def work(self, awake_s: float, asleep_s: float, busy_s: float | None = None) -> Window | None:
        """Make a step, looked at ten times a second; return the window that ends with it."""
        for share_s, is_awake in ((awake_s, True), (asleep_s, False)):
            for _ in range(round(share_s * 10)):
                self.now_ns += SECOND // 10
                self.awake += SECOND // 10 * is_awake
                self.sample(self.now_ns)
        self.step += 1
        if busy_s is not None:
            self.tell(busy_s)
        return self.note(self.step, self.now_ns) if self.now_ns >= self.due_ns else None

    def windows(self, *steps: tuple[float, ...]) -> list[Window]:
        """Make steps; return the windows that ended."""
        found = [self.work(*step) for step in steps]
        return [window for window in found if window is not None]


def test_time_on_a_core_is_busy_and_time_asleep_in_a_collective_is_not() -> None:
    assert Thread().windows(*[(0.6, 0.4)] * 12) == [Window(1, 6 * SECOND // 10, SECOND)]


def test_time_asleep_in_code_that_waits_for_nobody_is_busy() -> None:
    (window,) = Thread(is_waiting=False).windows(*[(0.6, 0.4)] * 12)
    assert window.busy_ns == pytest.approx(SECOND)


def test_one_step_that_was_held_up_does_not_count() -> None:
    steps = [(0.5, 0.5)] * 12
    steps[4] = (3.0, 0.0)
    (window,) = Thread().windows(*steps)
    assert window == Window(1, SECOND // 2, SECOND)


def test_windows_keep_to_their_grid_and_those_without_a_step_are_missing() -> None:
    thread = Thread()
    found = thread.windows(*[(0.5, 0.5)] * 11, (25.0, 0.0), *[(0.5, 0.5)] * 12)
    assert [window.num_windows for window in found] == [1, 4]


def test_short_steps_are_measured_together_and_their_pings_are_not_looked_at() -> None:
    thread = Thread()
    noted = 0
    for step in range(1, 1000):
        thread.now_ns += SECOND // 100
        thread.awake += SECOND // 200
        if thread.now_ns >= thread.due_ns:
            noted += 1
            window = thread.note(step, thread.now_ns)
            assert window is None
    assert noted <= 1 + 10 * SECOND // BLOCK_NS
    thread.now_ns += SECOND
    window = thread.note(1100, thread.now_ns)
    assert window == Window(1, SECOND // 200, SECOND // 100)


def test_with_a_device_only_the_script_knows() -> None:
    assert Thread(has_device=True).windows(*[(0.6, 0.4)] * 12) == []
    assert Thread(has_device=True).windows(*[(0.6, 0.4, 0.7)] * 12) == [Window(1, 7 * SECOND // 10, SECOND)]


@pytest.mark.parametrize("odd_s", [math.nan, math.inf, 1e300, -1e300, 10**400])
def test_what_no_time_can_be_is_passed_over(odd_s: float) -> None:
    """Seen before: after one such word a rank was compared no more, or by another measure than all others."""
    steps = [(0.5, 0.5, 0.75)] * 24
    steps[3] = (0.5, 0.5, odd_s)
    assert Thread(has_device=True).windows(*steps) == [Window(n, 3 * SECOND // 4, SECOND) for n in (1, 2)]


def test_a_script_that_goes_back_to_an_earlier_step_or_boasts_is_not_believed() -> None:
    thread = Thread()
    thread.windows(*[(0.5, 0.5)] * 4)
    thread.step = 1
    assert thread.windows(*[(0.5, 0.5)] * 8) == [Window(1, SECOND // 2, SECOND)]
    (window,) = Thread().windows(*[(0.5, 0.5, 1000.0)] * 12)
    assert window.busy_ns == SECOND, "more than all of the step it cannot be"


def test_pings_of_other_threads_and_iterations_that_are_not_measured_say_nothing() -> None:
    thread = Thread()
    thread._thread = 0
    assert thread.windows(*[(0.5, 0.5)] * 12) == []
    off = Thread()
    off.begin(0.0, 0)
    assert (off.is_on, off.due_ns) == (False, NEVER_NS)
    off.sample(SECOND)
