"""The conditions SparesExhausted and SparesSpread."""

from collections.abc import Iterator, Sequence

from unbroken_core.protocol.messages import JobStatus, PodStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role, WorkerPhase
from unbroken_operator.api.models import Spread
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.admission import ValidSpec
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut, listed
from unbroken_operator.decisions.snapshot import PodView, Snapshot
from unbroken_operator.decisions.spreading import Unserved, unserved


def spares_exhausted(verdict: ValidSpec, assessment: Assessment) -> ConditionState:
    """Say whether spares are wanted and none is ready."""
    wanted = verdict.settings.spares
    ready = sum(
        assessment.role(pod) is Role.SPARE and _is_ready(assessment.members.get(pod.uid)) for pod in assessment.alive
    )
    is_exhausted = wanted > 0 and ready == 0
    message = f"{counted(ready, 'spare pod is', 'spare pods are')} ready, {wanted} wanted"
    starting = sum(_is_starting(pod, assessment.members.get(pod.uid)) for pod in assessment.alive)
    if starting and ready < wanted:
        message += f", {counted(starting, 'pod is', 'pods are')} starting"
    if is_exhausted:
        message += "; the next lost pod costs ranks or waits until a new pod is up"
        message += "" if starting else ". More spares or free nodes would help"
    reason = Reason.SPARES_EXHAUSTED if is_exhausted else Reason.SPARES_READY
    return ConditionState(ConditionType.SPARES_EXHAUSTED, is_exhausted, reason, message)


def spares_spread(
    snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, report: JobStatus
) -> Iterator[ConditionState]:
    """Say whether spares are where they are wanted, once pods are settled: a promoted spare is soon replaced."""
    settings = verdict.settings

    def state(is_true: bool, text: str) -> ConditionState:
        reason = Reason.SPARES_SPREAD if is_true else Reason.SPARES_NOT_SPREAD
        return ConditionState(ConditionType.SPARES_SPREAD, is_true, reason, cut(text))

    if not settings.layers or not settings.spares or verdict.spec.spares.spread is Spread.ANYWHERE:
        if any(item["type"] == ConditionType.SPARES_SPREAD.value for item in snapshot.status.get("conditions") or ()):
            yield state(True, "nothing says where spares are to be (spares.count, spares.spread, topology.layers)")
        return
    is_all_there = len(assessment.alive) >= settings.replicas + settings.spares
    is_placed = all(pod.node or _is_unschedulable(pod) for pod in assessment.alive)
    if report.phase is not JobPhase.RUNNING or not is_all_there or not is_placed:
        return
    bare = list(unserved(settings, assessment))
    if bare:
        yield state(False, _bare_text(settings, bare))
    else:
        names = ", ".join(layer.name for layer in settings.layers)
        yield state(True, f"every domain of {names} with active pods has a spare pod")


def _bare_text(settings: JobSettings, bare: Sequence[Unserved]) -> str:
    seen = "; ".join(f"{item.layer}: no spare pod in {listed(item.domains)}" for item in bare)
    most = max(item.num_domains for item in bare)
    if settings.spares < most:
        return f"{seen}. Raise spares.count from {settings.spares} to {most}: one for each domain with active pods"
    return f"{seen}. Free or add a node there, then delete a spare pod elsewhere: the next one is made there"


def _is_starting(pod: PodView, member: PodStatus | None) -> bool:
    """Whether a pod has a node, or is about to get one, and its workers are not ready yet."""
    return pod.problem is None and (member is None or (not member.ranks and not _is_ready(member)))


def _is_unschedulable(pod: PodView) -> bool:
    return pod.problem is not None and pod.problem.reason is Reason.UNSCHEDULABLE


def _is_ready(member: PodStatus | None) -> bool:
    # A pod is up long before its workers have imported and loaded what they need.
    return member is not None and member.is_connected and set(member.workers) == {WorkerPhase.READY}
