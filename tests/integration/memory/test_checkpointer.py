"""`Checkpointer` with a real keeper, in one process: what is saved, what is refused, and what a broken slot does."""

import copy
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.waiting import wait_until
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from unbroken.keeper.reading import ReadLock
from unbroken.memory import Checkpointer, Reader, Saved, Skipped, Writer, client
from unbroken.memory.background.epochs import MARK
from unbroken.memory.slots import Slot, SlotChangedError
from unbroken.standstill import standstill
from unbroken_core.pod.memory_messages import Holds, ToAgent
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, HEAD_BYTES, SlotState, digests_name
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Candidate, Load, LoadSource, Restore

from .conftest import LivePod


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    first, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    tied.weight = first.weight
    model = nn.Sequential(first, tied, nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "tensor": torch.rand(5, 3).t(),
        "nested": {"a": [torch.rand(2), 3], "text": "x"},
    }


def step_once(state: dict[str, Any], seed: int) -> None:
    state["optimizer"].zero_grad()
    data = torch.rand(4, 8, generator=torch.Generator().manual_seed(seed))
    state["model"](data).square().sum().backward()
    state["optimizer"].step()
    state["schedule"].step()
    state["tensor"].add_(seed)


def contents(state: dict[str, Any]) -> Any:
    return copy.deepcopy([one.state_dict() if hasattr(one, "state_dict") else one for one in state.values()])


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_same, first, second))
    return bool(first == second)


