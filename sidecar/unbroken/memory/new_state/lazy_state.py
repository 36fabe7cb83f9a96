"""State that optimizers make in their first step: a new one must have it before it can be loaded in place."""

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class LazyState:
    """What the new optimizers of a state are given, until one checkpoint is loaded into them."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._new: dict[str, Any] = {name: one for name, one in state.items() if is_optimizer(one) and _is_new(one)}
        self._made: dict[str, set[str]] = {}
        """Numbers of the parameters for which there is a state now, by the optimizer's name."""
        self._groups: dict[str, list[dict[str, Any]]] = {}
        """What groups of parameters had before, by the optimizer's name: some count their steps in them."""

    def fit(self, names: Collection[str]) -> None:
        """Make what a checkpoint with these names has, and no more.

        A parameter that had no gradient yet has no state: that of an expert that was not chosen, or of a frozen layer.
        """
        for name, one in self._new.items():
            prefix = f"{name}.state."
            saved = {key[len(prefix) :].split(".", 1)[0] for key in names if key.startswith(prefix)}
            if self._made.setdefault(name, set()) != saved:
                self._renew(name)
                self._groups[name] = [_beside_parameters(group) for group in one.param_groups]
                _make(name, one, saved)
                self._made[name] = saved

    def drop(self) -> None:
        """Let the optimizers be new again: nothing was loaded, and no first step was made."""
        for name in self._made:
            self._renew(name)
        self._made.clear()

    def _renew(self, name: str) -> None:
        one = self._new[name]
        one.state.clear()
        for group, before in zip(one.param_groups, self._groups.pop(name, []), strict=False):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)


def is_optimizer(one: object) -> bool:
    """Return whether it is one of torch's kind, or is built around one, as schedule-free wrappers are."""
    names = ("param_groups", "state", "step", "zero_grad", "state_dict", "load_state_dict")
    return isinstance(one, Optimizer) or (not isinstance(one, nn.Module) and all(hasattr(one, name) for name in names))


def refuse_lost(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError where one of these, which a checkpoint has and nothing takes, belongs to an optimizer.

    It would go on as if it began, and nobody would see more than another loss.
    """
    for name, one in state.items():
        prefix = f"{name}.state."
        lost = [key for key in names if key.startswith(prefix)] if is_optimizer(one) else []
        if lost:
            raise ValueError(
                f"{name}: want an optimizer with a place for {lost[0]}, as in the checkpoint, got one of "
                f"{type(one).__name__} without ({len(lost)} names); let it be as new when it is loaded, with the "
                "options that it had, and have all its state after one step"
            )


def no_place(names: Sequence[str], step: int, *, is_model: bool) -> ValueError:
    """Return the error for what a checkpoint has and no rank's model, or other part of the state, has a place for."""
    kind, what = ("model", "weights and buffers") if is_model else ("state", "tensors")
    more = "" if is_model else "; an optimizer in the state itself, or get_state_dict of torch, makes its own"
    return ValueError(
        f"{names[0]}: want a {kind} with a place for it, as in the checkpoint of step {step}, got one without "
        f"({len(names)} names); let a new {kind} have all {what} before load, also those that are added later in "
        f"training{more}"
    )


def makes_places(one: object) -> bool:
    """Return whether a new one has a place for each tensor, or is given one by LazyState."""
    return isinstance(one, nn.Module) or is_optimizer(one)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step, and so the state, cannot be made without evaluating the model, as with LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_new(optimizer: Any) -> bool:
    # One that was switched to training has asked for the state of each parameter: there are dictionaries without any.
    return not any(optimizer.state.values()) and not any(_has_gradient(group) for group in optimizer.param_groups)


def _beside_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _make(name: str, optimizer: Any, numbers: Collection[str]) -> None:
    """Make the state of these parameters as the first step would, and change no parameter."""
    wanted = [
        parameter
        for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"])
        # Also one that is frozen in a new process, and was trained later.
        if str(number) in numbers
    ]
    try:
        with torch.no_grad():
            if wanted and not _is_made_by_torch(optimizer, wanted):
                _step_somehow(name, optimizer, wanted)
    finally:
        optimizer.zero_grad(set_to_none=True)


def _is_made_by_torch(optimizer: Any, wanted: Sequence[torch.Tensor]) -> bool:
    """Make the state by that part of a step which makes it; return False where torch has none for it.

    A whole step computes on each tensor a dozen times, which takes longer than all else that a load does.
    """
    kind = type(optimizer)
    # A subclass may make more in its own step.
    make = getattr(optimizer, "_init_group", None) if getattr(torch.optim, kind.__name__, None) is kind else None
    if make is None:
        return False
    for parameter in wanted:
        # Nobody reads it: its memory is never touched.
        parameter.grad = torch.empty_like(parameter)
    try:
        # Lists that it fills for the step, which is not made.
        lists = len(inspect.signature(make).parameters) - 1
        for group in optimizer.param_groups:
            make(group, *([] for _ in range(lists)))
    except Exception:
        # It is torch's own, and may be another one in each release.
        optimizer.state.clear()
    if all(optimizer.state.get(one) for one in wanted):
        return True
    # SGD makes it behind that.
    optimizer.state.clear()
    return False


def _step_somehow(name: str, optimizer: Any, wanted: Sequence[torch.Tensor]) -> None:
    """Make a whole step with gradients of the kind that it takes. Raises ValueError for an optimizer without a way."""
    problem: Exception | None = None
    for gradient in (torch.zeros_like, _sparse_zeros):
        try:
            _step(optimizer, wanted, gradient)
        except Exception as error:
            problem = problem or error
        # Some divide by the rate once all is there.
        if problem is None or all(optimizer.state.get(one) for one in wanted):
            return
        optimizer.state.clear()
    raise ValueError(
        f"{name}: want an optimizer that makes its state in a step with gradients of zeros, got one of "
        f"{type(optimizer).__name__}: {problem}"
    ) from problem


def _sparse_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an embedding of which no row was used, as SparseAdam takes it."""
    indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def _step(optimizer: Any, wanted: Iterable[torch.Tensor], gradient: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make a whole step, in which nothing is learnt."""
    if callable(train := getattr(optimizer, "train", None)):
        # Schedule-free ones make no step before.
        train()
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in wanted:
            parameter.grad = gradient(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        with contextlib.ExitStack() as stack:
            for one in (optimizer, *vars(optimizer).values()):
                if isinstance(one, Optimizer):
                    stack.enter_context(_without_hooks(one))
            optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Let nobody count this step, average weights after it, or wait in it for other ranks."""
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before


def _has_gradient(group: dict[str, object]) -> bool:
    parameters = group["params"]
    return isinstance(parameters, list) and any(one.grad is not None for one in parameters)
