"""What `unbroken size` predicts is what the literature's formulas say, and what published jobs saw."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.unbroken_cli.sizing.scenes import example, interrupted, llama_3, small

from unbroken_cli.sizing.formulas import (
    Batch,
    batched_quantile,
    daly_ettr,
    daly_interval_s,
    mttf_s,
    poisson_quantile,
    rsc_ettr,
)
from unbroken_cli.sizing.reading import read_scenario
from unbroken_cli.sizing.scenario import Scenario
from unbroken_cli.sizing.spreads import Scaled
from unbroken_cli.sizing.study import best_interval, estimate, nodes_out_p99, run_many

POINT = 0.01
LLAMA_3_MTBF_S = 54 * 86400 / 419


@pytest.mark.parametrize(
    ("mtbf_s", "interval_s", "blocking_s", "restart_s"),
    [
        pytest.param(LLAMA_3_MTBF_S, 654, 20, 480, id="Llama 3"),
        pytest.param(LLAMA_3_MTBF_S, 3600, 60, 300, id="rare checkpoints"),
        pytest.param(1800, 120, 5, 60, id="a fault every half hour"),
    ],
)
def test_simulation_meets_dalys_exact_form(
    mtbf_s: float, interval_s: float, blocking_s: float, restart_s: float
) -> None:
    scenario = interrupted(mtbf_s, interval_s, blocking_s, restart_s, days=500 * mtbf_s / 86400)
    found = estimate(run_many(scenario, 1, 40).ratio("ettr"))
    assert found.margin < 0.25 * POINT
    assert found.mean == pytest.approx(daly_ettr(mtbf_s, blocking_s, restart_s, interval_s), abs=0.3 * POINT)


@pytest.mark.parametrize("seed", range(1, 5))
def test_dalys_interval_comes_from_the_rates_and_not_from_what_a_few_runs_happened_to_meet(seed: int) -> None:
    """Only the switch goes back to the disk, once in 78 days: ten runs of a week may meet none."""
    gpu = next(fault for fault in small()["faults"] if fault["name"] == "gpu")
    switch = {"name": "switch", "hits": "switch", "rate": 0.2, "detect": 20, "repair": "4h"}
    scenario = read_scenario(small() | {"faults": [gpu, switch]})
    memory, disk = (best_interval(run_many(scenario, seed, 10), index, seed) for index in (0, 1))
    assert disk.best_s is not None
    assert disk.daly_s == pytest.approx(daly_interval_s(86_400_000 / (0.2 * 64), 15))
    assert memory.daly_s == pytest.approx(daly_interval_s(86_400_000 / (150 * 64), 0.2))


@pytest.mark.parametrize(("mtbf_s", "blocking_s"), [(LLAMA_3_MTBF_S, 20.0), (3600.0, 60.0)])
def test_best_interval_by_simulation_is_dalys(mtbf_s: float, blocking_s: float) -> None:
    scenario = interrupted(mtbf_s, 3 * daly_interval_s(mtbf_s, blocking_s), blocking_s, 300, 400 * mtbf_s / 86400)
    found = best_interval(run_many(scenario, 1, 20), 0, seed=1)
    assert found.best_s == pytest.approx(daly_interval_s(mtbf_s, blocking_s), rel=0.1)


def test_without_faults_all_time_is_progress() -> None:
    value = example() | {"faults": [], "checkpoints": []}
    runs = run_many(read_scenario(value), 1, 2)
    assert list(runs.ratio("ettr")) == list(runs.ratio("ettr_capacity")) == [1.0, 1.0]
    assert runs.ratio("goodput_allocated")[0] == pytest.approx(2048 / (2048 + 14)), "idle spares cost"
    saving = run_many(read_scenario(value | {"checkpoints": example()["checkpoints"]}), 1, 1)
    assert saving.ratio("ettr")[0] == pytest.approx(660 / 680, rel=1e-3)


def _small() -> Scenario:
    return replace(read_scenario(small()), refill=None)


def _mean(scenario: Scenario, ratio: str = "ettr") -> float:
    return float(np.mean(run_many(scenario, 3, 12).ratio(ratio)))


def test_more_faults_cost_more() -> None:
    base = _small()
    rated = [
        replace(base, faults=tuple(replace(fault, rate=fault.rate * factor) for fault in base.faults))
        for factor in (0.25, 0.5, 1.0, 2.0)
    ]
    values = [_mean(scenario) for scenario in rated]
    assert values == sorted(values, reverse=True)
    assert values[0] - values[-1] > POINT


def test_more_spares_train_more_of_the_time() -> None:
    values = [_mean(replace(_small(), shared_spares=count, min_nodes=64), "ettr_capacity") for count in (0, 2, 6, 16)]
    assert values == sorted(values)
    assert values[-1] - values[0] > POINT


def test_costlier_restarts_cost_more() -> None:
    base = _small()
    costs = [
        replace(base, restart=tuple((rung, Scaled(spread, factor)) for rung, spread in base.restart))
        for factor in (0.1, 1.0, 4.0, 16.0)
    ]
    values = [_mean(scenario) for scenario in costs]
    assert values == sorted(values, reverse=True)
    assert values[0] - values[-1] > POINT


def test_mean_time_to_failure_is_rscs_projection() -> None:
    assert mttf_s(16384 / 8, 6.5) / 3600 == pytest.approx(1.80, abs=0.005)
    assert mttf_s(131072 / 8, 6.5) / 3600 == pytest.approx(0.225, abs=0.0005)
    value = example()
    value["faults"] = [{"hits": "node", "rate": 6.5, "detect": 0, "repair": 0}]
    scenario = read_scenario(value)
    assert scenario.mtbf_s == pytest.approx(mttf_s(2048, 6.5))
    count = np.mean([outcome.num_interruptions for outcome in run_many(scenario, 1, 10).outcomes])
    assert 54 * 24 / count == pytest.approx(1.80, rel=0.03)


def test_rscs_form_of_ettr_gives_its_published_points() -> None:
    assert rsc_ettr(2000, 6.5, 300, 3600) == pytest.approx(0.684, abs=0.0005)
    assert rsc_ettr(2000, 6.5, 300, 300) == pytest.approx(0.932, abs=0.0005)


def test_llama_3_trains_nine_tenths_of_the_time() -> None:
    scenario = llama_3()
    assert scenario.mtbf_s == pytest.approx(LLAMA_3_MTBF_S)
    best_s = daly_interval_s(LLAMA_3_MTBF_S, 20)
    assert daly_ettr(LLAMA_3_MTBF_S, 20, 480, best_s) == pytest.approx(0.900, abs=0.3 * POINT)
    found = estimate(run_many(scenario, 1, 30).ratio("ettr"))
    assert found.mean == pytest.approx(0.900, abs=0.3 * POINT)


@pytest.mark.parametrize(("repair", "nodes"), [("4h", 4), ("24h", 13), ("72h", 31)])
def test_nodes_of_llama_3_that_are_out_at_a_time(repair: str, nodes: int) -> None:
    value = example()
    value["spares"] = {"shared": 0}
    for fault in value["faults"]:
        if "repair" in fault:
            fault["repair"] = repair
    assert nodes_out_p99(read_scenario(value)) == nodes


def _out_p99(nodes: int = 32, spares: int = 0, **fault: Any) -> int:
    return nodes_out_p99(
        read_scenario(
            {
                "job": {"gpus": 8 * nodes, "nodesPerDomain": 8, "racks": min(2, nodes // 8), "duration": "30d"},
                "spares": {"shared": spares},
                "faults": [{"rate": 0.5, "detect": 0, "repair": "24h", **fault}],
                "restart": {"pod": 60},
            }
        )
    )


def test_a_fault_takes_all_the_nodes_of_its_domain_or_rack_out_together() -> None:
    """0.016 domains are out on average: none in 98.4 % of the time, else eight nodes; not 0.128 nodes."""
    assert [_out_p99(hits=hits) for hits in ("node", "domain", "switch")] == [1, 8, 16]
    assert _out_p99(hits="domain", spares=4) == 9
    assert _out_p99(hits="domain", rate=0.25) == 0, "of 99.2 % of the time"
    assert _out_p99(hits="domain", rate=10) == 16
    assert _out_p99(hits="switch", share=0.5, rate=0.5) == 7
    assert _out_p99(hits="switch", share=0.5, rate=4) == 12


def test_no_more_nodes_are_out_than_there_are() -> None:
    assert _out_p99(rate=100_000, hits="node", repair="100d") == 32
    assert _out_p99(rate=1000, hits="switch", share=0.5, spares=2, repair="100d") == 34
    assert _out_p99(nodes=8, spares=1, rate=30, hits="domain", repair="4d") == 9


def test_nodes_out_of_all_kinds_of_faults_are_those_of_a_lottery() -> None:
    means = {Batch(1, 1.0): 3.0, Batch(8, 1.0): 0.7, Batch(64, 0.3): 0.2}
    chance = np.random.default_rng(1)
    total = np.zeros(400_000, np.int64)
    for batch, mean in means.items():
        total += chance.binomial(chance.poisson(mean, len(total)) * batch.nodes, batch.share)
    for share in (0.5, 0.9, 0.99, 0.999):
        assert batched_quantile(means, share, 1000) == pytest.approx(np.quantile(total, share), abs=1)
    assert batched_quantile({}, 0.99, 1000) == 0
    assert [batched_quantile({Batch(1, 1.0): mean}, 0.99, 10**6) for mean in (0.01, 4.0, 100.0)] == [0, 9, 124]
    assert batched_quantile({Batch(1, 1.0): 90_000.0}, 0.99, 10**6) == pytest.approx(90_000 + 2.326 * 300, abs=2)


def test_poisson_quantile_is_exact_where_it_matters() -> None:
    assert [poisson_quantile(mean, 0.99) for mean in (0.0, 0.01, 1.0, 4.0, 10.0, 100.0)] == [0, 0, 4, 9, 18, 124]
