"""What a status says of a job that gets nowhere: only while it is to train."""

from dataclasses import replace

from unbroken_core.coordinator.events import AgentReported
from unbroken_core.protocol.messages import Heartbeat
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

from .test_coordinator import RUNNING, SETTINGS, Bench

PATIENT = replace(SETTINGS, timeouts=Timeouts(heartbeat_s=10_000.0))


def test_a_job_that_forms_does_not_stand_still() -> None:
    bench = Bench(PATIENT)
    bench.now_s += 3600.0
    assert (bench.status().phase, bench.status().still_for_s) == (JobPhase.FORMING, 0.0)


def test_a_step_that_is_told_before_the_job_ran_does_not_make_it_stand_still() -> None:
    bench = Bench(PATIENT)
    bench.join("p0")
    bench.now_s += 10.0
    bench.seq += 1
    bench.step(AgentReported(bench.sessions["p0"], Heartbeat(bench.seq, 3, step_ago_s=1e9)))
    bench.now_s += 10.0
    assert bench.coordinator.progress.still_for_s(bench.now_s) == 0.0
    assert bench.status().still_for_s == 0.0


def test_a_job_stands_still_while_it_runs_or_is_repaired_and_nothing_is_new() -> None:
    bench = Bench(PATIENT)
    bench.run("p0", "p1", "p2")
    bench.worker("p0", 0, RUNNING, step=7)
    assert bench.status().still_for_s == 0.0
    bench.now_s += 2000.0
    assert (bench.status().phase, bench.status().still_for_s) == (JobPhase.RUNNING, 2000.0)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.now_s += 5.0
    assert (bench.status().phase, bench.status().still_for_s) == (JobPhase.INTERRUPTED, 2005.0)


def test_a_job_whose_ranks_have_all_returned_does_not_stand_still() -> None:
    bench = Bench(PATIENT)
    bench.run("p0", "p1", "p2")
    bench.worker("p0", 0, RUNNING, step=7)
    bench.now_s += 2000.0
    bench.all_are(WorkerPhase.COMPLETED, 0, "p0", "p1")
    status = bench.status()
    assert status.phase in (JobPhase.ENDING, JobPhase.COMPLETE)
    assert status.still_for_s == 0.0
