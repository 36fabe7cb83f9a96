"""Plug-ins of the wrapper and the ends of a call, with real workers."""

from pathlib import Path
from typing import Any

import pytest

from unbroken_core.pod.pod_messages import WorkerReport
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

from .agent_double import AgentDouble, Policy

pytestmark = pytest.mark.timeout(400)
"""Above the sum of the double's own limits, which say what they waited for."""


def start(folder: Path, function: str, policy: Any, **variables: str) -> Any:
    """Return a double."""
    files = {"TEST_GO": str(folder / "go"), "TEST_DONE": str(folder / "done")}
    return AgentDouble(folder, function, policy, files | variables)


def calls(job: Any, local_rank: int) -> list[tuple[str, int, str | None]]:
    """Return (plug-in, iteration, exception that it was shown) of one worker, in order."""
    return [
        (event.values["plugin"], event.values["iteration"], event.values["fault"])
        for event in job.events("called")
        if event.values["local"] == str(local_rank)
    ]


def test_plugins_run_in_the_order_of_the_reference(tmp_path: Path) -> None:
    """2.10, 2.14: initialize and health check before the function; abort, finalize and health check after a fault."""
    with start(tmp_path, "plugins", Policy(2, 2)) as job:
        assert set(job.wait_for_end().values()) == {0}
        culprit = next(rank for rank, cause in job.faults() if cause is Cause.EXCEPTION)
        for rank in (0, 1):
            shown = "ValueError" if rank == culprit else None
            assert calls(job, rank) == [
                ("initialize", 0, None),
                ("health_check", 0, None),
                ("abort", 0, None),
                ("finalize", 0, shown),
                ("health_check", 0, shown),
                ("initialize", 1, None),
                ("health_check", 1, None),
                ("completion", 1, None),
            ]


@pytest.mark.parametrize("fail", ["abort", "completion", "initialize@1"])
def test_failure_that_the_reference_tolerates_is_tolerated(tmp_path: Path, fail: str) -> None:
    """2.20: a bad abort and a bad completion change nothing; a bad initialize is one more fault."""
    with start(tmp_path, "plugins", Policy(2, 2), TEST_FAIL=fail) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert [event.values["value"] for event in job.events("returned")] == [2, 2]
        assert job.iteration == (2 if fail == "initialize@1" else 1)


@pytest.mark.parametrize(
    ("fail", "error", "cause", "fault"),
    [
        ("finalize@0", "OSError", "ValueError", Cause.BASE_EXCEPTION),
        ("health_check@0", "HealthCheckError", "OSError", Cause.UNHEALTHY),
    ],
)
def test_worker_that_cannot_go_on_leaves_and_the_others_restart(
    tmp_path: Path, fail: str, error: str, cause: str, fault: Cause
) -> None:
    """2.14, 2.18: a failed finalize is raised without a restart, a failed health check as HealthCheckError."""
    with start(tmp_path, "health_fails_after_fault", Policy(3, 3), TEST_FAIL=fail) as job:
        assert sorted(job.wait_for_end().values()) == [0, 0, 1]
        (raised,) = job.events("raised")
        assert (raised.values["error"], raised.values["cause"]) == (error, cause)
        assert [event.values["value"] for event in job.events("returned")] == [2, 2]
        assert fault in {cause for _, cause in job.faults()}
        assert [event.values["plugin"] for event in job.events("called")].count("terminate") == 1


def test_retry_controller_runs_the_function_so_often_and_no_more(tmp_path: Path) -> None:
    """2.20: max_iterations=4 runs it exactly four times, then RestartAbort."""
    with start(tmp_path, "limited", Policy(1, 1)) as job:
        job.wait_for_end()
        assert len(job.events("ran")) == 4
        (aborted,) = job.events("aborted")
        assert "want an iteration below 4, got 4" in aborted.values["text"]


