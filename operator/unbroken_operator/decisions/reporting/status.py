"""Pure: the status of a job, from what is stored, what the rendezvous reports and what the API server shows."""

from collections.abc import Mapping
from typing import Any

from unbroken_core.protocol.messages import Earlier, JobStatus, Recovery
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import JobPhase, Role
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_HISTORY, JobStateWord
from unbroken_operator.decisions.actions import Ordinals
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec, accepted_facts
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.lifecycle import ended_term, has_run, is_suspension_recorded, is_taken_over, is_unknown
from unbroken_operator.decisions.limits.fitting import fitted
from unbroken_operator.decisions.reporting.conditions import condition_states, merge_conditions
from unbroken_operator.decisions.snapshot import Snapshot
from unbroken_operator.decisions.suspects import next_suspects, pardoned
from unbroken_operator.decisions.time_spent import is_old, knows_earlier, time_of

_STATES = {
    JobPhase.FORMING: JobStateWord.FORMING,
    JobPhase.RUNNING: JobStateWord.RUNNING,
    JobPhase.INTERRUPTED: JobStateWord.RECOVERING,
    JobPhase.PLANNED: JobStateWord.RECOVERING,
    JobPhase.ENDING: JobStateWord.RUNNING,
    JobPhase.COMPLETE: JobStateWord.COMPLETE,
    JobPhase.FAILED: JobStateWord.FAILED,
}
ETTR_STEP = 0.05
"""A change of this size is worth its own write; it grows rare as the job grows older."""
_NO_RESTARTS: dict[str, Any] = {"total": 0, "byRung": {}, "byCause": {}}


def next_status(
    snapshot: Snapshot, verdict: ValidSpec | InvalidSpec, assessment: Assessment | None, ordinals: Ordinals
) -> dict[str, Any]:
    """Return the whole status as it should be stored, within the CRD's limits."""
    status = dict(snapshot.status)
    generation = snapshot.job["metadata"].get("generation") or 0
    status["observedGeneration"] = generation
    status["conditions"] = merge_conditions(
        status.get("conditions") or (), condition_states(snapshot, verdict, assessment), generation, snapshot.now
    )
    if snapshot.options.lease:
        status["lease"] = snapshot.options.lease
    else:
        status.pop("lease", None)
    report = snapshot.report
    if isinstance(verdict, ValidSpec):
        status.setdefault("accepted", accepted_facts(verdict.spec))
        # Not lower than before: those that were reserved and not used are in this operator's memory alone.
        status["nextPodOrdinal"] = max(ordinals.pod, snapshot.reserved_pod_ordinals)
        status["nextRendezvousOrdinal"] = ordinals.rendezvous
        status["selector"] = (
            f"{layout.JOB_LABEL}={snapshot.name},{layout.COMPONENT_LABEL}={layout.TRAINER},"
            f"{layout.ROLE_LABEL}={Role.ACTIVE.value}"
        )
    if report is not None and snapshot.report_from:
        mirrored = _mirrored(snapshot, report)
        # A new rendezvous counts from the last iteration on, once it knows the ranks.
        status |= {key: value for key, value in mirrored.items() if key != "iteration" or not is_taken_over(snapshot)}
    if assessment is not None:
        suspects = pardoned(snapshot, assessment.alive)
        if suspects is not None:
            status["suspectNodes"] = suspects
        status = _with_lifecycle(status, snapshot, assessment)
    status["state"] = _state(status, snapshot, verdict).value
    if status["state"] == JobStateWord.UNKNOWN.value:
        # How many there were is in the condition, with the time: a number would be read as one of now.
        status.pop("ranks", None)
    return fitted(status)


def _with_lifecycle(status: dict[str, Any], snapshot: Snapshot, assessment: Assessment) -> dict[str, Any]:
    """Return the status with what follows from start, suspension and end."""
    outcome = assessment.outcome
    if outcome is not None and outcome.is_recorded:
        return status
    present = () if assessment.is_suspended else assessment.alive
    status["replicas"] = sum(assessment.role(pod) is Role.ACTIVE for pod in present)
    if outcome is not None:
        status["completionTime"] = snapshot.now
        if outcome.is_ours and "ranks" in status:
            status["ranks"] = {"active": 0, "spare": 0, "lost": 0}
    elif not assessment.is_suspended:
        status.setdefault("startTime", snapshot.now)
    else:
        status.pop("startTime", None)
        if "ranks" in status:
            status["ranks"] = {"active": 0, "spare": 0, "lost": 0}
        if not is_suspension_recorded(snapshot):
            status["endedTerm"] = ended_term(snapshot)
    return status


def earlier(snapshot: Snapshot, settings: JobSettings) -> Earlier:
    """Return what a new rendezvous has to know of those before it: else it would use their numbers again."""
    status = snapshot.status
    history = status.get("history") or ()
    iterations = [status.get("iteration"), *(item.get("iteration") for item in history)]
    return Earlier(
        term=ended_term(snapshot),
        iteration=max((number for number in iterations if number is not None), default=-1),
        uses=tuple(use for cause, use in snapshot.memory.uses if settings.counts(cause)),
    )


