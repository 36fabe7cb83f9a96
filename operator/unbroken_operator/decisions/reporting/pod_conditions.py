"""The conditions PodsReady and UpToDate: what keeps pods from coming up, or makes them useless."""

from collections.abc import Iterator, Sequence

from unbroken_core.vocabulary.plurals import agreed, counted
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api import layout
from unbroken_operator.api.models import UpdatePolicy
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.actions import RepairTokens
from unbroken_operator.decisions.admission import ValidSpec
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.circles import NUM_FREE, pause_s
from unbroken_operator.decisions.reporting.condition_state import ConditionState, cut, listed, pod_names
from unbroken_operator.decisions.reporting.unschedulable import missing_on_nodes
from unbroken_operator.decisions.snapshot import PodView, Snapshot
from unbroken_operator.decisions.updates import CHANGED


def pods_ready(snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment) -> ConditionState:
    """Say whether all wanted pods run, and if not, the first reason that a person can act on."""
    wanted = verdict.settings.replicas + verdict.settings.spares
    running = min(sum(pod.phase in ("Running", "Succeeded") for pod in assessment.alive), wanted)
    count = f"{running} of {counted(wanted, 'training pod')} {'runs' if wanted == 1 else 'run'}"

    def state(reason: Reason, text: str) -> ConditionState:
        return ConditionState(ConditionType.PODS_READY, False, reason, f"{count}; {text}")

    unstartable = _unstartable(snapshot, is_short=running < wanted or assessment.rendezvous is None)
    if unstartable is not None:
        return state(*unstartable)
    troubled = [
        pod for pod in (assessment.awaited_rendezvous, *assessment.alive) if pod is not None and pod.problem is not None
    ]
    if troubled:
        reason, text = _trouble(snapshot, troubled)
        leaving = _leaving(assessment)
        # Those that wait are to take the place of pods that run: that is what somebody who drains a node waits for.
        return state(reason, f"{text}; {leaving}" if leaving else text)
    # Those that are to take the place of others come on top.
    useless = _useless(snapshot, assessment, is_short=running < wanted or bool(assessment.outdated))
    if useless is not None:
        return state(*useless)
    if assessment.rendezvous is None:
        successor = assessment.succession.successor
        text = "the rendezvous pod is being created" if successor is None else f"{successor.name} is to lead next"
        return state(Reason.WAITING_FOR_RENDEZVOUS, text)
    if running < wanted:
        return state(Reason.WAITING_FOR_PODS, counted(wanted - running, "is being created", "are being created"))
    return ConditionState(ConditionType.PODS_READY, True, Reason.PODS_READY, count)


def _unstartable(snapshot: Snapshot, *, is_short: bool) -> tuple[Reason, str] | None:
    """Return why no pod can come up, whatever nodes and images there are."""
    if snapshot.memory.num_circles > NUM_FREE and is_short:
        return Reason.POD_CREATION_BACK_OFF, _circle(snapshot)
    if snapshot.memory.refusals:
        first = snapshot.memory.refusals[0]
        return Reason.WRITE_REFUSED, f"the API server refused {first.name}: {first.message}"
    if snapshot.secret is not None and snapshot.secret.refused:
        text = f"Secret {snapshot.secret.name}: {snapshot.secret.refused}"
        return Reason.SECRET_DAMAGED, f"{text}: the operator goes on with those that it had, if any; write fewer"
    if snapshot.secret is not None and snapshot.secret.lacks:
        lacking = f"Secret {snapshot.secret.name} has lost {listed(snapshot.secret.lacks)}"
        return Reason.SECRET_DAMAGED, f"{lacking}: starting pods cannot go on; delete it, and the operator recreates it"
    for block, secret in snapshot.tokens.items():
        if secret.is_stale and RepairTokens(block, secret.name, secret.uid).key in snapshot.memory.reverts:
            stale = f"Secret {secret.name} holds tokens of an earlier key of the job, and could not be written"
            return Reason.SECRET_DAMAGED, f"{stale}: delete it, and the operator recreates it"
    return None


def _circle(snapshot: Snapshot) -> str:
    num = snapshot.memory.num_circles
    return (
        f"pods are created and deleted in circles: {counted(num, 'time')} in a row they went before they were of use, "
        f"last {snapshot.memory.last_circle}; now {pause_s(num):.0f} s pass before others are created"
    )


