"""A report says what a job of this size can say, or it is refused: every number, list, text and time of it."""

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.unbroken_operator.operator_world import a_job, a_recovery, running_world
from tests.unit.unbroken_operator.test_operator_large_jobs import trainer

from unbroken_core.protocol.messages import JobStatus, OtherFault
from unbroken_core.protocol.wire import encode
from unbroken_core.recovery.fault_words import MAX_OTHER
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.reasons import Cause, JobPhase
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.decisions.limits.report import (
    MAX_TAKERS,
    MAX_TEXT,
    SPARE_PODS,
    ReportLimits,
    read_report,
    report_limits,
    wanted_pods,
)
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.jobs import Jobs
from unbroken_operator.worker import JobWorker, _look

SPEC = {"replicas": 2, "spares": {"count": 1}, "ranksPerPod": 2}
LIMITS = report_limits(SPEC, 3)


def _sound() -> JobStatus:
    world = running_world()
    world.rendezvous_says(
        JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], recoveries=(a_recovery(),), ettr=1.0
    )
    assert world.report is not None
    memory = MemoryStatus(120, 110, 100, 3, "memory", "step 118: lost", "across rack", 50, 50, "step 100: full")
    return replace(world.report, memory=memory)


OTHER: dict[str, Any] = {"cause": "hard-timeout", "rank": 3, "pod": "digits-2", "detail": "", "taken_by": "digits-3"}
SOUND: dict[str, Any] = json.loads(encode(_sound()))


def _changed(path: str, value: Any) -> bytes:
    data = copy.deepcopy(SOUND)
    *steps, last = path.split(".")
    inner: Any = data
    for step in steps:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[int(last) if isinstance(inner, list) else last] = value
    return json.dumps(data).encode()


