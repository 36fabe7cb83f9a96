"""The leader of a preflight, beside the host with rank 0: tells who tests with whom, and what follows from it."""

import time
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.meeting import put, those_that_came
from unbroken.preflight.options import GRACE_S, Options
from unbroken.preflight.report import HostRecord, RoundFacts, Speed, make_report
from unbroken.preflight.statements import Arrival, PairResult, read_arrival, read_result
from unbroken_core.preflight.judging import judge
from unbroken_core.preflight.pairing import next_round
from unbroken_core.preflight.trials import HostState, Pair, Round, Trial

_GOODBYE_S = 10.0
"""For hosts to read the report."""


@dataclass
class _Record:
    """What has been tested."""

    trials: list[Trial] = field(default_factory=list)
    reasons: dict[Pair, str] = field(default_factory=dict)
    """Why a pair has failed last."""
    speeds: list[Speed] = field(default_factory=list)
    num_rounds: int = 0


def lead(options: Options, store: Store) -> dict[str, Any]:
    """Run a preflight and return the report, which all hosts get. Raises MeetingError where the store fails."""
    begin_s = time.monotonic()
    hosts = _gather(options, store)
    states = [host.state for host in hosts]
    record = _Record()
    last = 0
    while (found := next_round(states, record.trials, last)) is not None:
        last = found.number
        record.num_rounds += 1
        _run_round(options, store, hosts, found, record)
    report = make_report(
        options,
        hosts,
        judge(states, record.trials),
        RoundFacts(record.reasons, record.speeds, record.num_rounds, time.monotonic() - begin_s),
    )
    put(store, f"order/{record.num_rounds + 1}", {"report": report})
    those_that_came(store, [f"read/{host.rank}" for host in hosts if host.arrival is not None], _GOODBYE_S)
    return report


def _gather(options: Options, store: Store) -> list[HostRecord]:
    """Return all hosts in the order of the topology."""
    keys = {rank: f"arrived/{rank}" for rank in range(options.num_hosts)}
    came = those_that_came(store, list(keys.values()), options.arrival_s)
    hosts = []
    for rank, key in keys.items():
        arrival = read_arrival(came.get(key))
        hosts.append(HostRecord(rank, arrival, _state(arrival), is_garbled=key in came and arrival is None))
    return sorted(hosts, key=lambda host: (host.arrival.domains if host.arrival else (), host.rank))


def _state(arrival: Arrival | None) -> HostState:
    if arrival is None or arrival.is_unknown:
        return HostState.SILENT
    return HostState.ABLE if arrival.is_able else HostState.BROKEN


def _run_round(options: Options, store: Store, hosts: list[HostRecord], planned: Round, record: _Record) -> None:
    number = record.num_rounds
    tasks: dict[str, dict[str, Any]] = {}
    gpus = {pair: min(hosts[pair.left].gpus, hosts[pair.right].gpus) for pair in planned.pairs}
    if options.backend == "gloo":
        gpus = dict.fromkeys(planned.pairs, 0)
    limit_s = options.pair_s
    for pair in planned.pairs:
        for side, host in enumerate(pair):
            meeting = f"pair/{number}/{pair.left}-{pair.right}"
            tasks[str(hosts[host].rank)] = {"meeting": meeting, "side": side, "gpus": gpus[pair]}
    put(store, f"order/{number}", {"limit_s": limit_s, "tasks": tasks})
    keys = {host: f"result/{number}/{hosts[host].rank}" for pair in planned.pairs for host in pair}
    came = those_that_came(store, list(keys.values()), limit_s + GRACE_S)
    for pair in planned.pairs:
        said = {host: read_result(came.get(keys[host])) for host in pair}
        results = [result for result in said.values() if result is not None]
        silent = tuple(host for host, result in said.items() if result is None)
        why = _why_failed(options, results)
        if silent:
            why = f"{' and '.join(hosts[host].name for host in silent)} did not say how it went"
        elif not why:
            record.speeds.append(Speed(pair, min(result.gbits for result in results)))
        if why:
            record.reasons[pair] = why
        record.trials.append(Trial(pair, not why, silent))


def _why_failed(options: Options, results: list[PairResult]) -> str:
    """Return why a pair has failed, as far as one of the two says; "" where both have passed, and fast enough."""
    for result in results:
        if not result.has_passed:
            return result.why or "failed"
        if options.min_gbits is not None and result.gbits < options.min_gbits:
            return f"{result.gbits:.3g} Gbit/s, want {options.min_gbits:g} at least"
    return ""