def status_patch(
    before: Mapping[str, Any], after: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON merge patch from one status to the other; empty when there is nothing worth a write.

    ETTR and time move all the time: a small change is written together with something else, or once in a while.
    `stored` is what the API server holds, where not all of it is believed: what is not goes at once.
    """
    patch = _difference(before, after)
    if stored is not None and stored != before:
        return _difference(stored, after)
    if set(patch) <= {"ettr", "time"} and not is_old(before, after):
        moved = abs((before.get("ettr") or 0.0) - (after.get("ettr") or 0.0))
        return patch if moved >= ETTR_STEP else {}
    return patch


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        seen = before.get(key)
        if isinstance(value, dict) and isinstance(seen, dict):
            inner = _difference(seen, value)
            if inner:
                patch[key] = inner
        elif value != seen:
            patch[key] = value
    return patch


def _state(status: Mapping[str, Any], snapshot: Snapshot, verdict: ValidSpec | InvalidSpec) -> JobStateWord:
    report = snapshot.report
    held = {item["type"] for item in status["conditions"] if item["status"] == "True"}
    for is_it, state in (
        ("Complete" in held, JobStateWord.COMPLETE),
        ("Failed" in held, JobStateWord.FAILED),
        (isinstance(verdict, InvalidSpec) and not has_run(snapshot), JobStateWord.INVALID),
        ("Suspended" in held, JobStateWord.SUSPENDED),
        (is_unknown(snapshot), JobStateWord.UNKNOWN),
    ):
        if is_it:
            return state
    if report is None:
        stored = status.get("state")
        is_known = stored in (JobStateWord.RUNNING.value, JobStateWord.RECOVERING.value, JobStateWord.UNKNOWN.value)
        return JobStateWord(stored) if is_known else JobStateWord.FORMING
    if report.phase is JobPhase.PLANNED and not report.recoveries:
        return JobStateWord.FORMING
    return _STATES[report.phase]


def _mirrored(snapshot: Snapshot, report: JobStatus) -> dict[str, Any]:
    before, pod_uid = snapshot.status, snapshot.report_from
    earlier = _earlier_restarts(before, report, pod_uid)
    by_rung = _sum(earlier["byRung"], report.restarts_by_rung)
    result: dict[str, Any] = {
        "iteration": report.iteration,
        "ranks": {"active": report.world_size, "spare": report.spare_ranks, "lost": report.lost_ranks},
        "restarts": {
            "total": sum(by_rung.values()),
            "byRung": by_rung,
            "byCause": _sum(earlier["byCause"], report.restarts_by_cause),
        },
        "rendezvous": {"podUid": pod_uid, "term": report.term, "earlier": earlier},
    }
    # Of its own time alone a new rendezvous would say 1: it stays at what was known of the whole job.
    if report.ettr is not None and knows_earlier(snapshot, report):
        result["ettr"] = round(report.ettr, 4)
    time = time_of(snapshot, report)
    if time is not None:
        result["time"] = time
    if report.recoveries:
        last = report.recoveries[-1]
        result["lastInterruption"] = _interruption(last)
        ended = [item for item in report.recoveries if item.ended_at]
        if ended:
            result["lastRecovery"] = _record(ended[-1], report.term)
        result["history"] = _history(before.get("history") or (), report)
        suspects = next_suspects(before, report, snapshot.now, snapshot.hosts)
        if suspects:
            result["suspectNodes"] = suspects
    return result


def _earlier_restarts(before: Mapping[str, Any], report: JobStatus, pod_uid: str) -> dict[str, Any]:
    """Return the recoveries that other coordinators counted: each starts to count at zero."""
    stored = before.get("rendezvous")
    if stored is None:
        return _NO_RESTARTS
    if (stored["podUid"], stored["term"]) == (pod_uid, report.term):
        return dict(stored["earlier"])
    return dict(before.get("restarts") or _NO_RESTARTS)


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in sorted({*left, *right})}


def _interruption(recovery: Recovery) -> dict[str, Any]:
    return _without_empty(
        {
            "time": recovery.started_at,
            "cause": recovery.cause.value,
            "rank": recovery.rank,
            "pod": recovery.pod,
            "node": recovery.node,
            "domain": recovery.domain,
            "detail": recovery.detail[:2000],
        }
    )


def _record(recovery: Recovery, term: int) -> dict[str, Any]:
    return _without_empty(
        {
            "term": term,
            "number": recovery.number,
            "cause": recovery.cause.value,
            "rung": recovery.rung and recovery.rung.value,
            "rank": recovery.rank,
            "pod": recovery.pod,
            "node": recovery.node,
            "replacedBy": list(recovery.replaced_by[:64]),
            "iteration": max(recovery.iteration_after, 0),
            "startedAt": recovery.started_at,
            "endedAt": recovery.ended_at or None,
            "seconds": {phase: round(seconds, 4) for phase, seconds in recovery.phase_s.items()},
        }
    )


def _history(stored: Any, report: JobStatus) -> list[dict[str, Any]]:
    # What a rendezvous did not live to finish, the next one has finished and tells: no recovery lasts for ever.
    is_over = report.phase is JobPhase.RUNNING
    kept = (item for item in stored if item.get("endedAt") or item["term"] == report.term or not is_over)
    records = {(item["term"], item["number"]): dict(item) for item in kept}
    # Without its beginning a recovery has no place in the list: only a rendezvous that is not ours sends such.
    told = (item for item in report.recoveries if item.started_at)
    records |= {(report.term, item.number): _record(item, report.term) for item in told}
    return sorted(records.values(), key=lambda item: (item["startedAt"], item["number"]))[-MAX_HISTORY:]


def _without_empty(item: dict[str, Any]) -> dict[str, Any]:
    # Kubernetes 1.20 takes an empty string for null and refuses the whole status.
    return {key: value for key, value in item.items() if value is not None and value != ""}
