"""A filter of the world's size becomes numbers, which say the same for every size."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.inprocess import rank_assignment as ra
from unbroken.inprocess.assignment.policy import ask
from unbroken.inprocess.assignment.size_filter import SizeTable, tabulate
from unbroken.inprocess.state import State
from unbroken_core.protocol.messages import Policy
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.rules import Rules

FULL = 64
SETTINGS = JobSettings("digits", replicas=FULL, min_replicas=1, ranks_per_pod=1)


def rules(size_filter: Callable[[int], int], divisible_by: int = 1) -> Rules:
    table = tabulate(size_filter, 2 * FULL)
    settings = JobSettings("digits", replicas=FULL, min_replicas=1, ranks_per_pod=1, divisible_by=divisible_by)
    return Rules.of(settings, Policy(table.max_ranks, table.divisible_by, sizes=table.steps))


@pytest.mark.parametrize(
    ("size_filter", "table"),
    [
        pytest.param(lambda n: n, SizeTable(), id="everybody"),
        pytest.param(lambda n: n // 8 * 8, SizeTable(divisible_by=8), id="multiples"),
        pytest.param(lambda n: min(n, 48) // 16 * 16, SizeTable(48, 16), id="multiples with a limit"),
        pytest.param(lambda n: min(n, 5), SizeTable(5), id="limit"),
    ],
)
def test_filter_of_the_common_kind_becomes_divisor_and_limit(
    size_filter: Callable[[int], int], table: SizeTable
) -> None:
    """0.38"""
    assert tabulate(size_filter) == table


@given(steps=st.lists(st.integers(min_value=0, max_value=FULL), min_size=1, max_size=12), data=st.data())
def test_size_of_the_world_is_what_the_filter_says(steps: list[int], data: st.DataObject) -> None:
    """0.38, 0.45: of the healthy ranks each time, so that nothing shrinks for ever."""

    def size_filter(number: int) -> int:
        return max((step for step in steps if step <= number), default=0)

    found = tabulate(size_filter, 2 * FULL)
    number = data.draw(st.integers(min_value=1, max_value=FULL))
    if size_filter(FULL) > 0:
        assert Rules.of(SETTINGS, Policy(found.max_ranks, found.divisible_by, sizes=found.steps)).world_size(
            number
        ) == size_filter(number)


def test_power_of_two_of_what_is_healthy_is_active() -> None:
    """0.38"""
    world = rules(lambda n: 1 << (n.bit_length() - 1))
    assert [world.world_size(n) for n in (64, 63, 33, 32, 31, 3, 1)] == [64, 32, 32, 32, 16, 2, 1]


def test_divisor_of_the_spec_holds_beside_the_filter() -> None:
    world = rules(lambda n: next(size for size in (48, 30, 12, 7, 0) if size <= n), divisible_by=4)
    assert [world.world_size(n) for n in (64, 47, 40, 29, 11, 8)] == [48, 12, 12, 12, 0, 0]


@pytest.mark.parametrize(
    ("size_filter", "message"),
    [
        (lambda n: n + 1, r"world_size_filter\(1\): want 0 to 1, got 2"),
        (lambda n: n // (n - 3), r"world_size_filter\(1\): want 0 to 1, got -1"),
        (lambda n: [1][n - 1], r"world_size_filter\(2\): want a size, got IndexError: list index out of range"),
        (lambda n: n / 2, r"world_size_filter\(1\): want 0 to 1, got 0.5"),
        (lambda n: n - 1, "want the multiples of a number, .* or at most 1024 different sizes .*, got 131071: 2 -> 1"),
    ],
)
def test_filter_that_cannot_be_followed_is_refused_with_the_size(
    size_filter: Callable[[int], int], message: str
) -> None:
    tree = ra.Tree([ra.Layer()], size_filter)
    with pytest.raises(ValueError, match=message):
        ask(tree, None, State(rank=0, world_size=4))


def test_filter_that_leaves_nobody_fails_the_job_by_name() -> None:
    asked = ask(ra.Tree([ra.Layer()], lambda n: 0), None, State(rank=0, world_size=4))
    assert asked.policy is not None
    with pytest.raises(Exception, match="world_size_filter: want active ranks of 64"):
        Rules.of(SETTINGS, asked.policy)
