"""A step that one rank gives up is given up by all: nobody waits for what never comes, and all say who and why."""

import errno
import json
import os
import socket
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from unbroken.memory.background import handover
from unbroken.memory.background.epochs import MARK, MAX_REASON, Epoch, Failure
from unbroken.memory.background.handover import DiskSettings, Handover
from unbroken.memory.background.news import DiskNews, on_disk
from unbroken.memory.background.orders import WriteOrder, receive, send
from unbroken.memory.background.plans import WritePlan
from unbroken.memory.background.publishing import Publisher
from unbroken.memory.background.writer import DiskWriter, NotWrittenError, _read_plan
from unbroken.memory.place import WorkerInfo
from unbroken_core.pod.memory_messages import MAX_REQUEST_BYTES, Written
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import OnDisk
from unbroken_core.vocabulary.errors import WireError

FOR_EVER_S = 1e9


class FakeChild:
    """A process that writes, or has ended."""

    is_alive = True


@pytest.fixture
def epoch(tmp_path: Path) -> Epoch:
    """Return one that has begun."""
    epoch = Epoch(tmp_path, "job", 0, 1, 7)
    epoch.begin()
    return epoch


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    """Return what stands for this rank's process. Nobody sleeps: what would wait fails."""
    child = FakeChild()
    monkeypatch.setattr(handover._Process, "child", child)

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(time, "sleep", sleep)
    return child


def handed_over(epoch: Epoch, child: Any, rank: int, step: int = 10) -> Handover:
    """Return a rank that has ordered a step, and calls `wait` next."""
    one = Handover(DiskSettings(epoch.folder, 1, 3))
    one._epoch, one._rank, one._newest_due, one._ordered = epoch, rank, step, {step: child}
    return one


def test_the_first_who_gives_a_step_up_says_why_to_all(epoch: Epoch) -> None:
    assert epoch.failure(10) is None
    epoch.fail(10, Failure(3, "[Errno 28] No space left on device"))
    epoch.fail(10, Failure(1, "the step was given up"))
    assert str(epoch.failure(10)) == "rank 3: [Errno 28] No space left on device"
    assert epoch.failure(1) is None
    assert epoch.failed_steps() == [10]


def test_another_iteration_knows_nothing_of_it_and_is_told_nothing(epoch: Epoch) -> None:
    epoch.fail(10, Failure(3, "late"))
    later = Epoch(epoch.folder, "job", 1, 1, 8)
    later.begin()
    assert later.failure(10) is None
    epoch.fail(20, Failure(3, "too late"))
    assert (epoch.failed_steps(), later.failed_steps(), epoch.work.exists()) == ([], [], False)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"rank": 3}', b'{"reason": ' + b"9" * 10_000, b"\xff", b'"text"', b"[" * 4096]
)
def test_a_reason_that_cannot_be_read_is_still_a_failure(epoch: Epoch, content: bytes) -> None:
    (epoch.work / "failed" / "10-3").write_bytes(content)
    assert str(epoch.failure(10)) == "rank 3: its reason cannot be read"


def test_a_reason_is_one_short_line_and_marks_are_few(epoch: Epoch) -> None:
    for step in range(100):
        epoch.fail(step, Failure(0, "many\nlines " * 1000))
    for name in (".5-1.tmp", "x-1", "5-", "5-12345678", "1" * 30 + "-1"):
        (epoch.work / "failed" / name).touch()
    failure = epoch.failure(99)
    assert failure is not None
    assert "\n" not in failure.reason
    assert len(failure.reason) <= MAX_REASON
    epoch.forget_failures()
    assert epoch.failed_steps() == list(range(36, 100))


def test_flush_ends_at_once_with_who_has_failed_and_why(
    epoch: Epoch, child: FakeChild, caplog: pytest.LogCaptureFixture
) -> None:
    epoch.fail(10, Failure(3, "[Errno 28] No space left on device"))
    assert not handed_over(epoch, child, rank=1).wait(FOR_EVER_S)
    assert (
        "step 10 is not on the disk: step 10 was given up by rank 3: [Errno 28] No space left on device" in caplog.text
    )


def test_what_is_whole_is_on_the_disk_whatever_a_rank_has_said(epoch: Epoch, child: FakeChild) -> None:
    epoch.fail(10, Failure(3, "it was not so bad"))
    epoch.whole(10).mkdir()
    (epoch.whole(10) / MARK).write_text(json.dumps(epoch.mark))
    assert handed_over(epoch, child, rank=1).wait(FOR_EVER_S)