def test_failed_job_raises_restart_abort_in_every_worker(tmp_path: Path) -> None:
    """Release with FAILED, in the middle of a function."""
    with start(tmp_path, "limited", Policy(2, 2, does_interrupt=False)) as job:
        job.wait_for_event("ran", 2)
        job.wait_for(lambda: len(job.faults()) == 2, "both faults")

        async def fail() -> None:
            job.release(JobPhase.FAILED, "budget exhausted")

        job.call(fail())
        job.wait_for_end()
        assert {event.values["text"] for event in job.events("aborted")} == {"the job has failed: budget exhausted"}


def test_second_call_in_one_process_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """2.3: the job is complete after the first; a call that returned None at once would look like a success."""
    with start(tmp_path, "calls_twice", Policy(1, 1)) as job:
        job.wait_for_event("first")
        assert set(job.wait_for_end().values()) == {0}
        (again,) = job.events("second")
        assert again.values["threads"] == ["MainThread"]
        with_group, without = again.values["refused"]
        assert "this is the second call in this process, and a process group is open. Call both" in with_group
        assert without.startswith("RestartError: wrapped function: this is the second call in this process")
        assert len(job.events("first") + job.events("second")) == 2


def test_wrapped_functions_inside_of_a_wrapped_one_restart_with_it(tmp_path: Path) -> None:
    """2.3, 2.20: several in one process; a fault in one restarts all, also where the code around it swallows it."""
    with start(tmp_path, "wrapped_inside", Policy(2, 2), TEST_ATTEMPTS="2") as job:
        assert set(job.wait_for_end().values()) == {0}
        assert [event.values["value"] for event in job.events("returned")] == [[4, 4], [4, 4]]
        assert job.iteration == 2
        assert not job.events("seen outside")
        details = [report.fault.detail for _, report in job.reports if report.fault is not None]
        assert set(details) == {"ValueError: injected inside"}
        of_rank_1 = [
            (event.values["plugin"], event.values["iteration"])
            for event in job.events("called")
            if event.values["local"] == "1"
        ]
        begin = ["first begins", "second begins"]
        end = ["second ends", "outer ends"]
        assert of_rank_1 == [
            (plugin, iteration) for iteration in range(3) for plugin in (begin if iteration == 2 else begin + end)
        ]


def test_wrapped_functions_use_the_group_of_the_wrapped_one_around_them(tmp_path: Path) -> None:
    with start(tmp_path, "wrapped_inside_a_group", Policy(2, 2)) as job:
        assert set(job.wait_for_end().values()) == {0}
        assert [event.values["value"] for event in job.events("returned")] == [[2, 2, 2, 2], [2, 2, 2, 2]]
        details = [report.fault.detail for _, report in job.reports if report.fault is not None]
        assert set(details) == {"ValueError: injected inside"}


def test_plan_against_the_wrappers_policy_is_not_run(tmp_path: Path) -> None:
    """2.8: the end names the setting that is missing in the job's spec."""
    with start(tmp_path, "plan_is_too_large", Policy(2, 2)) as job:
        job.wait_for_end()
        texts = {event.values["text"] for event in job.events("aborted")}
        assert "rank_assignment: MaxActiveWorldSize: want at most 1 active ranks, got 2; set world.maxRanks to 1" in (
            text.removesuffix(" in the job's spec") for text in texts
        )
        assert {(cause, rank) for rank, cause in job.faults()} <= {(Cause.BASE_EXCEPTION, 0), (Cause.BASE_EXCEPTION, 1)}


def test_reports_tell_the_whole_life_of_a_worker(tmp_path: Path) -> None:
    """The contract with the agent: endpoint in READY only, fault in STOPPING, then READY again with a new endpoint."""
    with start(tmp_path, "limited", Policy(1, 1)) as job:
        job.wait_for_end()
        reports: list[WorkerReport] = [report for _, report in job.reports]
        ready, stopping = WorkerPhase.READY, WorkerPhase.STOPPING
        phases = [(report.phase, report.iteration) for report in reports[:4]]
        assert phases == [(ready, -1), (WorkerPhase.RUNNING, 0), (stopping, 0), (ready, 0)]
        ports = [report.port for report in reports if report.phase is ready]
        assert all(ports)
        assert len(set(ports)) == len(ports)
        assert {report.port for report in reports if report.phase is not ready} == {0}
        assert [report.fault is not None for report in reports[:4]] == [False, False, True, False]
