"""When a driver, or a check, counts as one that does not come back: soon, and not for a watch that was asleep."""

from pathlib import Path

import pytest

from unbroken.watch.checks.check import Check, Judgement
from unbroken.watch.checks.gpu import EVENTS
from unbroken.watch.config import WatchConfig
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.gpus import EventListener
from unbroken.watch.lane import Lane
from unbroken.watch.nvml import Gpu
from unbroken.watch.watch import PATIENCE_S, Watch

KNOWN_S = 45.0
"""Within so long it is known that no XID would be heard of."""


class SeenError(Exception):
    """The test has seen enough."""


class Driver:
    """Answers when its time is over, three times; then it fails, and is asked again after pauses."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.num_waits = 0
        self.listener = EventListener("all", lambda _check, _findings: None, EVENTS, lambda: self.now_s)
        self.deaf = ()

    def devices(self, _visible: str) -> list[Gpu]:
        self.take(0.0)
        return [Gpu("GPU-a", 1, "")]

    def listen(self, _gpus: list[Gpu]) -> "Driver":
        return self

    def wait(self, timeout_ms: int) -> None:
        if self.num_waits == 3:
            raise NotCheckedError("no driver")
        self.num_waits += 1
        self.take(timeout_ms / 1000)

    def take(self, seconds: float) -> None:
        """Let something take so long: until then and for a while after it nothing hangs."""
        assert not self.listener.is_hanging(self.now_s + seconds + PATIENCE_S - 0.1, PATIENCE_S)
        assert self.listener.is_hanging(self.now_s + seconds + PATIENCE_S + 0.1, PATIENCE_S)
        assert seconds + PATIENCE_S < KNOWN_S or self.num_waits == 3
        self.now_s += seconds
        if self.now_s > 2000.0:
            raise SeenError


def test_a_driver_that_does_not_answer_a_wait_for_events_is_soon_known_and_a_pause_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen before: it was known after three minutes. A driver that fails is asked again after a minute at most."""
    driver = Driver()
    monkeypatch.setattr("unbroken.watch.gpus.Nvml", lambda: driver)
    monkeypatch.setattr("unbroken.watch.gpus.time.sleep", driver.take)
    with pytest.raises(SeenError):
        driver.listener.run()
    assert driver.num_waits == 3


def test_a_watch_that_had_no_core_takes_no_check_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(WatchConfig(tmp_path, tmp_path, "", (), ()))
    lane = Lane([Check("fans", 1.0, lambda: None, lambda _h, _s: Judgement((), None))], lambda _c, _f: None)
    lane._running = ("fans", 0.0)
    watch._lanes = (lane,)
    watch._turned_s = 0.0
    monkeypatch.setattr(watch, "_wait", lambda _seconds: None)
    monkeypatch.setattr(watch._listener, "is_hanging", lambda _now_s, _patience_s: False)

    def hanging_at(at_s: float) -> list[str]:
        watch._turn(at_s)
        return [each.check for each in watch._board.health().findings]

    assert hanging_at(5.0) == []
    assert hanging_at(100.0) == [], "nor has anybody else had one"
    assert hanging_at(105.0) == ["fans"], "all had time to come back"
    lane._running = None
    assert hanging_at(110.0) == []
