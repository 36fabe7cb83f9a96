"""The random numbers of a process go on where they were, or are new ones on another rank."""

import random

import numpy as np
import pytest
import torch

from unbroken.integrations import random_numbers


def draw() -> tuple[float, float, float, float, float]:
    """Draw from every generator, a normal number too, of which two are made at once."""
    torch_number = float(torch.rand(1))
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), torch_number


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_numbers_go_on_where_they_were_on_the_same_rank() -> None:
    draw()
    state = random_numbers.capture(2, 4)
    want = [draw(), draw()]
    assert random_numbers.restore(state, 2, 4, seed=0)
    assert [draw(), draw()] == want


@pytest.mark.parametrize(("rank", "world_size"), [(1, 4), (2, 3)])
def test_another_rank_or_world_has_new_numbers_the_same_each_time(rank: int, world_size: int) -> None:
    state = random_numbers.capture(2, 4)
    assert random_numbers.world_size_of(state) == 4
    seen = []
    for seed in (7, 7, 8):
        assert not random_numbers.restore(state, rank, world_size, seed)
        seen.append(draw())
    assert seen[0] == seen[1] != seen[2]


def test_size_is_the_same_whatever_was_drawn() -> None:
    before = random_numbers.capture(0, 1)
    draw()
    assert random_numbers.capture(0, 1).numel() == before.numel()


@pytest.mark.parametrize("data", [b"", b"rng1", b"x" * 10_000])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    state = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(ValueError, match="random numbers: want a state"):
        random_numbers.restore(state, 0, 1, seed=0)
