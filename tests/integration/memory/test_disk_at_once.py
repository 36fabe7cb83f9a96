"""Real slots, a real folder and all who take part, in one process: no keeper's, and none that writes beside it."""

import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import LIMIT_S, wait_until
from torch.distributed.checkpoint.state_dict_loader import load

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.counting import Counting
from unbroken.keeper.digests import read_slot_head
from unbroken.keeper.server import Keeper
from unbroken.keeper.telling import Telling
from unbroken.memory import Checkpointer, Saved, Skipped, arena, checkpointer
from unbroken.memory.arena import WorkerSlots
from unbroken.memory.background import handover, news, writer
from unbroken.memory.background.epochs import Epoch, write_json
from unbroken.memory.background.orders import WriteOrder
from unbroken.memory.background.publishing import digest
from unbroken.memory.background.writer import DiskWriter
from unbroken.memory.disk import steps_on_disk
from unbroken.memory.place import WorkerInfo
from unbroken.memory.slots import Slot
from unbroken_core.pod.memory_messages import Find, Sealed
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, PIN_LOCK, Moment
from unbroken_core.vocabulary.checkpoints import OnDisk

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Pod:
    """One pod with one worker."""

    is_alive = True
    has_started = True
    is_told = False

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        config = KeeperConfig(folder, folder / "arena", "pod", 64 << 20, 1, b"\x01" * 16)
        self.arena = Arena(config)
        self.keeper = Keeper.__new__(Keeper)
        self.keeper._config, self.keeper._arena = config, self.arena
        self.keeper._counting, self.keeper._telling = Counting(64 << 20), Telling(self.arena, config.root)
        self.place = WorkerInfo(folder, 0, 1, 0, 0, 1)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        patch.setattr(news, "KeeperClient", lambda folder: self)
        patch.setattr(arena, "KeeperClient", lambda folder: self)
        patch.setattr(arena, "_arena", None)
        patch.setattr(checkpointer, "read_place", lambda: self.place)
        patch.setattr(handover._Process, "child", self)
        self.writer = DiskWriter(theirs, folder)

    def tell(self, message: Any) -> None:
        """Be the keeper's connection."""
        if isinstance(message, Sealed):
            self.arena.digest(self.arena.folder / f"{message.local_rank}-{message.index}.slot")
        else:
            self.keeper._answer(message)

    def ask_any(self, message: Any, _limit_s: float) -> Any:
        return self.keeper._answer(message)

    def ask(self, message: Any, _expected: type, _limit_s: float) -> Any:
        return self.keeper._answer(message) if isinstance(message, Find) else None

    def close(self) -> None:
        """Be closed, as a connection."""

    def is_free(self) -> bool:
        return True

    def has_taken(self) -> bool:
        return True

    def order(self, order: WriteOrder, descriptors: Sequence[int]) -> None:
        """Be the process that writes."""
        self.writer._take(order, [os.dup(one) for one in descriptors])
        self.writer._publish()

    def give_up(self, order: WriteOrder) -> None:
        self.writer._take(order, [])

    def end(self) -> None:
        """Give everything back."""
        self.arena.close()
        for one in (self._ours, self._theirs):
            one.close()


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pod]:
    """Return a pod whose worker begins its first iteration."""
    pod = Pod(monkeypatch, tmp_path)
    yield pod
    if arena._arena is not None:
        arena._arena.close()
    pod.end()


def test_a_state_that_is_flushed_is_read_by_plain_torch_and_known_to_the_keeper(pod: Pod, tmp_path: Path) -> None:
    """Between two steps that are due; then the disk is full, and has room again."""
    disk = tmp_path / "disk"
    state: dict[str, Any] = {"w": torch.arange(5000.0), "step": 7}
    checkpoints = Checkpointer(every=10, disk=disk, disk_every=100)
    assert checkpoints.load(state) is None
    assert pod.keeper._telling.held().disk == OnDisk(1, 0, 100)
    assert checkpoints.flush(state, 7)
    assert steps_on_disk(disk) == [7]
    found: dict[str, Any] = {"w": torch.zeros(5000), "step": 0}
    load(found, checkpoint_id=disk / "step-7")
    assert torch.equal(found["w"], state["w"])
    assert found["step"] == 7
    assert pod.keeper._telling.held().disk == OnDisk(1, 0, 100, 7)
    assert time.monotonic() >= pod.keeper._counting.counted().disk_whole_at_s > 0

    (epoch,) = (disk / ".unbroken").glob("*-*-*")
    (epoch / "step-8").mkdir()
    (epoch / "step-8" / "__0_0.distcp").symlink_to("/dev/full")
    state["w"] += 1
    assert not checkpoints.flush(state, 8)
    told = pod.keeper._telling.held().disk
    assert told is not None
    assert (told.step, told.num_given_up) == (7, 1)
    assert told.problem.startswith("step 8 was given up by rank 0: [Errno 28] No space left on device")
    assert pod.keeper._counting.counted().disk_failures == 1
    assert not (epoch / "step-8").exists()

    assert checkpoints.flush(state, 9)
    assert pod.keeper._telling.held().disk == OnDisk(1, 0, 100, 9, 1)
    load(found, checkpoint_id=disk / "step-9")
    assert torch.equal(found["w"], state["w"])