def test_a_new_process_gets_everything_back_bit_by_bit(pod: LivePod) -> None:
    """Tied weights, buffers, strides, lazily made state of the optimizer, schedule, nested lists."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    assert checkpointer.load(state) is None
    for step in range(3):
        step_once(state, step)
        assert isinstance(checkpointer.save(state, step), Saved)
    expected = contents(state)
    pod.be(iteration=1)
    pod.be_new_process()
    fresh = make_state(seed=1)
    assert Checkpointer().load(fresh) == 2
    assert is_same(contents(fresh), expected)
    assert fresh["model"][0].weight is fresh["model"][1].weight
    step_once(state, 9)
    step_once(fresh, 9)
    assert is_same(contents(fresh), contents(state))


def test_what_is_not_due_is_skipped_without_a_look(pod: LivePod) -> None:
    checkpointer = Checkpointer(every=5)
    assert [type(checkpointer.save({"a": object()}, step)) for step in (1, 4, 6)] == [Skipped] * 3
    assert checkpointer.num_skipped == 0


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every: want a number of steps from 1 on"):
        Checkpointer(every=every)


@pytest.mark.parametrize("step", [-1, 1.0, 1 << 53, None])
def test_a_wrong_step_is_refused(pod: LivePod, step: Any) -> None:
    """Before, one of 2**53, such as a time in nanoseconds, was saved, and no keeper could tell of it."""
    with pytest.raises(ValueError, match="step: want a number from 0 to"):
        Checkpointer().save({}, step)
    with pytest.raises(ValueError, match="step: want a number from 0 to"):
        Writer(step)


def test_what_could_not_be_read_without_running_code_is_refused_by_name(pod: LivePod) -> None:
    pod.start()
    with pytest.raises(TypeError, match=r"mine\.path: want tensors, numbers, text.* got pathlib.PosixPath: ") as caught:
        Checkpointer().save({"mine": {"path": Path("x"), "fine": 1}}, 0)
    # torch tells of two ways to run the code all the same, with codes for a terminal.
    assert "\x1b" not in "".join(traceback.format_exception(caught.value))


def test_a_save_in_an_iteration_without_a_load_is_told_once(pod: LivePod, caplog: pytest.LogCaptureFixture) -> None:
    """Seen before: who had forgotten it began anew after each fault, and nothing said so."""
    pod.start()
    state, told = {"x": torch.zeros(8)}, "save without a load: call `load` at the beginning of each iteration"
    Checkpointer().load(state)
    Checkpointer().save(state, 1)
    assert told not in caplog.text, "another one has loaded"
    pod.be(iteration=1)
    for step in (2, 3):
        assert isinstance(Checkpointer().save(state, step), Saved)
    assert caplog.text.count(told) == 1
    pod.be_new_process()
    reader = Reader(state)
    reader.close()
    Checkpointer().save(state, 4)
    assert caplog.text.count(told) == 1


def test_nothing_to_go_back_to_is_said_after_a_restart(pod: LivePod, caplog: pytest.LogCaptureFixture) -> None:
    """Before, a new rendezvous and pods without a part of what there was let all ranks begin anew without a word."""
    pod.start()
    assert Checkpointer().load({"a": torch.zeros(1)}) is None
    assert caplog.messages == []
    pod.be(iteration=1)
    assert Checkpointer().load({"a": torch.zeros(1)}) is None
    assert caplog.messages == ["no checkpoint in memory is left: no pod of this iteration has a part of one"]


def test_a_key_that_could_not_be_read_is_refused_by_name(pod: LivePod) -> None:
    """Before, no checkpoint with it could be read, which was said after the first fault."""
    pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"best": {}}, 0)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"best\.where/x: want text or numbers as keys.*PosixPath"):
            checkpointer.save({"best": {Path("where/x"): 1}}, 1)
    assert isinstance(checkpointer.save({"best": {("where", 1): 1, None: 2}}, 2), Saved)


def test_what_becomes_unreadable_later_is_refused_by_name(pod: LivePod) -> None:
    pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"best": {"value": 0.5, "where": []}}, 0)
    with pytest.raises(TypeError, match=r"best\.where: want tensors, numbers, text.*PosixPath within list: save it as"):
        checkpointer.save({"best": {"value": 0.5, "where": [Path("x")]}}, 1)
    with pytest.raises(TypeError, match=r"best\.value: want tensors, numbers, text"):
        checkpointer.save({"best": {"value": Path("x"), "where": []}}, 2)


def test_without_a_keeper_saves_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNBROKEN_DIR", raising=False)
    monkeypatch.delenv("UNBROKEN_POD_FOLDER", raising=False)
    monkeypatch.delenv("UNBROKEN_MEMORY_LIMIT", raising=False)
    checkpointer = Checkpointer()
    result = checkpointer.save({"a": torch.zeros(1)}, 0)
    assert isinstance(result, Skipped)
    assert "--memory SIZE" in result.reason
    assert checkpointer.load({"a": torch.zeros(1)}) is None


def test_too_small_a_limit_is_told_before_the_first_save_with_the_size_needed(pod: LivePod) -> None:
    pod.limit_bytes = 1 << 20
    pod.start()
    state, checkpointer = {"a": torch.zeros(1 << 18)}, Checkpointer()
    problem = checkpointer.reserve(state)
    needed = int(problem.split("need ")[1].split()[0])
    # Two slots for each of two workers, each with the tensor of 1 MiB and less than 100 KB beside it.
    assert 4 << 20 < needed < (4 << 20) + 4 * 100_000
    assert "its limit is 1048576" in problem
    assert isinstance(checkpointer.save(state, 0), Skipped)
    assert sum(path.stat().st_size for path in pod.root.rglob("*.slot")) == 0


def test_a_limit_that_is_just_enough_is_enough_for_all_workers(pod: LivePod) -> None:
    pod.limit_bytes = 1 << 20
    keeper = pod.start()
    state = {"a": torch.zeros(1 << 18)}
    pod.limit_bytes = int(Checkpointer().reserve(state).split("need ")[1].split()[0])
    keeper.kill()
    keeper.wait()
    pod.start()
    for local_rank in range(2):
        pod.be(local_rank, rank=local_rank, world_size=2)
        assert Checkpointer().reserve(state) == ""
        assert isinstance(Checkpointer().save(state, 0), Saved)


def test_a_full_file_system_is_no_room_and_changes_nothing(pod: LivePod) -> None:
    pod.limit_bytes = 1 << 49
    pod.start()
    huge = torch.empty(1 << 23, dtype=torch.uint8).as_strided((1 << 22, 1 << 22), (1, 1))
    problem = Checkpointer().reserve({"a": huge})
    assert "bytes left" in problem
    assert list(pod.root.rglob("*.slot")) == []


def test_a_layout_that_changes_is_saved_as_it_is_then(pod: LivePod) -> None:
    """Names, shapes, types and ties: nothing of the layout before may stay."""
    pod.start()
    shared = torch.rand(4)
    states: list[dict[str, torch.Tensor]] = [
        {"a": torch.rand(4), "b": torch.rand(4)},
        {"a": shared, "b": shared},
        {"a": torch.rand(4), "b": torch.rand(4)},
        {"a": torch.rand(4), "c": torch.rand(4)},
        {"a": torch.rand(2, 2), "b": torch.rand(4).double()},
        {"a": torch.rand(300_000), "b": torch.rand(4)},
        {"a": torch.rand(4)},
    ]
    checkpointer = Checkpointer()
    for step, state in enumerate(states):
        assert isinstance(checkpointer.save(state, step), Saved)
        blank = {name: torch.zeros_like(one) for name, one in state.items()}
        assert Checkpointer().load(blank) == step
        assert all(torch.equal(blank[name], state[name]) for name in state)


def test_a_state_of_another_shape_is_not_restored(pod: LivePod, caplog: pytest.LogCaptureFixture) -> None:
    pod.start()
    Checkpointer().save({"a": torch.ones(4)}, 0)
    for other in ({"a": torch.zeros(5)}, {"b": torch.zeros(4)}, {"a": torch.zeros(4).double()}):
        before = copy.deepcopy(other)
        assert Checkpointer().load(other) is None
        assert is_same(other, before)
    assert "checkpoint in memory not used: step=0" in caplog.text


@pytest.mark.parametrize("character", ["x", "я", "\U0001f525"])
def test_the_keeper_is_told_of_a_load_whatever_the_names_of_what_could_not_be_read(
    pod: LivePod, character: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of 4 KiB is all that it reads. Before, it refused such a line: nobody knew that a timeline had ended."""
    keeper = pod.start(tells=True)
    name = character * 400
    for step in (1, 2):
        Checkpointer().save({name: torch.zeros(3)}, step)
    assert Checkpointer().load({name: torch.zeros(4)}) is None
    assert "the keeper does not know what was restored" not in caplog.text
    assert keeper.stdout is not None
    told = (wire.decode(line, ToAgent) for line in keeper.stdout)
    (load,) = next(one.held.loads for one in told if isinstance(one, Holds) and one.held.loads)
    assert [step for step, why in load.refused if character * 20 in why] == [2, 1]


