"""A plug-in that hangs between two iterations is named, with where it stands."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.waiting import wait_until

from unbroken.inprocess import Wrapper
from unbroken.inprocess.finalize import Finalize
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.loop import plugins
from unbroken.inprocess.loop.plugins import Plugins
from unbroken.inprocess.loop.slow_plugin import named_when_slow
from unbroken.inprocess.state import FrozenState

STATE = FrozenState(rank=1, world_size=2, iteration=3)


class Hangs(Finalize, HealthCheck):
    """Returns once it was named."""

    def __init__(self, is_named: Callable[[], bool]) -> None:
        self.is_named = is_named

    def __call__(self, state: FrozenState) -> FrozenState:
        """Wait."""
        wait_until(self.is_named, "a word about this plug-in", 60.0)
        return state


@pytest.mark.parametrize(("name", "option"), [("finalize", "finalize"), ("check_health", "health_check")])
def test_plugin_that_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, option: str
) -> None:
    named: Any = plugins
    monkeypatch.setattr(named, "named_when_slow", lambda what, iteration: named_when_slow(what, iteration, 0.01))
    own: Any = Hangs(lambda: bool(caplog.messages))
    options = Wrapper(**{option: own}, hard_timeout=timedelta(seconds=90)).options
    with caplog.at_level(logging.WARNING):
        getattr(Plugins(options), name)(STATE)
    (said,) = caplog.messages
    assert said.startswith(f"{option} has run for 0.01 s after iteration 3: all ranks wait for this worker")
    assert "test_slow_plugin.py" in said


def test_plugin_that_returns_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with named_when_slow("finalize", 3, 3600.0):
        pass
    names = {thread.name for thread in threading.enumerate()}
    wait_until(lambda: "unbroken-slow-plugin" not in {one.name for one in threading.enumerate()}, str(names), 60.0)
    assert caplog.messages == []
