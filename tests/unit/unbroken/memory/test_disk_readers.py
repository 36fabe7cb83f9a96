"""What ranks say of the slots that they read, and of the folder: none saves on while others cannot."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.memory.background import handover, writer
from unbroken.memory.background.epochs import Epoch, Failure
from unbroken.memory.background.handover import DiskSettings, Handover
from unbroken.memory.background.publishing import innermost
from unbroken.memory.background.writer import NotWrittenError, _Check
from unbroken.memory.place import WorkerInfo


@pytest.fixture
def epoch(tmp_path: Path) -> Epoch:
    """Return one that has begun, with parts of step 10."""
    epoch = Epoch(tmp_path, "job", 0, 1, 7)
    epoch.begin()
    epoch.parts(10).mkdir()
    return epoch


@pytest.mark.parametrize(
    ("there", "rank", "may_begin", "is_kept"),
    [
        # Rank 0 looks for all others.
        (["0.reading", "1.reading", "2.read"], 0, False, True),
        (["0.reading", "1.read", "2.read"], 0, True, False),
        (["0.reading", "1.read"], 0, True, True),
        (["0.reading", "1.read"], 0, False, False),
        # The others look at what it says.
        (["0.reading", "1.read", "2.read"], 1, False, True),
        (["0.read", "1.read", "2.reading"], 1, True, False),
        (["1.read", "2.read"], 1, True, True),
        (["1.read", "2.read"], 1, False, False),
    ],
)
def test_a_slot_stays_while_another_rank_reads_its_own(
    epoch: Epoch, there: list[str], rank: int, may_begin: bool, is_kept: bool
) -> None:
    for name in [*there, "0.part", "__1_0.distcp"]:
        (epoch.parts(10) / name).touch()
    assert epoch.is_read_elsewhere(10, rank, 3, may_begin=may_begin) is is_kept


@pytest.mark.parametrize("end", ["given up", "whole", "void"])
def test_no_slot_stays_for_a_step_that_is_over(epoch: Epoch, end: str) -> None:
    for rank in (0, 1):
        epoch.begin_reading(10, rank)
    assert epoch.is_read_elsewhere(10, 1, 2, may_begin=False)
    if end == "given up":
        epoch.fail(10, Failure(0, "full"))
    elif end == "whole":
        epoch.publish(10)
    else:
        Epoch(epoch.folder, "job", 1, 1, 8).begin()
    assert not any(epoch.is_read_elsewhere(10, rank, 2, may_begin=True) for rank in (0, 1))


def test_nothing_of_it_is_left_in_a_whole_checkpoint(epoch: Epoch) -> None:
    for rank in (0, 1, 2):
        epoch.begin_reading(10, rank)
    epoch.end_reading(10, 1)
    epoch.forget_reading(10, 2)
    epoch.forget_reading(10, 2)
    assert sorted(path.name for path in epoch.parts(10).iterdir()) == ["0.reading", "1.read"]
    epoch.forget_readers(10)
    assert list(epoch.parts(10).iterdir()) == []


def test_what_never_becomes_whole_is_read_no_further(epoch: Epoch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is wanted: an iteration that begins cannot save there as long as the one before is written from it."""
    monkeypatch.setattr(writer, "_LOOK_S", 0.0)
    check = _Check(epoch, 10)
    check()
    epoch.fail(10, Failure(3, "full"))
    with pytest.raises(NotWrittenError, match="the step was given up by rank 3: full"):
        check()
    Epoch(epoch.folder, "job", 1, 1, 8).begin()
    with pytest.raises(NotWrittenError, match="another iteration of the job, or another job, has begun"):
        check()


class Ended:
    """A process that has ended before it has taken its order, or after."""

    is_alive = False

    def __init__(self, has_taken: bool) -> None:
        self._has_taken = has_taken

    def has_taken(self) -> bool:
        return self._has_taken


@pytest.mark.parametrize("has_taken", [False, True])
def test_the_others_are_told_at_the_next_save_of_a_process_that_ended_while_it_read(
    epoch: Epoch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_taken: bool
) -> None:
    """They keep their slots for it."""
    given_up: list[tuple[int, str]] = []
    later = SimpleNamespace(give_up=lambda order: given_up.append((order.step, order.given_up)))
    monkeypatch.setattr(handover, "_child", lambda: later)
    one = Handover(DiskSettings(epoch.folder, 1, 3))
    one._epoch = epoch
    due: Any = SimpleNamespace(step=10, place=WorkerInfo(None, 0, 1, 0, 1, 2))
    child: Any = Ended(has_taken)
    one._reading = child, due
    for _ in range(2):
        one.catch_up()
    why = "its process that writes to the disk has ended"
    assert given_up == ([] if has_taken else [(10, why)])
    assert caplog.text.count(f"not written to the disk: step 10: {why}") == (0 if has_taken else 1)


def test_a_reason_that_was_found_for_an_error_is_told_instead_of_it() -> None:
    """What torch makes of an error of the system says less than that one."""
    lost = FileNotFoundError(errno.ENOENT, "No such file or directory", "plan/1.json")
    explained, wrapped = NotWrittenError("another iteration has begun"), RuntimeError("inline_container.cc failed")
    explained.__context__, explained.__suppress_context__ = lost, True
    wrapped.__context__ = lost
    assert innermost(explained) is explained
    assert innermost(wrapped) is lost
