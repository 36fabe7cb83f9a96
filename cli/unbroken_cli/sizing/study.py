"""What many runs say: ratios, where the time goes, what one more spare or another interval is worth."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unbroken_cli.sizing.faults import TICKS, draw_faults
from unbroken_cli.sizing.formulas import Batch, batched_quantile, daly_ettr, daly_interval_s
from unbroken_cli.sizing.placement import make_placement
from unbroken_cli.sizing.scenario import LOSING, Scenario, Scope, Tier
from unbroken_cli.sizing.simulation import NO_FAULT, TERMS, Outcome, Term, cause_names, simulate
from unbroken_cli.sizing.spreads import Floats, Scaled

RATIOS = ("ettr", "ettr_capacity", "goodput_allocated")
IDLE = "idle spares"
MAX_STOPS_LOOKED_AT = 1_000_000
"""In one run, of checkpoints at another interval than the asked one."""


@dataclass(frozen=True)
class Estimate:
    """A number that differs from run to run."""

    mean: float
    margin: float
    """The mean of more and more runs lies within this of `mean`, with 95 % confidence; 0 of a single run."""
    low: float
    high: float
    """Nine in ten runs lie between these."""


@dataclass(frozen=True)
class Runs:
    """Some runs of one scenario."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]

    def each(self, value: Callable[[Outcome], float]) -> Floats:
        """Return a number of each run."""
        return np.array([value(outcome) for outcome in self.outcomes])

    def ratio(self, name: str) -> Floats:
        """Return a ratio of each run."""
        return np.array([ratios(self.scenario, outcome)[name] for outcome in self.outcomes])


def ratios(scenario: Scenario, outcome: Outcome) -> dict[str, float]:
    """Return the three ratios of a run."""
    nothing = len(outcome.by_cause) - 1
    gained, wall = outcome.by_cause[nothing][Term.PROGRESS], outcome.duration
    gained_gpus = gained * scenario.num_gpus - outcome.missing_by_cause[nothing][Term.PROGRESS]
    held_gpus = outcome.held_nodes * scenario.gpus_per_node
    return {
        "ettr": gained / wall,
        "ettr_capacity": gained_gpus / (wall * scenario.num_gpus),
        "goodput_allocated": gained_gpus / held_gpus if held_gpus else 0.0,
    }


def run_many(scenario: Scenario, seed: int, replicates: int) -> Runs:
    """Return independent runs; with the same seed, run k of two scenarios meets the same faults."""
    return Runs(
        scenario,
        tuple(
            simulate(scenario, make_placement(scenario), draw_faults(scenario, seed, number))
            for number in range(replicates)
        ),
    )


