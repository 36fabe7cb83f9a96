"""The pauses between calls of an `initialize` that keeps raising."""

import contextlib
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from unbroken.inprocess.initialize import Initialize
from unbroken.inprocess.interruption.gate import Gate, RankShouldRestart
from unbroken.inprocess.state import FrozenState
from unbroken.nvrx import inprocess
from unbroken.nvrx.inprocess.patience import PatientInitialize

STATE = FrozenState(rank=3, world_size=4, initial_rank=0)


class Fails(Initialize):
    """Raises these, one in each call; nothing once they are used up, or for None."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise the next."""
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return state


def pauses(plugin: Initialize, num_calls: int, longest_s: float = 5.0) -> list[float]:
    """Return the pauses of so many calls."""
    seen: list[float] = []
    patient = PatientInitialize(plugin, longest_s, seen.append)
    for _ in range(num_calls):
        try:
            assert patient(STATE) is STATE
        except (OSError, RankShouldRestart):
            pass
    return seen


def test_pause_grows_to_a_bound() -> None:
    assert pauses(Fails(*[OSError()] * 9), 10) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert pauses(Fails(*[OSError()] * 5000), 5000)[-1] == 5.0


def test_success_ends_the_pauses() -> None:
    assert pauses(Fails(OSError(), OSError(), None, OSError(), None), 7) == [0.1, 0.2, 0.1]


def test_fault_elsewhere_lets_a_pause_grow_and_begins_none() -> None:
    over = RankShouldRestart()
    assert pauses(Fails(over, over), 3) == []
    assert pauses(Fails(OSError(), over, over), 4) == [0.1, 0.2, 0.4]


@pytest.mark.timeout(60)
def test_end_of_the_iteration_ends_a_pause() -> None:
    gate, has_begun = Gate(), threading.Event()

    def sleep(pause_s: float) -> None:
        if pause_s > 1000:
            has_begun.set()
            threading.Event().wait(pause_s)

    def interrupt() -> None:
        has_begun.wait()
        gate.leave("the job is over")
        gate.force_out(lambda: True)

    def body() -> None:
        patient = PatientInitialize(Fails(*[OSError()] * 99), 10_000.0, sleep)
        while True:
            with contextlib.suppress(OSError):
                patient(STATE)

    gate.install()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        outcome = gate.run(body)
    finally:
        thread.join()
        gate.uninstall()
    assert isinstance(outcome.error, RankShouldRestart)


def test_wrapper_has_it_and_no_pause_that_looks_like_a_hang() -> None:
    own = Fails()
    wrapper: Any = inprocess.Wrapper(initialize=own)
    assert wrapper.initialize is own
    assert wrapper.options.initialize._longest_s == 5.0
    hasty: Any = inprocess.Wrapper(initialize=own, soft_timeout=timedelta(seconds=4))
    assert hasty.options.initialize._longest_s == 1.0


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def pauses_of_function(*ends: tuple[bool, float]) -> list[float]:
    """Return the pauses where the function was left so: whether it raised here, and after how many seconds."""
    seen: list[float] = []
    clock = Clock()
    patient = PatientInitialize(None, 5.0, seen.append, clock)
    for has_raised, ran_s in ends:
        assert patient(STATE) is STATE
        clock.now_s += ran_s
        patient.note_end(replace(STATE, fn_exception=OSError() if has_raised else None))
    return seen


def test_function_that_raises_at_once_is_called_after_a_pause() -> None:
    """Nothing else limits it: it was called sixty times a second."""
    assert pauses_of_function(*[(True, 0.0)] * 14) == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    # Another rank was sooner at times.
    assert pauses_of_function((True, 0.0), *[(False, 0.0)] * 9) == [0.1, 0.2]


def test_function_that_runs_for_a_while_is_called_at_once() -> None:
    assert pauses_of_function(*[(True, 1.5)] * 30) == []
    assert pauses_of_function(*[(False, 0.0)] * 30) == []
    assert pauses_of_function(*[(True, 0.0)] * 9, (True, 1.5), *[(True, 0.0)] * 8) == [0.1, 0.2]


def test_initialize_that_raised_counts_for_itself_alone() -> None:
    seen: list[float] = []
    patient = PatientInitialize(Fails(OSError()), 5.0, seen.append, Clock())
    with contextlib.suppress(OSError):
        patient(STATE)
    patient.note_end(replace(STATE, fn_exception=OSError()))
    assert patient._num_quick == 0
