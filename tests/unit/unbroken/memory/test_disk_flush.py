"""`flush` with a state: it is on the disk when the call returns, or all ranks say why not. No rank is left waiting."""

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unbroken.memory import Checkpointer, checkpointer
from unbroken.memory.arena import LentSlot, Saved, Skipped, WorkerSlots
from unbroken.memory.background import handover
from unbroken.memory.background.epochs import MARK, Epoch, Failure
from unbroken.memory.background.orders import WriteOrder
from unbroken.memory.place import WorkerInfo
from unbroken.memory.shard import Shard, ShardReader
from unbroken_core.pod.memory_messages import Measure, Measured, NoRoom
from unbroken_core.pod.memory_slots import Moment

PLACE = WorkerInfo(Path("/pod"), 0, 1, 0, 0, 1)
STATE = {"w": torch.ones(3)}


class FakeArena:
    """Memory of this pod, of which the last step is known."""

    def __init__(self) -> None:
        self.sealed: int | None = None
        self.written: list[tuple[int, float]] = []
        """Step, and how long it may wait for a slot."""
        self.refusal = ""

    def has(self, place: WorkerInfo, step: int) -> bool:
        return step == self.sealed

    def write(self, place: WorkerInfo, step: int, shard: Shard, wait_s: float = 0.0) -> Saved | Skipped:
        self.written.append((step, wait_s))
        if self.refusal:
            return Skipped(step, self.refusal)
        self.sealed = step
        return Saved(step, 12)

    def lend(self, moment: Moment) -> LentSlot | None:
        return LentSlot("/pod/slot", 1, os.memfd_create("slot")) if moment.step == self.sealed else None


class FakeChild:
    """A process that makes whole at once what it is ordered, or gives it up."""

    is_alive = True
    has_started = True
    is_told = False

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self.ordered: list[int] = []
        self.num_busy = 0
        """How often it says that it still writes something else."""
        self.problem = ""
        self.never_ends = False
        self.given_up: dict[int, str] = {}

    def is_free(self) -> bool:
        self.num_busy -= 1
        return self.num_busy < 0

    def has_taken(self) -> bool:
        return self.num_busy < 0

    def order(self, order: WriteOrder, descriptors: Sequence[int]) -> None:
        self.ordered.append(order.step)
        if self.problem:
            self._epoch.fail(order.step, Failure(0, self.problem))
            return
        if self.never_ends:
            self._epoch.parts(order.step).mkdir()
            self._epoch.part(order.step, 0).touch()
            return
        self._epoch.whole(order.step).mkdir()
        (self._epoch.whole(order.step) / MARK).write_text(json.dumps(self._epoch.mark))

    def give_up(self, order: WriteOrder) -> None:
        self.given_up[order.step] = order.given_up