def up_to_date(
    snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, *, are_pods_ready: bool
) -> Iterator[ConditionState]:
    """Say which pods are old, from the first change of the template on."""
    outdated = assessment.outdated
    if outdated:
        those = agreed(len(outdated), "delete it", "delete them one by one, spares first")
        text = f"{those}, or set spec.updatePolicy to Rolling"
        if verdict.spec.update_policy is UpdatePolicy.ROLLING:
            text = "ranks move to new pods as soon as those are ready"
        elif not are_pods_ready:
            # The new template may be what keeps them from it.
            text = "delete none of them before PodsReady is True: the pods that take their place must come up"
        alive = counted(len(assessment.alive), "training pod")
        message = f"{len(outdated)} of {alive} {agreed(len(outdated), 'was', 'were')} made from an earlier template"
        message = f"{message} ({pod_names(outdated)}); {text}"
        yield ConditionState(ConditionType.UP_TO_DATE, False, Reason.TEMPLATE_OUTDATED, message)
    elif assessment.rendezvous is not None and _has_begun(assessment):
        message = _succession(assessment, assessment.rendezvous)
        yield ConditionState(ConditionType.UP_TO_DATE, False, Reason.RENDEZVOUS_OUTDATED, cut(message))
    elif any(item["type"] == ConditionType.UP_TO_DATE.value for item in snapshot.status.get("conditions") or ()):
        message = "all training pods were made from the present template, and the rendezvous from the present spec"
        yield ConditionState(ConditionType.UP_TO_DATE, True, Reason.TEMPLATE_CURRENT, message)


def _has_begun(assessment: Assessment) -> bool:
    """Whether another rendezvous is on its way: a job that waits for its turn has nothing to say."""
    return assessment.succession.successor is not None or assessment.succession.wants_successor


def _succession(assessment: Assessment, leader: PodView) -> str:
    """Return what keeps the next rendezvous from taking over."""
    pod = assessment.succession.successor
    if pod is None:
        why = "its successor is to be created"
    elif pod.problem is not None:
        why = f"its successor {pod.name} cannot run: {pod.problem.message.rstrip('.')}"
    else:
        why = f"its successor {pod.name} is starting"
    old = "is on a node that is cordoned, or runs under an earlier spec"
    return f"rendezvous pod {leader.name} {old}, and goes on leading the job: {why}"


def _leaving(assessment: Assessment) -> str:
    """Return which pods are to leave their nodes; "" for none."""
    why: dict[str, list[str]] = {}
    for pod in assessment.alive:
        if assessment.troubled.get(pod.uid, CHANGED) != CHANGED:
            why.setdefault(assessment.troubled[pod.uid], []).append(pod.name)
    if not why:
        return ""
    parts = listed([f"{listed(names)} ({text})" for text, names in why.items()])
    return f"to be moved as soon as a spare pod elsewhere is ready: {parts}"


def _useless(snapshot: Snapshot, assessment: Assessment, *, is_short: bool) -> tuple[Reason, str] | None:
    """Return why pods that come up are of no use, or will not be for long."""
    leaving = _leaving(assessment)
    if leaving:
        return Reason.NODES_LEAVING, leaving
    report = snapshot.report
    if report is not None and report.refused:
        return Reason.POD_REFUSED, f"the rendezvous refuses {listed(report.refused, '; ')}"
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
        return first.reason, f"{pod_names(alike)}: {first.message}"
    waiting = [pod for pod in troubled if pod.problem is not None and pod.problem.reason is Reason.UNSCHEDULABLE]
    others = [pod for pod in waiting if pod.component == layout.TRAINER]
    if troubled[0].component != layout.TRAINER:
        also = f", as {counted(len(others), 'training pod does', 'training pods do')}" if others else ""
        return first.reason, f"the rendezvous pod {troubled[0].name} waits for a node{also}: {first.message}"
    text = f"{counted(len(waiting), 'waits for a node', 'wait for nodes')} ({pod_names(waiting)}): {first.message}"
    spec = snapshot.job["spec"]
    checkpoints = (spec.get("memory") or {}).get("sizeLimit")
    would_help = missing_on_nodes(spec["template"]["spec"], snapshot.nodes, checkpoints)
    return first.reason, f"{text}; {would_help}" if would_help else text