def test_a_folder_that_nobody_can_write_or_that_is_gone_is_told_and_of_use_again_later(
    pod: Pod, tmp_path: Path
) -> None:
    """Why a step was given up cannot be written into the folder then, where it is looked for."""
    disk, away = tmp_path / "disk", tmp_path / "away"
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(every=10, disk=disk, disk_every=100)
    assert checkpoints.load(state) is None
    assert checkpoints.flush(state, 7)
    (epoch,) = (disk / ".unbroken").glob("*-*-*")
    for name in ("has", "failed"):
        (epoch / name).rename(tmp_path / name)
        # Also root can write nothing there.
        (epoch / name).touch()
    assert not checkpoints.flush(state, 8, timeout_s=0)
    told = pod.keeper._telling.held().disk
    assert told is not None
    assert (told.step, told.num_given_up) == (7, 1)
    assert told.problem.startswith("step 8 was given up by rank 0: [Errno 20] Not a directory")
    for name in ("has", "failed"):
        (epoch / name).unlink()
        (tmp_path / name).rename(epoch / name)
    assert checkpoints.flush(state, 9)
    assert pod.keeper._telling.held().disk == OnDisk(1, 0, 100, 9, 1)

    disk.rename(away)
    assert not checkpoints.flush(state, 10, timeout_s=0)
    assert pod.keeper._telling.held().disk == OnDisk(1, 0, 100, -1, 1, f"{disk} is gone, or was emptied")
    away.rename(disk)
    assert checkpoints.flush(state, 11)
    told = pod.keeper._telling.held().disk
    assert told is not None
    assert (told.step, told.problem) == (11, "")


