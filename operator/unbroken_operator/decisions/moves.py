"""How pods that are to leave are led away: from a node that is about to go, or from an earlier template.

    troubled ──a ready spare elsewhere──> marked ──rendezvous hears of it, ranks move──> deleted
        │                                   (annotation: it outlives the operator)
        └── one more pod is made meanwhile, as if the pod were not there

Without a spare that is ready nothing moves: a node that is about to go is better than none.
"""

from collections.abc import Iterator

from unbroken_core.protocol.messages import PodStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import JobPhase, Role, WorkerPhase
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import Action, DeletePod, PatchPod
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.snapshot import Snapshot


def num_extra(settings: JobSettings, assessment: Assessment) -> int:
    """Return how many pods more than otherwise are wanted, so that others can leave their nodes."""
    return min(len(assessment.troubled), max(1, settings.spares))


def moves(snapshot: Snapshot, settings: JobSettings, assessment: Assessment) -> Iterator[Action]:
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
