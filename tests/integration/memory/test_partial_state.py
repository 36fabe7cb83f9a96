"""States of which a new process has less than was saved: no gradient yet, or dictionaries that are filled later."""

import copy
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from unbroken.memory import Checkpointer, Saved, restoring
from unbroken.memory.choosing import ReadableCheckpoint
from unbroken.memory.new_state.places import PLACES
from unbroken.memory.remote import Remote
from unbroken.memory.sources import open_source
from unbroken_core.pod.memory_messages import Found, FoundSlot

from .conftest import LivePod

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
LIMIT_S = 200.0


class Scores:
    """The best scores by name, none at first."""

    def __init__(self) -> None:
        self.best: dict[Any, Any] | None = None
        self.by_name: dict[str, dict[Any, Any]] = {"all": {}}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "by_name": self.by_name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.by_name = state["best"], state["by_name"]


def make_state() -> dict[str, Any]:
    """Two experts: the router has not chosen the second one yet."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def restored(pod: LivePod, new: Any, saved: Any, *, is_stateful: bool) -> Any:
    """Return what a new process has, which begins with `new`, once it has restored what was saved."""

    pod.start()
    assert isinstance(Checkpointer().save(state_of({"it": saved}, is_stateful=is_stateful), 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    fresh = state_of({"it": new}, is_stateful=is_stateful)
    assert Checkpointer().load(fresh) == 1
    return values_of(fresh)["it"]


def state_of(values: dict[str, Any], *, is_stateful: bool) -> dict[str, Any]:
    """Return a state with these parts, each within an object if they are to be stateful."""
    state: dict[str, Any] = {"step": 1}
    for name, value in values.items():
        scores = Scores()
        scores.best = copy.deepcopy(value)
        state[name] = scores if is_stateful else scores.best
    return state


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of such a state."""
    return {name: one.best if isinstance(one, Scores) else one for name, one in state.items() if name != "step"}


def be_without_memory(pod: LivePod) -> None:
    """Be a new process that has nothing but the disk."""
    pod.be_outside()
    pod.be_new_process()


def step_once(state: dict[str, Any], *experts: int) -> None:
    state["optimizer"].zero_grad()
    for number in experts:
        state["model"][number](torch.ones(4)).square().sum().backward()
    state["optimizer"].step()


def contents(state: dict[str, Any]) -> list[Any]:
    model, optimizer = state["model"].state_dict(), state["optimizer"].state_dict()
    steps = {number: {name: one.tolist() for name, one in kept.items()} for number, kept in optimizer["state"].items()}
    return copy.deepcopy([{name: one.tolist() for name, one in model.items()}, steps])


