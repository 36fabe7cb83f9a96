"""The faults of one run, drawn before it: all classes superposed, in the order of time.

Each class has a generator of its own for the nodes that the job wants, and another for its spares, and each fault a row
of uniform numbers. So two scenarios that differ in one input meet the same faults, and their difference is that
input's.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbroken_cli.sizing.scenario import FaultClass, Scenario, Scope
from unbroken_cli.sizing.spreads import MAX_DRAWS, Floats

TICKS = 1_000_000
"""A second, in the simulation's whole numbers: sums of them are exact."""
_GAP, _TARGET, _KEPT, _RUNG, _REPAIR, _DETECT, _RESTART = range(7)
_COLUMNS = _RESTART + MAX_DRAWS
Ints = NDArray[np.int64]
_SHARED = (Scope.DOMAIN, Scope.SWITCH, Scope.SOFTWARE)
"""What is hit is no single node."""


class FaultEvent(NamedTuple):
    """One fault."""

    at: int
    fault: int
    """Index of its class."""
    target: int
    """Node that is hit, or through which its domain or rack is found."""
    rung: int
    """Index in the class's rungs."""
    detect: int
    repair: int
    restart: int
    chance: float
    """Uniform: a lemon that was removed is spared by it."""
    seed: int
    """For what else is random of it."""


def draw_faults(scenario: Scenario, seed: int, replicate: int) -> list[FaultEvent]:
    """Return the faults of one run, in the order of time."""
    parts: list[tuple[NDArray[np.generic] | Sequence[int], ...]] = []
    restart = dict(scenario.restart)
    spans = [(0, scenario.num_nodes), (scenario.num_nodes, scenario.num_spares)]
    for (index, fault), span in itertools.product(enumerate(scenario.faults), spans):
        if not span[1] or (span[0] and fault.scope is Scope.SOFTWARE):
            continue
        rng = np.random.default_rng((seed, replicate, index, span[0] > 0))
        times, targets, draws = _times(scenario, fault, rng, span)
        count = len(times)
        if not count:
            continue
        bounds = np.cumsum([share for _rung, share in fault.rungs])
        rungs = np.minimum(np.searchsorted(bounds, draws[:, _RUNG], side="right"), len(fault.rungs) - 1)
        restarts = np.zeros(count)
        for number, (rung, _share) in enumerate(fault.rungs):
            chosen = rungs == number
            restarts[chosen] = restart[rung].sample(draws[chosen, _RESTART:])
        parts.append(
            (
                _ticks(times),
                np.full(count, index),
                targets,
                rungs,
                _ticks(fault.detect.sample(draws[:, _DETECT:])),
                _ticks(np.zeros(count) if fault.repair is None else fault.repair.sample(draws[:, _REPAIR:])),
                _ticks(restarts),
                draws[:, _KEPT],
                (draws[:, _TARGET] * (1 << 52)).astype(np.int64),
            )
        )
    if not parts:
        return []
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return list(map(FaultEvent, *(column[order].tolist() for column in columns)))


def _ticks(seconds: Floats) -> Ints:
    return np.rint(seconds * TICKS).astype(np.int64)


def _times(
    scenario: Scenario, fault: FaultClass, rng: np.random.Generator, span: tuple[int, int]
) -> tuple[Floats, Ints, Floats]:
    """Return times, nodes and the other draws of a class, on a span of nodes: the first, and how many."""
    if fault.shape == 1:
        rate = fault.rate * span[1] / (1000 * 86400)
        times, draws = _poisson(rate, scenario.duration_s, rng)
        targets = _targets(scenario, fault, draws[:, _TARGET], span)
    else:
        times, targets = _renewals(scenario, fault, rng, span)
        draws = rng.random((len(times), _COLUMNS))
    if fault.kept < 1:
        kept = np.random.default_rng(rng.integers(1 << 62)).random(len(times)) < fault.kept
        return times[kept], targets[kept], draws[kept]
    return times, targets, draws


