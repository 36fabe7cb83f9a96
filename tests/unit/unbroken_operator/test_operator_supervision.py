"""No task ends in silence: what it raises is logged by name, and it begins again."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from typing import cast

import pytest

from unbroken_core.protocol.messages import JobStatus
from unbroken_operator.__main__ import STATUS_NOT_ENDED
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget, SoundReport
from unbroken_operator.adapters.tasks.supervision import MAX_S, end_all, keep_running
from unbroken_operator.decisions.limits.report import ReportLimits
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.jobs import Jobs
from unbroken_operator.worker import JobWorker

from .operator_world import a_job, running_world
from .virtual_time import run

BUGS = [OverflowError("number too large"), LookupError("unknown encoding: x"), ValueError("newline in header")]


def test_a_task_that_fails_is_logged_and_begun_again_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    began_at: list[float] = []

    async def work() -> None:
        began_at.append(asyncio.get_running_loop().time())
        if len(began_at) < 10:
            raise OverflowError("number too large")

    run(keep_running("poll ml/digits", work))
    pauses = [after - before for before, after in itertools.pairwise(began_at)]
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_S, MAX_S, MAX_S])
    assert len(caplog.records) == 9
    assert "task=poll ml/digits" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info is not None


def test_a_task_that_is_cancelled_ends() -> None:
    async def scenario() -> None:
        async def wait() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(keep_running("x", wait))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(scenario())


class Buggy:
    """A client that fails in ways that nobody expects, then answers."""

    def __init__(self, bug: Exception) -> None:
        self._bug: Exception | None = bug
        self.num_asked = 0

    async def status(self, _target: RendezvousTarget, _after: JobStatus | None, _limits: ReportLimits) -> SoundReport:
        """See RendezvousApi."""
        self.num_asked += 1
        if self.num_asked <= 10 and self._bug is not None:
            raise self._bug
        report = running_world().report
        assert report is not None
        return SoundReport(report, 100)


@pytest.mark.parametrize("bug", BUGS, ids=["a huge number", "an unknown encoding", "a token of two lines"])
def test_polling_goes_on_after_a_bug_that_is_logged_with_its_job(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these ended the polling of a job without a word."""

    async def scenario() -> None:
        poller = Poller(cast(RendezvousApi, Buggy(bug)), lambda: None, "ml/digits")
        poller.follow(RendezvousTarget("uid", "digits-rendezvous-0", "127.0.0.1", "token"))
        await asyncio.sleep(10.0)
        assert type(bug).__name__ in poller.unreachable_because
        await asyncio.sleep(60.0)
        assert poller.is_reachable
        await poller.stop()

    run(scenario())
    assert any(record.exc_info and "job=ml/digits" in record.getMessage() for record in caplog.records)


class Nothing:
    """An API server that lists nothing."""

    async def list(self, _path: str, _selector: str = "", *, read: object) -> tuple[list[object], str]:
        """See Kube."""
        await asyncio.Event().wait()
        return [], ""


def test_a_jobs_worker_that_fails_outside_of_a_plan_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_runs = 0

    async def fail(_worker: object) -> None:
        nonlocal num_runs
        num_runs += 1
        raise OverflowError("number too large")

    monkeypatch.setattr("unbroken_operator.jobs.JobWorker.run", fail)

    async def scenario() -> None:
        client = cast(RendezvousApi, Buggy(BUGS[0]))
        metrics = OperatorMetrics()
        jobs = Jobs(cast(Kube, Nothing()), client, OperatorOptions("sidecar:1"), metrics, ("ml",))
        jobs.observe("ADDED", a_job())
        await asyncio.sleep(10.0)
        assert num_runs == 4
        assert metrics.registry.get_sample_value("unbroken_operator_reconcile_errors_total") == 4
        await jobs.stop()

    run(scenario())
    assert "task=job ml/digits" in caplog.records[0].getMessage()


async def _deaf() -> None:
    """Lose the first cancellation, as `asyncio.wait_for` does when it comes together with what it waits for."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


def test_a_task_ends_though_its_first_cancellation_was_lost() -> None:
    async def scenario() -> None:
        tasks = [asyncio.create_task(_deaf()) for _ in range(3)]
        tasks.append(asyncio.create_task(asyncio.sleep(0)))
        await asyncio.sleep(1.0)
        await end_all(tasks)
        assert [task.cancelled() for task in tasks] == [True, True, True, False]

    run(scenario())


def test_all_jobs_end_though_one_of_them_is_woken_at_that_very_moment() -> None:
    """Before, the operator waited for it for ever, and was killed without having given its lease back."""

    async def scenario() -> None:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        worker = JobWorker(a_job(), jobs._shared)
        jobs._workers["ml", "digits"] = (worker, asyncio.create_task(_deaf()))
        await asyncio.sleep(1.0)
        async with asyncio.timeout(60):
            await jobs.stop()

    run(scenario())


def test_a_process_that_does_not_end_in_time_says_what_it_does_and_ends() -> None:
    code = "import unbroken_operator.__main__ as m; m._end_in_time(0.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == STATUS_NOT_ENDED
    assert "did not end in time" in done.stderr
    assert "_end_in_time" in done.stderr.partition("most recent call first")[2]
