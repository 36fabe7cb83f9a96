"""State that optimizers make in their first step: a new one must have it before it can be loaded in place."""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class LazyState:
    """What the new optimizers of a state are given, until one checkpoint is loaded into them."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._new = {name: one for name, one in state.items() if isinstance(one, Optimizer) and _is_new(one)}
        self._made: dict[str, set[str]] = {}
        """Numbers of the parameters for which there is a state now, by the optimizer's name."""

    def fit(self, names: Collection[str]) -> None:
        """Make what a checkpoint with these names has, and no more.

        A parameter that had no gradient yet has no state: that of an expert that was not chosen, or of a frozen layer.
        """
        for name, one in self._new.items():
            prefix = f"{name}.state."
            saved = {key[len(prefix) :].split(".", 1)[0] for key in names if key.startswith(prefix)}
            if self._made.setdefault(name, set()) != saved:
                one.state.clear()
                _make(one, saved)
                self._made[name] = saved

    def drop(self) -> None:
        """Let the optimizers be new again: nothing was loaded, and no first step was made."""
        for name in self._made:
            self._new[name].state.clear()
        self._made.clear()


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step, and so the state, cannot be made without evaluating the model, as with LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_new(optimizer: Optimizer) -> bool:
    return not optimizer.state and not any(_has_gradient(group) for group in optimizer.param_groups)


def _make(optimizer: Optimizer, numbers: Collection[str]) -> None:
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
                _step(optimizer, wanted)
    finally:
        optimizer.zero_grad(set_to_none=True)


def _is_made_by_torch(optimizer: Optimizer, wanted: Sequence[torch.Tensor]) -> bool:
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


def _step(optimizer: Optimizer, wanted: Iterable[torch.Tensor]) -> None:
    """Make a whole step, in which nothing is learnt."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in wanted:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        with _without_hooks(optimizer):
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