def test_what_an_honest_rendezvous_says_is_read_as_it_is() -> None:
    assert read_report(encode(_sound()).encode(), LIMITS) == _sound()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("iteration", 1 << 70, ".iteration: want -1 to 9007199254740992", id="an iteration of 71 bits"),
        pytest.param("iteration", 10**4000, "a number of 13288 bits", id="an iteration of 4,000 digits"),
        pytest.param("term", -1, ".term: want 0 to", id="a term below 0"),
        pytest.param("world_size", 10**6, ".world_size: want 0 to 44, got 1000000", id="a world larger than the job"),
        pytest.param("lost_ranks", -5, ".lost_ranks: want 0 to 44, got -5", id="fewer ranks than none are lost"),
        pytest.param("memory.complete_step", -2, ".memory.complete_step: want -1 to", id="a step below none"),
        pytest.param("memory.protected_step", 1 << 70, ".memory.protected_step: want -1 to", id="a step of 71 bits"),
        pytest.param("memory.restored_step", 10**4000, "a number of 13288 bits", id="a step of 4,000 digits"),
        pytest.param("memory.steps_redone", -1, ".memory.steps_redone: want 0 to", id="fewer steps redone than none"),
        pytest.param("memory.source", "tape", ".memory.source: want words of", id="a source that is none"),
        pytest.param("memory.reason", "x" * 10**6, ".memory.reason: want at most", id="a reason of a megabyte"),
        pytest.param("memory.disk_step", -2, ".memory.disk_step: want -1 to", id="a step of the disk below none"),
        pytest.param("memory.disk_every", -1, ".memory.disk_every: want 0 to", id="fewer steps than none between two"),
        pytest.param("memory.disk_problem", "x" * 10**6, ".memory.disk_problem: want at most", id="a problem as long"),
        pytest.param("memory.across", "x" * 10**6, ".memory.across: want at most", id="a promise of a megabyte"),
        pytest.param("ettr", 7.5, ".ettr: want 0 to 1.01, got 7.5", id="more progress than time"),
        pytest.param("still_for_s", -1.0, ".still_for_s: want 0 to 1000000000", id="nothing new for less than no time"),
        pytest.param("still_for_s", 1e300, ".still_for_s: want 0 to 1000000000", id="nothing new since before time"),
        pytest.param("pods", SOUND["pods"] * 100, ".pods: want at most 22 for a job of this size, got 300", id="pods"),
        pytest.param("pods.0.ranks", [0, 1, 2], ".pods[].ranks: want at most 2", id="more ranks than a pod has"),
        pytest.param("pods.0.ranks", [0, 44 + 1], ".pods[].ranks: want 0 to 44, got 45", id="a rank beyond the world"),
        pytest.param("pods.0.workers", ["ready"] * 3, ".pods[].workers: want at most 2", id="workers of a pod"),
        pytest.param("pods.0.domains", ["r"] * 17, ".pods[].domains: want at most 16", id="domains of a pod"),
        pytest.param("pods.0.uid", "u" * 254, ".pods[].uid: want at most 253 characters, got 254", id="a long name"),
        pytest.param("recoveries", SOUND["recoveries"] * 11_000, "bytes for a job of this size", id="11,000 Events"),
        pytest.param("recoveries", SOUND["recoveries"] * 21, ".recoveries: want at most 20", id="21 recoveries"),
        pytest.param("recoveries.0.number", -1, ".recoveries[].number: want 0 to", id="a recovery before the first"),
        pytest.param("recoveries.0.rank", 1 << 70, ".recoveries[].rank: want 0 to", id="a culprit beyond all ranks"),
        pytest.param("recoveries.0.taken_by", "a b", ".recoveries[].taken_by: want a name", id="a taker that is none"),
        pytest.param("recoveries.0.others", [OTHER] * 17, ".recoveries[].others: want at most 16", id="other faults"),
        pytest.param("recoveries.0.others", [{**OTHER, "rank": -1}], ".others[].rank: want 0 to", id="rank of another"),
        pytest.param("recoveries.0.others", [{**OTHER, "pod": "a b"}], ".others[].pod: want a name", id="pod of it"),
        pytest.param("recoveries.0.others", [{**OTHER, "taken_by": "-"}], ".taken_by: want a name", id="its taker"),
        pytest.param("recoveries.0.started_at", "soon", ".started_at: want a time such as", id="a time in words"),
        pytest.param("recoveries.0.started_at", "2026-01-01T00:00:00", "want a time such as", id="a time of no zone"),
        pytest.param("recoveries.0.ended_at", "0001-01-01T00:00:00Z", "want a time such as", id="the first year"),
        pytest.param("recoveries.0.ended_at", "2026-13-01T00:00:00Z", "want a time such as", id="the 13th month"),
        pytest.param("recoveries.0.phase_s", {"stop": 1e300}, ".phase_s: want -1000000000 to", id="long phases"),
        pytest.param("recoveries.0.phase_s", {"lunch": 1.0}, ".phase_s: want words of", id="phases that are none"),
        pytest.param("restarts_by_rung", {"in-process": 1 << 70}, ".restarts_by_rung: want 0 to", id="restarts"),
        pytest.param("restarts_by_cause", {"luck": 1}, ".restarts_by_cause: want words of", id="a cause of its own"),
        pytest.param("refused", ["x"] * 65, ".refused: want at most 64", id="refused pods"),
        pytest.param("pods", "none", "JobStatus.pods: want a list", id="a text for a list"),
    ],
)
def test_what_no_job_of_this_size_says_is_refused_with_what_was_seen_and_wanted(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(WireError) as refused:
        read_report(_changed(path, value), LIMITS)
    assert message in str(refused.value)
    assert len(str(refused.value)) <= 800


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[" * 100_000, id="brackets"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"\xff\xfe\x00" * 1000, id="no text"),
        pytest.param(b'{"type": "JobStatus", "iteration": ' + b"9" * 5000 + b"}", id="more digits than Python reads"),
        pytest.param(b" " * (LIMITS.bytes + 1), id="too long for its job"),
    ],
)
def test_what_is_no_report_at_all_is_refused_in_few_words(body: bytes) -> None:
    with pytest.raises(WireError) as refused:
        read_report(body, LIMITS)
    assert len(str(refused.value)) <= 800


@pytest.mark.parametrize(
    "name", ["a $(touch x)", "a;b", "a\n  next  all is well", "a\x1b[2J", "-a", "a b", "ä", "a`b`"]
)
@pytest.mark.parametrize("path", ["recoveries.0.pod", "recoveries.0.node", "recoveries.0.domain", "pods.0.node"])
def test_names_that_people_copy_into_commands_are_names(path: str, name: str) -> None:
    with pytest.raises(WireError, match="want a name of Kubernetes, got"):
        read_report(_changed(path, name), LIMITS)


def test_texts_are_cut_where_nobody_reads_on() -> None:
    others = (OtherFault(Cause.HARD_TIMEOUT, 3, "digits-2", "x" * 10_000),) * 4
    fault = a_recovery(others=others, detail="x" * 10_000, replaced_by=("digits-1",) * 500, stack=("f" * 1000,) * 500)
    body = json.dumps({**SOUND, "message": "m" * 10_000, "recoveries": [json.loads(encode(fault))]}).encode()
    # A recovery within a report bears no type.
    data = json.loads(body)
    del data["recoveries"][0]["type"]
    found = read_report(json.dumps(data).encode(), LIMITS)
    (recovery,) = found.recoveries
    assert {len(other.detail) for other in recovery.others} == {MAX_OTHER}
    assert (len(found.message), len(recovery.detail), len(recovery.replaced_by)) == (MAX_TEXT, MAX_TEXT, MAX_TAKERS)
    assert sum(map(len, recovery.stack)) <= 24 * 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