@pytest.mark.parametrize(("rank", "wrote"), [(0, False), (0, True), (1, False)])
def test_a_rank_whose_process_has_ended_tells_the_others(
    epoch: Epoch, child: FakeChild, rank: int, wrote: bool
) -> None:
    """Nobody else makes a step whole than the process of rank 0."""
    epoch.parts(10).mkdir()
    if wrote:
        epoch.part(10, rank).touch()
    child.is_alive = False
    assert not handed_over(epoch, child, rank).wait(FOR_EVER_S)
    assert str(epoch.failure(10)) == f"rank {rank}: its process that writes to the disk has ended"


@pytest.mark.parametrize("name", ["1.part", MARK])
def test_what_an_ended_process_has_written_may_still_become_whole(epoch: Epoch, child: FakeChild, name: str) -> None:
    """Its part is there, or rank 0 has just taken it."""
    epoch.parts(10).mkdir()
    (epoch.parts(10) / name).touch()
    child.is_alive = False
    with pytest.raises(AssertionError, match="it waits"):
        handed_over(epoch, child, rank=1).wait(FOR_EVER_S)
    assert epoch.failure(10) is None


def test_a_later_process_of_the_rank_does_not_write_what_the_one_before_left(epoch: Epoch, child: FakeChild) -> None:
    before = FakeChild()
    before.is_alive = False
    assert not handed_over(epoch, before, rank=1).wait(FOR_EVER_S)
    assert "has ended" in str(epoch.failure(10))


def test_parts_of_a_step_that_is_given_up_go_at_once(epoch: Epoch, caplog: pytest.LogCaptureFixture) -> None:
    """A step before it may still come; the last parts are waited for no more."""
    for step in (10, 20):
        epoch.parts(step).mkdir()
    publisher = Publisher(epoch, 4, 3)
    epoch.fail(20, Failure(3, "its slot has changed"))
    publisher.turn()
    assert (epoch.steps(), publisher.is_waiting) == ([10], True)
    assert "checkpoint for the disk given up: step=20: rank 3: its slot has changed" in caplog.text
    epoch.fail(10, Failure(2, "late"))
    publisher.turn()
    assert (epoch.steps(), publisher.is_waiting) == ([], False)


def test_what_cannot_be_made_whole_is_told_by_rank_0(epoch: Epoch) -> None:
    epoch.parts(10).mkdir()
    epoch.part(10, 0).write_text('{"plan": "another", "rows": []}')
    Publisher(epoch, 1, 3).turn()
    assert str(epoch.failure(10)) == "rank 0: its ranks' states differ in form"
    assert epoch.steps() == []


def test_a_writer_that_fails_tells_the_others_and_takes_the_next_order(epoch: Epoch) -> None:
    """What it has ordered cannot be read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        order = WriteOrder(
            str(epoch.folder), epoch.job, epoch.term, epoch.iteration, epoch.nonce, 10, 3, 4, "", 1, 3, 10
        )
        epoch.parts(10).mkdir()
        (epoch.parts(10) / "__3_0.distcp").touch()
        (epoch.parts(10) / "__2_0.distcp").touch()
        DiskWriter(theirs)._take(order, [os.memfd_create("slot"), os.memfd_create("names")])
        assert ours.recv(100) == b"taken"
    failure = epoch.failure(10)
    assert failure is not None
    assert failure.rank == 3
    assert "Expecting value" in failure.reason
    assert [path.name for path in epoch.parts(10).iterdir()] == ["__2_0.distcp"]


def test_a_worker_that_no_longer_has_a_step_has_the_others_told(epoch: Epoch, caplog: pytest.LogCaptureFixture) -> None:
    """Its turn comes though the process still starts, and nothing is answered: no slot was lent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = WriteOrder(str(epoch.folder), epoch.job, epoch.term, epoch.iteration, epoch.nonce, 10, 3, 4, "", 0, 3, 10)
    with theirs:
        send(ours, replace(order, given_up="not in memory"), ())
        ours.shutdown(socket.SHUT_WR)
        DiskWriter(theirs).run()
        assert ours.recv(100) == b"taken", "it has started"
        theirs.close()
        assert ours.recv(100) == b""
        ours.close()
    assert str(epoch.failure(10)) == "rank 3: not in memory"
    assert caplog.text == "", "the worker has logged it"