def test_tensors_that_change_during_the_copy_are_not_sealed(pod: LivePod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.start()
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    checkpointer = Checkpointer()
    checkpointer.save(state, 0)
    targets = Slot._targets

    def change(slot: Slot, shard: Any) -> Any:
        state["a"].add_(1)
        return targets(slot, shard)

    monkeypatch.setattr(Slot, "_targets", change)
    result = checkpointer.save(state, 1)
    assert isinstance(result, Skipped)
    assert "changed while they were copied" in result.reason
    assert set(pod.sealed()) == {0}
    assert checkpointer.num_skipped == 1


def test_a_change_that_torch_does_not_count_is_found_by_the_keeper(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pod.start()
    state = {"a": torch.ones(4)}
    Checkpointer().save(state, 0)
    targets = Slot._targets

    def change(slot: Slot, shard: Any) -> Any:
        state["a"].data.add_(1)
        return targets(slot, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "_targets", change)
        assert isinstance(Checkpointer().save(state, 1), Saved)
    fresh = {"a": torch.zeros(4)}
    assert Checkpointer().load(fresh) == 0
    assert torch.equal(fresh["a"], torch.ones(4))
    assert "the copy differs from its source" in caplog.text


@pytest.mark.parametrize("place", ["tensor", "layout", "objects"])
def test_a_flipped_bit_is_never_restored(pod: LivePod, place: str, caplog: pytest.LogCaptureFixture) -> None:
    pod.start()
    state: dict[str, Any] = {"a": torch.zeros(100), "n": {"x": 1}}
    checkpointer = Checkpointer()
    for step in range(2):
        state["a"] += 1
        checkpointer.save(state, step)
        path = pod.wait_digested(step)
    head = pod.slots()[path]
    at = {"tensor": head.objects_offset - 200, "layout": 3, "objects": head.objects_offset + 200}[place]
    flip(path, CONTENT_OFFSET + at)
    fresh: dict[str, Any] = {"a": torch.zeros(100), "n": {"x": 0}}
    assert Checkpointer().load(fresh) == 0
    assert torch.equal(fresh["a"], torch.ones(100))
    assert "differ from what was sealed" in caplog.text
    assert [head.moment.step for head in pod.slots().values() if head.state is SlotState.SEALED] == [0]


def test_what_a_rank_has_for_itself_is_never_that_of_another_rank(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen before: a rank whose shard was with no pod that it knew took that of a rank beside it, all of it."""
    pod.start()
    for step in range(2):
        for rank in range(2):
            pod.be_new_process()
            pod.be(local_rank=rank, rank=rank, world_size=2)
            value = float(10 * step + rank)
            saved = Checkpointer().save({"random": torch.full((100,), value), "n": {"x": value}}, step)
            assert isinstance(saved, Saved)
    (path,) = [path for path, head in pod.slots().items() if (head.rank, head.moment.step) == (0, 1)]
    path.unlink()
    pod.be_new_process()
    pod.be(iteration=1, rank=0, world_size=2)
    restore = Restore(tuple(Candidate(1, 0, step, 2) for step in (1, 0)), "")
    monkeypatch.setenv("UNBROKEN_RESTORE", wire.encode(restore))
    fresh: dict[str, Any] = {"random": torch.full((100,), -1.0), "n": {"x": -1.0}}
    assert Checkpointer().load(fresh) == 0
    assert fresh["random"].tolist() == [0.0] * 100
    assert fresh["n"] == {"x": 0.0}
    assert "not used: step=1: the shards that this rank needs are on no host that it knows of" in caplog.text


@pytest.mark.parametrize("block", [1, 3, 5])
def test_a_flipped_bit_beyond_the_first_block_is_never_restored_and_nothing_is_overwritten(
    pod: LivePod, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Layout and objects lie in the first block, and are compared before there is a plan."""
    pod.start()
    size = BLOCK_BYTES // 2
    state: dict[str, Any] = {name: torch.zeros(size) for name in "abc"}
    checkpointer = Checkpointer()
    paths = []
    for step in range(2):
        for one in state.values():
            one.add_(1)
        checkpointer.save(state, step)
        paths.append(pod.wait_digested(step))
    flip(paths[1], CONTENT_OFFSET + block * BLOCK_BYTES + 1000)
    fresh = {name: torch.zeros(size) for name in "abc"}
    assert Checkpointer().load(fresh) == 0
    assert all(torch.equal(one, torch.ones(size)) for one in fresh.values())
    assert "blocks differ from what was sealed" in caplog.text
    flip(paths[0], CONTENT_OFFSET + block * BLOCK_BYTES + 1000)
    new = {name: torch.full((size,), 7.0) for name in "abc"}
    assert Checkpointer().load(new) is None
    assert all(torch.equal(one, torch.full((size,), 7.0)) for one in new.values()), "a state is never half restored"


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def flip_both(path: Path) -> None:
    """Flip a bit of each head."""
    flip(path, 20)
    flip(path, HEAD_BYTES + 20)


def replace_by_pipe(path: Path) -> None:
    """Put a pipe in its place, at which a careless reader waits for ever."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: os.truncate(path, CONTENT_OFFSET + 10), id="truncated"),
        pytest.param(lambda path: os.truncate(path, 10), id="truncated to nothing"),
        pytest.param(lambda path: path.unlink(), id="gone"),
        pytest.param(flip_both, id="both heads flipped"),
        pytest.param(lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), id="a link"),
        pytest.param(replace_by_pipe, id="a pipe"),
        pytest.param(
            lambda path: path.with_name(digests_name(path.name)).write_text('{"serial": 1e999}'), id="digests"
        ),
    ],
)
def test_a_spoilt_slot_leaves_the_other_one(pod: LivePod, spoil: Callable[[Path], Any]) -> None:
    pod.start()
    checkpointer = Checkpointer()
    for step in range(2):
        checkpointer.save({"a": torch.full((100,), float(step))}, step)
        path = pod.wait_digested(step)
    pod.be_new_process()
    spoil(path)
    fresh = {"a": torch.full((100,), 7.0)}
    found = Checkpointer().load(fresh)
    # Digests that are lost are made again: what was sealed is whole.
    assert found in (0, 1)
    assert torch.equal(fresh["a"], torch.full((100,), float(found)))


class WaitingState:
    """A state whose dictionary may be one more collective of all ranks."""

    def __init__(self, size: int) -> None:
        self.value = torch.zeros(size)
        self.num_asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {"value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.value = values["value"]


def test_a_state_is_asked_for_its_dictionary_once_however_many_checkpoints_are_tried(pod: LivePod) -> None:
    """One that waits there for another rank, which needs fewer attempts, would wait for ever."""
    pod.start()
    for step, size in ((0, 100), (1, 50)):
        Checkpointer().save({"a": WaitingState(size)}, step)
    fresh = WaitingState(100)
    fresh.value += 7
    assert Checkpointer().load({"a": fresh}) == 0
    assert torch.equal(fresh.value, torch.zeros(100))
    assert fresh.num_asked == 1


@pytest.mark.parametrize(
    ("load", "began"),
    [
        (Load(1, 1, LoadSource.NOTHING), "anew, when not all of it was there"),
        (Load(1, 1, LoadSource.DISK, step=3), "with step 3 of the disk"),
        (Load(1, 1, LoadSource.MEMORY, 1, 0, 3), "with step 3 of iteration 0"),
    ],
)
def test_a_checkpoint_that_is_whole_again_and_void_is_named(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: Load, began: str
) -> None:
    """A pod was away while the others went back to less than what it holds, and is there again."""
    pod.start()
    state = {"weights": torch.ones(3)}
    assert isinstance(Checkpointer().save(state, 5), Saved)
    pod.be(iteration=2)
    pod.be_new_process()
    caplog.clear()
    monkeypatch.setenv("UNBROKEN_RESTORE", wire.encode(Restore((), floors=(load,))))
    assert Checkpointer().load({"weights": torch.zeros(3)}) is None
    told = f"checkpoint in memory not used: step 5 of iteration 0 is whole, and void since iteration 1 began {began}"
    first, last = caplog.messages
    assert first == told
    assert last.startswith("no checkpoint is restored, and the training begins anew at its beginning: all of ")


def test_a_rank_whose_keeper_is_away_fails_and_lets_nobody_begin_anew(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where there is something to go back to: a first iteration begins, as one does whose steps are given up."""
    monkeypatch.setattr(client, "AWAY_S", 0.2)
    given_up = Restore((Candidate(1, 0, 5, 1, is_given_up=True),))
    for nothing in (Restore(()), given_up):
        monkeypatch.setenv("UNBROKEN_RESTORE", wire.encode(nothing))
        assert Checkpointer().load({"a": torch.zeros(1)}) is None
        pod.be_new_process()
    monkeypatch.setenv("UNBROKEN_RESTORE", wire.encode(Restore((Candidate(1, 0, 5, 1),))))
    with pytest.raises(RuntimeError, match=r"checkpoint of step 5 in memory: want the answer of this pod's keeper"):
        Checkpointer().load({"a": torch.zeros(1)})


def test_an_older_timeline_is_void_after_a_restore(pod: LivePod) -> None:
    pod.start()
    checkpointer = Checkpointer()
    for step in (10, 20):
        checkpointer.save({"a": torch.full((4,), float(step))}, step)
    pod.be(iteration=1)
    flip(pod.wait_digested(20), CONTENT_OFFSET + 4096)
    fresh = {"a": torch.zeros(4)}
    second = Checkpointer()
    assert second.load(fresh) == 10
    # Step 15 of the new timeline is newer than step 20 of the old one, which is void.
    second.save({"a": torch.full((4,), 15.0)}, 15)
    pod.be(iteration=2)
    assert Checkpointer().load(fresh) == 15
    assert set(pod.sealed()) == {10, 15}


def test_a_slot_that_comes_back_from_an_earlier_time_is_as_old_as_it_says(pod: LivePod) -> None:
    """With its digests, so that all of it fits together: it is the older checkpoint, and not the newest."""
    pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"a": torch.full((4,), 0.0)}, 0)
    path = pod.wait_digested(0)
    digests = path.with_name(digests_name(path.name))
    replayed = (path.read_bytes(), digests.read_bytes())
    for step in (1, 2):
        checkpointer.save({"a": torch.full((4,), float(step))}, step)
    assert pod.wait_digested(2) == path
    for file, content in zip((path, digests), replayed, strict=True):
        file.write_bytes(content)
    fresh = {"a": torch.full((4,), 7.0)}
    assert Checkpointer().load(fresh) == 1
    assert fresh["a"].tolist() == [1.0] * 4


def test_slots_of_another_job_are_not_seen(pod: LivePod) -> None:
    keeper = pod.start()
    Checkpointer().save({"a": torch.ones(4)}, 3)
    keeper.kill()
    keeper.wait()
    pod.job = "another"
    pod.start()
    assert Checkpointer().load({"a": torch.zeros(4)}) is None


def test_a_save_needs_no_keeper_and_a_later_one_finds_it(pod: LivePod) -> None:
    keeper = pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"a": torch.ones(4)}, 0)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    assert isinstance(checkpointer.save({"a": torch.full((4,), 2.0)}, 1), Saved)
    pod.start()
    fresh = {"a": torch.zeros(4)}
    assert Checkpointer().load(fresh) == 1
    assert fresh["a"].tolist() == [2.0] * 4


