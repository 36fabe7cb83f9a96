"""Log rules in a running job: what they end, restart or name is the job's own wish, whoever reports it."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import (
    GONE,
    READY,
    RUNNING,
    SETTINGS,
    STARTING,
    STOPPING,
    Bench,
    sent,
)

from unbroken_core.coordinator.events import Action, AgentReported
from unbroken_core.protocol.log_rules.rules import LogRule, LogVerdict
from unbroken_core.protocol.messages import Activity, Fault, Finish, Interrupt, Report
from unbroken_core.protocol.settings import HealthMode, JobSettings
from unbroken_core.vocabulary.findings import LOG_LINES, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause, Doing, JobPhase, Reason, WorkerPhase

RULES = (
    LogRule("end", "x", LogVerdict.FATAL_STOP),
    LogRule("again", "x", LogVerdict.FATAL_RESTART),
    LogRule("still", "x", LogVerdict.HANG, every_s=60.0),
    LogRule("io", "x", LogVerdict.SLOW),
)
WITH_RULES = replace(SETTINGS, log_rules=RULES)


def find(
    bench: Bench, pod: str, rule: str, phase: WorkerPhase = RUNNING, cause: Cause = Cause.LOG_RULE
) -> list[Action]:
    """Let the agent of a pod say what a rule has found of its first worker."""
    detail = f"log rule {rule}: a line matches: step {bench.seq} is lost"
    fault = Fault(cause, bench.status().iteration, detail, rule=rule, is_hang=cause is Cause.SOFT_TIMEOUT)
    return bench.worker(pod, 0, phase, fault)


@pytest.mark.parametrize("phase", [RUNNING, STOPPING, GONE])
def test_a_line_that_stops_the_job_ends_it_with_the_rule_and_the_line(phase: WorkerPhase) -> None:
    bench = Bench(WITH_RULES)
    bench.run("p0", "p1", "p2")
    iteration = bench.status().iteration
    actions = find(bench, "p1", "end", phase)
    assert set(sent(actions, Finish)) == {"p0", "p1", "p2"}
    stops = sent(actions, Interrupt)
    assert set(stops) == {"p0", "p1", "p2"}, "no rank trains on until its launcher ends it"
    assert {(stop.iteration, stop.cause, stop.rank, stop.pod) for stop in stops.values()} == {
        (iteration, Cause.LOG_RULE, 2, "p1")
    }
    status = bench.status()
    assert (status.phase, status.reason, status.recoveries) == (JobPhase.FAILED, Reason.FATAL_LINE, ())
    assert status.message.startswith("rank 2 (p1): log rule end: a line matches: step ")


@pytest.mark.parametrize("phase", [READY, STARTING])
def test_a_line_that_stops_the_job_ends_it_after_its_worker_or_its_successor_is_without_a_rank(
    phase: WorkerPhase,
) -> None:
    bench = Bench(WITH_RULES)
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    assert bench.status().phase is JobPhase.INTERRUPTED
    find(bench, "p2", "end", phase)
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.FATAL_LINE)


@pytest.mark.parametrize("iteration", [-1, 0])
def test_no_line_of_a_worker_that_never_had_a_rank_ends_a_job_that_has_never_run(iteration: int) -> None:
    bench = Bench(WITH_RULES)
    fault = Fault(Cause.LOG_RULE, iteration, "log rule end: a line matches: x", rule="end")
    states = bench.states["p0"] = [replace(state, fault=fault) for state in bench.workers(READY)]
    bench.join("p0", workers=tuple(states))
    assert bench.status().phase is JobPhase.FORMING


@pytest.mark.parametrize(
    ("settings", "rule", "cause"),
    [
        pytest.param(WITH_RULES, "again", Cause.LOG_RULE, id="a rule that restarts"),
        pytest.param(WITH_RULES, "unknown", Cause.LOG_RULE, id="a rule that the job does not have"),
        pytest.param(WITH_RULES, "end", Cause.EXCEPTION, id="another cause"),
        pytest.param(SETTINGS, "end", Cause.LOG_RULE, id="a job without rules"),
    ],
)
def test_nothing_else_that_a_pod_says_of_a_line_ends_the_job(settings: JobSettings, rule: str, cause: Cause) -> None:
    bench = Bench(settings)
    bench.run("p0", "p1", "p2")
    find(bench, "p1", rule, cause=cause)
    assert bench.status().phase is JobPhase.INTERRUPTED
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.rank) == (cause, 2)
    assert recovery.detail.startswith(f"log rule {rule}: a line matches: ")


@pytest.mark.parametrize(("limit", "most"), [(None, 10), (3, 3)])
def test_a_rule_that_always_matches_ends_the_job_at_the_limit_whatever_the_lines_say(
    limit: int | None, most: int
) -> None:
    bench = Bench(replace(WITH_RULES, no_progress_limit=limit))
    bench.run("p0", "p1")
    for number in range(most + 1):
        assert bench.status().phase is not JobPhase.FAILED, number
        bench.all_are(RUNNING, bench.status().iteration, "p0", "p1")
        find(bench, "p0", "again")
        iteration = bench.status().iteration
        bench.renew(bench.all_are(READY, iteration, "p0", "p1"))
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)
    assert "log rule again" in bench.status().message


def test_a_rule_that_says_hang_names_who_hangs_by_what_all_ranks_do_and_not_who_should_have_printed() -> None:
    bench = Bench(WITH_RULES)
    bench.run("p0", "p1")
    iteration = bench.status().iteration
    find(bench, "p0", "still", cause=Cause.SOFT_TIMEOUT)
    waits = Activity(iteration, Doing.COLLECTIVE, "all_reduce", 50.0)
    reads = Activity(iteration, Doing.IO, "train.py:41 load", 50.0)
    for pod in ("p0", "p1"):
        states = bench.workers(READY, iteration)
        doing = [reads if (pod, number) == ("p1", 1) else waits for number in range(len(states))]
        bench.states[pod] = [replace(state, activity=each) for state, each in zip(states, doing, strict=True)]
        bench.report(pod)
    (recovery,) = bench.status().recoveries
    assert recovery.cause is Cause.SOFT_TIMEOUT
    assert recovery.rank != 0
    assert recovery.detail.startswith("log rule still: a line matches: ")
    assert "; " in recovery.detail


SLOW = Finding(LOG_LINES, "io", Verdict.DEGRADED, message="rank 0: a line matches: retry")


def tell(bench: Bench, *findings: Finding) -> None:
    bench.seq += 1
    report = Report(bench.seq, tuple(bench.states["p0"]), health=Health(findings))
    bench.step(AgentReported(bench.sessions["p0"], report))


@pytest.mark.parametrize("mode", list(HealthMode))
def test_what_is_slow_by_a_rule_is_told_in_any_mode_and_speaks_against_nobody(mode: HealthMode) -> None:
    bench = Bench(replace(WITH_RULES, health=mode))
    bench.run("p0", "p1", "p2")
    tell(bench, SLOW)
    health = bench.status().health
    assert health is not None
    assert [(item.pod, item.finding) for item in health.findings] == [("p0", SLOW)]
    assert health.num_pods == 0, "no watch has said anything"
    table = bench.coordinator._job.health
    assert (dict(table.strikes), dict(table.worn)) == ({}, {})
    tell(bench)
    assert bench.status().health is None


def test_a_pod_that_forges_what_is_slow_says_no_more_than_that() -> None:
    bench = Bench(replace(WITH_RULES, health=HealthMode.ACT))
    bench.run("p0", "p1", "p2")
    tell(bench, replace(SLOW, verdict=Verdict.FATAL), replace(SLOW, entity="unknown"), replace(SLOW, entity="end"))
    health = bench.status().health
    assert health is not None
    assert [item.finding for item in health.findings] == [SLOW]
    assert dict(bench.coordinator._job.health.strikes) == {}