def test_parameters_without_a_gradient_so_far_have_no_state_after_a_restore_either(pod: LivePod) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    step_once(state, 0)
    assert isinstance(checkpointer.save(state, 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    fresh = make_state()
    assert Checkpointer().load(fresh) == 1
    assert contents(fresh) == contents(state)
    for one in (state, fresh):
        step_once(one, 0, 1)
    assert contents(fresh) == contents(state)
    assert sorted(contents(fresh)[1]) == [0, 1, 2, 3]


def test_they_have_none_after_a_load_from_the_disk_either(pod: LivePod, tmp_path: Path) -> None:
    pod.be_outside()
    state = make_state()
    step_once(state, 0)
    save(state, checkpoint_id=tmp_path / "step-1")
    fresh = make_state()
    assert Checkpointer(disk=tmp_path).load(fresh) == 1
    assert contents(fresh) == contents(state)


@pytest.mark.parametrize("has_disk", [False, True])
def test_parameters_that_were_unfrozen_later_have_their_state_again(
    pod: LivePod, tmp_path: Path, has_disk: bool
) -> None:
    """They are frozen in a new process, as when the training began."""
    states = make_state(), make_state()
    for one in states:
        one["model"][0].requires_grad_(False)
    state, fresh = states
    step_once(state, 1)
    state["model"][0].requires_grad_(True)
    step_once(state, 0, 1)
    if has_disk:
        pod.be_outside()
        save(state, checkpoint_id=tmp_path / "step-2")
    else:
        pod.start()
        assert isinstance(Checkpointer().save(state, 2), Saved)
        pod.be(iteration=1)
        pod.be_new_process()
    assert Checkpointer(disk=tmp_path).load(fresh) == 2
    assert contents(fresh) == contents(state)
    assert not any(one.requires_grad or one.grad is not None for one in fresh["model"][0].parameters())


def test_an_optimizer_is_as_new_when_nothing_could_be_restored(pod: LivePod) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer()
    step_once(state, 0)
    checkpointer.save(state, 1)
    pod.be(iteration=1)
    fresh = make_state()
    assert Checkpointer().load(fresh | {"more": torch.zeros(1)}) is None
    assert not fresh["optimizer"].state
    untouched = make_state()
    for one in (fresh, untouched):
        step_once(one, 0, 1)
    assert contents(fresh) == contents(untouched)


def test_hooks_of_an_optimizer_see_no_step_in_a_load(pod: LivePod) -> None:
    """One that counts steps, or averages weights after each, would be one ahead."""
    pod.start()
    state, fresh = make_state(), make_state()
    for one in (state, fresh):
        # torch makes its state in a whole step alone.
        one["optimizer"] = torch.optim.SGD(one["model"].parameters(), lr=0.1, momentum=0.9)
    step_once(state, 0)
    assert isinstance(Checkpointer().save(state, 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    seen: list[str] = []
    fresh["optimizer"].register_step_pre_hook(lambda *_: seen.append("pre"))
    fresh["optimizer"].register_step_post_hook(lambda *_: seen.append("post"))
    assert Checkpointer().load(fresh) == 1
    assert seen == []
    step_once(fresh, 0, 1)
    assert seen == ["pre", "post"]


def test_what_a_loop_has_filled_since_it_began_is_restored(pod: LivePod) -> None:
    pod.start()
    scores = Scores()
    counts: dict[str, Any] = {"a.b": {}}
    checkpointer = Checkpointer()
    assert checkpointer.load({"scores": scores, "counts": counts}) is None
    scores.best = {"loss": 0.5, 7: [1, 2]}
    scores.by_name["all"]["x.y"] = 3
    counts["a.b"]["c"] = 4
    assert isinstance(checkpointer.save({"scores": scores, "counts": counts}, 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    fresh = Scores()
    state: dict[str, Any] = {"scores": fresh, "counts": {}}
    assert Checkpointer().load(state) == 1
    assert (fresh.best, fresh.by_name) == ({"loss": 0.5, 7: [1, 2]}, {"all": {"x.y": 3}})
    assert state["counts"] == {"a.b": {"c": 4}}


DROPPED = [
    pytest.param({"a": 1, "b": 2}, {"b": 3}, id="a key less"),
    pytest.param({"a": {"x": 1, "y": {"z": 2}}, "b": 2}, {"b": 3}, id="dictionaries less"),
    pytest.param({"a": {"x": 1}, "b": 2}, {"a": {}, "b": 3}, id="a dictionary that is empty now"),
    pytest.param({"a": 1}, {}, id="nothing"),
    pytest.param({"a": {}}, {"a": {}}, id="empty before and after"),
    pytest.param({}, {"a": {"b": {}}}, id="an empty one that is new"),
    pytest.param({"a": [{"x": 1}, {"x": 2}, {"y": 3}]}, {"a": [{"x": 4}]}, id="a shorter list of dictionaries"),
    pytest.param({"a": [{"x": 1}], "b": 2}, {"a": [], "b": 3}, id="a list that is empty now"),
    pytest.param({"a": {"x": 1}}, {"a": 5}, id="a number in the place of a dictionary"),
    pytest.param({"a": 5}, {"a": {"x": 1}}, id="a dictionary in the place of a number"),
    pytest.param({1: 2, 3: 4}, {3: 5}, id="numbers as keys"),
    pytest.param([{"x": 1}], [], id="a list, empty now"),
    pytest.param([{"x": 1}], [2, 3], id="a list, of numbers now"),
    pytest.param({"x": 1}, 5, id="a number"),
    pytest.param({"a.b": 1, "a": {"c": 2}}, {"a": {"c": 3}}, id="a name with a dot"),
]
"""What a new process begins with, and what was saved: less, or other things."""


@pytest.mark.parametrize(("first", "later"), DROPPED)
@pytest.mark.parametrize("is_stateful", [False, True])
def test_what_a_loop_has_dropped_since_it_began_is_not_there_after_a_restore(
    pod: LivePod, first: Any, later: Any, is_stateful: bool
) -> None:
    assert restored(pod, first, later, is_stateful=is_stateful) == later


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (Counter("aab"), Counter("ac")),
        (Counter("a"), Counter()),
        (Counter(), Counter()),
        (defaultdict(int, x=1), defaultdict(int)),
        (OrderedDict(x={"y": 1}), OrderedDict(x={})),
    ],
)
def test_a_dictionary_of_another_kind_stays_one(pod: LivePod, first: Any, later: Any, is_stateful: bool) -> None:
    """Seen before: a Counter that both have could not be loaded, and an empty one came back as a plain dictionary."""
    found = restored(pod, first, later, is_stateful=is_stateful)
    assert found == later
    assert type(found) is type(later)


def test_truth_values_in_memory_that_nobody_has_filled_are_saved_as_they_are(pod: LivePod) -> None:
    """Seen before: torch copies such a byte as 1, and no checkpoint with one was ever taken for whole."""
    pod.start()
    state = {"mask": torch.full((100,), 5, dtype=torch.uint8).view(torch.bool)}
    assert isinstance(Checkpointer().save(state, 1), Saved)
    pod.be_new_process()
    fresh = {"mask": torch.zeros(100, dtype=torch.bool)}
    assert Checkpointer().load(fresh) == 1
    assert fresh["mask"].view(torch.uint8).tolist() == [5] * 100


class Counting(torch.optim.Optimizer):
    """Keeps a plain number for each parameter, as optimizers of other packages do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            kept["step"] = kept.get("step", 0) + 1
            parameter.sub_(0.1 / kept["step"])


def make_counting() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"optimizer": Counting(model.parameters()), "numbers": {7: {8: 0}}, "log": []}


@pytest.mark.parametrize("has_disk", [False, True])
def test_numbers_as_keys_are_restored(pod: LivePod, tmp_path: Path, has_disk: bool) -> None:
    """An optimizer's step counts: torch would put them under the texts of the numbers, beside the old ones."""
    state = make_counting()
    for _ in range(5):
        state["optimizer"].step()
    state["numbers"][7][8] = 5
    if has_disk:
        pod.be_outside()
        del state["log"]
        save(state, checkpoint_id=tmp_path / "step-5")
    else:
        pod.start()
        state["log"] = [{"loss": 1.0}, {"loss": 0.5, "at": {3: "x"}}]
        state["optimizer"].param_groups[0]["initial_lr"] = 0.7
        assert isinstance(Checkpointer().save(state, 5), Saved)
        pod.be(iteration=1)
        pod.be_new_process()
    fresh = make_counting()
    if has_disk:
        del fresh["log"]
    assert Checkpointer(disk=tmp_path).load(fresh) == 5
    assert fresh["optimizer"].state_dict()["state"] == {0: {"step": 5}, 1: {"step": 5}}
    assert fresh["optimizer"].state_dict()["param_groups"] == state["optimizer"].state_dict()["param_groups"]
    assert (fresh["numbers"], fresh.get("log")) == (state["numbers"], state.get("log"))


def test_a_state_that_cannot_be_restored_is_left_as_it_was(pod: LivePod) -> None:
    pod.start()
    scores, checkpointer = Scores(), Checkpointer()
    scores.by_name["all"]["x"] = 1
    checkpointer.save({"scores": scores}, 1)
    pod.be(iteration=1)
    fresh = Scores()
    assert Checkpointer().load({"scores": fresh, "more": torch.zeros(1)}) is None
    assert (fresh.best, fresh.by_name) == (None, {"all": {}})


def test_what_a_state_has_no_place_for_is_named_in_the_log(pod: LivePod, caplog: pytest.LogCaptureFixture) -> None:
    pod.start()
    Checkpointer().save({"a": torch.zeros(1), "gone": 1}, 1)
    pod.be(iteration=1)
    assert Checkpointer().load({"a": torch.zeros(1)}) == 1
    assert "no place for it: step=1 names=1: gone; let a new state have the keys" in caplog.text


def test_what_a_state_has_no_place_for_on_the_disk_is_named_in_the_log(
    pod: LivePod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch leaves it out without a word."""
    pod.be_outside()
    scores, model = Scores(), nn.Linear(2, 2)
    scores.by_name["all"]["x"] = 1
    model.register_buffer("late", torch.ones(1))
    save({"scores": scores, "model": model, "of another rank": 1}, checkpoint_id=tmp_path / "step-1")
    assert Checkpointer(disk=tmp_path).load({"scores": Scores(), "model": nn.Linear(2, 2)}) == 1
    assert "has no place for it: step=1 names=2: model.late, scores.by_name.all.x; let a new state" in caplog.text


class Wrapped:
    """A training as many write it: one object, whose dictionary has those of model and optimizer."""

    def __init__(self) -> None:
        self.parts = make_state()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.parts.items():
            one.load_state_dict(state[name])


@pytest.mark.usefixtures("own_writer")
@pytest.mark.parametrize("has_disk", [False, True])
def test_state_of_an_optimizer_within_an_object_of_ones_own_is_restored(
    pod: LivePod, tmp_path: Path, has_disk: bool
) -> None:
    """Seen before: Adam began anew after each fault, and the log alone said so."""
    pod.start()
    trained = Wrapped()
    checkpointer = Checkpointer(disk=tmp_path, disk_every=3) if has_disk else Checkpointer()
    assert checkpointer.load({"all": trained}) is None
    for step in range(1, 4):
        step_once(trained.parts, 0, 1)
        assert isinstance(checkpointer.save({"all": trained}, step), Saved)
    if has_disk:
        assert checkpointer.flush(timeout_s=LIMIT_S)
        be_without_memory(pod)
    else:
        pod.be(iteration=1)
        pod.be_new_process()
    fresh = Wrapped()
    assert Checkpointer(disk=tmp_path).load({"all": fresh}) == 3
    assert contents(fresh.parts) == contents(trained.parts)
    for one in (trained, fresh):
        step_once(one.parts, 0, 1)
    assert contents(fresh.parts) == contents(trained.parts)


MADE = [
    pytest.param({}, {"x": torch.arange(3.0)}, id="a name"),
    pytest.param({"x": None}, {"x": torch.arange(3.0)}, id="None before"),
    pytest.param({"x": 5}, {"x": torch.tensor(2, dtype=torch.int8)}, id="a number before"),
    pytest.param({"a.b": {}}, {"a.b": {7: {"c": torch.ones(2, 2)}}}, id="dots and numbers as keys"),
    pytest.param([], [torch.ones(1), 3, torch.zeros(2), {"y": torch.ones(3)}], id="a list"),
    pytest.param([torch.zeros(1)], [torch.ones(1), torch.ones(2)], id="a longer list"),
    pytest.param({}, {"x": torch.zeros(0, 4)}, id="no values"),
    pytest.param({"x": {"y": 1}}, {"x": torch.ones(2)}, id="a dictionary before"),
    pytest.param({"x": torch.ones(2)}, {"x": {"y": torch.ones(2)}}, id="a tensor before"),
]
"""What a new process begins with, and what was saved: tensors that it has no place for."""


@pytest.mark.parametrize(("new", "saved"), MADE)
@pytest.mark.parametrize("is_stateful", [False, True])
def test_tensors_that_a_loop_has_made_since_it_began_are_restored(
    pod: LivePod, new: Any, saved: Any, is_stateful: bool
) -> None:
    found = restored(pod, new, saved, is_stateful=is_stateful)
    torch.testing.assert_close(found, saved, rtol=0.0, atol=0.0)


@pytest.mark.usefixtures("own_writer")
@pytest.mark.parametrize("is_stateful", [False, True])
def test_from_the_disk_all_of_that_is_restored_as_from_memory(
    pod: LivePod, tmp_path: Path, is_stateful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen before: what a new state had no keys for was left out, and what it had more of was an error."""
    pod.start()
    cases = [*DROPPED, *MADE]
    state = state_of({f"it{at}": one.values[1] for at, one in enumerate(cases)}, is_stateful=is_stateful)
    checkpointer = Checkpointer(disk=tmp_path, disk_every=1)
    assert checkpointer.load(state) is None
    assert isinstance(checkpointer.save(state, 1), Saved)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    be_without_memory(pod)
    fresh = state_of({f"it{at}": one.values[0] for at, one in enumerate(cases)}, is_stateful=is_stateful)
    assert Checkpointer(disk=tmp_path).load(fresh) == 1
    torch.testing.assert_close(values_of(fresh), values_of(state), rtol=0.0, atol=0.0)
    assert "not restored" not in caplog.text


@pytest.mark.usefixtures("own_writer")
def test_what_cannot_be_placed_is_refused_from_the_disk_too_and_without_paths_it_is_named_in_the_log(
    pod: LivePod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pod.start()
    state = {"it": {1.5: torch.ones(2), "known": 1}}
    checkpointer = Checkpointer(disk=tmp_path, disk_every=1)
    assert checkpointer.load(state) is None
    assert isinstance(checkpointer.save(state, 1), Saved)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    be_without_memory(pod)
    with pytest.raises(ValueError, match=r"it\.1\.5: want a state with a place for it, .* step 1, got .* \(1 names\)"):
        Checkpointer(disk=tmp_path).load({"it": {}})
    (tmp_path / "step-1" / PLACES).write_bytes(b'{"common": 5, "of_rank": {}, "world_size": 1}')
    pod.be_new_process()
    fresh: dict[str, Any] = {"it": {}}
    assert Checkpointer(disk=tmp_path).load(fresh) == 1
    assert f"{PLACES}: no places: " in caplog.text
    assert "has no place for it: step=1 names=2: it.1.5, it.known" in caplog.text
    assert fresh == {"it": {}}


def test_places_of_tensors_are_told_anew_where_the_same_names_lie_elsewhere(pod: LivePod) -> None:
    pod.start()
    checkpointer = Checkpointer()
    for step, values in enumerate(({"a.b": torch.ones(2)}, {"a": {"b": torch.ones(2)}}), 1):
        assert isinstance(checkpointer.save({"it": values}, step), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    fresh: dict[str, Any] = {"it": {}}
    assert Checkpointer().load(fresh) == 2
    assert fresh["it"]["a"]["b"].tolist() == [1.0, 1.0]


def test_a_tensor_for_which_no_place_can_be_made_is_refused(pod: LivePod) -> None:
    pod.start()
    assert isinstance(Checkpointer().save({"it": {1.5: torch.ones(2)}}, 1), Saved)
    pod.be(iteration=1)
    with pytest.raises(ValueError, match=r"it\.1\.5: want a state with a place for it, .* step 1, got .* \(1 names\)"):
        Checkpointer().load({"it": {}})


def test_a_models_buffer_without_a_place_is_refused(pod: LivePod) -> None:
    """It would begin anew, and nobody would see more than another loss."""
    pod.start()
    model = nn.Linear(2, 2)
    model.register_buffer("late", torch.ones(1))
    Checkpointer().save({"model": model, "gone": 1}, 1)
    pod.be(iteration=1)
    fresh = nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"model\.late: want a model with a place for it, .* step 1, got .* \(1 names\)"
    ):
        Checkpointer().load({"model": fresh})
    assert torch.equal(fresh.weight, before)


def test_what_to_do_about_a_tensor_that_grows_is_said_in_the_log(
    pod: LivePod, caplog: pytest.LogCaptureFixture
) -> None:
    pod.start()
    Checkpointer().save({"losses": torch.ones(3), "numbers": [1.0, 2.0, 3.0]}, 3)
    pod.be(iteration=1)
    assert Checkpointer().load({"losses": torch.zeros(0), "numbers": []}) is None
    assert "step=3: Size mismatch" in caplog.text
    assert "losses; tensors are restored to the size that a new state gives them: keep what grows as a" in caplog.text


def test_a_list_that_grows_is_restored(pod: LivePod) -> None:
    pod.start()
    Checkpointer().save({"numbers": [1.0, 2.0, 3.0]}, 3)
    pod.be(iteration=1)
    fresh: dict[str, Any] = {"numbers": []}
    assert Checkpointer().load(fresh) == 3
    assert fresh == {"numbers": [1.0, 2.0, 3.0]}


def test_an_optimizer_without_a_group_that_was_added_later_is_refused_with_what_to_change(pod: LivePod) -> None:
    pod.start()
    state = make_state()
    state["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(4))], "lr": 0.2})
    step_once(state, 0)
    assert isinstance(Checkpointer().save(state, 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    with pytest.raises(
        ValueError, match=r"optimizer: want 2 parameter groups, as in the .* step 1, got 1; give it all"
    ):
        Checkpointer().load(make_state())


def test_an_optimizer_that_needs_a_closure_is_refused_at_the_first_save(pod: LivePod) -> None:
    """Not after the first fault, when a new one could not be given its state."""
    pod.start()
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}
    with pytest.raises(TypeError, match=r"optimizer: want an optimizer whose step\(\) needs no closure, got LBFGS"):
        Checkpointer().save(state, 1)


@pytest.mark.parametrize("has_scores", [True, False])
def test_what_a_shard_of_another_pod_may_have_is_not_taken_for_dropped(
    pod: LivePod, monkeypatch: pytest.MonkeyPatch, has_scores: bool
) -> None:
    """One of two pods is lost, and the first rank has the shard of the second one at hand, which never had scores."""
    pod.start()
    for rank, values in enumerate(({"step": 1, "scores": 7} if has_scores else {"step": 1}, {"step": 1})):
        pod.be(rank, rank=rank, world_size=2)
        pod.be_new_process()
        assert isinstance(Checkpointer().save({"it": values}, 1), Saved)
    pod.be(iteration=1)
    pod.be_new_process()
    shards: dict[int, FoundSlot] = {}

    def second_alone(found: Found) -> tuple[FoundSlot, ...]:
        shards.update({one.rank: one for one in found.slots})
        return (shards[1],)

    monkeypatch.setattr(restoring, "_newest_of_each", second_alone)
    monkeypatch.setattr(restoring, "candidates", lambda offers: [ReadableCheckpoint(offers[0].moment, 2, False)])
    monkeypatch.setattr(Remote, "has_any", lambda *_: True)
    monkeypatch.setattr(Remote, "ranks", lambda *_: [0])
    monkeypatch.setattr(Remote, "open", lambda _, candidate, rank: open_source(shards[rank]))
    fresh: dict[str, Any] = {"it": {"step": 0, "scores": None}}
    assert Checkpointer().load(fresh) == 1
    assert fresh["it"] == ({"step": 1, "scores": 7} if has_scores else {"step": 1})