def estimate(values: Floats) -> Estimate:
    """Return the mean with its confidence, and where single runs lie."""
    count = len(values)
    margin = _student(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    low, high = np.quantile(values, (0.05, 0.95))
    return Estimate(float(np.mean(values)), margin, float(low), float(high))


def _student(freedom: int) -> float:
    """Return Student's 97.5 % quantile, by its expansion around that of the normal distribution."""
    z = 1.959964
    if freedom < 3:
        return {1: 12.706, 2: 4.303}.get(freedom, math.inf)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def gpu_hours(runs: Runs) -> dict[str, dict[str, float]]:
    """Return GPU-hours of one run on average, by cause and term; idle spares are a cause of their own."""
    scenario = runs.scenario
    factor = 1 / (TICKS * 3600 * len(runs.outcomes))
    found: dict[str, dict[str, float]] = {}
    used = 0.0
    for index, cause in enumerate(cause_names(scenario)):
        terms = {}
        for term, name in enumerate(TERMS):
            ticks = sum(outcome.by_cause[index][term] for outcome in runs.outcomes)
            missing = sum(outcome.missing_by_cause[index][term] for outcome in runs.outcomes)
            value = (ticks * scenario.num_gpus - missing) * factor
            used += value
            if ticks:
                terms[name] = value
        if terms or cause == NO_FAULT:
            found[cause] = terms
    held = sum(outcome.held_nodes for outcome in runs.outcomes) * scenario.gpus_per_node * factor
    found[IDLE] = {"idle": max(held - used, 0.0)}
    return found


def shares(runs: Runs) -> dict[str, float]:
    """Return the share of the time that each term takes; they sum to 1."""
    total = sum(outcome.duration for outcome in runs.outcomes)
    return {
        name: sum(sum(causes[term] for causes in outcome.by_cause) for outcome in runs.outcomes) / total
        for term, name in enumerate(TERMS)
    }


@dataclass(frozen=True)
class Difference:
    """What another input would change, in runs that meet the same faults."""

    name: str
    ettr: Estimate
    goodput: Estimate


def compare(name: str, base: Runs, other: Scenario, seed: int) -> Difference:
    """Return what another scenario gains over some runs."""
    runs = run_many(other, seed, len(base.outcomes))
    gains = [estimate(runs.ratio(ratio) - base.ratio(ratio)) for ratio in ("ettr", "goodput_allocated")]
    return Difference(name, *gains)


def what_matters(base: Runs, seed: int) -> list[Difference]:
    """Return what half of each input would gain, the most first."""
    scenario = base.scenario
    found = [compare(name, base, other, seed) for name, other in _halves(scenario)]
    return sorted(found, key=lambda item: -abs(item.goodput.mean))


def _halves(scenario: Scenario) -> list[tuple[str, Scenario]]:
    faults = scenario.faults
    found = []
    for index, fault in enumerate(faults):
        others = [("rate", replace(fault, kept=0.5))]
        if fault.takes_nodes and fault.repair is not None:
            others.append(("repair", replace(fault, repair=Scaled(fault.repair, 0.5))))
        for word, half in others:
            changed = (*faults[:index], half, *faults[index + 1 :])
            found.append((f"{word} of {fault.name}", replace(scenario, faults=changed)))
    if faults:
        quick = tuple(replace(fault, detect=Scaled(fault.detect, 0.5)) for fault in faults)
        found.append(("detection", replace(scenario, faults=quick)))
        restart = tuple((rung, Scaled(spread, 0.5)) for rung, spread in scenario.restart)
        found.append(("restart costs", replace(scenario, restart=restart)))
    for index, tier in enumerate(scenario.tiers):
        for word, half_tier in (
            ("blocking", replace(tier, blocking_s=tier.blocking_s / 2)),
            ("restore", replace(tier, restore_s=tier.restore_s / 2)),
            ("interval", replace(tier, every_s=max(tier.every_s / 2, tier.blocking_s * 1.001))),
        ):
            if half_tier != tier:
                found.append((f"{word} of {tier.name}", with_tier(scenario, index, half_tier)))
    return found


def one_more_spare(base: Runs, seed: int) -> Difference | None:
    """Return what another spare gains; None where there is no room for one."""
    scenario = base.scenario
    if scenario.num_spares >= scenario.num_nodes:
        return None
    more = replace(scenario, shared_spares=scenario.shared_spares + 1)
    return compare("one more spare", base, more, seed)


@dataclass(frozen=True)
class BestInterval:
    """How often to save on one tier."""

    tier: str
    every_s: float
    """As it is."""
    best_s: float | None
    """By simulation; None: no fault goes back to this tier, or its checkpoints cost nothing.

    Where it is so short that other tiers' checkpoints would be too many to simulate, it is Daly's.
    """
    daly_s: float | None
    """Daly's estimate, for the faults that go back to it."""


def best_interval(base: Runs, index: int, seed: int) -> BestInterval:
    """Fit what a tier costs at five intervals: a / interval + b * interval + c, which is least at sqrt(a / b)."""
    scenario, tier = base.scenario, base.scenario.tiers[index]
    rate = _rate_back_to(scenario, index)
    if not rate or not tier.blocking_s:
        return BestInterval(tier.name, tier.every_s, None, None)
    daly_s = max(daly_interval_s(1 / rate, tier.blocking_s), tier.blocking_s * 1.01)
    intervals = [max(daly_s * factor, tier.blocking_s * 1.001) for factor in (0.4, 0.65, 1.0, 1.6, 2.5)]
    others = [with_tier(scenario, index, replace(tier, every_s=each)) for each in intervals]
    if any(other.expected_stops > max(MAX_STOPS_LOOKED_AT, scenario.expected_stops) for other in others):
        return BestInterval(tier.name, tier.every_s, daly_s, daly_s)
    losses = [_loss(other, seed, base) for other in others]
    rows = np.array([[1 / each, each, 1.0] for each in intervals])
    falling, rising, _rest = np.linalg.lstsq(rows, np.array(losses), rcond=None)[0].tolist()
    best_s = math.sqrt(falling / rising) if falling > 0 and rising > 0 else daly_s
    return BestInterval(tier.name, tier.every_s, min(max(best_s, intervals[0]), intervals[-1]), daly_s)


def _rate_back_to(scenario: Scenario, index: int) -> float:
    """Return how many faults of active nodes go back to a tier in a second: none that survives them is newer."""
    rate = 0.0
    for fault in scenario.faults:
        for rung, share in fault.rungs:
            severity = scenario.severity(fault, rung)
            left = [(tier.every_s, at) for at, tier in enumerate(scenario.tiers) if tier.survives >= severity]
            if left and min(left)[1] == index:
                rate += fault.rate * fault.kept * share * scenario.num_nodes / (1000 * 86400)
    return rate


def _loss(scenario: Scenario, seed: int, base: Runs) -> float:
    values = run_many(scenario, seed, len(base.outcomes)).ratio("ettr")
    return 1 / float(np.mean(values)) if np.mean(values) > 0 else 1e9


def with_tier(scenario: Scenario, index: int, tier: Tier) -> Scenario:
    """Return a scenario with another tier in the place of one."""
    return replace(scenario, tiers=(*scenario.tiers[:index], tier, *scenario.tiers[index + 1 :]))


@dataclass(frozen=True)
class SizingAnswer:
    """All that `unbroken size` says; `-o json` is its shape."""

    name: str
    gpus: int
    nodes: int
    spares: int
    duration_s: float
    replicates: int
    seed: int
    ratios: dict[str, Estimate]
    shares: dict[str, float]
    gpu_hours: dict[str, dict[str, float]]
    mtbf_s: float | None
    interruptions: Estimate
    waits: float
    """Interruptions of one run that waited for a node, on average."""
    wait_in_a_run: float
    """Share of the runs in which the job waited at least once."""
    most_out: Estimate
    """Nodes that were out at the same time at most."""
    out_p99: int
    """Nodes out at any moment, 99th percentile, by formula."""
    daly_ettr: float | None
    """By formula, with the fastest tier that survives everything, and mean costs; None without one."""
    daly_tier: str | None
    """That tier. The formula knows of one: what others gain and cost is not in it."""
    one_more_spare: Difference | None
    intervals: tuple[BestInterval, ...]
    matters: tuple[Difference, ...]
    notes: tuple[str, ...]


def answer(
    scenario: Scenario, seed: int, replicates: int, *, looks: int, notes: Sequence[str] = (), quick: bool = False
) -> SizingAnswer:
    """Return the answer; what would be if something were different is looked at in `looks` of the runs."""
    runs = run_many(scenario, seed, replicates)
    base = Runs(scenario, runs.outcomes[:looks])
    mtbf_s, tier = scenario.mtbf_s, _tier_for_all(scenario)
    return SizingAnswer(
        name=scenario.name,
        gpus=scenario.num_gpus,
        nodes=scenario.num_nodes,
        spares=scenario.num_spares,
        duration_s=scenario.duration_s,
        replicates=replicates,
        seed=seed,
        ratios={name: estimate(runs.ratio(name)) for name in RATIOS},
        shares=shares(runs),
        gpu_hours=gpu_hours(runs),
        mtbf_s=None if math.isinf(mtbf_s) else mtbf_s,
        interruptions=estimate(runs.each(lambda one: one.num_interruptions)),
        waits=float(runs.each(lambda one: one.num_waits).mean()),
        wait_in_a_run=float(runs.each(lambda one: one.num_waits > 0).mean()),
        most_out=estimate(runs.each(lambda one: one.most_out)),
        out_p99=nodes_out_p99(scenario),
        daly_ettr=None if tier is None else by_formula(scenario, tier),
        daly_tier=None if tier is None else tier.name,
        one_more_spare=None if quick else one_more_spare(runs, seed),
        intervals=() if quick else tuple(best_interval(base, index, seed) for index in range(len(scenario.tiers))),
        matters=() if quick else tuple(what_matters(base, seed)),
        notes=tuple(notes),
    )


def nodes_out_p99(scenario: Scenario) -> int:
    """Return how many nodes are out at any moment, 99th percentile: faults times repair, each with all that it hits."""
    domains = Counter(scenario.domains())
    racks: Counter[int] = Counter()
    for domain, nodes in domains.items():
        racks[scenario.rack_of(domain)] += nodes
    sizes = {Scope.DOMAIN: Counter(domains.values()), Scope.SWITCH: Counter(racks.values())}
    means: defaultdict[Batch, float] = defaultdict(float)
    for fault in scenario.faults:
        if fault.repair is not None and fault.takes_nodes:
            losing = sum(share for rung, share in fault.rungs if rung in LOSING)
            mean = losing * scenario.rate_per_s(fault) * fault.repair.mean_s
            # A unit is hit the likelier the more nodes it has.
            for size, count in sizes.get(fault.scope, {1: scenario.total_nodes}).items():
                means[Batch(size, fault.share)] += mean * size * count / scenario.total_nodes
    return batched_quantile(means, 0.99, scenario.total_nodes)


def _tier_for_all(scenario: Scenario) -> Tier | None:
    """Return the fastest tier that survives all faults; None without one, or without faults."""
    needed = max((scenario.severity(fault, rung) for fault in scenario.faults for rung, _ in fault.rungs), default=0)
    enough = [tier for tier in scenario.tiers if tier.survives >= needed] if scenario.faults else []
    return min(enough, key=lambda one: one.every_s, default=None)


def by_formula(scenario: Scenario, tier: Tier) -> float:
    """Return Daly's ETTR with one tier, of mean costs."""
    costs = dict(scenario.restart)
    total = sum(fault.rate for fault in scenario.faults)
    restart_s = sum(
        fault.rate / total * (fault.detect.mean_s + sum(share * costs[rung].mean_s for rung, share in fault.rungs))
        for fault in scenario.faults
    )
    return daly_ettr(scenario.mtbf_s, tier.blocking_s, restart_s + tier.restore_s, tier.every_s)
