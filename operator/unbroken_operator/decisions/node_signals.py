"""Pure: which pods are to leave their nodes, and when.

    sign on the node ──a ready spare elsewhere──> marked ──rendezvous is told, ranks move──> deleted
           │                                        (annotation: it outlives the operator)
           └── one more pod is made meanwhile, as if the pod were not there

Without a spare that is ready nothing moves: a node that is about to go is better than none.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from unbroken_core.messages import PodStatus
from unbroken_core.reasons import JobPhase, Role, WorkerPhase
from unbroken_core.settings import JobSettings
from unbroken_operator.api import layout
from unbroken_operator.api.recovery_models import NodeSignals, Reaction
from unbroken_operator.decisions.actions import Action, DeletePod, PatchPod
from unbroken_operator.decisions.snapshot import NodeView, PodView, Snapshot

if TYPE_CHECKING:
    from unbroken_operator.decisions.assessment import Assessment


def sign_of(node: NodeView, signals: NodeSignals) -> str:
    """Return why a node counts as about to go, "" when it does not."""
    if signals.cordon is Reaction.MOVE and node.is_cordoned:
        return "is cordoned"
    for taint in signals.taints:
        for key, effect in node.taints:
            if key == taint.key and (taint.effect is None or effect == taint.effect.value):
                return f"has taint {key}:{effect}"
    for condition in signals.conditions:
        if node.conditions.get(condition.type) == condition.status.value:
            return f"has condition {condition.type}={condition.status.value}"
    return ""


def troubled_pods(snapshot: Snapshot, signals: NodeSignals, pods: Iterable[PodView]) -> dict[str, str]:
    """Return the uids of the pods that are to leave their nodes, and why; what is marked stays so."""
    pods = list(pods)
    nodes = {pod.node for pod in pods if pod.node in snapshot.nodes}
    signs = {name: sign_of(snapshot.nodes[name], signals) for name in nodes}
    found = {pod.uid: pod.leaving or (signs.get(pod.node) and f"node {pod.node} {signs[pod.node]}") for pod in pods}
    return {uid: why for uid, why in found.items() if why}


def num_extra(settings: JobSettings, assessment: "Assessment") -> int:
    """Return how many pods more than otherwise are wanted, so that others can leave their nodes."""
    return min(len(assessment.troubled), max(1, settings.spares))


def moves(snapshot: Snapshot, settings: JobSettings, assessment: "Assessment") -> Iterator[Action]:
    """Yield what brings pods off their nodes: marks while spares are ready, deletions of those without ranks."""
    report = assessment.report
    if not assessment.troubled or report is None or report.phase is not JobPhase.RUNNING or not snapshot.is_reachable:
        return
    troubled = [pod for pod in assessment.alive if pod.uid in assessment.troubled]
    num_ready = sum(
        pod.uid not in assessment.troubled and is_ready_spare(assessment.members.get(pod.uid))
        for pod in assessment.alive
    )
    with_ranks = [pod for pod in troubled if _has_ranks(assessment.members.get(pod.uid))]
    waiting = [pod for pod in with_ranks if not pod.leaving]
    room = num_ready - (len(with_ranks) - len(waiting))
    chosen = waiting[: max(0, room)]
    idle = [pod for pod in troubled if pod not in with_ranks]
    # A spare that is to leave as well must not be the one to which ranks move.
    for pod in (*chosen, *(pod for pod in idle if chosen and not pod.leaving)):
        yield PatchPod(pod.name, pod.uid, {}, {layout.LEAVING_ANNOTATION: assessment.troubled[pod.uid]})
    is_full = num_ready >= max(1, settings.spares)
    for pod in idle:
        if pod.leaving or is_full:
            yield DeletePod(pod.name, pod.uid, assessment.troubled[pod.uid])


def is_ready_spare(member: PodStatus | None) -> bool:
    """Whether ranks can move to this pod at once."""
    is_spare = member is not None and member.is_connected and member.role is Role.SPARE
    return is_spare and member is not None and set(member.workers) == {WorkerPhase.READY}


def _has_ranks(member: PodStatus | None) -> bool:
    return member is not None and bool(member.ranks)
