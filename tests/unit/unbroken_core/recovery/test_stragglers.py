"""Who is slow, by how busy each rank is: rules, and how often it is told right in simulated months."""

import random

import pytest

from unbroken_core.coordinator.state.pace_table import PaceTable
from unbroken_core.protocol.messages import Pace
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.stragglers import MIN_RANKS, find_slow, stage_of

STEP_S = 1.2
NOISE = 0.02
"""Deviation of what a window tells of a rank that is like all others."""
DAY = 24 * 60
"""Windows of a minute."""


def paces(*busy_s: float, step_s: float = STEP_S) -> dict[int, tuple[float, float]]:
    return {rank: (busy, step_s) for rank, busy in enumerate(busy_s)}


@pytest.mark.parametrize(
    ("busy_s", "slow"),
    [
        pytest.param((1.0,) * 7 + (1.1,), [7], id="one is slow"),
        pytest.param((1.0,) * 7 + (1.03,), [], id="by less than 3 % of a step"),
        pytest.param((1.0, 1.02, 0.98, 1.05, 0.95, 1.04, 0.97, 1.1), [], id="within what all differ by"),
        pytest.param((1.0,) * 4 + (1.5,) * 4, [], id="two kinds of ranks"),
        pytest.param((1.0,) * 12 + (1.3,) * 4, [12, 13, 14, 15], id="a whole node"),
        pytest.param((1.0,) * 7 + (0.5,), [], id="one is fast"),
        pytest.param((0.0,) * 8, [], id="nobody works"),
        pytest.param((1.0,) * (MIN_RANKS - 2) + (2.0,), [], id="too few to compare"),
        pytest.param((), [], id="nobody"),
    ],
)
def test_slow_is_who_is_busy_for_longer_than_ranks_differ_by(busy_s: tuple[float, ...], slow: list[int]) -> None:
    assert sorted(find_slow(paces(*busy_s))) == slow


def test_what_a_slow_rank_costs_is_measured_against_the_step_not_against_its_work() -> None:
    """A job that communicates for nine tenths of its time loses nothing by a rank that computes 20 % longer."""
    assert not find_slow(paces(*(0.1,) * 7, 0.12))
    (found,) = find_slow(paces(*(0.1,) * 7, 0.16)).values()
    assert (found.usual_s, found.busy_s, round(found.percent)) == (0.1, 0.16, 60)


@pytest.mark.parametrize(("world_size", "num_stages"), [(8, 1), (8, 4), (10, 4), (3, 8), (1, 1)])
def test_stages_are_neighbouring_ranks_of_about_the_same_number(world_size: int, num_stages: int) -> None:
    stages = [stage_of(rank, world_size, num_stages) for rank in range(world_size)]
    assert stages == sorted(stages)
    assert set(stages) <= set(range(num_stages))
    sizes = [stages.count(stage) for stage in set(stages)]
    assert max(sizes) - min(sizes) <= 1


class Fleet:
    """Ranks that work alike but for noise, in windows without end."""

    def __init__(self, seed: int, num_ranks: int, factors: dict[int, float] | None = None) -> None:
        self.random = random.Random(seed)
        self.table = PaceTable()
        self.table.begin(0)
        self.num_ranks, self.factors = num_ranks, factors or {}
        self.noise = [1 + self.random.gauss(0, NOISE) for _ in range(20_000)]
        self._workers: list[Worker] = [("p", rank) for rank in range(num_ranks)]
        self._told = {worker: Pace(worker[1], 0, 0, 1.0, STEP_S) for worker in self._workers}

    def window(self, number: int, held_up: int | None = None) -> set[int]:
        """Let all tell one window; return who is a straggler now."""
        at = self.random.randrange(len(self.noise) - self.num_ranks)
        busy = self.noise[at : at + self.num_ranks]
        for rank, factor in self.factors.items():
            busy[rank] *= factor
        if held_up is not None:
            busy[held_up] *= 1.5
        self.table.begin_window(number)
        self.table.told = self._told
        self.table.judge(find_slow({worker: (each, STEP_S) for worker, each in zip(self._workers, busy, strict=True)}))
        return {rank for _pod, rank in self.table.stragglers}


def test_a_rank_that_is_a_sixth_slower_is_found_in_the_second_window_and_nobody_else() -> None:
    """At 2 % noise of a window: 5 deviations are 10 %, which is where half of them would be found."""
    found = [Fleet(seed, 256, {7: 1.17}) for seed in range(40)]
    assert [fleet.window(0) for fleet in found] == [set()] * 40
    assert sum(fleet.window(1) == {7} for fleet in found) >= 39


def test_a_straggler_of_ten_percent_is_found_within_two_windows_where_windows_are_as_even_as_medians_are() -> None:
    """A window of 64 steps with 2 % noise each has a median that is off by a third of a percent."""
    hits = 0
    for seed in range(40):
        fleet = Fleet(seed, 256, {7: 1.1})
        fleet.noise = [1 + (value - 1) * 1.2533 / 64**0.5 for value in fleet.noise]
        fleet.window(0)
        hits += fleet.window(1) == {7}
    assert hits == 40


def test_nobody_is_flagged_in_thirty_days_in_which_each_rank_is_held_up_for_a_minute_once_a_week() -> None:
    fleet, share = Fleet(seed=1, num_ranks=64), 64 / (7 * DAY)
    flags, held_up_times = 0, 0
    before: set[int] = set()
    for number in range(30 * DAY):
        held_up = fleet.random.randrange(64) if fleet.random.random() < share else None
        held_up_times += held_up is not None
        found = fleet.window(number, held_up)
        flags += len(found - before)
        before = found
    assert held_up_times > 200
    assert flags < 1


def test_a_straggler_is_one_until_two_windows_show_otherwise() -> None:
    fleet = Fleet(seed=3, num_ranks=64, factors={5: 1.5})
    assert [fleet.window(number) for number in range(3)] == [set(), {5}, {5}]
    fleet.factors = {}
    assert [fleet.window(number) for number in (3, 4)] == [{5}, set()]


def test_windows_that_do_not_follow_each_other_confirm_nothing() -> None:
    fleet = Fleet(seed=4, num_ranks=64, factors={5: 1.5})
    assert [fleet.window(number) for number in (0, 2, 4)] == [set()] * 3
