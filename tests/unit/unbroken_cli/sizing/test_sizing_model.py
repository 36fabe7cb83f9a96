"""The parts of the model: checkpoints, placement, faults, and an account that is exact."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.unbroken_cli.sizing.scenes import small

from unbroken_cli.sizing.checkpoints import CheckpointClock
from unbroken_cli.sizing.faults import TICKS, draw_faults, is_lemon
from unbroken_cli.sizing.placement import CountPlacement, PlannerPlacement, make_placement
from unbroken_cli.sizing.reading import read_scenario
from unbroken_cli.sizing.scenario import Lemons, Tier
from unbroken_cli.sizing.simulation import Term, cause_names, simulate
from unbroken_cli.sizing.spreads import MAX_DRAWS, Distribution, Fixed, Histogram, Total, Weibull
from unbroken_cli.sizing.study import IDLE, Runs, answer, gpu_hours, ratios, run_many, shares


class SlowClock:
    """The same as CheckpointClock, tick by tick."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = sorted(tiers, key=lambda tier: tier.every_s)
        self._made = [0] * len(tiers)
        self._making: list[list[int]] = []
        self.work = 0

    def run(self, ticks: int) -> int:
        stood = 0
        for _ in range(ticks):
            self._finish()
            if self._making:
                self._making[0][1] -= 1
                stood += 1
            else:
                self.work += 1
                for index, tier in enumerate(self._tiers):
                    if self.work % round(tier.every_s * TICKS) == 0:
                        self._making.append([index, round(tier.blocking_s * TICKS)])
            self._finish()
        return stood

    def _finish(self) -> None:
        while self._making and not self._making[0][1]:
            self._made[self._making.pop(0)[0]] = self.work

    def go_back(self, severity: int) -> tuple[int, int, int | None]:
        found = [(made, -tier.restore_s, tier) for made, tier in zip(self._made, self._tiers, strict=True)]
        alive = [one for one in found if one[2].survives >= severity and one[0] > 0]
        best = max(alive, key=lambda one: one[:2], default=(0, 0.0, None))
        self._made = [
            min(made, best[0]) if tier.survives >= severity else 0
            for made, tier in zip(self._made, self._tiers, strict=True)
        ]
        lost, self.work, self._making = self.work - best[0], best[0], []
        return lost, round(-best[1] * TICKS), None


def _tier(every: int, blocking: int, restore: int, survives: int) -> Tier:
    return Tier(f"tier-{every}", every / TICKS, blocking / TICKS, restore / TICKS, survives)


