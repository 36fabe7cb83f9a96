"""A plug-in that hangs between two iterations is named, with where it stands."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import wait_until

from unbroken.inprocess import Wrapper
from unbroken.inprocess.abort import Abort
from unbroken.inprocess.completion import Completion
from unbroken.inprocess.finalize import Finalize
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.interruption.gate import Gate
from unbroken.inprocess.interruption.interrupter import Interrupter
from unbroken.inprocess.interruption.slow_plugin import named_when_slow
from unbroken.inprocess.loop import call, plugins
from unbroken.inprocess.loop.plugins import Plugins
from unbroken.inprocess.rank_assignment import RankAssignment
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.terminate import Terminate
from unbroken.inprocess.torch_state.leftovers import Leftovers
from unbroken_core.protocol.messages import Question

STATE = FrozenState(rank=1, world_size=2, iteration=3)


OTHERS_WAIT, AT_END = "all ranks wait for this worker", "this worker's part of the job is over"


class Hangs(Abort, Completion, Finalize, HealthCheck, RankAssignment, Terminate):
    """Returns once it was named."""

    def __init__(self, is_named: Callable[[], bool]) -> None:
        self.is_named = is_named

    def __call__(self, state: Any) -> Any:
        """Wait."""
        wait_until(self.is_named, "a word about this plug-in", 60.0)
        return state


def impatient(*words: object) -> Any:
    """Name a plug-in soon."""
    what, iteration, _, *outcome = words
    return named_when_slow(what, iteration, 0.01, *outcome)  # type: ignore[arg-type]  # passed on


@pytest.mark.parametrize(
    ("name", "option", "outcome"),
    [
        ("finalize", "finalize", OTHERS_WAIT),
        ("check_health", "health_check", OTHERS_WAIT),
        ("complete", "completion", AT_END),
        ("terminate", "terminate", AT_END),
    ],
)
def test_plugin_that_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, option: str, outcome: str
) -> None:
    monkeypatch.setattr(plugins, "named_when_slow", impatient)
    own: Any = Hangs(lambda: bool(caplog.messages))
    options = Wrapper(**{option: own}, hard_timeout=timedelta(seconds=90)).options
    with caplog.at_level(logging.WARNING):
        getattr(Plugins(options), name)(STATE, *([OSError()] if name == "terminate" else []))
    (said,) = caplog.messages
    assert said.startswith(f"{option} has run for 0.01 s after iteration 3: {outcome}")
    assert "test_slow_plugin.py" in said


def test_abort_that_hangs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """In standalone mode the signal that ends its process was the only word."""
    running: Any = SimpleNamespace(iteration=3, state=STATE)
    own = Hangs(lambda: bool(caplog.messages))
    with caplog.at_level(logging.WARNING):
        Interrupter(Gate(), Leftovers(), running, lambda: [own], 0.01).abort_once(3)
    (said,) = caplog.messages
    assert said.startswith(f"abort has run for 0.01 s after iteration 3: {OTHERS_WAIT}")


def test_rank_assignment_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(call, "named_when_slow", impatient)
    own = Hangs(lambda: bool(caplog.messages))
    said: list[Any] = []
    running: Any = SimpleNamespace(
        _options=SimpleNamespace(rank_assignment=own, rank_filter=None),
        _iteration=3,
        _plugins=SimpleNamespace(patience_s=5.0),
        _report=lambda *_, **words: said.append(words["answer"]),
    )
    with caplog.at_level(logging.WARNING):
        call.WrappedCall._answer(running, Question(1, 2, 4, 2, 2, ()))
    assert len(said) == 1
    assert caplog.messages[0].startswith("rank_assignment has run for 0.01 s after iteration 3: all ranks wait for its")


def test_plugin_is_named_before_its_process_is_ended() -> None:
    limits = {"soft_timeout": timedelta(seconds=4), "hard_timeout": timedelta(seconds=9)}
    assert Plugins(Wrapper(**limits).options).patience_s == 2.5  # type: ignore[arg-type]  # two of many options
    assert Plugins(Wrapper().options).patience_s == 5.0


def test_plugin_that_returns_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with named_when_slow("finalize", 3, 3600.0):
        pass
    names = {thread.name for thread in threading.enumerate()}
    wait_until(lambda: "unbroken-slow-plugin" not in {one.name for one in threading.enumerate()}, str(names), 60.0)
    assert caplog.messages == []
