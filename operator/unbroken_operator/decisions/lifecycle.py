"""Pure: whether a job runs and is heard, is suspended or is over, and how long it may go on.

    ┌─────────── spec.suspend ───────────┐
    v                                    │
 suspended ──spec.suspend false──> all its pods have ended ──> runs ──report, deadline──> over ──ttl──> deleted

Times of day are the operator's own: it wrote status.startTime and status.completionTime itself, in whole seconds.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.vocabulary.reasons import JobPhase, Reason
from unbroken_operator.api.models import Spec
from unbroken_operator.api.status_models import JobStateWord
from unbroken_operator.decisions.snapshot import PodView, Snapshot

_PHASES = {"Complete": JobPhase.COMPLETE, "Failed": JobPhase.FAILED}
SILENT_S = 5.0
"""Without an answer for so long, nobody says any more that a job trains. A rendezvous starts within a second or two."""
_AT_WORK = (JobStateWord.RUNNING.value, JobStateWord.RECOVERING.value, JobStateWord.UNKNOWN.value)


@dataclass(frozen=True)
class JobOutcome:
    """How the job ended."""

    phase: JobPhase
    """COMPLETE or FAILED."""
    reason: str
    message: str
    is_recorded: bool
    """Whether the stored status says so, too."""

    @property
    def is_ours(self) -> bool:
        """Whether the operator decided it: the pods do not know."""
        return self.reason == Reason.DEADLINE_EXCEEDED.value


def without_ended_report(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without a report that counts no more: of a coordinator that suspension or deadline has ended.

    What it reports while its pods end, such as that none is left, is no fault.
    """
    report = snapshot.report
    if report is None:
        return snapshot
    ended = snapshot.status.get("endedTerm")
    outcome = _recorded_outcome(snapshot)
    is_fenced = is_suspension_recorded(snapshot) or (ended is not None and report.term <= ended)
    if not is_fenced and (outcome is None or not outcome.is_ours):
        return snapshot
    return dataclasses.replace(snapshot, report=None, report_from="", is_reachable=False)


def job_outcome(snapshot: Snapshot, spec: Spec | None = None) -> JobOutcome | None:
    """Return how the job ended, None while it goes on; without a spec there is no deadline."""
    recorded = _recorded_outcome(snapshot)
    if recorded is not None:
        return recorded
    report = snapshot.report
    if report is not None and report.phase in _PHASES.values():
        return JobOutcome(report.phase, report.reason.value, report.message, is_recorded=False)
    left_s = None if spec is None else deadline_left_s(snapshot, spec)
    if spec is None or left_s is None or left_s > 0:
        return None
    message = (
        f"the job has not completed within spec.activeDeadlineSeconds ({spec.active_deadline_seconds}) of its start at "
        f"{snapshot.status['startTime']}"
    )
    return JobOutcome(JobPhase.FAILED, Reason.DEADLINE_EXCEEDED.value, message, is_recorded=False)


def is_suspended(snapshot: Snapshot, spec: Spec) -> bool:
    """Whether no pod may be created: the spec says so, or pods from before a suspension have not ended yet."""
    return spec.suspend or (is_suspension_recorded(snapshot) and bool(ending_pods(snapshot)))


def is_suspension_recorded(snapshot: Snapshot) -> bool:
    """Whether the stored status says that the job is suspended."""
    conditions = snapshot.status.get("conditions") or ()
    return any(item["type"] == "Suspended" and item["status"] == "True" for item in conditions)


def was_suspended(snapshot: Snapshot) -> bool:
    """Whether the stored status says anything about suspension."""
    return any(item["type"] == "Suspended" for item in snapshot.status.get("conditions") or ())


