"""Gradients wait where a batch adds some and their optimizer does not step; leftovers do not."""

from collections.abc import Callable

import pytest
import torch

from unbroken.integrations.waiting_gradients import WaitingGradients

Step = Callable[[torch.optim.Optimizer, torch.optim.Optimizer, torch.Tensor, torch.Tensor], None]


def _steps_first(first: torch.optim.Optimizer, second: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor) -> None:
    first.zero_grad()
    (a * a).sum().backward()
    first.step()


def _leaves_some_in_first(
    first: torch.optim.Optimizer, second: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor
) -> None:
    _steps_first(first, second, a, b)
    second.zero_grad()
    (a * b).sum().backward()
    second.step()


def _adds(first: torch.optim.Optimizer, second: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor) -> None:
    (a * a).sum().backward()


def _adds_to_second(
    first: torch.optim.Optimizer, second: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor
) -> None:
    _steps_first(first, second, a, b)
    (b * b).sum().backward()


def _zeroes(first: torch.optim.Optimizer, second: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor) -> None:
    _adds(first, second, a, b)
    first.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("batches", "wait"),
    [
        pytest.param([_steps_first] * 2, [False, False], id="one that steps"),
        pytest.param([_leaves_some_in_first] * 2, [False, False], id="what another loss left"),
        pytest.param([_adds, _adds, _steps_first], [True, True, False], id="gradients over three batches"),
        pytest.param([_adds_to_second, _leaves_some_in_first], [True, False], id="one of two"),
        pytest.param([_leaves_some_in_first, _steps_first], [False, False], id="one that rests"),
        pytest.param([_zeroes], [False], id="gradients that are zeroed"),
    ],
)
def test_gradients_that_no_step_has_used_wait(batches: list[Step], wait: list[bool]) -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = (torch.optim.SGD([one], lr=0.1) for one in (a, b))
    waiting = WaitingGradients([first, second])
    found: list[bool] = []
    for batch in batches:
        batch(first, second, a, b)
        found.append(waiting.are_left_by_batch())
    assert found == wait