def test_the_first_save_after_a_keeper_was_started_again_is_digested_at_once(pod: LivePod) -> None:
    """Before, its news went to the old one: it was copied nowhere until the next save."""
    keeper = pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"a": torch.ones(4)}, 0)
    pod.wait_digested(0)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    pod.start()
    checkpointer.save({"a": torch.full((4,), 2.0)}, 1)
    pod.wait_digested(1)


def test_what_is_being_copied_to_another_pod_is_not_overwritten(pod: LivePod) -> None:
    """That save is skipped; the newest checkpoint stays, and the next save finds the slot free."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    for step in (1, 2):
        assert isinstance(checkpointer.save(state, step), Saved)
    older = next(path for path, head in pod.slots().items() if head.moment.step == 1)
    with ReadLock(older, pod.slots()[older]):
        assert checkpointer.save(state, 3) == Skipped(
            3, "earlier checkpoints have to stay until they are copied, to other pods or to the disk"
        )
        assert {head.moment.step for head in pod.slots().values()} == {1, 2}
    assert isinstance(checkpointer.save(state, 4), Saved)
    assert {head.moment.step for head in pod.slots().values()} == {2, 4}


def test_a_step_that_is_saved_twice_leaves_the_step_before_it(pod: LivePod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this rank had nothing in common with one that was lost before it saved that step."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    checkpointer.load(state)
    for step in (0, 1, 1, 2, 2):
        step_once(state, step)
        assert isinstance(checkpointer.save(state, step), Saved)
    assert sorted(pod.sealed()) == [1, 2]
    with monkeypatch.context() as context:
        context.setattr(Slot, "copy", changed)
        assert isinstance(checkpointer.save(state, 2), Skipped)
    assert sorted(pod.sealed()) == [1]
    step_once(state, 3)
    assert isinstance(checkpointer.save(state, 3), Saved)
    assert sorted(pod.sealed()) == [1, 3]


def test_a_step_before_one_that_was_saved_is_not_saved(pod: LivePod) -> None:
    """Else two states of one step were in memory, and ranks took either."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    checkpointer.load(state)
    assert [type(checkpointer.save(state, step)) for step in (9, 10)] == [Saved, Saved]
    for step in (5, 9, 10):
        result = checkpointer.save(state, step)
        assert isinstance(result, Skipped)
        assert "step 10 was saved before, in the same iteration" in result.reason
    assert sorted(pod.sealed()) == [9, 10]
    pod.be(iteration=1)
    assert Checkpointer().load(make_state()) == 10
    assert isinstance(Checkpointer().save(state, 5), Saved)
    # Whoever goes back by a load does not go back in numbers that were saved since.
    assert Checkpointer().load(make_state()) == 5
    assert isinstance(Checkpointer().save(state, 4), Saved)