@given(path=st.sampled_from(sorted(set(SOUND) | {f"pods.0.{key}" for key in SOUND["pods"][0]})), value=JSON)
def test_whatever_a_field_holds_the_report_is_read_or_refused(path: str, value: Any) -> None:
    message = ""
    try:
        read_report(_changed(path, value), LIMITS)
    except WireError as error:
        message = str(error)
    assert len(message) <= 800


def test_a_refused_report_is_a_condition_and_one_event() -> None:
    world = running_world()
    world.is_reachable = False
    world.is_report_refused = True
    world.unreachable_because = (
        "rendezvous digits-rendezvous-0 sent what is not a status: report.term: want 0 to 9, got 10"
    )
    world.settle()
    assert world.condition("Running") == ("Unknown", "ReportRefused")
    (message,) = world.messages("ReportRefused")
    assert "report.term: want 0 to 9, got 10. " in message
    assert "Training goes on meanwhile" in message


@pytest.mark.parametrize(
    ("spec", "num_pods", "pods", "ranks"),
    [
        pytest.param(SPEC, 0, 22, 44, id="by the spec"),
        pytest.param(SPEC, 100, 216, 432, id="by the pods that are there"),
        pytest.param({}, 0, 18, 18, id="by defaults"),
        pytest.param(
            {"replicas": 10**9, "ranksPerPod": 10**9}, 10**9, 2 * 65_536 + 16, (2 * 65_536 + 16) * 64, id="cap"
        ),
        pytest.param({"replicas": "many", "spares": [], "ranksPerPod": -1}, 0, 18, 18, id="no numbers"),
        pytest.param(None, 0, 18, 18, id="no spec"),
    ],
)
def test_limits_follow_the_size_of_the_job(spec: Any, num_pods: int, pods: int, ranks: int) -> None:
    limits = report_limits(spec, num_pods)
    assert (limits.pods, limits.ranks) == (pods, ranks)
    assert limits.bytes <= 4 << 20
    assert wanted_pods(SPEC) == 3


def test_a_spec_counts_only_as_far_as_pods_were_made() -> None:
    """A spec of 65,536 replicas is a line of YAML: with it a job of one pod reported 24,000, which took 38 MB."""
    spec = {"replicas": 65_536}
    assert [report_limits(spec, *numbers).pods for numbers in ((0, 0), (1, 1), (3, 300), (300, 3))] == [
        16,
        18,
        616,
        616,
    ]
    assert report_limits(SPEC, 0, 65_536).pods == report_limits(SPEC, 0).pods


def test_of_a_report_an_entry_of_each_pod_that_exists_is_kept_and_of_others_a_bounded_number() -> None:
    first = _sound().pods[0]
    existing = [replace(first, pod=f"digits-{number}", uid=f"uid-{number}") for number in range(100)]
    others = [replace(first, pod=f"digits-{number}", uid=f"gone-{number}") for number in range(1000, 1900)]
    again = [replace(first, uid="uid-0", node=f"n-{number}") for number in range(1900, 2000)]
    status = replace(_sound(), pods=(*others, *existing, *again))
    body = encode(status).encode()
    limits = report_limits({"replicas": 2000, "ranksPerPod": 2}, 2000)
    assert read_report(body, limits).pods == status.pods
    known = frozenset(f"uid-{number}" for number in range(3))
    kept = read_report(body, replace(limits, known=known)).pods
    assert [pod.uid for pod in kept if pod.uid in known] == ["uid-0", "uid-1", "uid-2"]
    assert len(kept) == 3 * len(known) + SPARE_PODS
    assert read_report(body, replace(limits, known=frozenset(pod.uid for pod in existing))).pods[-1] in existing


def test_a_worker_takes_reports_of_the_pods_that_its_job_has() -> None:
    async def scenario() -> tuple[ReportLimits, ReportLimits]:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        worker = JobWorker({**a_job(replicas=65_536), "status": {"nextPodOrdinal": 3}}, jobs._shared)
        found = []
        for number in range(3):
            jobs._shared.pods.upsert(trainer(number))
            look = _look(jobs._shared.pods.held(worker.key, worker.uid), "digits", jobs._shared.nodes)
            found.append(worker._report_limits(look, 1.0))
        await jobs.stop()
        return found[0], found[-1]

    few, more = asyncio.run(scenario())
    assert (few.pods, few.known) == (22, frozenset(("pod-0",)))
    assert (more.pods, more.known) == (22, frozenset(("pod-0", "pod-1", "pod-2")))
    assert more.bytes < 2 << 20
