"""Pure: the conditions of a job. Each says whether, why in one word, and why in one sentence with numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.ranks.tree import Misplaced
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.lifecycle import (
    JobOutcome,
    ending_pods,
    has_run,
    is_unknown,
    job_outcome,
    was_suspended,
)
from unbroken_operator.decisions.reporting.alert_conditions import alert_conditions_over, no_progress, restart_storm
from unbroken_operator.decisions.reporting.condition_state import MAX_MESSAGE, ConditionState, cut, listed
from unbroken_operator.decisions.reporting.health_condition import nodes_healthy, straggling
from unbroken_operator.decisions.reporting.pod_conditions import pods_ready, up_to_date
from unbroken_operator.decisions.reporting.recovery_text import culprit
from unbroken_operator.decisions.reporting.silence import silent_reason, unknown, why_silent
from unbroken_operator.decisions.reporting.spare_conditions import spares_exhausted, spares_spread
from unbroken_operator.decisions.snapshot import Snapshot

_OF_PODS: dict[ConditionType, bool | None] = {
    ConditionType.PODS_READY: False,
    ConditionType.RUNNING: False,
    ConditionType.RECOVERING: False,
    ConditionType.DEGRADED: False,
    ConditionType.SPARES_EXHAUSTED: False,
    ConditionType.SPARES_SPREAD: None,
    ConditionType.UP_TO_DATE: None,
    ConditionType.RESTART_STORM: False,
    ConditionType.NO_PROGRESS: False,
}
"""What conditions about pods are when the job is to have none."""


def condition_states(
    snapshot: Snapshot, verdict: ValidSpec | InvalidSpec, assessment: Assessment | None
) -> list[ConditionState]:
    """Return the conditions that this snapshot decides; the others keep what is stored."""
    found = [_admitted(snapshot, verdict), *_throttled(snapshot)]
    if isinstance(verdict, ValidSpec) and assessment is not None and assessment.is_suspended:
        found += _suspended(snapshot, verdict)
    elif isinstance(verdict, ValidSpec) and assessment is not None:
        if was_suspended(snapshot) and assessment.outcome is None:
            found.append(ConditionState(ConditionType.SUSPENDED, False, Reason.RESUMED, "the job may have pods"))
        problem = pods_ready(snapshot, verdict, assessment)
        found += [] if assessment.outcome is not None else [problem]
        if verdict.settings.layers and assessment.domains.by_pod:
            found.append(_topology_known(verdict, assessment))
        found += _progress(snapshot, verdict, assessment, problem)
        if assessment.outcome is None:
            found += up_to_date(snapshot, verdict, assessment, are_pods_ready=bool(problem.is_true))
    elif is_unknown(snapshot):
        found += unknown(snapshot, assessment)
    elif snapshot.report is not None and snapshot.is_reachable:
        found += [_running(snapshot.report), _recovering(snapshot.report), *_ends(job_outcome(snapshot))]
    return found


def _admitted(snapshot: Snapshot, verdict: ValidSpec | InvalidSpec) -> ConditionState:
    if isinstance(verdict, InvalidSpec):
        message = verdict.message
        if has_run(snapshot):
            message = _with_meanwhile(message, "the job goes on as it is, and lost pods are not replaced meanwhile")
        return ConditionState(ConditionType.ADMITTED, False, Reason.INVALID_SPEC, message)
    if verdict.refused is not None:
        message = _with_meanwhile(verdict.refused.message, "the spec before it stays in force")
        return ConditionState(ConditionType.ADMITTED, False, Reason.INVALID_SPEC, message)
    named = [("Secret", item) for item in snapshot.secrets] + [("Service", snapshot.service)]
    names = [f"{kind} {item.name}" for kind, item in named if item is not None and item.owner_uid != snapshot.uid]
    if names:
        left = [
            pod.name
            for pod in snapshot.pods
            if pod.owner_uid != snapshot.uid and pod.component == layout.TRAINER and not pod.is_terminal
        ]
        running = f"; {counted(len(left), 'pod')} of an earlier job may still train ({listed(left)})" if left else ""
        message = (
            f"{' and '.join(names)} exist and do not belong to this job: delete them, or give this job another "
            f"name (those of a deleted job of the same name go within seconds, but not after --cascade=orphan){running}"
        )
        return ConditionState(ConditionType.ADMITTED, False, Reason.NAME_TAKEN, message)
    settings = verdict.settings
    message = (
        f"{settings.replicas} active and {counted(settings.spares, 'spare pod')} of "
        f"{counted(settings.ranks_per_pod, 'rank')} are wanted, "
        f"at least {counted(settings.minimum_replicas, 'active pod')} to train"
    )
    message = "; beware: ".join((message, *verdict.warnings))
    return ConditionState(ConditionType.ADMITTED, True, Reason.SPEC_ACCEPTED, message)


def _throttled(snapshot: Snapshot) -> Iterator[ConditionState]:
    """Say once that the job is held back, and of what; no numbers that change, each of which would be a write."""
    of = snapshot.memory.throttled
    if of:
        words = " and ".join(budget.value for budget in of)
        message = (
            f"more {words} than a job of this size has: the rest is held back, so that other jobs are not slowed; stop "
            "what changes all the time: pods that fail once they are ready, or a rendezvous with news every second"
        )
        yield ConditionState(ConditionType.THROTTLED, True, Reason.THROTTLED, message)
    elif any(item["type"] == ConditionType.THROTTLED.value for item in snapshot.status.get("conditions") or ()):
        yield ConditionState(
            ConditionType.THROTTLED, False, Reason.WITHIN_BUDGETS, "nothing was held back for 10 minutes"
        )


def _with_meanwhile(message: str, meanwhile: str) -> str:
    return f"{cut(message, MAX_MESSAGE - len(meanwhile) - 2)}; {meanwhile}"


def _suspended(snapshot: Snapshot, verdict: ValidSpec) -> Iterator[ConditionState]:
    """Say that the job is suspended, and nothing about pods that it is not to have."""
    message = "spec.suspend is true: the job has no pods, and starts when it is false"
    num_ending = len(ending_pods(snapshot))
    if num_ending and not verdict.spec.suspend:
        message = "spec.suspend is false again: the job starts when the pods that it had have ended"
    elif num_ending:
        message = "spec.suspend is true: the job's pods are ending; it starts again when it is false"
    yield ConditionState(ConditionType.SUSPENDED, True, Reason.SUSPENDED, message)
    stored = {item["type"] for item in snapshot.status.get("conditions") or ()}
    for kind, is_true in _OF_PODS.items():
        if kind.value in stored:
            yield ConditionState(kind, is_true, Reason.SUSPENDED, "the job is suspended")


def _topology_known(verdict: ValidSpec, assessment: Assessment) -> ConditionState:
    layers, domains = verdict.settings.layers, assessment.domains
    missing = [f"label {label} on {listed(who)}" for label, who in sorted(domains.missing.items())]
    parts = [f"missing: {'; '.join(missing)}. Their pods count as one domain without a name"] if missing else []
    if domains.differing:
        parts.append(f"differing: {listed(domains.differing, '; ')}")
    if domains.misplaced:
        wrong = listed([_contradiction(layers, item) for item in domains.misplaced], "; ")
        parts.append(f"contradicting: {wrong}. Each of them counts as two domains")
    if not parts:
        message = f"all of the job's pods, or their nodes, bear the labels of {counted(len(layers), 'layer')}"
        return ConditionState(ConditionType.TOPOLOGY_KNOWN, True, Reason.TOPOLOGY_KNOWN, message)
    reason = Reason.TOPOLOGY_LABEL_MISSING if missing else Reason.TOPOLOGY_LABELS_CONTRADICT
    return ConditionState(ConditionType.TOPOLOGY_KNOWN, False, reason, cut("; ".join(parts)))


def _contradiction(layers: Sequence[Layer], found: Misplaced) -> str:
    """Say which label to correct: the outermost of the two that differ."""
    depth = next(index for index, name in enumerate(found.above) if name != found.other_above[index])
    layer, outer = layers[found.depth], layers[depth]
    return (
        f"{layer.label}={found.name}: must be in one {outer.name}, but has {outer.label}={found.above[depth]} on "
        f"{found.key} and {outer.label}={found.other_above[depth]} on {found.other_key}"
    )


def _progress(
    snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, pods_ready: ConditionState
) -> Iterator[ConditionState]:
    outcome, report = assessment.outcome, snapshot.report
    yield from _ends(outcome)
    if outcome is not None:
        yield from alert_conditions_over(snapshot)
        if outcome.is_ours:
            reason = Reason(outcome.reason)
            yield ConditionState(ConditionType.RUNNING, False, reason, cut(outcome.message))
            yield ConditionState(ConditionType.RECOVERING, False, Reason.NOTHING_TO_RECOVER, "the job is over")
        elif report is not None:
            yield _running(report)
            yield _recovering(report)
        return
    if is_unknown(snapshot):
        yield from unknown(snapshot, assessment)
        yield from restart_storm(snapshot)
        return
    if report is None or (report.iteration < 0 and _cannot_answer(snapshot, assessment)):
        yield from _unheard(snapshot, assessment, pods_ready)
        return
    yield _running(report, pods_ready)
    yield _recovering(report)
    yield from nodes_healthy(snapshot, report)
    yield from straggling(snapshot, report)
    yield from restart_storm(snapshot)
    yield from no_progress(snapshot, report)
    yield _degraded(report)
    if report.iteration >= 0:
        yield spares_exhausted(verdict, assessment)
        yield from spares_spread(snapshot, verdict, assessment, report)


def _unheard(snapshot: Snapshot, assessment: Assessment, pods_ready: ConditionState) -> Iterator[ConditionState]:
    """Say why a job does not train of which no rendezvous has told; nothing while what is stored may still be true."""
    because, reason = "the rendezvous has not answered yet", silent_reason(snapshot)
    cannot_answer = _cannot_answer(snapshot, assessment)
    is_waiting = not cannot_answer and not _is_obstacle(pods_ready)
    if _is_stored(snapshot, ConditionType.RUNNING) and (has_run(snapshot) or is_waiting):
        # After a start of the operator what is stored stays true until the rendezvous has been asked.
        return
    if cannot_answer:
        because = why_silent(snapshot, assessment)
    if _is_obstacle(pods_ready):
        reason, because = pods_ready.reason, pods_ready.message
    yield ConditionState(ConditionType.RUNNING, False, reason, cut(because))


def _cannot_answer(snapshot: Snapshot, assessment: Assessment) -> bool:
    """Whether it is known why the rendezvous of a job does not answer."""
    pod = assessment.rendezvous
    is_starting = pod is None or pod.phase == "Pending"
    return not snapshot.is_reachable and (is_starting or bool(snapshot.unreachable_because))


def _is_stored(snapshot: Snapshot, kind: ConditionType) -> bool:
    return any(item["type"] == kind.value for item in snapshot.status.get("conditions") or ())


def _is_obstacle(pods_ready: ConditionState) -> bool:
    waits = (Reason.WAITING_FOR_PODS, Reason.WAITING_FOR_RENDEZVOUS)
    return pods_ready.is_true is False and pods_ready.reason not in waits


def _running(report: JobStatus, pods_ready: ConditionState | None = None) -> ConditionState:
    is_running = report.phase is JobPhase.RUNNING
    if report.phase is JobPhase.FORMING and pods_ready is not None and _is_obstacle(pods_ready):
        return ConditionState(ConditionType.RUNNING, False, pods_ready.reason, pods_ready.message)
    return ConditionState(ConditionType.RUNNING, is_running, report.reason, cut(report.message))


def _recovering(report: JobStatus) -> ConditionState:
    last = report.recoveries[-1] if report.recoveries else None
    is_over = report.phase in (JobPhase.COMPLETE, JobPhase.FAILED)
    if last is not None and not last.ended_at and not is_over:
        message = f"{culprit(last)}: {last.cause}: {last.detail}"
        return ConditionState(ConditionType.RECOVERING, True, Reason.RECOVERING, cut(message.rstrip(": ")))
    return ConditionState(ConditionType.RECOVERING, False, Reason.NOTHING_TO_RECOVER, "no recovery is under way")


def _degraded(report: JobStatus) -> ConditionState:
    if report.reason is Reason.BELOW_MINIMUM:
        message = "no rank trains: fewer pods than minReplicas can have ranks"
        return ConditionState(ConditionType.DEGRADED, True, Reason.FEWER_RANKS, message)
    if report.iteration < 0:
        return ConditionState(ConditionType.DEGRADED, False, Reason.FULL_STRENGTH, "the job has not started yet")
    is_degraded = report.lost_ranks > 0
    message = f"{counted(report.world_size, 'active rank')}, {report.lost_ranks} lost, {report.spare_ranks} spare"
    reason = Reason.FEWER_RANKS if is_degraded else Reason.FULL_STRENGTH
    return ConditionState(ConditionType.DEGRADED, is_degraded, reason, message)


def _ends(outcome: JobOutcome | None) -> Iterator[ConditionState]:
    if outcome is not None and outcome.is_recorded:
        return
    for kind, phase in ((ConditionType.COMPLETE, JobPhase.COMPLETE), (ConditionType.FAILED, JobPhase.FAILED)):
        if outcome is not None and outcome.phase is phase:
            yield ConditionState(kind, True, Reason(outcome.reason), cut(outcome.message))
        else:
            yield ConditionState(kind, False, Reason.NOT_FINISHED, f"the job is not {phase.value}")


def merge_conditions(
    stored: Sequence[Mapping[str, Any]], found: Sequence[ConditionState], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the stored conditions with these states in them; the time moves only when the status does.

    One without a time has lost it: what was stored cannot be.
    """
    by_type = {item["type"]: {"lastTransitionTime": now, **item} for item in stored}
    for state in found:
        status = "Unknown" if state.is_true is None else str(state.is_true)
        before = by_type.get(state.type.value, {})
        by_type[state.type.value] = {
            "type": state.type.value,
            "status": status,
            "reason": state.reason.value,
            "message": cut(state.message),
            "observedGeneration": generation,
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else now,
        }
    order = [kind.value for kind in ConditionType]
    return sorted(by_type.values(), key=lambda item: order.index(item["type"]) if item["type"] in order else 99)
