"""Whatever one trainer or agent says, its operator can still read what the rendezvous reports of the job."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.unbroken_core.coordinator.test_coordinator import READY, RUNNING, SETTINGS, Bench

from unbroken_core.coordinator.events import AgentReported, Observed
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_SECONDS
from unbroken_core.protocol.messages import (
    AgentMessage,
    Fault,
    JobStatus,
    Observation,
    Plan,
    PodObservation,
    Policy,
    RankPlan,
    Report,
)
from unbroken_core.protocol.settings import HealthMode
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import MAX_FINDINGS, Finding, Health, Verdict
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.names import MAX_DOMAINS, NAME, plain_domains, plain_name
from unbroken_core.vocabulary.reasons import Cause, RankReason, Role, WorkerPhase
from unbroken_operator.decisions.limits.report import read_report, report_limits

LIMITS = report_limits({"replicas": 2, "spares": {"count": 1}, "ranksPerPod": 2}, 3)
WIDE = "\U0001f525"
"""Twelve characters of JSON."""


def read(bench: Bench) -> JobStatus:
    """Return the job's status as its operator reads it."""
    status = bench.coordinator.status(bench.now_s, lambda _seconds: "2026-01-01T00:00:00.5Z")
    return read_report(wire.encode(status).encode(), LIMITS)


def a_claim(**changes: Any) -> Plan:
    parts = tuple(RankPlan(rank, rank, RankReason.KEPT) for rank in range(2))
    return replace(Plan(1, 3, Role.ACTIVE, 4, "10.0.0.1", 5000, parts), **changes)


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param({"node": "\x1b[31m"}, id="a node that is an escape sequence"),
        pytest.param({"node": "n" * 512}, id="a long node"),
        pytest.param({"domains": ("rack 3\n", "é")}, id="domains that are texts"),
        pytest.param({"domains": (WIDE * 16_384,) * 2}, id="a megabyte of domains"),
        pytest.param({"term": 1, "plan": a_claim(), "entered_ago_s": MAX_SECONDS}, id="an iteration of thirty years"),
        pytest.param({"term": 1, "plan": a_claim(world_size=1024)}, id="a world that never was"),
    ],
)
def test_a_hello_keeps_no_operator_from_reading_the_report(hello: dict[str, Any]) -> None:
    """Before, one such name, of one agent, cost the whole job its status, and its lost pods a replacement."""
    bench = Bench(replace(SETTINGS, layers=(Layer("zone", "l/zone"), Layer("rack", "l/rack"))))
    for pod in ("p0", "p1", "p2"):
        bench.join(pod, **(hello if pod == "p0" else {}))
        read(bench)
    bench.live(100.0)
    bench.all_are(RUNNING, max(bench.status().iteration, 0), "p0", "p1")
    read(bench)
    bench.fault("p0", 0, Cause.EXCEPTION)
    assert {pod.pod for pod in read(bench).pods} == {"p0", "p1", "p2"}


@pytest.mark.parametrize(
    "changes",
    [{"pod": "p0\n"}, {"pod": "x" * 254}, {"pod_uid": "uid-p1\x1b"}, {"pod_uid": "-"}],
    ids=["line end", "long", "nearly that of another", "no name"],
)
def test_who_has_no_name_of_kubernetes_is_refused_before_anybody_sees_it(changes: dict[str, Any]) -> None:
    """In a report it could pass for another pod, once its name was made one."""
    with pytest.raises(WireError, match=rf"Hello.{next(iter(changes))}: want at most 253 characters of a name of Kub"):
        wire.decode(wire.encode(replace(Bench().hello("p0"), **changes)), AgentMessage)


def test_keys_of_a_script_that_are_no_names_are_shown_as_names() -> None:
    bench = Bench()
    policy = Policy(layers=(Layer(replace_from=True),) + (Layer(replace_from=True),) * 20)
    for pod in ("p0", "p1"):
        key = f"rack {pod}\x1b[31m/{WIDE * 1000}"
        bench.states[pod] = [replace(state, policy=policy, keys=(key,) * 20) for state in bench.workers(READY)]
    bench.run("p0", "p1")
    bench.fault("p0", 0, Cause.EXCEPTION)
    shown = {pod.pod: pod.domains for pod in read(bench).pods}
    assert shown["p0"] == ("rack-p0-31m",) * MAX_DOMAINS
    assert read(bench).recoveries[-1].domain == "rack-p0-31m"


def finding(check: str, **changes: Any) -> Finding:
    return replace(Finding(check, WIDE * 128, Verdict.FATAL, "c" * 64, WIDE * 100, WIDE * 300), **changes)


@pytest.mark.parametrize("check", ["-", "_gpu", "gpu-", "a b", "x" * 41])
def test_a_check_that_is_no_name_is_refused_with_its_findings(check: str) -> None:
    """Before, one forged finding of one trainer had the operator refuse every report of the job."""
    with pytest.raises(WireError, match=r"findings\[0\].check"):
        wire.decode(wire.encode(Health((Finding(check, "", Verdict.UNKNOWN),))), Health)


def test_the_longest_words_of_all_trainers_fit_in_a_report() -> None:
    """All that they may say at once: findings, faults with their stacks in twenty recoveries."""
    bench = Bench(replace(SETTINGS, health=HealthMode.ACT, no_progress_limit=None))
    bench.run("p0", "p1", "p2")
    for pod in ("p0", "p1", "p2"):
        findings = tuple(finding(f"c-{number}") for number in range(MAX_FINDINGS // 2))
        silent = tuple(finding(f"u-{pod}-{number}", verdict=Verdict.UNKNOWN) for number in range(MAX_FINDINGS // 2))
        bench.seq += 1
        said = wire.encode(Report(bench.seq, tuple(bench.states[pod]), health=Health((*findings, *silent))))
        bench.step(AgentReported(bench.sessions[pod], wire.decode(said, AgentMessage)))
    for turn in range(20):
        fault = Fault(Cause.EXCEPTION, bench.status().iteration, f"{turn}" + WIDE * 1990, stack=(WIDE * 300,) * 24)
        bench.worker("p1", 0, WorkerPhase.STOPPING, fault)
        iteration = bench.status().iteration
        bench.all_are(READY, iteration, "p0", "p1", "p2")
        bench.tick(5.0)
        bench.all_are(RUNNING, iteration + 1, *(pod.pod for pod in bench.status().pods if pod.ranks))
    report = read(bench)
    assert report.health is not None
    assert report.health.num_findings == 3 * MAX_FINDINGS // 2
    assert [bool(item.stack) for item in report.recoveries] == [False] * 18 + [True] * 2


@given(st.text(max_size=300), st.integers(1, 60))
def test_whatever_a_name_was_it_is_one_then(text: str, most: int) -> None:
    name = plain_name(text, most)
    assert NAME.fullmatch(name)
    assert len(name) <= most or name == "unnamed"
    assert plain_name(name) == name
    assert bool(name) == bool(text)
    assert all(map(NAME.fullmatch, plain_domains((text,) * most)))


def test_the_operators_word_on_a_pods_node_counts() -> None:
    """A fault would count against the node that an agent names."""
    bench = Bench()
    bench.run("p0", "p1")
    pods = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", ()) for pod in ("p0", "p1")}
    bench.step(Observed(Observation(pods)))
    bench.join("p0", node="node-p1")
    assert {pod.pod: pod.node for pod in read(bench).pods} == {"p0": "node-p0", "p1": "node-p1"}
