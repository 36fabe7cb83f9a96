"""Tells whether gradients wait for more batches, where a module steps its optimizers itself.

    backward ──adds──> gradients of an optimizer ──its step()──> used

A checkpoint has no gradients, so none may be taken while some wait. Leftovers wait for nothing: those of an optimizer
that has stepped in this batch, such as what a generator's loss adds to the discriminator's.
"""

from collections.abc import Sequence
from typing import Any

import torch


class WaitingGradients:
    """Watches the optimizers of one training. Gradients that are all zero, or None, do not wait."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._added: set[int] = set()
        """Numbers of optimizers whose gradients have changed since their last step."""
        self._stepped: set[int] = set()
        """Those that have stepped since `are_left_by_batch`."""
        for number, optimizer in enumerate(optimizers):
            _watch(optimizer, number, self._added, self._stepped)

    def are_left_by_batch(self) -> bool:
        """Return whether some wait after the batch that ends here; the next one begins."""
        numbers = self._added - self._stepped
        self._stepped.clear()
        return any(_has_gradients(self._optimizers[number]) for number in numbers)


def _watch(optimizer: torch.optim.Optimizer, number: int, added: set[int], stepped: set[int]) -> None:
    def add(_: torch.Tensor) -> None:
        added.add(number)

    def step(*_: Any) -> None:
        added.discard(number)
        stepped.add(number)

    optimizer.register_step_post_hook(step)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(add)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (one.grad for group in optimizer.param_groups for one in group["params"])
    return any(one is not None and bool(one.count_nonzero()) for one in gradients)
