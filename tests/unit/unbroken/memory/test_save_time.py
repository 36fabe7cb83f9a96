"""Checkpoints in memory tell how long training waits for them."""

from collections.abc import Iterator

import pytest
import torch

from unbroken.memory.checkpointer import Checkpointer
from unbroken.standstill import standstill


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Begin an iteration, and yield the nanoseconds that are told in it."""
    found: list[int] = []
    standstill.begin(found.append)
    yield found
    standstill.end()


def test_a_save_that_is_due_is_told_and_others_are_not(told: list[int]) -> None:
    checkpointer, state = Checkpointer(every=10), {"w": torch.zeros(4)}
    checkpointer.save(state, 9)
    assert told == []
    checkpointer.save(state, 10)
    checkpointer.flush()
    assert len(told) == 2
