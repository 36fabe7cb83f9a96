"""Causes that say nothing against the job: recoveries from them cost no budget."""

from dataclasses import replace

import pytest

from unbroken_core.protocol.settings import JobSettings, RungBudget
from unbroken_core.protocol.wire import settings_from_json, settings_to_json
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung

from .test_coordinator import GONE, READY, RUNNING, SETTINGS, Bench

ONCE = replace(SETTINGS, rungs=(RungBudget(Rung.POD, 1, 3600.0),), uncounted_causes=(Cause.POD_LEAVING,))


def leave(bench: Bench, pod: str, *survivors: str) -> None:
    """Let a pod be preempted; another one takes its place, and all train on where the job lets them."""
    bench.report(pod, is_leaving=True)
    iteration = bench.status().iteration
    bench.all_are(READY, iteration, *survivors)
    if bench.status().phase is JobPhase.PLANNED:
        bench.all_are(RUNNING, iteration + 1, *survivors)


def test_preemptions_use_up_no_budget() -> None:
    bench = Bench(ONCE)
    bench.run("p0", "p1", "p2")
    leave(bench, "p0", "p1", "p2")
    bench.join("p3")
    leave(bench, "p1", "p2", "p3")
    status = bench.status()
    assert (status.phase, status.restarts_by_rung) == (JobPhase.RUNNING, {"pod": 2})


def test_without_the_wish_they_do() -> None:
    bench = Bench(replace(ONCE, uncounted_causes=()))
    bench.run("p0", "p1", "p2")
    leave(bench, "p0", "p1", "p2")
    bench.join("p3")
    leave(bench, "p1", "p2", "p3")
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.BUDGET_EXHAUSTED)


def test_a_budget_that_faults_have_used_up_does_not_hold_up_a_preemption() -> None:
    bench = Bench(ONCE)
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    bench.all_are(READY, 0, "p1", "p2")
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.join("p3")
    leave(bench, "p1", "p2", "p3")
    assert bench.status().phase is JobPhase.RUNNING


def test_a_rung_that_is_forbidden_stays_so() -> None:
    bench = Bench(replace(ONCE, rungs=(RungBudget(Rung.POD, 0, 3600.0),)))
    bench.run("p0", "p1", "p2")
    leave(bench, "p0", "p1", "p2")
    assert bench.status().phase is JobPhase.FAILED


@pytest.mark.parametrize("causes", [(), (Cause.POD_LEAVING, Cause.NODE_LOST)])
def test_the_causes_reach_the_rendezvous(causes: tuple[Cause, ...]) -> None:
    settings = JobSettings("j", uncounted_causes=causes)
    assert settings_from_json(settings_to_json(settings)) == settings