def test_a_step_that_cannot_be_read_is_not_told_as_the_newest_on_the_disk(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(every=10, disk=disk, disk_every=100)
    assert checkpoints.load(state) is None
    assert checkpoints.flush(state, 7)
    assert checkpoints.flush(state, 17)
    for part in (disk / "step-17").glob("*.distcp"):
        part.write_bytes(b"")
    for slot in pod.arena.folder.glob("*.slot"):
        slot.unlink()
    assert arena._arena is not None
    arena._arena.close()
    monkeypatch.setattr(arena, "_arena", None)
    pod.place = replace(pod.place, iteration=1)
    assert checkpoints.load(state) == 7
    assert pod.keeper._telling.held().disk == OnDisk(1, 1, 100, 7)
    assert checkpoints.flush(state, 8)
    assert pod.keeper._telling.held().disk == OnDisk(1, 1, 100, 8)


def fail_before_the_disk_has(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, disk: Path, *steps: int
) -> tuple[dict[str, Any], Checkpointer]:
    """Save these steps, of which none is written, and begin the next iteration; return the state and what loads it."""
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(every=5, disk=disk, disk_every=10)
    assert checkpoints.load(state) is None
    with monkeypatch.context() as patch:
        patch.setattr(pod, "order", lambda *_: None)
        for step in steps:
            assert isinstance(checkpoints.save(state, step), Saved)
    pod.place = replace(pod.place, iteration=1)
    return state, Checkpointer(every=5, disk=disk, disk_every=10)


@pytest.mark.parametrize("is_new", [False, True], ids=["same-process", "new-process"])
def test_a_step_that_was_due_before_a_fault_is_written_after_it(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    """Seen before: `flush` returned True, since nothing had come to be due since the load, and the disk was empty."""
    disk = tmp_path / "disk"
    state, checkpoints = fail_before_the_disk_has(pod, monkeypatch, disk, 10, 15)
    if is_new:
        assert arena._arena is not None
        arena._arena.close()
        monkeypatch.setattr(arena, "_arena", None)
    found: dict[str, Any] = {"w": torch.zeros(5000)}
    assert checkpoints.load(found) == 15
    assert checkpoints.flush()
    assert steps_on_disk(disk) == [15]
    # Of the same interval: not due again.
    found["w"] += 1
    assert isinstance(checkpoints.save(found, 19), Skipped)
    assert checkpoints.load(found) == 15
    assert steps_on_disk(disk) == [15]
    load(found, checkpoint_id=disk / "step-15")
    assert torch.equal(found["w"], state["w"])


@pytest.mark.parametrize("is_handed_over", [False, True], ids=["next-save", "handed-over"])
def test_a_step_that_was_due_and_is_not_in_the_own_memory_is_not_told_as_on_the_disk(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_handed_over: bool
) -> None:
    """No rank writes what one of them cannot: the first save after it is due, or the script hands it over."""
    disk = tmp_path / "disk"
    state, checkpoints = fail_before_the_disk_has(pod, monkeypatch, disk, 10)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerSlots, "has_part", lambda *_: False)
        assert checkpoints.load(state) == 10
    assert (
        "not written to the disk: step 10: not all ranks have their own parts of it in memory; a later" in caplog.text
    )
    assert not checkpoints.flush()
    assert "step 10 is not on the disk: rank 0 did not save it" in caplog.text
    if is_handed_over:
        assert checkpoints.flush(state, 10)
    else:
        assert isinstance(checkpoints.save(state, 15), Saved)
        assert checkpoints.flush()
    assert steps_on_disk(disk) == [10 if is_handed_over else 15]


def test_a_part_is_that_of_the_same_rank_in_a_world_of_the_same_size(pod: Pod) -> None:
    assert isinstance(Checkpointer().save({"w": torch.ones(3)}, 10), Saved)
    slots = arena._arena
    assert slots is not None
    assert slots.has_part(pod.place, Moment(1, 0, 10))
    assert not slots.has_part(replace(pod.place, world_size=2), Moment(1, 0, 10))
    assert not slots.has_part(replace(pod.place, rank=1), Moment(1, 0, 10))
    assert not slots.has_part(pod.place, Moment(1, 1, 10))


def begin_to_write(pod: Pod, epoch: Epoch) -> tuple[threading.Thread, Slot]:
    """Save step 10, and have rank 1 of 2 write it; return the thread that does, and the slot."""
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    assert isinstance(Checkpointer().save(state, 10), Saved)
    assert arena._arena is not None
    lent = arena._arena.lend(Moment(1, 0, 10))
    assert lent is not None
    order = WriteOrder(str(epoch.folder), "job", 1, 0, 7, 10, 1, 2, lent.path, lent.serial, 3, 10)
    names = os.memfd_create("names")
    os.write(names, b'{"w": ["w"]}')
    thread = threading.Thread(target=pod.writer._take, args=(order, [lent.descriptor, names]))
    thread.start()
    return thread, next(one for one in arena._arena._slots if one.path == lent.path)


def test_a_slot_is_not_kept_for_long_for_ranks_that_are_late(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """These save on. Before, nobody else did for a minute: a fault then left no step that all ranks had in memory."""
    monkeypatch.setattr(writer, "_HOLD_S", 0.0)
    epoch = Epoch(tmp_path / "disk", "job", 0, 1, 7)
    epoch.begin()
    late, slot = begin_to_write(pod, epoch)
    wait_until(slot.lock, "a slot that may be written while the others are waited for")
    assert late.is_alive()
    head = slot.head
    assert head is not None
    slot.void(head)
    slot.unlock()
    has = (epoch.work / "has" / "1.json").read_bytes()
    write_json(epoch.work / "plan" / "1.json", {"plan": "id", "has": digest(has), "indices": [0], "problem": ""})
    late.join(LIMIT_S)
    assert not late.is_alive()
    assert str(epoch.failure(10)) == "rank 1: its slot was written again, or void, before it was read"
    assert "[Errno" not in caplog.text


def test_a_slot_is_kept_while_another_rank_reads_its_own(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one skips its saves. Before, this one saved on: a fault then left no step that all ranks had in memory.

    The next order waits until the disk has all: its slot would wait in the queue, on this rank alone.
    """
    monkeypatch.setattr(writer, "_BEGIN_S", 0.0)
    is_told: list[bool] = []
    monkeypatch.setattr(writer, "sync", lambda path: is_told.append(bool(select.select([pod._ours], [], [], 0)[0])))
    epoch = Epoch(tmp_path / "disk", "job", 0, 1, 7)
    epoch.begin()
    epoch.parts(10).mkdir()
    (epoch.parts(10) / "0.reading").touch()
    quick, slot = begin_to_write(pod, epoch)
    has = epoch.work / "has" / "1.json"
    wait_until(has.exists, "what this rank has")
    plan = {"plan": "id", "has": digest(has.read_bytes()), "indices": [0], "problem": ""}
    write_json(epoch.work / "plan" / "1.json", plan)
    wait_until(lambda: any((epoch.parts(10) / name).exists() for name in ("1.read", "1.part")), "a slot that is read")
    assert not slot.lock()
    (epoch.parts(10) / "0.reading").rename(epoch.parts(10) / "0.read")
    quick.join(LIMIT_S)
    assert not quick.is_alive()
    assert slot.lock()
    slot.unlock()
    assert epoch.has_part(10, 1)
    assert set(is_told) == {False}
    assert pod._ours.recv(100) == b"taken"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_slot_that_waits_for_its_process_is_kept_for_a_while(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of other ranks may be there before, and keep theirs. Before, this rank saved on without them."""
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(disk=tmp_path / "disk", disk_every=10)
    assert checkpoints.load(state) is None
    monkeypatch.setattr(pod, "is_free", lambda: False)
    assert isinstance(checkpoints.save(state, 10), Saved)
    assert isinstance(checkpoints.save(state, 11), Saved)
    assert isinstance(checkpoints.save(state, 12), Skipped)
    # Who is forked meanwhile, as one that loads data, does not keep it for longer.
    readable, writable = os.pipe()
    if (forked := os.fork()) == 0:
        os.close(writable)
        os.read(readable, 1)
        os._exit(handover._Process.kept is not None)
    os.close(readable)
    handover._Process.kept_until_s = 0.0
    assert isinstance(checkpoints.save(state, 13), Saved)
    assert isinstance(checkpoints.save(state, 20), Saved)
    assert isinstance(checkpoints.save(state, 21), Saved)
    # One that waits for a slot does not wait for itself.
    assert not checkpoints.flush(state, 22, timeout_s=0.5)
    assert {_step_in(path) for path in pod.arena.own_slots()} == {21, 22}
    os.close(writable)
    assert os.waitpid(forked, 0)[1] == 0


def test_a_slot_that_differs_from_its_digests_is_not_written_and_counts(pod: Pod, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(every=10, disk=tmp_path / "disk", disk_every=100)
    assert checkpoints.load(state) is None
    assert isinstance(checkpoints.save(state, 10), Saved)
    (slot,) = (path for path in pod.arena.folder.glob("*.slot") if _step_in(path) == 10)
    with slot.open("r+b") as file:
        file.seek(CONTENT_OFFSET)
        byte = file.read(1)[0]
        file.seek(CONTENT_OFFSET)
        file.write(bytes([byte ^ 1]))
    assert not checkpoints.flush(state, 10)
    assert steps_on_disk(tmp_path / "disk") == []
    counted = pod.keeper._counting.counted()
    assert (counted.disk_failures, counted.digest_failures) == (1, 1)


def _step_in(slot: Path) -> int:
    head = read_slot_head(slot)
    return -1 if head is None else head.moment.step


def test_a_step_that_is_demanded_takes_the_place_of_a_rounder_one_beside_what_is_protected(
    pod: Pod, tmp_path: Path
) -> None:
    """Else a rank with 8 would wait for ever: the others, which have not saved 8, wait for all to have 9."""
    state: dict[str, Any] = {"w": torch.arange(5000.0)}
    checkpoints = Checkpointer(disk=tmp_path / "disk", disk_every=100)
    assert checkpoints.load(state) is None
    assert isinstance(checkpoints.save(state, 7), Saved)
    (slot,) = (path for path in pod.arena.own_slots() if _step_in(path) == 7)
    with slot.open("rb") as pinned:
        fcntl.fcntl(pinned, fcntl.F_OFD_SETLK, struct.pack(PIN_LOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        assert isinstance(checkpoints.save(state, 8), Saved)
        assert isinstance(checkpoints.save(state, 9), Skipped), "8 is what other ranks may still come to have"
        assert checkpoints.flush(state, 9, timeout_s=60)
        assert _step_in(slot) == 7
    assert steps_on_disk(tmp_path / "disk") == [9]
