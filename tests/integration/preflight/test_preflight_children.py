"""Functions in child processes: whatever they do, their parent goes on in time."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.processes import is_gone
from tests.waiting import wait_until

from unbroken.preflight.forked import EndedError, Forked, Tell, answer_of, answers_of

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


def test_what_a_child_has_started_ends_with_it() -> None:
    def start(tell: Tell) -> None:
        tell(Forked(lambda tell: hang()).pid)
        hang()

    child = Forked(start)
    grandchild = child.read(time.monotonic() + LIMIT_S)
    child.end()
    wait_until(lambda: is_gone(grandchild), "the grandchild to end")
