"""Follows the status of one job's rendezvous. No answer is a normal state."""

import asyncio
import logging
from collections.abc import Callable

from unbroken_core.messages import JobStatus
from unbroken_core.reasons import JobPhase
from unbroken_operator.adapters.errors import RendezvousUnreachable
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget

logger = logging.getLogger(__name__)

MAX_DELAY_S = 5.0
HOLD_S = 0.5
NUM_FAILURES_SHOWN = 5
"""So many failures in a row, 3 seconds of them, are shown to the user: a rendezvous takes a second or two to start."""


class Poller:
    """Holds the last report of the current target. `on_change` is called when anything of it changed."""

    def __init__(self, client: RendezvousApi, on_change: Callable[[], None], job: str) -> None:
        self._client = client
        self._on_change = on_change
        self._job = job
        self._target: RendezvousTarget | None = None
        self._task: asyncio.Task[None] | None = None
        self.report: JobStatus | None = None
        """The last report of any rendezvous of the job."""
        self.report_from = ""
        """Uid of the pod that it came from."""
        self.is_reachable = False
        self.unreachable_because = ""

    @property
    def target(self) -> RendezvousTarget | None:
        """The rendezvous that is followed now."""
        return self._target

    def follow(self, target: RendezvousTarget | None) -> None:
        """Follow another rendezvous, or none."""
        if target == self._target:
            return
        self._target = target
        self.is_reachable = False
        self.unreachable_because = ""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if target is not None:
            self._task = asyncio.create_task(self._run(target), name=f"poll {self._job} {target.pod}")

    def doubt(self) -> None:
        """Take the rendezvous for unreachable until it reports again, which makes the next report news."""
        self.is_reachable = False
        target, self._target = self._target, None
        self.follow(target)

    async def stop(self) -> None:
        """End the polling."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, target: RendezvousTarget) -> None:
        num_failures = 0
        after: JobStatus | None = None
        while True:
            try:
                report = await self._client.status(target, after)
            except RendezvousUnreachable as error:
                num_failures += 1
                after = None
                self._fail(str(error), num_failures)
                await asyncio.sleep(min(0.1 * 2 ** min(num_failures, 10), MAX_DELAY_S))
                continue
            num_failures = 0
            after = report
            self._take(report, target)
            if self._client.is_token_old(target):
                # The worker reads the Secret, and follows with what it finds there.
                self._on_change()

    def _take(self, report: JobStatus, target: RendezvousTarget) -> None:
        is_news = not self.is_reachable or self.report_from != target.pod_uid or self.report != report
        self.report, self.report_from = report, target.pod_uid
        self.is_reachable, self.unreachable_because = True, ""
        if not is_news:
            return
        # Most recoveries are over before anybody could read that they began: the end alone is worth a write.
        hold_s = HOLD_S if report.phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED) else 0.0
        asyncio.get_running_loop().call_later(hold_s, self._on_change)

    def _fail(self, message: str, num_failures: int) -> None:
        was = (self.is_reachable, self.unreachable_because)
        self.is_reachable = False
        if num_failures >= NUM_FAILURES_SHOWN and not self.unreachable_because:
            self.unreachable_because = message
            logger.warning("rendezvous does not answer job=%s error=%s", self._job, message)
        if was != (self.is_reachable, self.unreachable_because):
            self._on_change()
