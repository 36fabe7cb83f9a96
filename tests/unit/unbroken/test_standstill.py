"""How long training stands still for checkpoints, as whoever saves measures it."""

import threading

import pytest

from unbroken import standstill as module
from unbroken.standstill import Standstill


class Clock:
    """Nanoseconds that pass only when somebody says so."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the module's clock."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_checkpoint_within_another_counts_once(clock: Clock) -> None:
    told: list[int] = []
    one = Standstill()
    one.begin(told.append)
    with one.measured():
        clock.now_ns += 5
        with one.measured():
            clock.now_ns += 7
    assert told == [12]


def test_one_that_fails_counts_until_then(clock: Clock) -> None:
    told: list[int] = []
    one = Standstill()
    one.begin(told.append)
    with pytest.raises(OSError, match="no space"), one.measured():
        clock.now_ns += 3
        raise OSError("no space")
    assert told == [3]


def test_what_another_thread_saves_holds_nobody_up(clock: Clock) -> None:
    told: list[int] = []
    one = Standstill()
    one.begin(told.append)

    def save() -> None:
        with one.measured():
            clock.now_ns += 9

    thread = threading.Thread(target=save)
    with one.measured():
        thread.start()
        thread.join()
    assert told == [9], "the main thread waited for it"
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert told == [9]


def test_an_iteration_that_was_interrupted_within_one_does_not_keep_the_next_from_counting(clock: Clock) -> None:
    told: list[int] = []
    one = Standstill()
    one.begin(told.append)
    # An interruption may strike between any two instructions, here before the block is left: that comes late.
    left = one.measured()
    left.__enter__()
    one.begin(told.append)
    with one.measured():
        clock.now_ns += 4
        left.__exit__(None, None, None)
    assert told == [4]
    with one.measured():
        clock.now_ns += 2
    assert told == [4, 2]