def changed(*_given: Any) -> None:
    """Be what a copy finds whose source changes all the time."""
    raise SlotChangedError("it changed")


def test_two_keepers_never_share_a_folder(pod: LivePod) -> None:
    pod.start()
    second = pod.start()
    assert second.wait(30) == 2
    assert "another keeper has" in (pod.folder / "stderr").read_text()


def test_a_writer_of_an_earlier_iteration_ends(pod: LivePod, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of async_save may live on after its iteration."""
    pod.start()
    checkpointer = Checkpointer()
    checkpointer.save({"a": torch.ones(4)}, 0)
    entered, go_on = threading.Event(), threading.Event()
    targets = Slot._targets

    def wait(slot: Slot, shard: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return targets(slot, shard)

    results: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "_targets", wait)
        old = threading.Thread(target=lambda: results.append(checkpointer.save({"a": torch.zeros(4)}, 1)))
        old.start()
        assert entered.wait(60)
        pod.be(iteration=1)
        late = Checkpointer()
        late._enter()
        go_on.set()
        old.join(60)
    assert [result.reason for result in results] == ["another iteration has begun"]
    assert isinstance(late.save({"a": torch.ones(4)}, 1), Saved)


def test_nothing_is_saved_once_collectives_were_aborted(pod: LivePod) -> None:
    """A GPU goes on after the abort of its collective, with what half of it has left, and nobody is told."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    checkpointer.load(state)
    assert isinstance(checkpointer.save(state, 1), Saved)
    expected = contents(state)
    copy_in = Slot.copy

    def abort_meanwhile(slot: Slot, *arguments: Any) -> Any:
        samples = copy_in(slot, *arguments)
        standstill.spoil()
        return samples

    step_once(state, 2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slot, "copy", abort_meanwhile)
            saved = checkpointer.save(state, 2)
        assert saved == Skipped(2, "the iteration is over, and its collectives were aborted")
        assert isinstance(checkpointer.save(state, 3), Skipped)
    finally:
        standstill.begin(lambda _: None)
        standstill.end()
    pod.be(iteration=1)
    fresh = make_state(seed=1)
    assert Checkpointer().load(fresh) == 1
    assert is_same(contents(fresh), expected)
    assert isinstance(Checkpointer().save(fresh, 2), Saved)


@pytest.mark.timeout(400)
def test_memory_and_descriptors_stay_flat_over_a_thousand_saves_and_two_hundred_restores(pod: LivePod) -> None:
    keeper = pod.start()
    processes = [psutil.Process(), psutil.Process(keeper.pid)]
    state = make_state()
    step_once(state, 0)

    def measure() -> list[tuple[int, int]]:
        gc.collect()
        return [(process.num_fds(), process.num_threads()) for process in processes]

    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in pod.root.rglob("*") if path.is_file())

    def run(num_saves: int, num_restores: int, iteration: int) -> None:
        pod.be(iteration=iteration)
        checkpointer = Checkpointer()
        for step in range(num_saves):
            assert isinstance(checkpointer.save(state, step), Saved)
        for _ in range(num_restores):
            assert Checkpointer().load(state) == num_saves - 1
        pod.wait_digested(num_saves - 1)

    run(50, 10, 0)
    before, before_used, before_bytes = measure(), used(), processes[0].memory_info().rss
    run(1000, 200, 1)

    def is_flat() -> bool:
        # At the first look the keeper may still have had the file of the last digests open.
        return all(
            now <= then
            for one, other in zip(measure(), before, strict=True)
            for now, then in zip(one, other, strict=True)
        )

    wait_until(is_flat, f"at most {before} descriptors and threads", describe=lambda: str(measure()))
    assert used() == before_used
    assert processes[0].memory_info().rss - before_bytes < 8 << 20


