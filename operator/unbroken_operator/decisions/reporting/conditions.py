"""Pure: the conditions of a job. Each says whether, why in one word, and why in one sentence with numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken_core.messages import JobStatus, PodStatus
from unbroken_core.ranks.tree import Misplaced
from unbroken_core.reasons import JobPhase, Reason, Role, WorkerPhase
from unbroken_core.settings import JobSettings, Layer
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spread, UpdatePolicy
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.admission import Accepted, Refused
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.lifecycle import Outcome, ending_pods, job_outcome, was_suspended
from unbroken_operator.decisions.reporting.recovery_text import culprit
from unbroken_operator.decisions.reporting.unschedulable import missing_on_nodes
from unbroken_operator.decisions.snapshot import PodView, Snapshot
from unbroken_operator.decisions.spreading import Unserved, unserved
from unbroken_operator.decisions.updates import CHANGED

MAX_MESSAGE = 1000
MAX_NAMES = 5
_OF_PODS: dict[ConditionType, bool | None] = {
    ConditionType.PODS_READY: False,
    ConditionType.RUNNING: False,
    ConditionType.RECOVERING: False,
    ConditionType.DEGRADED: False,
    ConditionType.SPARES_EXHAUSTED: False,
    ConditionType.SPARES_SPREAD: None,
    ConditionType.UP_TO_DATE: None,
}
"""What conditions about pods are when the job is to have none."""


@dataclass(frozen=True)
class Finding:
    """A condition without its times."""

    type: ConditionType
    is_true: bool | None
    """None means unknown."""
    reason: Reason
    message: str


def findings(snapshot: Snapshot, verdict: Accepted | Refused, assessment: Assessment | None) -> list[Finding]:
    """Return the conditions that this snapshot decides; the others keep what is stored."""
    found = [_admitted(snapshot, verdict)]
    if isinstance(verdict, Accepted) and assessment is not None and assessment.is_suspended:
        found += _suspended(snapshot, verdict)
    elif isinstance(verdict, Accepted) and assessment is not None:
        if was_suspended(snapshot) and assessment.outcome is None:
            found.append(Finding(ConditionType.SUSPENDED, False, Reason.RESUMED, "the job may have pods"))
        problem = _pods_ready(snapshot, verdict, assessment)
        found += [] if assessment.outcome is not None else [problem]
        if verdict.settings.layers and assessment.domains:
            found.append(_topology_known(verdict, assessment))
        found += _progress(snapshot, verdict, assessment, problem)
        found += [] if assessment.outcome is not None else _up_to_date(snapshot, verdict, assessment)
    elif snapshot.report is not None and snapshot.is_reachable:
        found += [_running(snapshot.report), _recovering(snapshot.report), *_ends(job_outcome(snapshot))]
    return found


def _admitted(snapshot: Snapshot, verdict: Accepted | Refused) -> Finding:
    if isinstance(verdict, Refused):
        return Finding(ConditionType.ADMITTED, False, Reason.INVALID_SPEC, verdict.message)
    names = [
        f"{kind} {item.name}"
        for kind, item in (("Secret", snapshot.secret), ("Service", snapshot.service))
        if item is not None and item.owner_uid != snapshot.uid
    ]
    if names:
        message = (
            f"{' and '.join(names)} exist and do not belong to this job; want them gone, or this job under another "
            "name (after a job of the same name was deleted, they go within seconds)"
        )
        return Finding(ConditionType.ADMITTED, False, Reason.NAME_TAKEN, message)
    settings = verdict.settings
    message = (
        f"{settings.replicas} active and {settings.spares} spare pods of {settings.ranks_per_pod} ranks are wanted, "
        f"at least {settings.minimum_replicas} active pods to train"
    )
    return Finding(ConditionType.ADMITTED, True, Reason.SPEC_ACCEPTED, message)


def _suspended(snapshot: Snapshot, verdict: Accepted) -> Iterator[Finding]:
    """Say that the job is suspended, and nothing about pods that it is not to have."""
    message = "spec.suspend is true: the job has no pods, and starts when it is false"
    num_ending = len(ending_pods(snapshot))
    if num_ending and not verdict.spec.suspend:
        message = "spec.suspend is false again: the job starts when the pods that it had have ended"
    elif num_ending:
        message = "spec.suspend is true: the job's pods are ending; it starts again when it is false"
    yield Finding(ConditionType.SUSPENDED, True, Reason.SUSPENDED, message)
    stored = {item["type"] for item in snapshot.status.get("conditions") or ()}
    for kind, is_true in _OF_PODS.items():
        if kind.value in stored:
            yield Finding(kind, is_true, Reason.SUSPENDED, "the job is suspended")


def _pods_ready(snapshot: Snapshot, verdict: Accepted, assessment: Assessment) -> Finding:
    wanted = verdict.settings.replicas + verdict.settings.spares
    running = min(sum(pod.phase in ("Running", "Succeeded") for pod in assessment.alive), wanted)
    count = f"{running} of {wanted} training pods run"

    def finding(reason: Reason, text: str) -> Finding:
        return Finding(ConditionType.PODS_READY, False, reason, f"{count}; {text}")

    unstartable = _unstartable(snapshot)
    if unstartable is not None:
        return finding(*unstartable)
    troubled = [
        pod for pod in (assessment.rendezvous, *assessment.alive) if pod is not None and pod.problem is not None
    ]
    if troubled:
        return finding(*_trouble(snapshot, troubled))
    # Those that are to take the place of others come on top.
    useless = _useless(snapshot, assessment, is_short=running < wanted or bool(assessment.outdated))
    if useless is not None:
        return finding(*useless)
    if assessment.rendezvous is None:
        return finding(Reason.WAITING_FOR_RENDEZVOUS, "the rendezvous pod is being created")
    if running < wanted:
        return finding(Reason.WAITING_FOR_PODS, f"{wanted - running} are being created")
    return Finding(ConditionType.PODS_READY, True, Reason.PODS_READY, count)


def _unstartable(snapshot: Snapshot) -> tuple[Reason, str] | None:
    """Return why no pod can come up, whatever nodes and images there are."""
    if snapshot.memory.refusals:
        first = snapshot.memory.refusals[0]
        return Reason.WRITE_REFUSED, f"the API server refused {first.name}: {first.message}"
    if snapshot.secret is not None and snapshot.secret.lacks:
        lacking = f"Secret {snapshot.secret.name} has lost {_listed(snapshot.secret.lacks)}"
        return Reason.SECRET_DAMAGED, f"{lacking}: pods that start cannot go on; delete it, and it is made again"
    return None


def _up_to_date(snapshot: Snapshot, verdict: Accepted, assessment: Assessment) -> Iterator[Finding]:
    """Say which pods are old, from the first change of the template on."""
    outdated = assessment.outdated
    if outdated:
        is_rolling = verdict.spec.update_policy is UpdatePolicy.ROLLING
        text = (
            "ranks move to new pods as soon as those are ready"
            if is_rolling
            else "delete them one by one, spares first, or set spec.updatePolicy to Rolling"
        )
        message = f"{len(outdated)} of {len(assessment.alive)} training pods were made from an earlier template"
        message = f"{message} ({_names(outdated)}); {text}"
        yield Finding(ConditionType.UP_TO_DATE, False, Reason.TEMPLATE_OUTDATED, message)
    elif any(item["type"] == ConditionType.UP_TO_DATE.value for item in snapshot.status.get("conditions") or ()):
        message = "all training pods were made from the present template"
        yield Finding(ConditionType.UP_TO_DATE, True, Reason.TEMPLATE_CURRENT, message)


def _leaving(assessment: Assessment) -> str:
    """Return which pods are to leave their nodes; "" for none."""
    why: dict[str, list[str]] = {}
    for pod in assessment.alive:
        if assessment.troubled.get(pod.uid, CHANGED) != CHANGED:
            why.setdefault(assessment.troubled[pod.uid], []).append(pod.name)
    if not why:
        return ""
    parts = _listed([f"{_listed(names)} ({text})" for text, names in why.items()])
    return f"to be moved as soon as a spare pod elsewhere is ready: {parts}"


def _useless(snapshot: Snapshot, assessment: Assessment, *, is_short: bool) -> tuple[Reason, str] | None:
    """Return why pods that come up are of no use, or will not be for long."""
    leaving = _leaving(assessment)
    if leaving:
        return Reason.NODES_LEAVING, leaving
    report = snapshot.report
    if report is not None and report.refused:
        return Reason.POD_REFUSED, f"the rendezvous refuses {_listed(report.refused, '; ')}"
    failed = [pod for pod in snapshot.trainers() if pod.phase == "Failed"]
    if not (snapshot.memory.num_early_failures and failed and is_short):
        return None
    last = max(failed, key=lambda pod: pod.ordinal)
    text = f"pods fail before they are ready, last {last.name}: {last.end}; see `kubectl logs {last.name}`"
    return Reason.FAILED_BEFORE_READY, text


def _trouble(snapshot: Snapshot, troubled: Sequence[PodView]) -> tuple[Reason, str]:
    first = troubled[0].problem
    assert first is not None
    if first.reason is not Reason.UNSCHEDULABLE:
        alike = [pod for pod in troubled if pod.problem is not None and pod.problem.reason is first.reason]
        return first.reason, f"{_names(alike)}: {first.message}"
    waiting = [pod for pod in troubled if pod.problem is not None and pod.problem.reason is Reason.UNSCHEDULABLE]
    text = f"{len(waiting)} wait for nodes ({_names(waiting)}): {first.message}"
    if waiting[-1].component != layout.TRAINER:
        return first.reason, text
    would_help = missing_on_nodes(snapshot.job["spec"]["template"]["spec"], snapshot.nodes)
    return first.reason, f"{text}; {would_help}" if would_help else text


def _topology_known(verdict: Accepted, assessment: Assessment) -> Finding:
    layers = verdict.settings.layers
    missing = [f"label {label} on {_listed(nodes)}" for label, nodes in sorted(assessment.missing_labels.items())]
    parts = [f"missing: {'; '.join(missing)}. Such nodes count as one domain without a name"] if missing else []
    if assessment.misplaced:
        wrong = _listed([_contradiction(layers, item) for item in assessment.misplaced], "; ")
        parts.append(f"contradicting: {wrong}. Each of them counts as two domains")
    if not parts:
        message = f"all nodes of the job's pods bear the labels of {len(layers)} layers"
        return Finding(ConditionType.TOPOLOGY_KNOWN, True, Reason.TOPOLOGY_KNOWN, message)
    reason = Reason.TOPOLOGY_LABEL_MISSING if missing else Reason.TOPOLOGY_LABELS_CONTRADICT
    return Finding(ConditionType.TOPOLOGY_KNOWN, False, reason, _cut("; ".join(parts)))


def _contradiction(layers: Sequence[Layer], found: Misplaced) -> str:
    """Say which label wants to be corrected: the outermost of the two that differ."""
    depth = next(index for index, name in enumerate(found.above) if name != found.other_above[index])
    layer, outer = layers[found.depth], layers[depth]
    return (
        f"{layer.label}={found.name}: want it in one {outer.name}, got {outer.label}={found.above[depth]} on node "
        f"{found.key} and {outer.label}={found.other_above[depth]} on node {found.other_key}"
    )


def _progress(snapshot: Snapshot, verdict: Accepted, assessment: Assessment, pods_ready: Finding) -> Iterator[Finding]:
    outcome, report = assessment.outcome, snapshot.report
    yield from _ends(outcome)
    if outcome is not None:
        if outcome.is_ours:
            reason = Reason(outcome.reason)
            yield Finding(ConditionType.RUNNING, False, reason, _cut(outcome.message))
            yield Finding(ConditionType.RECOVERING, False, Reason.NOTHING_TO_RECOVER, "the job is over")
        elif report is not None:
            yield _running(report)
            yield _recovering(report)
        return
    because = snapshot.unreachable_because
    if assessment.rendezvous is None and not snapshot.is_reachable:
        because = "there is no rendezvous pod at the moment"
    if because:
        yield _without_rendezvous(because, report, pods_ready)
        return
    if report is None:
        # After a start of the operator what is stored stays true until the rendezvous has been asked.
        if all(item["type"] != ConditionType.RUNNING.value for item in snapshot.status.get("conditions") or ()):
            yield _without_rendezvous("the rendezvous has not answered yet", report, pods_ready)
        return
    yield _running(report, pods_ready)
    yield _recovering(report)
    yield _degraded(report)
    if report.iteration >= 0:
        yield _spares(verdict, assessment)
        yield from _spread(snapshot, verdict, assessment, report)


def _without_rendezvous(because: str, report: JobStatus | None, pods_ready: Finding) -> Finding:
    if report is not None and report.phase is JobPhase.RUNNING:
        message = f"{because}; training goes on without it, last seen at iteration {report.iteration}"
        return Finding(ConditionType.RUNNING, None, Reason.WAITING_FOR_RENDEZVOUS, _cut(message))
    reason = Reason.WAITING_FOR_RENDEZVOUS
    message = because
    if _is_obstacle(pods_ready):
        reason, message = pods_ready.reason, pods_ready.message
    return Finding(ConditionType.RUNNING, False, reason, _cut(message))


def _is_obstacle(pods_ready: Finding) -> bool:
    waits = (Reason.WAITING_FOR_PODS, Reason.WAITING_FOR_RENDEZVOUS)
    return pods_ready.is_true is False and pods_ready.reason not in waits


def _running(report: JobStatus, pods_ready: Finding | None = None) -> Finding:
    is_running = report.phase is JobPhase.RUNNING
    if report.phase is JobPhase.FORMING and pods_ready is not None and _is_obstacle(pods_ready):
        return Finding(ConditionType.RUNNING, False, pods_ready.reason, pods_ready.message)
    return Finding(ConditionType.RUNNING, is_running, report.reason, _cut(report.message))


def _recovering(report: JobStatus) -> Finding:
    last = report.recoveries[-1] if report.recoveries else None
    is_over = report.phase in (JobPhase.COMPLETE, JobPhase.FAILED)
    if last is not None and not last.ended_at and not is_over:
        message = f"{culprit(last)}: {last.cause}: {last.detail}"
        return Finding(ConditionType.RECOVERING, True, Reason.RECOVERING, _cut(message.rstrip(": ")))
    return Finding(ConditionType.RECOVERING, False, Reason.NOTHING_TO_RECOVER, "no recovery is under way")


def _degraded(report: JobStatus) -> Finding:
    if report.reason is Reason.BELOW_MINIMUM:
        message = "no rank trains: fewer pods than minReplicas can have ranks"
        return Finding(ConditionType.DEGRADED, True, Reason.FEWER_RANKS, message)
    is_degraded = report.lost_ranks > 0 and report.iteration >= 0
    message = f"{report.world_size} ranks are active, {report.lost_ranks} are lost, {report.spare_ranks} are spare"
    reason = Reason.FEWER_RANKS if is_degraded else Reason.FULL_STRENGTH
    return Finding(ConditionType.DEGRADED, is_degraded, reason, message)


def _spares(verdict: Accepted, assessment: Assessment) -> Finding:
    wanted = verdict.settings.spares
    ready = sum(
        assessment.role(pod) is Role.SPARE and _is_ready(assessment.members.get(pod.uid)) for pod in assessment.alive
    )
    is_exhausted = wanted > 0 and ready == 0
    message = f"{ready} spare pods are ready, {wanted} are wanted"
    if is_exhausted:
        message += (
            "; the next lost pod costs ranks or waits until a new pod is up. More spares or free nodes would help"
        )
    reason = Reason.SPARES_EXHAUSTED if is_exhausted else Reason.SPARES_READY
    return Finding(ConditionType.SPARES_EXHAUSTED, is_exhausted, reason, message)


def _spread(snapshot: Snapshot, verdict: Accepted, assessment: Assessment, report: JobStatus) -> Iterator[Finding]:
    """Judge where the spares stand, once it is settled: a spare that is promoted is missed for a moment only."""
    settings = verdict.settings

    def finding(is_true: bool, text: str) -> Finding:
        reason = Reason.SPARES_SPREAD if is_true else Reason.SPARES_NOT_SPREAD
        return Finding(ConditionType.SPARES_SPREAD, is_true, reason, _cut(text))

    if not settings.layers or not settings.spares or verdict.spec.spares.spread is Spread.ANYWHERE:
        if any(item["type"] == ConditionType.SPARES_SPREAD.value for item in snapshot.status.get("conditions") or ()):
            yield finding(True, "spares are not asked to be anywhere (spares.count, spares.spread, topology.layers)")
        return
    is_all_there = len(assessment.alive) >= settings.replicas + settings.spares
    is_placed = all(pod.node or _is_unschedulable(pod) for pod in assessment.alive)
    if report.phase is not JobPhase.RUNNING or not is_all_there or not is_placed:
        return
    bare = list(unserved(settings, assessment))
    if bare:
        yield finding(False, _bare_text(settings, bare))
    else:
        names = ", ".join(layer.name for layer in settings.layers)
        yield finding(True, f"every domain of {names} with active pods has a spare pod")


def _bare_text(settings: JobSettings, bare: Sequence[Unserved]) -> str:
    parts = []
    for item in bare:
        text = f"{item.layer}: no spare pod in {_listed(item.domains)}"
        if settings.spares < item.num_domains:
            text += f": want spares.count of {item.num_domains}, one for each domain with active pods"
            text += f", got {settings.spares}"
        else:
            text += f": want a node with room there, {settings.spares} spares for {item.num_domains} domains are enough"
        parts.append(text)
    return "; ".join(parts)


def _is_unschedulable(pod: PodView) -> bool:
    return pod.problem is not None and pod.problem.reason is Reason.UNSCHEDULABLE


def _is_ready(member: PodStatus | None) -> bool:
    # A pod is up long before its workers have imported and loaded what they need.
    return member is not None and member.is_connected and set(member.workers) == {WorkerPhase.READY}


def _ends(outcome: Outcome | None) -> Iterator[Finding]:
    if outcome is not None and outcome.is_recorded:
        return
    for kind, phase in ((ConditionType.COMPLETE, JobPhase.COMPLETE), (ConditionType.FAILED, JobPhase.FAILED)):
        if outcome is not None and outcome.phase is phase:
            yield Finding(kind, True, Reason(outcome.reason), _cut(outcome.message))
        else:
            yield Finding(kind, False, Reason.NOT_FINISHED, f"the job is not {phase.value}")


def merge_conditions(
    stored: Sequence[Mapping[str, Any]], found: Sequence[Finding], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the stored conditions with the findings in them; the time moves only when the status does."""
    by_type = {item["type"]: dict(item) for item in stored}
    for finding in found:
        status = "Unknown" if finding.is_true is None else str(finding.is_true)
        before = by_type.get(finding.type.value, {})
        by_type[finding.type.value] = {
            "type": finding.type.value,
            "status": status,
            "reason": finding.reason.value,
            "message": _cut(finding.message),
            "observedGeneration": generation,
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else now,
        }
    order = [kind.value for kind in ConditionType]
    return sorted(by_type.values(), key=lambda item: order.index(item["type"]) if item["type"] in order else 99)


def _names(pods: Sequence[PodView]) -> str:
    return _listed([pod.name for pod in pods])


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    rest = len(names) - MAX_NAMES
    shown = separator.join(names[:MAX_NAMES])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."
