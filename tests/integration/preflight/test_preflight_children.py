"""Functions in child processes: whatever they do, their parent goes on in time."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.processes import is_gone
from tests.waiting import wait_until

from unbroken.preflight import own_checks
from unbroken.preflight.forked import EndedError, Forked, StarvedError, Tell, answer_of, answers_of
from unbroken.preflight.statements import read_arrival

LIMIT_S = 60.0


def hang() -> Any:
    while True:
        signal.pause()


def die() -> Any:
    signal.raise_signal(signal.SIGKILL)


def fail() -> Any:
    raise ValueError


def test_what_a_function_returns_comes_back() -> None:
    assert answer_of(lambda: {"a": [1, "x" * 3_000_000]}, LIMIT_S) == {"a": [1, "x" * 3_000_000]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(die, "was ended by SIGKILL", id="killed"),
        pytest.param(fail, "ended with exit code 1", id="failed"),
        pytest.param(lambda: os._exit(0), "ended with exit code 0", id="without a word"),
    ],
)
def test_how_a_child_ended_is_said(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(EndedError, match=message):
        answer_of(function, LIMIT_S)


def test_a_child_that_hangs_is_killed_and_hides_no_other() -> None:
    answers = answers_of([hang, os.getpid], 10.0)
    assert isinstance(answers[0].error, TimeoutError)
    assert answers[1].error is None
    assert is_gone(answers[1].value)


def spin() -> Any:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True:
        pass


def test_a_child_that_waits_for_a_core_is_known_as_that() -> None:
    children = [Forked(lambda tell: spin()) for _ in range(2)]
    try:
        wait_until(lambda: all(child.waited_s() > 0.1 for child in children), "both have waited for the core")
    finally:
        for child in children:
            child.end()


def test_no_end_of_who_had_no_core_is_no_fault_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forked, "waited_s", lambda child: 0.3)
    answers = answers_of([hang, os.getpid], 1.0)
    assert isinstance(answers[0].error, StarvedError)
    monkeypatch.setattr(own_checks, "_facts", hang)
    found = own_checks.own_checks(None, 1.0)
    arrival = read_arrival({"name": "a", "domains": [], **found})
    assert arrival is not None
    assert arrival.is_unknown
    assert "this host is busy" in found["checks"][0]["message"]


def test_what_a_child_has_started_ends_with_it() -> None:
    def start(tell: Tell) -> None:
        tell(Forked(lambda tell: hang()).pid)
        hang()

    child = Forked(start)
    grandchild = child.read(time.monotonic() + LIMIT_S)
    child.end()
    wait_until(lambda: is_gone(grandchild), "the grandchild to end")
