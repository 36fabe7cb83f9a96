"""What a callback keeps without a state is named, and nothing that is there again by itself."""

import copy
from typing import Any

import torch
from torch import nn

from unbroken.integrations.callback_values import MAX_NAMES, CallbackValues


class Averaging:
    """Counts, and keeps means of weights in three ways."""

    def __init__(self, model: nn.Module) -> None:
        self.num_steps = 0
        self.weights = torch.ones(3)
        self.model, self.layer, self.own = model, model[0], list(model.parameters())  # type: ignore[index]  # it is a Sequential
        self.mean: Any = copy.deepcopy(model)
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.last: Any = None

    def step(self) -> None:
        """Change all but `weights` and what is of the model that trains."""
        self.num_steps += 1
        with torch.no_grad():
            for one in self.own:
                one.add_(1)
            self.mean[0].weight.mul_(0.9)
            self.shadow["0.bias"].mul_(0.9)
            self.last = self.model(torch.ones(2))


class Restored(Averaging):
    """Has a state."""


def test_counts_and_means_are_named_and_what_trains_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ones = [Averaging(model), Restored(model)]
    begun = CallbackValues(ones, lambda one: isinstance(one, Restored), model)
    assert begun.changed(ones) == []
    for one in ones:
        one.step()
    assert sorted(begun.changed(ones)) == [f"Averaging.{name}" for name in ("last", "mean", "num_steps", "shadow")]


def test_two_of_one_class_are_not_taken_for_each_other() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ones = [Averaging(model), Averaging(model)]
    ones[1].num_steps = 7
    ones[1].shadow = {"other": torch.zeros(2)}
    begun = CallbackValues(ones, lambda one: False, model)
    assert begun.changed(ones) == []
    ones[1].num_steps += 1
    assert begun.changed(ones) == ["Averaging[2].num_steps"]


def test_a_few_are_named_of_many() -> None:
    one = Averaging(nn.Sequential(nn.Linear(2, 2)))
    begun = CallbackValues([one], lambda one: False, one.model)
    vars(one).update({f"count{number}": number for number in range(2 * MAX_NAMES)})
    assert len(begun.changed([one])) == MAX_NAMES
    del one.num_steps
    assert "Averaging.num_steps" not in begun.changed([one])
