"""Pure: what is said of a job that has run while nobody knows what it does now.

    no answer for SILENT_S        its rendezvous is away: pod pending, node lost, network cut
    nobody to be asked            no rendezvous pod runs, and this operator has not heard of the job yet
    an answer without a world     a new rendezvous, to which the pods have not come back yet

Its training may go on in all cases. So it is neither Running nor at rest: it is Unknown, with what was known last.
"""

from collections.abc import Iterator

from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role
from unbroken_operator.api.status_models import ConditionType, JobStateWord
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.reporting.finding import Finding, cut, listed
from unbroken_operator.decisions.snapshot import PodView, Snapshot

SILENT_S = 5.0
"""Without an answer for so long, nobody says any more that a job trains. A rendezvous starts within a second or two."""
_KNOWN_BY_THE_RENDEZVOUS = (
    ConditionType.RUNNING,
    ConditionType.RECOVERING,
    ConditionType.DEGRADED,
    ConditionType.SPARES_EXHAUSTED,
    ConditionType.SPARES_SPREAD,
)
_AT_WORK = (JobStateWord.RUNNING.value, JobStateWord.RECOVERING.value, JobStateWord.UNKNOWN.value)


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


def unknown(snapshot: Snapshot, assessment: Assessment | None) -> Iterator[Finding]:
    """Yield the conditions of such a job: Unknown for all that only its rendezvous knows."""
    stored = {item["type"] for item in snapshot.status.get("conditions") or ()}
    report, reason = snapshot.report, silent_reason(snapshot)
    if snapshot.is_reachable and report is not None:
        reason, because = report.reason, f"a new rendezvous waits for the pods: {report.message}"
        message = f"{because}. Training may go on meanwhile"
    else:
        because = why_silent(snapshot, assessment)
        message = f"{because}. {_last_known(snapshot)}{_meanwhile(assessment)}"
    for kind in _KNOWN_BY_THE_RENDEZVOUS:
        if kind is ConditionType.RUNNING:
            yield Finding(kind, None, reason, cut(message))
        elif kind.value in stored:
            yield Finding(kind, None, reason, cut(because))


def silent_reason(snapshot: Snapshot) -> Reason:
    """Return in one word why there is no report that counts."""
    return Reason.REPORT_REFUSED if snapshot.is_report_refused else Reason.WAITING_FOR_RENDEZVOUS


def why_silent(snapshot: Snapshot, assessment: Assessment | None) -> str:
    """Return what keeps the rendezvous from answering, as far as it is known."""
    pod = None if assessment is None else assessment.awaited_rendezvous
    if pod is None:
        return snapshot.unreachable_because or "there is no rendezvous pod at the moment"
    if pod.problem is not None:
        return f"rendezvous pod {pod.name}: {pod.problem.message.rstrip('.')}"
    if pod.phase == "Pending":
        return f"rendezvous pod {pod.name} is starting"
    if pod.is_standby:
        return f"rendezvous pod {pod.name} is about to lead"
    return snapshot.unreachable_because or f"rendezvous pod {pod.name} does not answer"


def _meanwhile(assessment: Assessment | None) -> str:
    """Return what that means for the training: it stands once an active pod has gone."""
    present = set() if assessment is None else {pod.uid for pod in assessment.alive}
    members = {} if assessment is None else assessment.members
    gone = [member.pod for uid, member in members.items() if member.role is Role.ACTIVE and uid not in present]
    if gone:
        return f"Since then {listed(gone)} has gone: the training stands still until the rendezvous is back"
    # Whose pods nobody has told may have lost some before.
    goes_on = "goes on" if members else "may go on"
    return f"Training {goes_on} meanwhile; a fault is repaired only when the rendezvous is back"


def _last_known(snapshot: Snapshot) -> str:
    report = snapshot.report
    if report is None or not snapshot.heard_at:
        return "This operator has not heard from it. "
    doing = "it was repairing a fault" if report.iteration >= 0 else "it waited for the pods"
    if report.phase is JobPhase.RUNNING:
        doing = f"{counted(report.world_size, 'rank')} trained in iteration {report.iteration}"
    return f"When it was last heard, at {snapshot.heard_at}, {doing}. "


def has_run(snapshot: Snapshot) -> bool:
    """Return whether the job has trained since it was started or resumed."""
    if snapshot.status.get("state") in _AT_WORK:
        return True
    return snapshot.report is not None and snapshot.report.iteration >= 0
