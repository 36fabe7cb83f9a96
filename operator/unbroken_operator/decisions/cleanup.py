"""Pure: the deletions of a job that is suspended or over, of pods that no kubelet ends, or whose agent crashes."""

from collections.abc import Iterator
from dataclasses import dataclass

from unbroken_core.protocol.settings import HealthMode, JobSettings
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api.models import CleanPodPolicy, Spec
from unbroken_operator.decisions.actions import Action, DeleteJob, DeletePod, Ordinals
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.lifecycle import JobOutcome, ttl_left_s
from unbroken_operator.decisions.snapshot import PodView, Snapshot

RENDEZVOUS_END_S = 10.0
"""A rendezvous that is being deleted has so long to end before the training pods are: its kubelet gives it 5."""
UNFINISHED_S = 2.0
"""A pod that never had a node is marked and removed at once. An API server that dies in between leaves it marked."""
_SUSPENDED = "the job is suspended"
_OVER = "the job is over"


@dataclass(frozen=True)
class Objects:
    """Actions on objects, and the ordinals that stay free after them."""

    actions: tuple[Action, ...]
    ordinals: Ordinals
    check_after_s: float | None = None
    num_held: int = 0
    """Pods that wait for the job's budget."""


def suspended(snapshot: Snapshot, assessment: Assessment, free: Ordinals) -> Objects:
    """End all pods, with their grace period: the rendezvous first, to which the others would be faults to repair."""
    actions: list[Action] = []
    wait_s = 0.0
    for pod in snapshot.rendezvous_pods():
        if not pod.is_deleting:
            actions.append(DeletePod(pod.name, pod.uid, _SUSPENDED))
        if not pod.is_terminal and pod.uid not in assessment.lost:
            wait_s = max(wait_s, RENDEZVOUS_END_S - snapshot.memory.deleting_for_s.get(pod.uid, 0.0))
    if wait_s <= 0:
        actions += [
            DeletePod(pod.name, pod.uid, _SUSPENDED)
            for pod in snapshot.trainers()
            if not pod.is_deleting and pod.phase != "Failed"
        ]
    actions += forced(snapshot, assessment)
    waits = [wait for wait in (wait_s, force_wait_s(snapshot, assessment)) if wait > 0]
    return Objects(tuple(actions), free, min(waits, default=None))


def after_the_end(
    snapshot: Snapshot, spec: Spec, assessment: Assessment, outcome: JobOutcome, free: Ordinals
) -> Objects:
    """Keep ended pods for their logs as far as the spec says so; end pods that would wait forever."""
    if not outcome.is_recorded:
        return Objects((), free)
    linger_s = 0.0 if outcome.is_ours else snapshot.options.linger_s - snapshot.memory.finished_for_s
    actions = [
        DeletePod(pod.name, pod.uid, _OVER)
        for pod in snapshot.trainers()
        if not pod.is_deleting and _is_to_go(pod, spec.clean_pod_policy, outcome, linger_s)
    ]
    gone = {action.uid for action in actions}
    is_anyone_left = any(
        not pod.is_terminal and not pod.is_deleting and pod.uid not in gone for pod in snapshot.trainers()
    )
    if not is_anyone_left or linger_s <= 0:
        actions += [DeletePod(pod.name, pod.uid, _OVER) for pod in snapshot.rendezvous_pods() if not pod.is_deleting]
    waits = [linger_s] if is_anyone_left and linger_s > 0 else []
    ttl_s = ttl_left_s(snapshot, spec)
    if ttl_s == 0 and not waits:
        metadata = snapshot.job["metadata"]
        why = f"spec.ttlSecondsAfterFinished ({spec.ttl_seconds_after_finished}) is over"
        return Objects((DeleteJob(snapshot.uid, str(metadata.get("resourceVersion", "")), why),), free)
    waits += [wait for wait in (ttl_s, force_wait_s(snapshot, assessment)) if wait]
    return Objects((*actions, *forced(snapshot, assessment)), free, min(waits, default=None))


def _is_to_go(pod: PodView, policy: CleanPodPolicy, outcome: JobOutcome, linger_s: float) -> bool:
    if pod.is_terminal:
        return policy is CleanPodPolicy.ALL
    if pod.phase == "Pending" or outcome.is_ours:
        return True
    return policy is not CleanPodPolicy.NONE and linger_s <= 0


def without_agent(snapshot: Snapshot, assessment: Assessment) -> Iterator[DeletePod]:
    """Yield the deletions of pods whose agent does not stay up: they run, but can have no part in the job any more.

    Only what the rendezvous has given up counts: a rank that trains on without its agent is left alone. Before the
    first plan a job in which nobody joins is left alone as well: another pod would do no better.
    """
    report = assessment.report
    if report is None or not snapshot.is_reachable or report.phase is JobPhase.ENDING:
        return
    if report.iteration < 0 and not any(member.is_connected for member in report.pods):
        return
    for pod in assessment.alive:
        member = assessment.members.get(pod.uid)
        if pod.agent_crashes and (member is None or not (member.is_connected or member.ranks)):
            yield DeletePod(pod.name, pod.uid, f"its agent does not stay up: {pod.agent_crashes}")


def forced(snapshot: Snapshot, assessment: Assessment) -> Iterator[Action]:
    """Yield the deletions that no kubelet carries out any more."""
    for pod, after_s, why in _stuck_ends(snapshot, assessment):
        if snapshot.memory.deleting_for_s.get(pod.uid, 0.0) >= after_s:
            yield DeletePod(pod.name, pod.uid, why, is_forced=True)


def force_wait_s(snapshot: Snapshot, assessment: Assessment) -> float:
    """Return the seconds until the next such deletion, 0 for none or now."""
    waits = [
        after_s - snapshot.memory.deleting_for_s.get(pod.uid, 0.0)
        for pod, after_s, _ in _stuck_ends(snapshot, assessment)
    ]
    return max(min(waits, default=0.0), 0.0)


def _stuck_ends(snapshot: Snapshot, assessment: Assessment) -> Iterator[tuple[PodView, float, str]]:
    """Yield deleted pods that no kubelet removes, after how many seconds to force them away, and why."""
    for pod in (*snapshot.trainers(), *snapshot.rendezvous_pods()):
        if not pod.is_deleting:
            continue
        if not pod.node and not pod.finalizers:
            yield pod, UNFINISHED_S, "its deletion was begun, and broke off"
        elif pod.uid in assessment.lost:
            yield pod, snapshot.options.force_delete_after_s, f"node {pod.node} does not come back"


def unfit(snapshot: Snapshot, settings: JobSettings, assessment: Assessment) -> Iterator[Action]:
    """Delete pods whose watch or preflight found a broken device, once their ranks are elsewhere: others take their
    place."""
    report = assessment.report
    is_sure = report is not None and report.phase is JobPhase.RUNNING and snapshot.is_reachable
    if HealthMode.ACT not in (settings.health, settings.preflight) or not is_sure:
        return
    for pod in assessment.alive:
        member = assessment.members.get(pod.uid)
        if member is not None and member.unfit and not member.ranks:
            yield DeletePod(pod.name, pod.uid, f"it was found to be broken: {member.unfit[:200]}")