@pytest.mark.parametrize("names", [("first", "second"), ("model", "model")])
def test_second_state_of_a_job_is_refused(pod: LivePod, names: tuple[str, str]) -> None:
    """After a fault one of them would have begun anew, since a step has one checkpoint."""
    pod.start()
    state, other = {names[0]: nn.Linear(2, 2)}, {names[1]: nn.Linear(2, 2)}
    checkpointer, second = Checkpointer(), Checkpointer()
    assert isinstance(checkpointer.save(state, 1), Saved)
    with pytest.raises(ValueError, match="save: want the state that another Checkpointer saves in this iteration"):
        second.save(other, 1)
    assert isinstance(second.save(dict(state), 2), Saved), "the same state in another dictionary, as at a planned move"
    assert isinstance(checkpointer.save(state | {"more": 1}, 3), Saved), "a state of one's own may grow"
    pod.be(iteration=1)
    assert isinstance(second.save(other, 4), Saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_on_disk", [False, True], ids=["memory", "disk"])
def test_a_loader_that_knows_the_place_of_one_rank_is_named_where_the_world_is_another(
    pod: LivePod, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_on_disk: bool
) -> None:
    """Seen before: samples came twice and others never, without a word."""

    class Loader:
        __module__ = "torchdata.stateful_dataloader.stateful_dataloader"

        def state_dict(self) -> dict[str, Any]:
            return {"position": 5}

        def load_state_dict(self, _state: dict[str, Any]) -> None:
            pass

    state: dict[str, Any] = {"w": torch.ones(3), "loader": Loader()}
    disk = tmp_path / "disk"
    pod.start()
    if is_on_disk:
        save(state, checkpoint_id=disk / "step-10")
        (disk / "step-10" / MARK).write_text('{"world_size": 2}')
    for rank in () if is_on_disk else range(2):
        pod.be_new_process()
        pod.be(rank, rank=rank, world_size=2)
        assert isinstance(Checkpointer().save(state, 10), Saved)
    pod.be_new_process()
    pod.be(iteration=1)
    assert Checkpointer(disk=disk).load(state) == 10
    named = [one for one in caplog.messages if "Loader knows where one rank was in its data" in one]
    assert [one.split(":")[0] for one in named] == ["loader"]
    assert "in a world of 2 ranks; in one of 1, from step 10 on" in named[0]
    pod.be(iteration=2)
    if not is_on_disk:
        assert isinstance(Checkpointer().save(state, 20), Saved)
        caplog.clear()
        pod.be(iteration=3)
        assert Checkpointer(disk=disk).load(state) == 20
        assert "knows where one rank was" not in caplog.text
