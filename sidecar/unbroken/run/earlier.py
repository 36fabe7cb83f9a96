"""What the rendezvous before this one had counted: the run keeps it, as the operator does in a cluster. Pure."""

from unbroken_core.protocol.messages import EarlierRun, JobStatus

_TOLERANCE_S = 1.0
"""Between a report's way here and the next one's."""


class EarlierReports:
    """The last report that knows of all the time, and that of the rendezvous before the present one."""

    def __init__(self) -> None:
        self._last: tuple[JobStatus, float] | None = None
        """And when it came."""
        self._before: tuple[JobStatus, float] | None = None

    def note(self, status: JobStatus, now_s: float) -> None:
        """Take a report. A new rendezvous knows less than the one before, until it was told: that counts as none."""
        if status.ran_for_s is None or status.time is None:
            return
        if self._last is not None and status.term != self._last[0].term:
            before, at_s = self._last
            if status.ran_for_s < (before.ran_for_s or 0.0) + (now_s - at_s) - _TOLERANCE_S:
                return
        self._last = status, now_s

    def end(self) -> None:
        """The rendezvous has ended: the next one is to be told."""
        self._before = self._last

    def told(self, now_s: float) -> EarlierRun | None:
        """Return what the present rendezvous should know of the one before; None where there was none, or no time."""
        if self._before is None:
            return None
        status, at_s = self._before
        ran_for_s = status.ran_for_s or 0.0
        return EarlierRun(max(now_s - at_s, 0.0), min(status.gained_s, ran_for_s), ran_for_s, status.time)