@pytest.mark.parametrize(("given_up", "num_descriptors", "wanted"), [("", 0, 2), ("late", 2, 0)])
def test_an_order_without_its_slot_or_with_one_too_many_is_refused(
    epoch: Epoch, given_up: str, num_descriptors: int, wanted: int
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = WriteOrder(str(epoch.folder), "job", 1, 0, 7, 10, 3, 4, "", 0, 3, 10, given_up=given_up)
    descriptors = [os.memfd_create("file") for _ in range(num_descriptors)]
    with ours, theirs:
        send(ours, order, descriptors)
        with pytest.raises(WireError, match=f"want {wanted} descriptors, got {num_descriptors}"):
            receive(theirs)
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_rank_that_waits_for_others_is_told_that_one_has_given_up(epoch: Epoch) -> None:
    order = WriteOrder(str(epoch.folder), epoch.job, epoch.term, epoch.iteration, epoch.nonce, 10, 1, 4, "", 1, 3, 10)
    assert _read_plan(epoch, order, "") is None
    epoch.fail(10, Failure(3, "full"))
    with pytest.raises(NotWrittenError, match="the step was given up by rank 3: full"):
        _read_plan(epoch, order, "")


class Ear(DiskNews):
    """Hears what a keeper would be told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.heard: list[tuple[OnDisk, bool]] = []
        """With each, whether its age was told."""
        self.num_failed = 0

    def tell(self, on_disk: OnDisk, age_s: float) -> None:
        self.heard.append((on_disk, age_s >= 0))

    def failed(self) -> None:
        self.num_failed += 1


def writer_of(epoch: Epoch, sent: socket.socket) -> tuple[DiskWriter, Ear]:
    """Return the process of rank 0 of two, and who hears it."""
    writer, ear = DiskWriter(sent), Ear()
    writer._news, writer._epoch, writer._every, writer._publisher = ear, epoch, 10, Publisher(epoch, 2, 3)
    return writer, ear


def test_the_keeper_hears_each_change_once_and_all_again_with_the_next_order(epoch: Epoch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        writer, ear = writer_of(epoch, theirs)
        for _ in range(3):
            writer._publish()
        assert ear.heard == [(OnDisk(1, 0, 10), False)]
        # Of an earlier iteration, or the user's.
        (epoch.whole(20)).mkdir()
        (epoch.whole(20) / ".metadata").touch()
        epoch.parts(30).mkdir()
        epoch.fail(30, Failure(1, "full"))
        for _ in range(3):
            writer._publish()
        told = OnDisk(1, 0, 10, 20, 1, "step 30 was given up by rank 1: full")
        assert ear.heard[1:] == [(told, False)]
        order = WriteOrder(str(epoch.folder), epoch.job, 1, 0, epoch.nonce, 40, 0, 2, "", 1, 3, 10)
        writer._take(order, [os.memfd_create("slot"), os.memfd_create("names")])
        writer._publish()
        last, _ = ear.heard[-1]
        assert (last.step, last.num_given_up) == (20, 2)
        assert last.problem.startswith("step 40 was given up by rank 0: Expecting value")
        assert ear.num_failed == 1
        # Another rank is to blame for this one.
        epoch.fail(50, Failure(1, "full"))
        writer._give_up(replace(order, step=50), "the step was given up by rank 1")
        assert ear.num_failed == 1


def test_a_step_that_is_made_whole_ends_the_problem_and_has_an_age(
    epoch: Epoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        writer, ear = writer_of(epoch, theirs)
        epoch.fail(10, Failure(1, "full"))
        writer._publish()
        assert ear.heard[-1][0].problem
        key = ("w", (0,))
        decision = WritePlan("id", ((0,), ()), frozenset({key}), Metadata({}), {})
        publisher = writer._publisher
        assert publisher is not None
        publisher._decision = decision
        epoch.parts(20).mkdir()
        rows = [["w", [0], "__0_0.distcp", 0, 4]]
        for rank, part in enumerate((rows, [])):
            epoch.part(20, rank).write_text(json.dumps({"plan": "id", "rows": part}))
        writer._publish()
        assert ear.heard[-1] == (OnDisk(1, 0, 10, 20, 1, ""), True)
        assert epoch.is_whole(20)


@pytest.mark.parametrize(
    ("every", "saved_every", "interval"), [(100, 1, 100), (100, 10, 100), (10, 100, 100), (150, 100, 200), (1, 1, 1)]
)
def test_the_interval_that_is_told_is_that_of_steps_that_are_saved(every: int, saved_every: int, interval: int) -> None:
    one = Handover(DiskSettings(Path("nowhere"), every, 3, saved_every))
    due = []
    for step in range(0, 1000, saved_every):
        if one.is_due(step):
            due.append(step)
            one._newest = step
    assert DiskSettings(Path("nowhere"), every, 3, saved_every).interval == interval
    assert max(after - before for before, after in pairwise([0, *due])) == interval


@pytest.mark.parametrize(("step_s", "first", "apart"), [(0.1, 0, 1), (0.02, 0, 1), (1.0, 3, 2), (0.35, 0, 7)])
def test_ranks_that_wrote_different_steps_soon_write_the_same(
    monkeypatch: pytest.MonkeyPatch, step_s: float, first: int, apart: int
) -> None:
    """Seen before: each took its next step in turn, for the whole job, and no step on the disk was whole."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    ranks = [Handover(DiskSettings(Path("nowhere"), 10, 3)) for _ in range(3)]
    slots: Any = None
    now_s[0] += 300.0  # until the first save
    busy_until_s, written = [0.0, 0.0, 0.0], [list[int](), list[int](), list[int]()]
    # Of the second one a slot is kept for longer: it begins later.
    busy_until_s[1] = now_s[0] + (10 + apart) * step_s
    for step in range(first, 4000):
        now_s[0] += step_s
        for rank, one in enumerate(ranks):
            if not one.is_due(step):
                continue
            if now_s[0] < busy_until_s[rank]:
                one.skipped()
                continue
            one.offer(WorkerInfo(None, 0, 1, 0, rank, 3), slots, Moment(1, 0, step), {})
            written[rank].append(step)
        for rank in range(3):
            if written[rank] and written[rank][-1] == step:
                is_common = all(steps and steps[-1] == step for steps in written)
                busy_until_s[rank] = now_s[0] + (0.1 if is_common else 5.0 + 0.1 * rank)

    common = set.intersection(*map(set, written))
    assert common, [steps[:20] for steps in written]
    # What comes after is written by all, or by none.
    assert all(steps == sorted(common) for steps in ([s for s in one if s >= min(common)] for one in written))
    assert len(common) > 10


def test_a_folder_in_which_nothing_can_be_written_is_told_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    one = Handover(DiskSettings(tmp_path / "file", 10, 3))
    with pytest.raises(OSError, match="file"):
        one.begin(WorkerInfo(None, 0, 1, 2, 0, 1))
    told = one.told()
    assert told is not None
    assert (told.iteration, told.every, told.step) == (2, 10, -1)
    assert told.problem.startswith("rank 0: ")
    with pytest.raises(OSError, match="file"):
        one.begin(WorkerInfo(None, 0, 1, 3, 1, 2))
    assert one.told() is None, "rank 0 says it"


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EACCES, "Permission denied"), (0, "see its log")], ids=["errno", "none"]
)
def test_what_one_rank_cannot_begin_all_know_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    """Before, the others kept their slots for 5 s, and waited for a minute, at each step that was due."""
    told: list[list[list[int]]] = []

    def gather(rows: list[list[int]], width: int) -> list[list[list[int]]]:
        told.append(rows)
        return [rows, rows, [[number]] if len(told) == 2 else rows]

    monkeypatch.setattr(handover, "gather", gather)
    monkeypatch.setattr(handover, "_child", lambda: pytest.fail("nothing is written, so no process is started"))
    one = Handover(DiskSettings(tmp_path, 10, 3))
    with pytest.raises(OSError, match=f"rank 2 cannot write there: {why}"):
        one.begin(WorkerInfo(None, 0, 1, 2, 0, 3))
    assert told[1] == [[-1]], "this rank can"
    on_disk = one.told()
    assert on_disk is not None
    assert on_disk.problem == f"rank 2 cannot write there: {why}"