@pytest.mark.parametrize("seed", range(60))
def test_checkpoints_in_one_step_are_those_of_single_ticks(seed: int) -> None:
    chance = random.Random(seed)
    everies = chance.sample(range(2, 40), chance.randint(0, 3))
    tiers = [_tier(every, chance.randrange(every), chance.randrange(9), chance.randrange(5)) for every in everies]
    fast, slow = CheckpointClock(tiers), SlowClock(tiers)
    for _ in range(60):
        ticks = chance.randrange(90)
        assert fast.run(ticks) == slow.run(ticks)
        assert fast.work == slow.work
        if chance.random() < 0.4:
            severity = chance.randrange(5)
            assert fast.go_back(severity)[:2] == slow.go_back(severity)[:2]
            assert fast.work == slow.work


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"minReplicas": 1, "divisibleBy": 64}, id="divisible by eight nodes"),
        pytest.param({"minReplicas": 64}, id="all or nothing"),
        pytest.param({"minReplicas": 50, "divisibleBy": 12}, id="cuts a node in two"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_counting_gives_the_planners_answer(job: dict[str, Any], seed: int) -> None:
    scenario = replace(read_scenario(small(**job)), shared_spares=3, spares_per_domain=seed % 2)
    chance = random.Random(seed)
    counted, planned = CountPlacement(scenario), PlannerPlacement(scenario)
    out: list[int] = []
    assert counted.gpus == planned.gpus == scenario.num_gpus - scenario.num_gpus % scenario.divisible_by
    for _ in range(120):
        if out and chance.random() < 0.5:
            node = out.pop(chance.randrange(len(out)))
            counted.restore(node)
            planned.restore(node)
        else:
            size = chance.choice((1, 1, 1, 8))
            first = chance.randrange(scenario.total_nodes - size)
            nodes = [node for node in range(first, first + size) if not planned.is_out(node)]
            counted.lose(nodes)
            planned.lose(nodes)
            out += nodes
        assert (counted.healthy, counted.is_out(0)) == (planned.healthy, planned.is_out(0))
        is_enough = planned.plan()
        assert counted.plan() is is_enough
        if is_enough:
            assert counted.gpus == planned.gpus
            assert counted.may_grow() is planned.may_grow() is False
            active = [sum(map(each.is_active, range(scenario.total_nodes))) for each in (counted, planned)]
            assert active[0] == active[1] == -(-counted.gpus // 8)


def test_whole_runs_by_count_and_by_planner_lose_the_same_time() -> None:
    scenario = replace(read_scenario(small()), lemons=Lemons())
    events = [draw_faults(scenario, 5, number) for number in range(6)]
    runs = [
        Runs(scenario, tuple(simulate(scenario, make_placement(scenario, planner), each) for each in events))
        for planner in (False, True)
    ]
    by_count, by_planner = (float(np.mean(each.ratio("ettr_capacity"))) for each in runs)
    assert by_count == pytest.approx(by_planner, abs=0.01)


def test_spares_that_stay_within_their_domain_help_less() -> None:
    scenario = replace(read_scenario(small(minReplicas=64)), refill=None)
    kept = replace(scenario, stays_within="domain")
    values = [float(np.mean(run_many(each, 2, 4).ratio("ettr_capacity"))) for each in (scenario, kept)]
    assert values[1] < values[0] - 0.01


@pytest.mark.parametrize("job", [{}, {"growBack": "5m", "minReplicas": 8}, {"divisibleBy": 48, "minReplicas": 1}])
@pytest.mark.parametrize("seed", range(4))
def test_every_tick_of_a_run_is_accounted_for_once(job: dict[str, Any], seed: int) -> None:
    scenario = read_scenario(small(**job))
    outcome = simulate(scenario, make_placement(scenario), draw_faults(scenario, seed, 0))
    assert sum(map(sum, outcome.by_cause)) == outcome.duration == 7 * 86400 * TICKS
    assert min(min(terms) for terms in outcome.by_cause) >= 0
    assert outcome.num_interruptions > 50
    for term in (Term.CHECKPOINT, Term.REDO, Term.DETECT, Term.RESTART):
        assert sum(terms[term] for terms in outcome.by_cause) > 0
    found = ratios(scenario, outcome)
    assert 0 < found["ettr_capacity"] <= found["ettr"] < 1
    runs = Runs(scenario, (outcome,))
    assert sum(shares(runs).values()) == pytest.approx(1.0, abs=1e-12)
    hours = gpu_hours(runs)
    held = outcome.held_nodes * 8 / TICKS / 3600
    assert sum(sum(terms.values()) for terms in hours.values()) == pytest.approx(held, rel=1e-9)
    assert set(hours) <= {*cause_names(scenario), IDLE}


def test_a_job_that_lacks_nodes_waits_for_them() -> None:
    value = small(minReplicas=64)
    value["spares"] = {}
    value["faults"] = [{"name": "node", "hits": "node", "rate": 30, "detect": 0, "repair": "6h"}]
    outcome = run_many(read_scenario(value), 1, 1).outcomes[0]
    assert outcome.num_waits > 0
    waited_s = outcome.by_cause[0][Term.WAITING] / TICKS
    assert waited_s > 0.9 * outcome.num_waits * 6 * 3600 - 86400


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("lemons", [Lemons(), Lemons(0.1, 50.0)])
def test_faults_come_at_their_rate_from_the_start(shape: float, lemons: Lemons) -> None:
    scenario = read_scenario(small(duration="20d"))
    fault = replace(scenario.faults[2], rate=100.0, shape=shape)
    scenario = replace(scenario, faults=(fault,), lemons=lemons)
    events = [event for number in range(20) for event in draw_faults(scenario, 1, number)]
    expected = 20 * 0.1 * 68 * 20
    assert len(events) == pytest.approx(expected, rel=0.08)
    early = sum(event.at < 5 * 86400 * TICKS for event in events)
    assert early == pytest.approx(expected / 4, rel=0.12)
    bad = sum(is_lemon(scenario, event.target) for event in events)
    num_bad = sum(is_lemon(scenario, node) for node in range(68))
    assert num_bad == (6 if lemons.share else 0)
    share = 6 * 50 / (6 * 50 + 58) * 64 / 68 if lemons.share else 0.0
    assert bad / len(events) == pytest.approx(share, abs=0.06)


def test_lemons_that_are_removed_break_no_more() -> None:
    value = small()
    value["faults"] = [{"name": "node", "hits": "node", "rate": 400, "detect": 0, "repair": 0}]
    value["lemons"] = {"share": 0.05, "factor": 100}
    kept = sum(outcome.num_interruptions for outcome in run_many(read_scenario(value), 1, 5).outcomes)
    value["lemons"]["removedAfter"] = 2
    removed = sum(outcome.num_interruptions for outcome in run_many(read_scenario(value), 1, 5).outcomes)
    assert removed < 0.7 * kept


def test_a_common_cause_strikes_a_share_of_a_rack() -> None:
    value = small(minReplicas=1)
    value["spares"] = {}
    value["faults"] = [{"name": "cooling", "hits": "switch", "rate": 1, "detect": 0, "repair": 1, "share": 0.5}]
    most = [outcome.most_out for outcome in run_many(read_scenario(value), 1, 40).outcomes if outcome.most_out]
    assert 1 < min(most) <= max(most) <= 16
    assert np.mean(most) == pytest.approx(8, abs=2)


@pytest.mark.parametrize(
    ("spread", "mean"),
    [
        (Fixed(3.0), 3.0),
        (Weibull(10.0), 10.0),
        (Weibull(10.0, 0.6), 10.0),
        (Histogram((0.0, 1.0, 5.0, 10.0), (1.0, 0.0, 3.0)), (0.5 + 3 * 7.5) / 4),
        (Total((Fixed(1.0), Weibull(2.0))), 3.0),
    ],
)
def test_samples_have_the_mean_of_their_spread(spread: Distribution, mean: float) -> None:
    samples = spread.sample(np.random.default_rng(1).random((40_000, MAX_DRAWS)))
    assert spread.mean_s == pytest.approx(mean)
    assert samples.mean() == pytest.approx(mean, rel=0.04)
    if isinstance(spread, Histogram):
        assert not ((samples > 1.001) & (samples < 4.999)).any(), "no sample of an empty bucket"


def test_answer_says_what_spares_intervals_and_inputs_are_worth() -> None:
    value = small()
    value["spares"] = {}
    found = answer(read_scenario(value), 1, 3, looks=3)
    assert found.one_more_spare is not None
    assert [each.tier for each in found.intervals] == ["memory", "disk"]
    assert {item.name for item in found.matters} >= {"rate of gpu", "repair of node", "restart costs", "detection"}
    gains = [abs(item.goodput.mean) for item in found.matters]
    assert gains == sorted(gains, reverse=True)
    assert 0 < found.wait_in_a_run <= 1