def ending_pods(snapshot: Snapshot) -> tuple[PodView, ...]:
    """Return the job's pods that run, wait or end: all but failed ones, which stay for their logs.

    A pod that has ended and that only a finalizer keeps has freed its node.
    """
    owned = (*snapshot.rendezvous_pods(), *snapshot.trainers())
    there = [pod for pod in owned if not (pod.is_deleting and pod.has_ended and pod.finalizers)]
    return tuple(pod for pod in there if pod.is_deleting or pod.phase != "Failed")


def ended_term(snapshot: Snapshot) -> int:
    """Return the highest term that is known of the job's coordinators, 0 for none."""
    stored = (snapshot.status.get("rendezvous") or {}).get("term") or 0
    return max(stored, snapshot.status.get("endedTerm") or 0, snapshot.report.term if snapshot.report else 0)


def deadline_left_s(snapshot: Snapshot, spec: Spec) -> float | None:
    """Return the seconds that an unsuspended job still has; None when there is no deadline, or it has not started."""
    started = snapshot.status.get("startTime")
    if spec.active_deadline_seconds is None or spec.suspend or not started:
        return None
    return spec.active_deadline_seconds - seconds_between(started, snapshot.now)


def ttl_left_s(snapshot: Snapshot, spec: Spec) -> float | None:
    """Return the seconds until a job that is over is deleted, at least 0; None when it stays."""
    if spec.ttl_seconds_after_finished is None:
        return None
    ended = snapshot.status.get("completionTime") or _ended_at(snapshot.status)
    return max(0.0, spec.ttl_seconds_after_finished - seconds_between(ended, snapshot.now)) if ended else None


def seconds_between(earlier: str, later: str) -> float:
    """Return the seconds from one time (RFC 3339) to another."""
    return (datetime.datetime.fromisoformat(later) - datetime.datetime.fromisoformat(earlier)).total_seconds()


def _recorded_outcome(snapshot: Snapshot) -> JobOutcome | None:
    for item in snapshot.status.get("conditions") or ():
        if item["type"] in _PHASES and item["status"] == "True":
            return JobOutcome(_PHASES[item["type"]], item["reason"], item["message"], is_recorded=True)
    return None


def _ended_at(status: Mapping[str, Any]) -> str:
    ends = [item for item in status.get("conditions") or () if item["type"] in _PHASES and item["status"] == "True"]
    return str(ends[0].get("lastTransitionTime") or "") if ends else ""


def is_unknown(snapshot: Snapshot) -> bool:
    """Return whether a job has run, and nobody knows what it does now."""
    if snapshot.is_reachable or not has_run(snapshot):
        return is_taken_over(snapshot)
    is_unheard = snapshot.report is None and not any(map(_may_answer, snapshot.rendezvous_pods()))
    return is_unheard or is_taken_over(snapshot) or silent_in_s(snapshot) <= 0


def _may_answer(pod: PodView) -> bool:
    return bool(pod.ip) and not (pod.is_terminal or pod.is_deleting or pod.is_standby)


def is_taken_over(snapshot: Snapshot) -> bool:
    """Return whether the last to answer for a job that has run is a new rendezvous without its ranks yet."""
    report = snapshot.report
    is_new = report is not None and report.iteration < 0 and report.phase is JobPhase.FORMING
    return is_new and snapshot.status.get("state") in _AT_WORK


def silent_in_s(snapshot: Snapshot) -> float:
    """Return the seconds until a rendezvous counts as silent that does not answer now."""
    return 0.0 if snapshot.unreachable_because else max(0.0, SILENT_S - snapshot.unheard_for_s)


def look_again_s(snapshot: Snapshot) -> float | None:
    """Return when a rendezvous that does not answer now will count as silent; None when it answers, or does already."""
    is_decided = snapshot.is_reachable or not has_run(snapshot) or is_unknown(snapshot)
    return None if is_decided else silent_in_s(snapshot) or None


def has_run(snapshot: Snapshot) -> bool:
    """Return whether the job has trained since it was started or resumed."""
    if snapshot.status.get("state") in _AT_WORK:
        return True
    return snapshot.report is not None and snapshot.report.iteration >= 0
