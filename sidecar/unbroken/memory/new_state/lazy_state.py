"""State that optimizers make in their first step: a new one must have it before it can be loaded in place."""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
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
    rates = [group.get("lr") for group in optimizer.param_groups]
    number = 0
    try:
        with torch.no_grad(), _without_hooks(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # Also of one that is frozen in a new process, and was trained later.
                    if str(number) in numbers:
                        parameter.grad = torch.zeros_like(parameter)
                    number += 1
                if "lr" in group:
                    rate = group["lr"]
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            if numbers:
                optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


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
