"""What is changed in an object is found, however it is changed, and nothing else."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unbroken.integrations.module_values import ModuleValues, PlainValues


def make() -> SimpleNamespace:
    """Return one with values of each kind."""
    return SimpleNamespace(rate=0.1, worst=math.nan, name="x", sizes=[1, 2], cache=torch.zeros(1), last=None)


def put(**values: Any) -> Callable[[SimpleNamespace], None]:
    """Return what sets these."""
    return lambda one: one.__dict__.update(values)


def swap(one: SimpleNamespace) -> None:
    """Take one name away, and add another."""
    del one.cache
    one.more = 3


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda one: None, {}),
        (put(rate=0.2), {"rate": 0.2}),
        (put(rate=float("0.1"), worst=float("nan")), {}),
        (lambda one: one.sizes.append(3), {"sizes": [1, 2, 3]}),
        (put(sizes=[1, 2]), {}),
        (put(cache=1.0), {"cache": 1.0}),
        (lambda one: one.cache.add_(1), {}),
        (put(last=0), {"last": 0}),
        (put(more=False), {"more": False}),
        (swap, {"more": 3}),
    ],
)
def test_values_that_are_others_are_found(change: Callable[[Any], object], want: dict[str, Any]) -> None:
    one = make()
    begun = PlainValues(one)
    change(one)
    assert begun.changed(one) == want
    assert begun.changed(make()) == {}


def test_a_module_that_was_added_has_all_its_values() -> None:
    dropout = nn.Dropout(0.1)
    model = nn.Sequential(dropout)
    begun = ModuleValues(model)
    assert begun.changed(model) == {}
    dropout.p = 0.3
    model.append(nn.Dropout(0.2))
    assert begun.changed(model) == {"0": {"p": 0.3}, "1": {"p": 0.2, "inplace": False}}