class World:
    """One rank that has begun an iteration; others as far as a test says."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.arena, self.epoch = FakeArena(), Epoch(folder, "job", 0, 1, 7)
        self.epoch.begin()
        self.child = FakeChild(self.epoch)
        self.checkpointer = Checkpointer(every=10, disk=folder, disk_every=100)
        assert self.checkpointer._handover is not None
        self.checkpointer._handover._epoch = self.epoch
        self.others: list[list[list[list[int]]]] = []
        """What other ranks say, by how often they have met."""
        self.num_met = 0
        self.now_s = 1000.0
        patch.setattr(checkpointer, "read_place", lambda: PLACE)
        patch.setattr(checkpointer, "arena_of", lambda place: self.arena)
        patch.setattr(handover._Process, "child", self.child)
        patch.setattr(handover, "gather", self._gather)
        patch.setattr(time, "sleep", self._sleep)
        patch.setattr(time, "monotonic", lambda: self.now_s)

    def _gather(self, rows: list[list[int]], width: int) -> list[list[list[int]]]:
        self.num_met += 1
        return [rows, *(self.others[self.num_met - 1] if self.num_met <= len(self.others) else [])]

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """Return a world of one rank."""
    return World(monkeypatch, tmp_path)


def test_a_state_is_written_at_once_though_its_step_is_not_due(world: World) -> None:
    """Neither for the memory nor for the disk."""
    assert world.checkpointer.flush(STATE, 7, timeout_s=50.0)
    assert world.arena.written == [(7, 50.0)], "a slot that is still read is waited for"
    assert world.child.ordered == [7]
    assert world.epoch.is_whole(7)
    # The next one in its interval is due again.
    world.checkpointer.save(STATE, 100)
    assert world.checkpointer.flush()
    assert world.child.ordered == [7, 100]


def test_what_is_in_memory_or_ordered_already_is_neither_saved_nor_ordered_again(world: World) -> None:
    world.checkpointer.save(STATE, 100)
    assert world.checkpointer.flush(STATE, 100)
    world.checkpointer.save(STATE, 110)
    assert world.checkpointer.flush(STATE, 110)
    assert [step for step, _ in world.arena.written] == [100, 110]
    assert world.child.ordered == [100, 110]


def test_it_waits_until_the_step_before_is_written(world: World) -> None:
    world.child.num_busy = 3
    assert world.checkpointer.flush(STATE, 7)
    assert world.child.ordered == [7]
    assert world.now_s > 1000.0


def test_a_step_that_is_no_longer_in_memory_is_given_up_at_once(world: World) -> None:
    """Other ranks have ordered it, and keep their slots for it until all have said what they have."""
    world.child.num_busy = 2
    for step in (100, 110, 120):
        world.checkpointer.save(STATE, step)
        # Its slot is kept for it, but not for long.
        world.now_s += 6.0
    assert (world.child.ordered, list(world.child.given_up)) == ([], [100])
    assert "not in memory any more" in world.child.given_up[100]


@pytest.mark.parametrize(
    ("has_started", "why"),
    [
        (True, "the disk, or another rank, takes longer than `disk_every`"),
        (False, "the process that writes to the disk had not started yet when step 200 was due"),
    ],
)
def test_a_step_whose_turn_has_not_come_before_the_next_one_is_due_is_given_up_at_once(
    world: World, caplog: pytest.LogCaptureFixture, has_started: bool, why: str
) -> None:
    """Seen before: a job with a quick disk called it slow, while the process was still importing torch."""
    world.child.has_started = has_started
    world.child.num_busy = 3
    world.checkpointer.save(STATE, 100)
    world.checkpointer.save(STATE, 200)
    assert (world.child.ordered, list(world.child.given_up)) == ([], [100])
    assert world.child.given_up[100] == why
    assert caplog.text.count("not written to the disk") == 1
    assert f"not written to the disk: step 100: {why}" in caplog.text
    assert world.checkpointer.flush()
    assert world.child.ordered == [200]


def test_a_disk_that_takes_too_long_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.child.num_busy = 10**9
    assert not world.checkpointer.flush(STATE, 7, timeout_s=5.0)
    assert world.now_s < 1010.0
    assert (world.child.ordered, world.num_met) == ([], 2)
    assert "step 7 is not on the disk" in caplog.text


@pytest.mark.parametrize(
    ("others", "missing"),
    [
        ([[[0]], [[1]], [[0]]], ": want the part of rank 1, 3"),
        ([[[0]]] * 14, ": want the part of rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more ranks"),
        ([[[1]]], ", though all parts are on the disk: the process of rank 0 has to put them together"),
    ],
)
def test_whose_part_is_waited_for_is_told_when_the_time_is_over(
    world: World, others: list[list[list[int]]], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen before: it was not whole, said all ranks, and none which one to look at."""
    world.child.never_ends = True
    world.others = [[[[7], [7]]] * len(others), [[[0]]] * len(others), others]
    assert not world.checkpointer.flush(STATE, 7, timeout_s=8.0)
    assert caplog.text.count(f"step 7 is not on the disk: step 7 is not whole after 8 s{missing}\n") == 1


