"""Renumbering of ranks."""

from itertools import combinations

import pytest

from unbroken_core.ranks.tree.renumbering import (
    active_rank,
    divisible_active_world_size,
    fill_gap_rank,
    filled_ranks,
    max_active_world_size,
    shift_rank,
    shifted_ranks,
)


def test_shift_closes_gaps_and_keeps_the_order() -> None:
    """0.10, 0.11"""
    assert [shift_rank(rank, {1, 4, 5}) for rank in range(8)] == [0, None, 1, 2, None, None, 3, 4]


def test_shift_never_makes_an_invalid_rank_set() -> None:
    """0.14: every loss pattern of worlds of 2 to 8."""
    for world_size in range(2, 9):
        for num_lost in range(world_size):
            for lost in combinations(range(world_size), num_lost):
                ranks = [shift_rank(rank, lost) for rank in range(world_size)]
                assert [rank for rank in ranks if rank is not None] == list(range(world_size - num_lost))


def test_ranks_of_all_at_once_are_those_of_each_alone() -> None:
    """0.10, 0.12, 0.14: every loss pattern of worlds of 1 to 8, everybody included."""
    for world_size in range(1, 9):
        for num_lost in range(world_size + 1):
            for lost in map(set, combinations(range(world_size), num_lost)):
                shifted = {shift_rank(rank, lost): rank for rank in range(world_size) if rank not in lost}
                filled = {fill_gap_rank(rank, world_size, lost): rank for rank in range(world_size) if rank not in lost}
                assert dict(enumerate(shifted_ranks(world_size, lost))) == shifted
                assert dict(enumerate(filled_ranks(world_size, lost))) == filled


@pytest.mark.parametrize(
    ("world_size", "active", "limit", "expected"),
    [
        pytest.param(8, None, None, 8, id="no limit: the whole world"),
        pytest.param(8, None, 6, 6, id="limit below the world"),
        pytest.param(4, None, 6, 4, id="limit above the world"),
        pytest.param(8, 5, None, 5, id="active size of an earlier step"),
        pytest.param(3, 5, None, 3, id="the world is smaller than the active size"),
        pytest.param(8, 5, 4, 4, id="limit below the active size"),
    ],
)
def test_max_active_world_size(world_size: int, active: int | None, limit: int | None, expected: int) -> None:
    """0.7"""
    assert max_active_world_size(world_size, active, limit) == expected


@pytest.mark.parametrize(
    ("world_size", "active", "divisor", "expected"),
    [
        pytest.param(11, None, 4, 8, id="rounded down"),
        pytest.param(12, 10, 4, 8, id="after a limit"),
        pytest.param(3, None, 4, 0, id="nothing is left"),
        pytest.param(7, None, 1, 7, id="divisor one"),
    ],
)
def test_divisible_active_world_size(world_size: int, active: int | None, divisor: int, expected: int) -> None:
    """0.9"""
    assert divisible_active_world_size(world_size, active, divisor) == expected


def test_ranks_beyond_the_active_world_are_spares() -> None:
    """0.8"""
    assert [active_rank(rank, 2) for rank in range(4)] == [0, 1, None, None]
