"""A worker waits after a step for as long as it is told to, and no longer."""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbroken.inprocess.loop import step_hold
from unbroken.inprocess.loop.step_hold import StepHold
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken_core.pod import stamps
from unbroken_core.protocol.messages import NO_STEP, Halt, Halted

LIMIT_S = 30.0
ASK = Halt(term=1, number=1, iteration=3, step=0, is_common=False, within_s=600.0)


class Script:
    """A training function whose pings run in a thread of their own; answers come in a queue."""

    def __init__(self, folder: Path) -> None:
        page = folder / "stamps"
        page.write_bytes(stamps.pack_header(1).ljust(stamps.page_bytes(1), b"\0"))
        self.progress = ProgressSlot(0, 0)
        self.progress.attach(page)
        self.answers: queue.Queue[Halted] = queue.Queue()
        self.step_hold = StepHold(self.progress, self.answers.put)
        self.step_hold.begin(3)
        self.progress.begin(3)
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def ping(self, step: int | None, is_atomic: bool = False) -> None:
        if self.progress.ping(step):
            self.progress.arm()
            self.step_hold.wait(step, is_atomic)

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except ValueError as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def answer(self) -> Halted:
        return self.answers.get(timeout=LIMIT_S)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_worker_waits_in_its_next_ping_goes_on_to_the_named_step_and_saves_there(script: Script) -> None:
    saved: list[int] = []
    script.step_hold.on_move(saved.append)
    script.ping(4)
    script.step_hold.obey(ASK)
    assert script.answer() == Halted(1, 1, 4)

    def train() -> None:
        for step in range(5, 9):
            script.ping(step)

    script.start(train)
    assert script.answer() == Halted(1, 1, 5, is_held=True)
    script.step_hold.obey(replace(ASK, number=2, step=7))
    assert [script.answer(), script.answer()] == [Halted(1, 2, 5), Halted(1, 2, 7, is_held=True)]
    script.step_hold.obey(replace(ASK, number=3, step=7, is_common=True))
    done = Halted(1, 3, 7, is_held=True, is_done=True)
    assert [script.answer(), script.answer()] == [replace(done, is_done=False), done]
    script.step_hold.obey(replace(ASK, number=4, step=NO_STEP))
    script.join()
    assert saved == [7]


@pytest.mark.parametrize(
    ("last", "ordered", "following"),
    [
        pytest.param(9, 9, 10, id="it was passed when the order came"),
        # A script that counts the steps of each epoch from 0 never comes to the step after the last.
        pytest.param(99, 100, 0, id="steps begin anew"),
    ],
)
def test_worker_that_does_not_come_to_the_named_step_waits_in_its_next_ping(
    script: Script, last: int, ordered: int, following: int
) -> None:
    script.ping(last)
    script.step_hold.obey(replace(ASK, step=ordered))
    assert script.answer() == Halted(1, 1, last)
    script.start(lambda: script.ping(following))
    assert script.answer() == Halted(1, 1, following, is_held=True)
    script.step_hold.obey(replace(ASK, number=2, step=NO_STEP))
    script.join()


@pytest.mark.parametrize(
    ("step", "is_atomic"), [pytest.param(None, False, id="no step"), pytest.param(5, True, id="atomic")]
)
def test_ping_inside_of_an_atomic_section_or_without_a_step_does_not_wait(
    script: Script, step: int | None, is_atomic: bool
) -> None:
    script.step_hold.obey(ASK)
    script.answer()
    script.ping(step, is_atomic)
    script.start(lambda: script.ping(6))
    assert script.answer() == Halted(1, 1, 6, is_held=True)
    script.step_hold.obey(replace(ASK, number=2, step=NO_STEP))
    script.join()


def test_nobody_waits_longer_than_the_order_says(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent, or the rendezvous, may be gone for good."""
    now_s = 1000.0
    monkeypatch.setattr(step_hold, "time", SimpleNamespace(monotonic=lambda: now_s))
    script.step_hold.obey(replace(ASK, within_s=0.2))
    script.answer()
    script.start(lambda: script.ping(1))
    assert script.answer() == Halted(1, 1, 1, is_held=True)
    now_s += 0.2
    script.join()
    assert script.answer() == Halted(1, 1, 1)


def test_order_of_another_iteration_and_a_repeated_one_are_ignored(script: Script) -> None:
    script.step_hold.obey(replace(ASK, iteration=2))
    script.step_hold.obey(ASK)
    script.step_hold.obey(ASK)
    script.answer()
    assert script.answers.empty()
    script.step_hold.end()
    script.step_hold.begin(4)
    script.ping(1)
    assert script.answers.empty()


def test_what_a_save_raises_comes_out_of_ping(script: Script) -> None:
    def fail(_step: int) -> None:
        raise ValueError("disk is full")

    script.step_hold.on_move(fail)
    script.step_hold.obey(ASK)
    script.answer()
    script.start(lambda: script.ping(1))
    script.answer()
    script.step_hold.obey(replace(ASK, number=2, step=1, is_common=True))
    script.join()
    assert str(script.error) == "disk is full"


def test_worker_that_waits_is_not_taken_for_one_that_hangs(script: Script, tmp_path: Path) -> None:
    script.step_hold.obey(ASK)
    script.answer()
    script.start(lambda: script.ping(1))
    script.answer()
    flags = stamps.unpack_slot((tmp_path / "stamps").read_bytes(), 0).flags
    assert flags & stamps.FLAG_PROTECTION_OFF
    script.step_hold.obey(replace(ASK, number=2, step=NO_STEP))
    script.join()
    assert not stamps.unpack_slot((tmp_path / "stamps").read_bytes(), 0).flags & stamps.FLAG_PROTECTION_OFF