@pytest.mark.parametrize("refusal", ["checkpoints in memory need 99 bytes in this pod", "tensors changed"])
def test_a_rank_that_cannot_save_meets_the_others_all_the_same(
    world: World, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.arena.refusal = refusal
    assert not world.checkpointer.flush(STATE, 7)
    assert (world.num_met, world.child.ordered) == (2, [])
    assert refusal in caplog.text
    assert "step 7 is not on the disk: rank 0 did not save it in memory, or no longer had it" in caplog.text


def test_what_cannot_be_saved_is_raised_once_the_others_wait_no_more(world: World) -> None:
    with pytest.raises(TypeError):
        world.checkpointer.flush({"w": object()}, 7)
    assert world.num_met == 2


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ([[7]], "rank 1 did not save it in memory, or no longer had it"),
        ([[6], [6]], "rank 1 is at step 6"),
        ([[-1]], "rank 1 has saved none that was due"),
    ],
)
def test_ranks_that_do_not_write_the_same_step_say_which_one_does_not(
    world: World, other: list[list[int]], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.others = [[other]]
    assert not world.checkpointer.flush(STATE, 7)
    assert f"step 7 is not on the disk: {problem}" in caplog.text


@pytest.mark.parametrize("has_seen_it", [True, False])
def test_all_ranks_return_the_same_and_what_one_has_seen_whole_is(world: World, has_seen_it: bool) -> None:
    """The time of this rank is over, or it does not see the folder yet."""
    world.child.problem = "late"
    world.others = [[[[7], [7]]], [[[int(has_seen_it)]]]]
    assert world.checkpointer.flush(STATE, 7) is has_seen_it


def test_a_step_that_was_given_up_is_told_at_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.child.problem = "[Errno 28] No space left on device"
    began_s = world.now_s
    assert not world.checkpointer.flush(STATE, 7)
    assert world.now_s - began_s < 1.0
    assert "given up by rank 0: [Errno 28] No space left on device" in caplog.text


def test_without_a_load_or_memory_it_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.checkpointer._handover is not None
    world.checkpointer._handover._epoch = None
    assert not world.checkpointer.flush(STATE, 7)
    assert "step 7 is not on the disk: `load` was not called at the beginning of this iteration" in caplog.text
    monkeypatch.setattr(checkpointer, "arena_of", lambda place: None)
    assert not world.checkpointer.flush(STATE, 8)
    assert "this process belongs to no job with memory" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((STATE, None), "step: want a number from 0 to 9007199254740991, got None"),
        ((STATE, -1), "step: want a number from 0 to 9007199254740991, got -1"),
        ((None, 7), "flush: want a state with its step, or neither, got NoneType"),
        ((600.0,), "flush: want a state with its step, or neither, got float"),
    ],
)
def test_half_a_demand_is_refused_before_any_rank_waits(world: World, arguments: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        world.checkpointer.flush(*arguments)
    assert world.num_met == 0


@pytest.mark.parametrize("seconds", ["10", None, True, -1.0, math.nan, math.inf])
def test_no_time_to_wait_is_refused_before_any_rank_waits(world: World, seconds: Any) -> None:
    with pytest.raises(ValueError, match=rf"timeout_s: want seconds, at least 0 and at most .*, got {seconds!r}"):
        world.checkpointer.flush(STATE, 7, timeout_s=seconds)
    with pytest.raises(ValueError, match="timeout_s: want seconds"):
        world.checkpointer.flush(timeout_s=seconds)
    assert world.num_met == 0


def test_a_checkpointer_that_writes_nothing_in_the_background_does_not_claim_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the training raised ValueError after its last step, and repeated it until the job was given up."""
    assert Checkpointer(disk=tmp_path).flush()
    assert not Checkpointer(disk=tmp_path).flush(STATE, 7)
    assert "step 7 is not written to the disk: want `disk_every` in the Checkpointer, or in the job" in caplog.text


class FakeClient:
    """Hears what a keeper would be told."""

    def __init__(self) -> None:
        self.heard: list[Measured] = []

    def tell(self, message: Measured) -> None:
        self.heard.append(message)


@pytest.mark.parametrize(("wait_s", "num_looks", "distance"), [(0.0, 1, 30), (1.0, 20, 0)])
def test_a_slot_that_is_read_is_waited_for_as_long_as_is_said_and_counts_as_one_skip(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, num_looks: int, distance: int
) -> None:
    client: Any = FakeClient()
    slots, looks, now = WorkerSlots(Path("/pod"), 0, client), [], [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(slots, "reserve", lambda shard: "")
    monkeypatch.setattr(slots, "_locked", lambda moment, distance: looks.append((moment.step, distance)))
    slots.enter(PLACE)
    shard: Any = None
    result = slots.write(PLACE, 30, shard, wait_s)
    assert isinstance(result, Skipped)
    assert num_looks <= len(looks) <= num_looks + 2
    assert set(looks) == {(30, distance)}, "from the save before, at each look; none of a step that is demanded"
    assert client.heard == [Measured(Measure.SKIPPED, "busy")]


@pytest.mark.parametrize(
    ("needed", "words"), [(500, ", but its limit is 400: too full"), (300, ", and its limit is 400, but too full")]
)
def test_a_file_system_that_is_full_within_the_limit_is_not_told_as_too_low_a_limit(needed: int, words: str) -> None:
    class FullKeeper(FakeClient):
        def ask_any(self, message: Any, limit_s: float) -> NoRoom:
            return NoRoom(needed, 400, "too full")

    client: Any = FullKeeper()
    slots = WorkerSlots(Path("/pod"), 0, client)

    problem = slots.reserve(ShardReader().read({"a": torch.zeros(4)}))

    need = f"checkpoints in memory need {needed} bytes in this pod (two slots for each worker, three for each copy)"
    assert problem == need + words


def test_what_could_not_begin_is_not_called_a_load_that_was_missed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen before: with a folder that is read-only, of each step that was due, on each rank."""
    of_it = world.checkpointer._handover
    assert of_it is not None
    of_it._epoch, of_it._begun, of_it._problem = None, world.epoch, "rank 0: [Errno 30] Read-only file system"
    for step in (100, 200):
        world.checkpointer.save(STATE, step)
    assert caplog.text == "", "the load has said it"
    assert not world.checkpointer.flush()
    assert "step 200 is not on the disk: rank 0: [Errno 30] Read-only file system" in caplog.text


def test_the_newest_step_that_was_due_is_named_though_an_earlier_one_was_skipped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves are quick: after the first one that is skipped, the next ones are not tried."""
    world.arena.refusal = "busy"
    for step in (100, 110):
        world.checkpointer.save(STATE, step)
    world.arena.refusal = ""
    world.checkpointer.save(STATE, 200)
    assert not world.checkpointer.flush()
    assert "step 200 is not on the disk: rank 0 did not save it in memory, or" in caplog.text


def test_a_step_that_is_due_and_tried_once_more_is_written_as_that_of_the_others_is(world: World) -> None:
    """Seen before: a script that tries until a step is saved had it in memory, and never on the disk."""
    world.arena.refusal = "busy"
    world.checkpointer.save(STATE, 100)
    world.arena.refusal = ""
    world.checkpointer.save(STATE, 100)
    assert world.checkpointer.flush()
    assert world.child.ordered == [100]


def test_that_the_process_has_not_started_is_said_once_and_to_the_other_ranks_of_each_step(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.child.has_started = False
    world.child.num_busy = 100
    for step in (100, 200, 300, 400):
        world.checkpointer.save(STATE, step)
    assert list(world.child.given_up) == [100, 200, 300]
    assert caplog.text.count("not written to the disk") == 1


def test_another_state_is_refused_by_its_names_whatever_they_are(world: World) -> None:
    """Seen before: an error of `join`, of names that are no text."""
    world.checkpointer.save({}, 10)
    other: dict[Any, Any] = {None: 3, "a": 4}
    with pytest.raises(ValueError, match="in this iteration, of nothing, got another one, of None, a; checkpoints"):
        Checkpointer().save(other, 20)


def test_a_state_that_is_refused_hinders_no_other_one(world: World) -> None:
    """Seen before: what a second Checkpointer could save was refused, for a state that nobody had saved."""
    with pytest.raises(TypeError, match="object"):
        world.checkpointer.save({"w": torch.ones(3), "mistake": object()}, 10)
    assert Checkpointer(every=10).save(STATE, 20) == Saved(20, 12)
