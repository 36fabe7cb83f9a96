"""State that optimizers make in their first step: a new one must have it before it can be loaded in place."""

import torch
from torch.optim import Optimizer


def make_lazy_state(optimizer: Optimizer) -> None:
    """Make an optimizer's state as its first step would, and change no parameter."""
    if optimizer.state or any(_has_gradient(group) for group in optimizer.param_groups):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                if "lr" in group:
                    rate = group["lr"]
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def _has_gradient(group: dict[str, object]) -> bool:
    parameters = group["params"]
    return isinstance(parameters, list) and any(one.grad is not None for one in parameters)