@pytest.mark.parametrize("character", ["x", "\x00", "я", "\ud800", "\U0001f525"])
def test_the_keeper_takes_the_longest_reason_that_a_rank_can_give(epoch: Epoch, character: str) -> None:
    """A line of 4 KiB is all that it reads. Before, it refused such a line, and showed the step before for ever."""
    epoch.fail(10, Failure(3, character * 10_000))
    problem = f"step 10 was given up by {epoch.failure(10)}"
    told = on_disk(replace(epoch, iteration=2**31 - 1, term=2**31 - 1), 2**31 - 1, 2**31 - 1, problem)
    assert told.problem.startswith("step 10 was given up by rank 3: " + " ".join((character * 200).split()))
    assert len(wire.encode(Written(told, 999_999.123456789))) < MAX_REQUEST_BYTES


def test_nobody_waits_for_who_never_writes_a_reason(epoch: Epoch) -> None:
    """Before, all ranks and their processes did, for ever: in `open` of a pipe."""
    os.mkfifo(epoch.work / "failed" / "10-3")
    assert str(epoch.failure(10)) == "rank 3: its reason cannot be read"
    epoch.whole(20).mkdir()
    os.mkfifo(epoch.whole(20) / MARK)
    assert not epoch.is_whole(20)


@pytest.mark.parametrize("content", [b"[" * 4000, b"[" * 100_000, b'{"a":' * 700, b"\xff", b"", b"7"])
def test_a_mark_that_is_none_ends_no_process(epoch: Epoch, content: bytes) -> None:
    """Before, one that is nested deeply did."""
    epoch.whole(20).mkdir()
    (epoch.whole(20) / MARK).write_bytes(content)
    assert not epoch.is_whole(20)
    epoch.retain(1, 20)
    assert epoch.whole(20).is_dir()
