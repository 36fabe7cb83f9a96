"""Follows the status of one job's rendezvous. No answer is a normal state.

The rendezvous' image is the user's, so however it answers, it is asked only as often as a budget allows.
"""

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Callable
from functools import partial

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.adapters.errors import RendezvousUnreachable, ReportRefused
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.adapters.tasks.supervision import end_all, keep_running
from unbroken_operator.decisions.limits.budgets import POLLS, full, spend, wait_s
from unbroken_operator.decisions.limits.report import ABSOLUTE

logger = logging.getLogger(__name__)

MAX_DELAY_S = 5.0
MAX_REFUSED_DELAY_S = 60.0
"""After reports that were refused: they cost the operator something, and change seldom by themselves."""
BYTES_PER_POLL = 128 << 10
"""A report of this size costs as much as another poll."""
LOG_EVERY_S = 60.0
MAX_BUG = 300
"""Characters of an unexpected error that are shown."""
HOLD_S = 0.5
NUM_FAILURES_SHOWN = 5
"""So many failures in a row, 3 seconds of them, are shown to the user: a rendezvous takes a second or two to start."""


class Poller:
    """Holds the last report of the current target. `on_change` is called when anything of it changed."""

    def __init__(
        self,
        client: RendezvousApi,
        on_change: Callable[[], None],
        job: str,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._on_refused = on_refused
        self._logged_at = float("-inf")
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
        self.is_refused = False
        """Whether that is because its report was refused."""
        self.limits = ABSOLUTE
        """Of the job's reports; set by its worker."""
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
        self.is_reachable = self.is_refused = False
        self.unreachable_because = ""
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if target is not None:
            name = f"poll {self._job} {target.pod}"
            self._task = asyncio.create_task(keep_running(name, partial(self._run, target)), name=name)

    def doubt(self) -> None:
        """Take the rendezvous for unreachable until it reports again, which makes the next report news."""
        self.is_reachable = False
        target, self._target = self._target, None
        self.follow(target)

    async def stop(self) -> None:
        """End the polling."""
        task, self._task = self._task, None
        if task is not None:
            await end_all([task])

    async def _run(self, target: RendezvousTarget) -> None:
        num_failures = 0
        after: JobStatus | None = None
        while True:
            await self._turn()
            began_s = time.monotonic()
            try:
                reading = await self._client.status(target, after, self.limits)
            except Exception as problem:
                error = _expected(problem, self._job)
                num_failures += 1
                after = None
                if self._unheard_since is None:
                    self._unheard_since = began_s
                self._fail(error, num_failures)
                most_s = MAX_REFUSED_DELAY_S if isinstance(error, ReportRefused) else MAX_DELAY_S
                await asyncio.sleep(min(0.1 * 2 ** min(num_failures, 10), most_s))
                continue
            num_failures = 0
            after = reading.status
            self._pay(reading.num_bytes)
            self._take(reading.status, target)
            if self._client.is_token_old(target):
                # The worker reads the Secret, and follows with what it finds there.
                self._on_change()

    async def _turn(self) -> None:
        """Wait until the job may cost another poll, a little longer now and then: jobs should not come together."""
        clock = asyncio.get_running_loop().time
        while (pause_s := wait_s(self._polls, POLLS, clock())) > 0:
            await asyncio.sleep(pause_s * (1 + random.random() / 4))
        self._polls = spend(self._polls, POLLS, 1.0, clock())

    def _pay(self, num_bytes: int) -> None:
        """Let a long report cost more than a short one, for which a turn was enough."""
        self._polls = spend(self._polls, POLLS, num_bytes // BYTES_PER_POLL, asyncio.get_running_loop().time())

    def _take(self, report: JobStatus, target: RendezvousTarget) -> None:
        is_news = not self.is_reachable or self.report_from != target.pod_uid or self.report != report
        self.report, self.report_from = report, target.pod_uid
        self.is_reachable, self.unreachable_because, self.is_refused = True, "", False
        self._unheard_since = None
        self.heard_at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if not is_news:
            return
        # Most recoveries are over before anybody could read that they began: the end alone is worth a write.
        hold_s = HOLD_S if report.phase in (JobPhase.INTERRUPTED, JobPhase.PLANNED) else 0.0
        asyncio.get_running_loop().call_later(hold_s, self._on_change)

    def _fail(self, error: RendezvousUnreachable, num_failures: int) -> None:
        was = (self.is_reachable, self.unreachable_because)
        self.is_reachable = False
        is_refused = isinstance(error, ReportRefused)
        if isinstance(error, ReportRefused):
            self._pay(error.num_bytes)
            self._on_refused()
        if (is_refused and not self.is_refused) or (
            num_failures >= NUM_FAILURES_SHOWN and not self.unreachable_because
        ):
            self.unreachable_because, self.is_refused = str(error), is_refused
            self._log(str(error))
        if was != (self.is_reachable, self.unreachable_because):
            self._on_change()

    def _log(self, message: str) -> None:
        """Log it, unless this job had another one lately: it may come and go with each answer."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now_s
            logger.warning("rendezvous does not answer as it should job=%s error=%s", self._job, message)


def _expected(problem: Exception, job: str) -> RendezvousUnreachable:
    """Return what happened as a rendezvous that does not answer, which is tried again; what is a bug is logged."""
    if isinstance(problem, RendezvousUnreachable):
        return problem
    logger.error("poll failed by a bug, trying again job=%s", job, exc_info=problem)
    return RendezvousUnreachable(f"the operator cannot poll it: {type(problem).__name__}: {problem}"[:MAX_BUG])
