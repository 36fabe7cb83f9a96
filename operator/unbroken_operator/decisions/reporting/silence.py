"""Pure: what is said of a job that has run while nobody knows what it does now.

    no answer for SILENT_S        its rendezvous is away: pod pending, node lost, network cut
    nobody to be asked            no rendezvous pod runs, and this operator has not heard of the job yet
    an answer without a world     a new rendezvous, to which the pods have not come back yet

Its training may go on in all cases. So it is neither Running nor at rest: it is Unknown, with what was known last.
"""

from collections.abc import Iterator

from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut, listed
from unbroken_operator.decisions.snapshot import Snapshot

_KNOWN_BY_THE_RENDEZVOUS = (
    ConditionType.RUNNING,
    ConditionType.RECOVERING,
    ConditionType.DEGRADED,
    ConditionType.SPARES_EXHAUSTED,
    ConditionType.SPARES_SPREAD,
    ConditionType.NO_PROGRESS,
)


def unknown(snapshot: Snapshot, assessment: Assessment | None) -> Iterator[ConditionState]:
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
            yield ConditionState(kind, None, reason, cut(message))
        elif kind.value in stored:
            yield ConditionState(kind, None, reason, cut(because))


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
