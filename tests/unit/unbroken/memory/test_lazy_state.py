"""State that a new optimizer is given before a checkpoint is loaded into it: that of a first step, without the step."""

import inspect
from typing import Any

import pytest
import torch
from torch.optim import Adam, Optimizer

from unbroken.memory.new_state.lazy_state import LazyState, needs_closure, refuse_lost

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"fused": True}),
    ("Adam", {"foreach": True}),
    ("AdamW", {"lr": torch.tensor(1e-3)}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


def kinds() -> list[tuple[str, dict[str, Any]]]:
    """Return all of torch's optimizers that a step needs nothing for but gradients, with their settings."""
    found = [
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer and name != "SparseAdam"
    ]
    made = [(name, make(name, {})) for name in found]
    return [*((name, {}) for name, one in made if not needs_closure(one)), *SETTINGS]


def make(name: str, settings: dict[str, Any]) -> Optimizer:
    torch.manual_seed(0)
    values = [torch.rand(4, 3), torch.rand(5, 2), torch.rand(5, 7).t(), torch.rand(2, 2)]
    parameters = [torch.nn.Parameter(one) for one in values]
    parameters[3].requires_grad = False
    optimizer: Optimizer = getattr(torch.optim, name)(parameters, **{"lr": 1e-3, **settings})
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def forms(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what each parameter has: types, sizes and strides of tensors, and all else as it is."""
    return [
        {
            key: (value.dtype, value.size(), value.stride()) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(one, {}).items()
        }
        for one in parameters_of(optimizer)
    ]


@pytest.mark.parametrize(("name", "settings"), kinds(), ids=str)
def test_a_new_optimizer_has_the_state_of_a_first_step_and_the_same_parameters(
    name: str, settings: dict[str, Any]
) -> None:
    stepped = make(name, settings)
    stepped.state.clear()
    for number, one in enumerate(parameters_of(stepped)):
        if number in (0, 2):
            one.grad = torch.ones_like(one)
    stepped.step()
    optimizer = make(name, settings)
    optimizer.state.clear()
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [one.clone() for one in parameters_of(optimizer)]

    LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.step", "optimizer.state.2.step"])

    assert forms(optimizer) == forms(stepped)
    assert all(map(torch.equal, parameters_of(optimizer), before))
    assert all(one.grad is None for one in parameters_of(optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_no_step_is_made_where_torch_can_make_the_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(_optimizer: Optimizer) -> None:
        raise AssertionError("a step computes on each tensor a dozen times")

    monkeypatch.setattr(Adam, "step", step)
    optimizer = make("Adam", {})

    LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.step"])

    assert set(forms(optimizer)[0]) == {"step", "exp_avg", "exp_avg_sq"}


class WithMore(Adam):
    """Keeps one thing more than torch's own."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["more"] = torch.zeros(7)
        return result


def test_an_optimizer_of_the_users_makes_its_state_in_its_own_step() -> None:
    parameter = torch.nn.Parameter(torch.rand(3))
    optimizer = WithMore([parameter])

    LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.step"])

    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", "more"}


def test_a_step_is_made_where_another_release_of_torch_makes_the_state_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_group(optimizer: Optimizer, group: dict[str, Any], _a: list[Any], _b: list[Any]) -> None:
        optimizer.state[group["params"][0]] = {"half": torch.zeros(1)}
        raise TypeError("other arguments")

    monkeypatch.setattr(Adam, "_init_group", make_group)
    monkeypatch.setattr(Adam, "step", _step_by_hand)
    optimizer = make("Adam", {})

    LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.step", "optimizer.state.2.step"])

    assert [set(one) for one in forms(optimizer)] == [{"by_hand"}, set(), {"by_hand"}, set()]


def _step_by_hand(optimizer: Optimizer) -> None:
    for one in parameters_of(optimizer):
        if one.grad is not None:
            optimizer.state[one]["by_hand"] = torch.zeros_like(one)


class ScheduleFree(Optimizer):
    """As those of the package schedulefree: counts in its groups, and makes no step before it is switched to training.

    The switch asks for the state of each parameter, so that there is one without anything in it.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0, "is_training": False})

    def train(self) -> None:
        for group in self.param_groups:
            group["is_training"] = True
            for one in group["params"]:
                _ = self.state[one]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has overloads
        for group in self.param_groups:
            if not group["is_training"]:
                raise RuntimeError("not switched to training")
            group["count"] += 1
            group["largest"] = group["lr"]
            for one in group["params"]:
                if one.grad is not None and "z" not in self.state[one]:
                    self.state[one]["z"] = one.detach().clone()
        _ = 1 / self.param_groups[0]["lr"]


class Around:
    """An optimizer in another one, which is no class of torch's."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.zero_grad, self.train = base.zero_grad, getattr(base, "train", lambda: None)
        self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize("wrap", [lambda one: one, Around], ids=["itself", "wrapped"])
def test_an_optimizer_that_is_switched_to_training_has_a_place_for_what_it_keeps(wrap: Any, is_switched: bool) -> None:
    """Without one its averages were lost after each fault, and training went on with others."""
    parameter = torch.nn.Parameter(torch.rand(3))
    before, optimizer = parameter.detach().clone(), ScheduleFree([parameter])
    if is_switched:
        optimizer.train()
    lazy = LazyState({"optimizer": wrap(optimizer)})

    lazy.fit(["optimizer.state.0.z"])

    assert set(optimizer.state[parameter]) == {"z"}
    assert torch.equal(parameter, before)
    lazy.drop()
    assert not optimizer.state
    groups = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
    assert groups == [{"lr": 0.1, "count": 0, "is_training": is_switched}], "nothing was loaded"


def test_hooks_of_an_optimizer_in_another_one_do_not_see_the_step_in_which_the_state_is_made() -> None:
    optimizer, seen = ScheduleFree([torch.nn.Parameter(torch.rand(3))]), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    LazyState({"optimizer": Around(optimizer)}).fit(["optimizer.state.0.z"])
    assert seen == []


def test_an_optimizer_of_sparse_gradients_has_a_place_for_what_it_keeps() -> None:
    """SparseAdam takes no others, so that each restart failed."""
    parameter = torch.nn.Parameter(torch.rand(5, 2))
    before, optimizer = parameter.detach().clone(), torch.optim.SparseAdam([parameter])
    LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.exp_avg"])
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(parameter, before)
    assert parameter.grad is None


class Never(Optimizer):
    """Takes no gradient of zeros."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has overloads
        raise ZeroDivisionError("a norm of zero")


def test_an_optimizer_that_no_step_makes_a_state_for_is_named() -> None:
    optimizer = Never([torch.nn.Parameter(torch.rand(3))], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"optimizer: want .* gradients of zeros, got one of Never: a norm of zero"):
        LazyState({"optimizer": optimizer}).fit(["optimizer.state.0.z"])


def test_what_a_checkpoint_has_of_an_optimizer_is_never_left_out() -> None:
    state = {"model": torch.nn.Linear(2, 2), "optimizer": make("SGD", {})}
    refuse_lost(state, ["model.more", "optimizer.param_groups.0.more", "step"])
    with pytest.raises(ValueError, match=r"optimizer: want .* place for optimizer\.state\.0\.momentum_buffer, .* SGD"):
        refuse_lost(state, ["optimizer.state.0.momentum_buffer"])
