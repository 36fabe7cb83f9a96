"""Pure: a scenario from what a YAML file says. Every number is bounded; what is wrong is one line with its field."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unbroken_cli.sizing.fields import Fields, refuse
from unbroken_cli.sizing.scenario import (
    LOSING,
    RUNGS,
    SURVIVES,
    FaultClass,
    Lemons,
    Refill,
    Scenario,
    Scope,
    Tier,
)
from unbroken_cli.sizing.spreads import Distribution, Fixed, Total
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Rung

MAX_GPUS = 1_000_000
MIN_RATE = 1e-9
MAX_RATE = 100_000.0
"""Faults per 1,000 node-days: one of a million nodes in 2,700 years, and a hundred a day of each node."""
MAX_FAULTS = 2_000_000
"""Of one run."""
MAX_STOPS = 10_000_000
"""Of one run, in which checkpoints of all kinds but the most frequent are made."""
MAX_TIERS = 5
_JOB = (
    *("name", "gpus", "gpusPerNode", "nodesPerDomain", "racks", "duration", "minReplicas", "divisibleBy"),
    *("growBack", "replaceWithin"),
)
_FAULT = (*("name", "hits", "rate", "count", "over", "rungs", "detect", "repair", "shape", "share", "destroys"),)


def read_scenario(value: Any, measured: Mapping[str, Distribution] | None = None) -> Scenario:
    """Return what is to be simulated. Raises InputError.

    `measured` has spreads by phase of a real job's recoveries: its detection counts where a class names none, and its
    other phases, which hold the loading of a checkpoint, instead of all restart and restore costs.
    """
    top = Fields("", value, ("job", "spares", "lemons", "faults", "checkpoints", "restart"))
    scenario = _with_spares(_job(Fields("job", top.raw("job"), _JOB)), top)
    detect = None if measured is None else measured.get("detect", Fixed(0.0))
    faults = tuple(_fault(f"faults[{index}]", item, detect) for index, item in enumerate(top.items("faults")))
    tiers = tuple(_tier(f"checkpoints[{index}]", item) for index, item in enumerate(top.items("checkpoints")))
    if len(tiers) > MAX_TIERS:
        refuse("checkpoints", f"at most {MAX_TIERS}", len(tiers))
    if measured:
        costs: Distribution = Total(tuple(spread for phase, spread in measured.items() if phase != "detect"))
        restart = tuple((rung, costs) for rung in RUNGS)
        tiers = tuple(replace(tier, restore_s=0.0) for tier in tiers)
    else:
        restart = _restart(top, faults)
    scenario = replace(scenario, faults=faults, tiers=tiers, restart=restart)
    _check_names(scenario)
    return _bounded(scenario)


def _job(job: Fields) -> Scenario:
    size = job.whole("gpusPerNode", 1, 1024, 8)
    gpus = job.whole("gpus", 1, MAX_GPUS)
    if gpus % size:
        refuse(job.path("gpus"), f"a multiple of gpusPerNode ({size})", gpus)
    nodes = gpus // size
    per_domain = job.whole("nodesPerDomain", 1, nodes, min(16, nodes))
    domains = -(-nodes // per_domain)
    divisible_by = job.whole("divisibleBy", 1, gpus, 1)
    within = job.word("replaceWithin", ("job", "rack", "domain"), "job")
    return Scenario(
        name=str(job.raw("name", "job"))[:100],
        num_nodes=nodes,
        gpus_per_node=size,
        nodes_per_domain=per_domain,
        num_racks=job.whole("racks", 1, domains, domains),
        duration_s=job.seconds("duration", least=60.0),
        min_nodes=job.whole("minReplicas", 1, nodes, nodes),
        divisible_by=divisible_by,
        spares_per_domain=0,
        shared_spares=0,
        refill=None,
        grow_back_s=job.seconds("growBack", least=1.0) if job.has("growBack") else None,
        stays_within=None if within == "job" else within,
        faults=(),
        tiers=(),
        restart=(),
    )


def _with_spares(scenario: Scenario, top: Fields) -> Scenario:
    spares = Fields("spares", top.raw("spares", {}), ("perDomain", "shared", "refill"))
    nodes = scenario.num_nodes
    scenario = replace(
        scenario,
        spares_per_domain=spares.whole("perDomain", 0, MAX_GPUS, 0),
        shared_spares=spares.whole("shared", 0, MAX_GPUS, 0),
    )
    for key, count in (("perDomain", scenario.num_spares - scenario.shared_spares), ("shared", scenario.num_spares)):
        if count > nodes:
            raise InputError(f"spares.{key}: want at most as many spare nodes as the job has ({nodes}), got {count}")
    if spares.has("refill"):
        refill = Fields("spares.refill", spares.raw("refill"), ("nodes", "after"))
        scenario = replace(scenario, refill=Refill(refill.whole("nodes", 1, nodes), refill.spread("after")))
    if top.has("lemons"):
        lemons = Fields("lemons", top.raw("lemons"), ("share", "factor", "removedAfter"))
        removed = lemons.whole("removedAfter", 1, 1000) if lemons.has("removedAfter") else None
        found = Lemons(lemons.number("share", 0.0, 0.5), lemons.number("factor", 1.0, 10_000), removed)
        scenario = replace(scenario, lemons=found)
    return scenario


def _fault(where: str, value: Any, measured: Distribution | None) -> FaultClass:
    fields = Fields(where, value, _FAULT)
    scope = Scope(fields.word("hits", [scope.value for scope in Scope]))
    detect = fields.spread("detect") if fields.has("detect") or measured is None else measured
    repair = fields.spread("repair") if fields.has("repair") else None
    rungs = _rungs(fields, repair)
    if repair is not None and scope is Scope.SOFTWARE:
        raise InputError(f"{fields.path('repair')}: want none, since {scope} takes no node out")
    share = fields.number("share", 0.0, 1.0, 1.0)
    if share < 1 and scope not in (Scope.DOMAIN, Scope.SWITCH):
        refuse(fields.path("share"), f"1 of a fault that hits one {scope}", share)
    return FaultClass(
        name=str(fields.raw("name", scope.value))[:60],
        scope=scope,
        rate=_rate(fields),
        rungs=rungs,
        detect=detect,
        repair=repair,
        shape=fields.number("shape", 0.1, 10.0, 1.0),
        share=share,
        destroys=SURVIVES.index(fields.word("destroys", SURVIVES)) if fields.has("destroys") else None,
    )


def _rate(fields: Fields) -> float:
    """Return faults per 1,000 node-days: named, or counted over some nodes and days."""
    if fields.has("rate") == fields.has("count"):
        raise InputError(f"{fields.path('rate')}: want either rate (per 1,000 node-days), or count and over")
    if fields.has("rate"):
        return fields.number("rate", MIN_RATE, MAX_RATE)
    over = Fields(fields.path("over"), fields.raw("over"), ("nodes", "time"))
    node_days = over.whole("nodes", 1, MAX_GPUS) * over.seconds("time", least=60.0) / 86400
    rate = fields.whole("count", 1, 10**9) / node_days * 1000
    if rate > MAX_RATE:
        raise InputError(f"{fields.path('count')}: want at most {MAX_RATE:g} per 1,000 node-days, got {rate:g}")
    return rate


def _rungs(fields: Fields, repair: Distribution | None) -> tuple[tuple[Rung, float], ...]:
    value = fields.raw("rungs", {"in-process" if repair is None else "pod": 1})
    words = [rung.value for rung in RUNGS]
    named = Fields(fields.path("rungs"), value, words)
    shares = [(rung, named.number(rung.value, 0.0, 1.0)) for rung in RUNGS if named.has(rung.value)]
    total = sum(share for _rung, share in shares)
    if abs(total - 1) > 1e-6:
        refuse(named.where, "probabilities that sum to 1", total)
    if repair is not None and not any(rung in LOSING for rung, _share in shares):
        raise InputError(f"{fields.path('repair')}: want none, since no rung of this class takes a node out")
    return tuple(shares)


def _tier(where: str, value: Any) -> Tier:
    fields = Fields(where, value, ("name", "every", "blocking", "restore", "survives"))
    tier = Tier(
        name=str(fields.raw("name", where))[:60],
        every_s=fields.seconds("every", least=0.001),
        blocking_s=fields.seconds("blocking", 0),
        restore_s=fields.seconds("restore", 0),
        survives=SURVIVES.index(fields.word("survives", SURVIVES)),
    )
    if tier.every_s <= tier.blocking_s:
        raise InputError(
            f"{fields.path('every')}: want more than blocking ({tier.blocking_s:g} s), got {tier.every_s:g} s"
        )
    return tier


def _restart(top: Fields, faults: tuple[FaultClass, ...]) -> tuple[tuple[Rung, Distribution], ...]:
    fields = Fields("restart", top.raw("restart", {}), [rung.value for rung in RUNGS])
    used = {rung for fault in faults for rung, _share in fault.rungs}
    found: list[tuple[Rung, Distribution]] = []
    for rung in RUNGS:
        if fields.has(rung.value) or rung in used:
            found.append((rung, fields.spread(rung.value)))
        else:
            # No class takes it; a world that grows back is planned as cheaply as any restart in the process.
            found.append((rung, found[0][1] if found else Fixed(0.0)))
    return tuple(found)


def _check_names(scenario: Scenario) -> None:
    for key, names in (
        ("faults", [fault.name for fault in scenario.faults]),
        ("checkpoints", [tier.name for tier in scenario.tiers]),
    ):
        if len(set(names)) < len(names):
            refuse(key, "names that differ", names)


def _bounded(scenario: Scenario) -> Scenario:
    if scenario.rules.wanted_ranks < 1:
        refuse("job.divisibleBy", f"at most job.gpus ({scenario.num_gpus})", scenario.divisible_by)
    least = -(-scenario.divisible_by // scenario.gpus_per_node)
    if scenario.min_nodes < least:
        scenario = replace(scenario, min_nodes=least)
    expected = scenario.expected_faults
    if expected > MAX_FAULTS:
        raise InputError(
            f"job.duration, faults: want at most {MAX_FAULTS} faults in one run, got {expected:.0f}; the duration, the "
            f"rates or the nodes are too large"
        )
    if scenario.expected_stops > MAX_STOPS:
        raise InputError(
            f"job.duration, checkpoints: want at most {MAX_STOPS} checkpoints in one run of all kinds but the most "
            f"frequent, got {scenario.expected_stops:.0f}; make `every` longer"
        )
    return scenario