def _poisson(rate: float, duration_s: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    expected = rate * duration_s
    draws = rng.random((int(expected + 6 * math.sqrt(expected)) + 16, _COLUMNS))
    while True:
        times = np.cumsum(-np.log1p(-draws[:, _GAP])) / rate
        if times[-1] >= duration_s:
            count = int(np.searchsorted(times, duration_s))
            return times[:count], draws[:count]
        draws = np.concatenate((draws, rng.random((16 + len(draws) // 10, _COLUMNS))))


def _targets(scenario: Scenario, fault: FaultClass, draws: Floats, span: tuple[int, int]) -> Ints:
    """Return the nodes that are hit; see `is_lemon`."""
    first, total = span
    bad = 0 if first or fault.scope in _SHARED else num_lemons(scenario)
    if not bad:
        return first + (draws * total).astype(np.int64).clip(0, total - 1)
    factor = scenario.lemons.factor
    weight = bad * factor / (bad * factor + total - bad)
    stride = total // bad
    among_bad = (draws / weight * bad).astype(np.int64).clip(0, bad - 1) * stride
    number = ((draws - weight) / (1 - weight) * (total - bad)).astype(np.int64).clip(0, total - bad - 1)
    # The sound nodes lie between the lemons, and after the last.
    block = number // (stride - 1)
    sound = np.where(block < bad, block * stride + 1 + number % (stride - 1), number + bad)
    return np.where(draws < weight, among_bad, sound)


def num_lemons(scenario: Scenario) -> int:
    """Return how many nodes are lemons; at most half of those that the job wants."""
    return min(round(scenario.lemons.share * scenario.num_nodes), scenario.num_nodes // 2)


def is_lemon(scenario: Scenario, node: int) -> bool:
    """Return whether a node is one: every n-th of those that are active at first."""
    bad = num_lemons(scenario)
    stride = scenario.num_nodes // bad if bad else 0
    return bool(bad) and node % stride == 0 and node // stride < bad


def _renewals(
    scenario: Scenario, fault: FaultClass, rng: np.random.Generator, span: tuple[int, int]
) -> tuple[Floats, Ints]:
    """Return the faults of units that each fail again and again, at intervals of a Weibull distribution.

    Each begins somewhere within an interval, as if it had always run: so the rate is the asked one from the start.
    """
    units = _units(scenario, fault, span)
    mean_s = len(units) * 1000 * 86400 / (fault.rate * span[1])
    scales = np.full(len(units), mean_s / math.gamma(1 + 1 / fault.shape))
    bad = 0 if span[0] or fault.scope in _SHARED else num_lemons(scenario)
    if bad:
        even = 1 + bad / len(units) * (scenario.lemons.factor - 1)
        is_bad = np.array([is_lemon(scenario, node) for node in range(len(units))])
        scales *= np.where(is_bad, even / scenario.lemons.factor, even)
    # The interval in which one looks is the longer the likelier: its power is Gamma distributed.
    within = scales * rng.gamma(1 + 1 / fault.shape, size=len(units)) ** (1 / fault.shape)
    times = within * rng.random(len(units))
    found: list[tuple[Floats, Ints]] = []
    while len(times):
        inside = times < scenario.duration_s
        times, units, scales = times[inside], units[inside], scales[inside]
        found.append((times, units))
        times = times + scales * rng.standard_exponential(len(times)) ** (1 / fault.shape)
    return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])


def _units(scenario: Scenario, fault: FaultClass, span: tuple[int, int]) -> Ints:
    """Return a node of each unit that fails."""
    if fault.scope not in _SHARED:
        return np.arange(span[0], span[0] + span[1], dtype=np.int64)
    if fault.scope is Scope.SOFTWARE:
        return np.zeros(1, np.int64)
    domains = range(scenario.num_domains)
    names = list(domains) if fault.scope is Scope.DOMAIN else [scenario.rack_of(domain) for domain in domains]
    first = {name: domain for domain, name in reversed(list(enumerate(names)))}
    return np.array(sorted(first.values()), np.int64) * scenario.nodes_per_domain
