"""Exit codes with which a script says that no restart would help."""

from dataclasses import replace

import pytest

from unbroken_core.errors import InputError
from unbroken_core.messages import Finish
from unbroken_core.reasons import Cause, JobPhase, Reason, WorkerPhase
from unbroken_core.settings import JobSettings

from .test_coordinator import GONE, RUNNING, SETTINGS, STARTING, Bench, sent

FATAL = replace(SETTINGS, fatal_exit_codes=(3, 78))


def test_a_worker_that_ends_with_such_a_code_ends_the_job_at_once_and_all_are_told() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    finishes = sent(bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78), Finish)
    assert set(finishes) == {"p0", "p1", "p2"}
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.FATAL_EXIT)
    assert status.message == "rank 2 (p1) exited with code 78, after which restart.fatalExitCodes wants no restart"
    assert status.recoveries == (), "no restart is counted"


@pytest.mark.parametrize(
    ("phase", "exit_code"),
    [
        pytest.param(GONE, 1, id="another code"),
        pytest.param(GONE, None, id="a signal, or nobody knows"),
        pytest.param(WorkerPhase.STOPPING, 78, id="a process that has not ended"),
    ],
)
def test_any_other_end_is_recovered(phase: WorkerPhase, exit_code: int | None) -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.PROCESS_EXIT, phase, exit_code=exit_code)
    assert bench.status().phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED)


def test_without_such_codes_every_end_is_recovered() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78)
    assert bench.status().phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED)


def test_a_script_that_gives_up_before_it_is_ready_ends_the_job_as_well() -> None:
    bench = Bench(FATAL)
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    bench.fault("p0", 1, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT
    assert bench.status().message.startswith("p0 worker 1 exited with code 3,")


def test_a_spare_that_gives_up_ends_the_job_too_since_the_script_is_the_same() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p2", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT


def test_time_after_such_an_end_is_not_lost_time_of_the_job() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.now_s += 10.0
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().reason is Reason.FATAL_EXIT
    at_the_end = bench.status().ettr
    bench.now_s += 1000.0
    assert bench.status().ettr == at_the_end == 1.0


def test_a_process_that_was_told_to_end_may_end_as_it_likes() -> None:
    """A worker that hangs is replaced; what its handler of SIGTERM returns is no word of the script."""
    bench = Bench(FATAL)
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.live(FATAL.timeouts.barrier_s + 1)
    place = bench.coordinator._job.members.by_uid["uid-p1"].places[0]
    assert place.replacing is not None, "its end is ordered"
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    assert bench.status().phase is not JobPhase.FAILED


@pytest.mark.parametrize("code", [0, 256, -9])
def test_a_code_that_no_process_can_give_is_refused(code: int) -> None:
    with pytest.raises(InputError, match=f"restart.fatalExitCodes: want codes of 1 to 255, got {code}"):
        JobSettings("j", fatal_exit_codes=(code,))


def test_codes_survive_the_end_of_the_job_only_as_words() -> None:
    bench = Bench(FATAL)
    bench.run("p0", "p1")
    bench.all_are(RUNNING, 0, "p0", "p1")
    bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE, exit_code=3)
    first = bench.status()
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE, exit_code=78)
    assert bench.status().message == first.message, "the first one counts"
