"""What a preflight has found, in words and as JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.preflight.options import Options
from unbroken.preflight.statements import Arrival
from unbroken.preflight.versions import KNOWN_BAD, differences, listed
from unbroken_core.preflight.judging import Diagnosis, HostVerdict, Named, Why
from unbroken_core.preflight.trials import HostState, Pair
from unbroken_core.vocabulary.plurals import agreed, counted

OK, BAD, NOT_ALL_TESTED = 0, 1, 3
_MAX_OK_SHOWN = 16


@dataclass(frozen=True)
class HostRecord:
    """One host, as it has arrived."""

    rank: int
    arrival: Arrival | None
    """None: it has not, or cannot be read."""
    state: HostState
    is_garbled: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        return f"rank {self.rank}" if self.arrival is None else self.arrival.name

    @property
    def gpus(self) -> int:
        """How many it has."""
        return 0 if self.arrival is None else self.arrival.gpus


@dataclass(frozen=True)
class Speed:
    """How fast a pair was."""

    pair: Pair
    gbits: float


@dataclass(frozen=True)
class RoundFacts:
    """What the rounds were like."""

    reasons: Mapping[Pair, str]
    speeds: Sequence[Speed]
    num_rounds: int
    seconds: float


def make_report(
    options: Options, hosts: Sequence[HostRecord], diagnosis: Diagnosis, facts: RoundFacts
) -> dict[str, Any]:
    """Return the report, as JSON has it."""
    names = _names(hosts)
    ends = sorted(facts.speeds, key=lambda speed: speed.gbits)
    report: dict[str, Any] = {
        "exitCode": OK,
        "rounds": facts.num_rounds,
        "seconds": round(facts.seconds, 2),
        "hosts": [_host(hosts[each.host], each, names, facts.reasons) for each in diagnosis.hosts],
        "links": [
            {"hosts": _pair(link.pair, names), "failed": link.num_failed, "why": facts.reasons.get(link.pair, "")}
            for link in diagnosis.links
        ],
        "unsettled": [_pair(pair, names) for pair in diagnosis.unsettled],
        "untested": [_pair(pair, names) for pair in diagnosis.untested],
        "badVersions": _bad_versions(options, hosts, names),
        "differences": _differences(hosts, names),
        "slowest": {"hosts": _pair(ends[0].pair, names), "gbits": round(ends[0].gbits, 3)} if ends else None,
        "fastest": {"hosts": _pair(ends[-1].pair, names), "gbits": round(ends[-1].gbits, 3)} if ends else None,
    }
    report["exitCode"] = _exit_code(report)
    return report


def _exit_code(report: Mapping[str, Any]) -> int:
    verdicts = {host["verdict"] for host in report["hosts"]}
    if Named.BAD.value in verdicts or report["links"] or report["badVersions"]:
        return BAD
    is_whole = verdicts == {Named.OK.value} and not report["unsettled"] and not report["untested"]
    return OK if is_whole else NOT_ALL_TESTED


def _names(hosts: Sequence[HostRecord]) -> list[str]:
    """Return a name for each host that no other one has."""
    names = [host.name for host in hosts]
    return [
        name if names.count(name) == 1 else f"{name} (rank {host.rank})"
        for name, host in zip(names, hosts, strict=True)
    ]


def _pair(pair: Pair, names: Sequence[str]) -> list[str]:
    return [names[host] for host in pair]


def _host(host: HostRecord, verdict: HostVerdict, names: Sequence[str], reasons: Mapping[Pair, str]) -> dict[str, Any]:
    checks = [] if host.arrival is None else list(host.arrival.checks)
    return {
        "rank": host.rank,
        "name": names[verdict.host],
        "domains": [] if host.arrival is None else list(host.arrival.domains),
        "verdict": verdict.named.value,
        "why": verdict.why.value,
        "evidence": _evidence(host, verdict, names, reasons),
        "passed": [names[partner] for partner in verdict.passed],
        "failed": [names[partner] for partner in verdict.failed],
        "checks": checks,
        "gpus": host.gpus,
        "versions": {} if host.arrival is None else host.arrival.versions,
    }


def _evidence(host: HostRecord, verdict: HostVerdict, names: Sequence[str], reasons: Mapping[Pair, str]) -> str:
    """Return one line for people."""
    if verdict.named is Named.OK:
        return ""
    if host.arrival is not None and (verdict.why is Why.OWN_CHECKS or host.arrival.is_unknown):
        failed = [check for check in host.arrival.checks if check["verdict"] != "ok"]
        return "; ".join(f"{check['check']} {check['entity']}".strip() + f": {check['message']}" for check in failed)
    if verdict.why is Why.SILENT:
        if host.is_garbled:
            return "what it says cannot be read"
        return "did not arrive" if host.arrival is None else "arrived, and then did not answer"
    if verdict.why is Why.NO_PAIR:
        return "there was no host to test with"
    failed_with = sorted(set(verdict.failed))
    tries = f"failed {len(verdict.failed)} of {counted(len(verdict.failed) + len(verdict.passed), 'test')}"
    last = next((why for pair, why in reasons.items() if verdict.host in pair and why), "")
    partners = listed(names[partner] for partner in failed_with)
    tail = {
        Why.PROVEN_PARTNERS: ", who pass with others",
        Why.ONE_OF_TWO: ": it may be either, or what is between them",
        Why.TOO_MANY: ": more than half of the hosts fail like this, so look at what they have in common",
        Why.UNSETTLED: ": not enough to name it",
    }.get(verdict.why, "")
    return f"{tries} with {partners}{tail}" + (f" ({last})" if last else "")


def _bad_versions(options: Options, hosts: Sequence[HostRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for bad in (*options.bad_versions, *KNOWN_BAD):
        having = [
            (name, host.arrival.versions[bad.name])
            for host, name in zip(hosts, names, strict=True)
            if host.arrival is not None and bad.matches(host.arrival.versions)
        ]
        if having:
            found.append(
                {
                    "name": bad.name,
                    "version": having[0][1],
                    "hosts": [name for name, _ in having],
                    "why": bad.why,
                    "source": bad.source,
                }
            )
    return found


def _differences(hosts: Sequence[HostRecord], names: Sequence[str]) -> list[str]:
    arrived = {name: host.arrival for host, name in zip(hosts, names, strict=True) if host.arrival is not None}
    found = differences({name: arrival.versions for name, arrival in arrived.items() if arrival.versions})
    by_count: dict[int, list[str]] = {}
    for name, arrival in arrived.items():
        by_count.setdefault(arrival.gpus, []).append(name)
    if len(by_count) > 1:
        ordered = sorted(by_count.items(), key=lambda item: -len(item[1]))
        found.append("GPUs: " + "; ".join(f"{count} on {listed(having)}" for count, having in ordered))
    return found


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return the report for people."""
    hosts = report["hosts"]
    ok = [host["name"] for host in hosts if host["verdict"] == Named.OK.value]
    lines = [
        f"preflight of {counted(len(hosts), 'host')}: {counted(report['rounds'], 'round')} of pairs, "
        f"{report['seconds']:g} s"
    ]
    for word in (Named.BAD, Named.UNKNOWN):
        lines += [f"{word.value:<8} {each['name']}: {each['evidence']}" for each in hosts if each["verdict"] == word]
    for link in report["links"]:
        lines.append(f"{'link':<8} {' <-> '.join(link['hosts'])}: failed {link['failed']} times ({link['why']})")
    for bad in report["badVersions"]:
        source = f" ({bad['source']})" if bad["source"] else ""
        lines.append(f"{'version':<8} {bad['name']} {bad['version']} on {listed(bad['hosts'])}: {bad['why']}{source}")
    for what, pairs in (("failed once or more, and was not settled", "unsettled"), ("was not tested", "untested")):
        lines += [f"{'pair':<8} {' <-> '.join(pair)}: {what}" for pair in report[pairs]]
    lines += [f"{'differs':<8} {each}" for each in report["differences"]]
    lines.append(f"{'ok':<8} {counted(len(ok), 'host')}" + (f": {listed(ok, _MAX_OK_SHOWN)}" if ok else ""))
    if report["slowest"] is not None:
        slowest, fastest = report["slowest"], report["fastest"]
        lines.append(
            f"{'speed':<8} {slowest['gbits']:.3g} Gbit/s ({' <-> '.join(slowest['hosts'])}) "
            f"to {fastest['gbits']:.3g} Gbit/s ({' <-> '.join(fastest['hosts'])})"
        )
    return lines


def line_of_host(report: Mapping[str, Any], rank: int) -> str:
    """Return what it says of one host."""
    host = next(each for each in report["hosts"] if each["rank"] == rank)
    others = sum(each["verdict"] == Named.BAD.value for each in report["hosts"] if each["rank"] != rank)
    evidence = f": {host['evidence']}" if host["evidence"] else ""
    tail = f"; {counted(others, 'other host')} {agreed(others, 'is', 'are')} bad" if others else ""
    return f"preflight: {host['name']} is {host['verdict']}{evidence}{tail}"
