"""Follows the status of one job's rendezvous. No answer is a normal state.

The rendezvous' image is the user's, so however it answers, it is asked only as often as a budget allows.
"""

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Callable

from unbroken_core.messages import JobStatus
from unbroken_core.reasons import JobPhase
from unbroken_operator.adapters.errors import RendezvousUnreachable
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.decisions.limits.budgets import POLLS, full, spend, wait_s

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
        self._polls = full(POLLS, 0.0)
        """Of the job, whichever rendezvous is followed."""
        self.report: JobStatus | None = None
        """The last report of any rendezvous of the job."""
        self.report_from = ""
        """Uid of the pod that it came from."""
        self.is_reachable = False
        self.unreachable_because = ""
        self.heard_at = ""
        """Wall-clock time of the last answer of any rendezvous of the job, RFC 3339 UTC; "" before the first."""
        self._unheard_since: float | None = time.monotonic()

    @property
    def unheard_for_s(self) -> float:
        """Seconds since the first attempt that failed, or since there is nobody to be asked; 0 while all is well."""
        return 0.0 if self._unheard_since is None else time.monotonic() - self._unheard_since

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
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
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
            await self._turn()
            began_s = time.monotonic()
            try:
                report = await self._client.status(target, after)
            except RendezvousUnreachable as error:
                num_failures += 1
                after = None
                if self._unheard_since is None:
                    self._unheard_since = began_s
                self._fail(str(error), num_failures)
                await asyncio.sleep(min(0.1 * 2 ** min(num_failures, 10), MAX_DELAY_S))
                continue
            num_failures = 0
            after = report
            self._take(report, target)

    async def _turn(self) -> None:
        """Wait until the job may cost another poll, a little longer now and then: jobs should not come together."""
        clock = asyncio.get_running_loop().time
        while (pause_s := wait_s(self._polls, POLLS, clock())) > 0:
            await asyncio.sleep(pause_s * (1 + random.random() / 4))
        self._polls = spend(self._polls, POLLS, 1.0, clock())

    def _take(self, report: JobStatus, target: RendezvousTarget) -> None:
        is_news = not self.is_reachable or self.report_from != target.pod_uid or self.report != report
        self.report, self.report_from = report, target.pod_uid
        self.is_reachable, self.unreachable_because = True, ""
        self._unheard_since = None
        self.heard_at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
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
