"""What a status says of a job that gets nowhere: only while it is to train."""

from dataclasses import replace

from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

from .test_coordinator import RUNNING, SETTINGS, Bench

PATIENT = replace(SETTINGS, timeouts=Timeouts(heartbeat_s=10_000.0))


def test_a_job_that_forms_does_not_stand_still() -> None:
    bench = Bench(PATIENT)
    bench.now_s += 3600.0
    assert (bench.status().phase, bench.status().still_for_s) == (JobPhase.FORMING, 0.0)


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
