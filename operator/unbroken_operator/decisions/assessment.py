"""Pure: what a snapshot means: which pods count, which are lost, their roles and domains, whether the job is over."""

from dataclasses import dataclass

from unbroken_core.protocol.messages import JobStatus, Observation, PodObservation, PodStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Role, WorkerPhase
from unbroken_operator.decisions.admission import ValidSpec
from unbroken_operator.decisions.domains import Domains, find_domains
from unbroken_operator.decisions.lifecycle import JobOutcome, has_run, is_suspended, job_outcome, look_again_s
from unbroken_operator.decisions.node_signals import troubled_pods
from unbroken_operator.decisions.objects.manifests import settings_digest
from unbroken_operator.decisions.objects.rendezvous_place import made_from
from unbroken_operator.decisions.objects.successor import Succession, can_stand_by, succession
from unbroken_operator.decisions.snapshot import PodView, Snapshot
from unbroken_operator.decisions.time_spent import earlier_time, newest_counted
from unbroken_operator.decisions.updates import leaving_for_update, outdated_pods


@dataclass(frozen=True)
class Assessment:
    """Facts that follow from one snapshot of an admitted job."""

    outcome: JobOutcome | None
    """Once the job is over."""
    is_suspended: bool
    """Whether the job is to have no pods."""
    report: JobStatus | None
    members: dict[str, PodStatus]
    """Pods of the report by uid."""
    lost: frozenset[str]
    """Uids of pods whose node is dead."""
    alive: tuple[PodView, ...]
    """Training pods that count as present, by ordinal."""
    outdated: tuple[PodView, ...]
    """Present pods that were made from an earlier template."""
    troubled: dict[str, str]
    """Uids of present pods that are to make way for others, and why."""
    rendezvous: PodView | None
    """The rendezvous pod to keep."""
    is_rendezvous_outdated: bool
    """Whether that one was made with other settings, and is kept until it may be replaced."""
    stale_rendezvous: tuple[PodView, ...]
    """Rendezvous pods to delete."""
    succession: Succession
    """Which rendezvous pod stands by, and what becomes of it."""
    domains: Domains
    """Where the training pods are."""

    @property
    def awaited_rendezvous(self) -> PodView | None:
        """The rendezvous pod to keep; without one, that which is to lead next."""
        return self.rendezvous or self.succession.successor

    def role(self, pod: PodView) -> Role:
        """Return the role that the rendezvous reports, else the one that the pod was made for."""
        member = self.members.get(pod.uid)
        if member is not None and self.report is not None and self.report.iteration >= 0:
            return member.role
        return Role.SPARE if pod.role == Role.SPARE.value else Role.ACTIVE


def assess(snapshot: Snapshot, verdict: ValidSpec) -> Assessment:
    """Return what the snapshot means under this spec."""
    settings = verdict.settings
    report = snapshot.report
    members = {pod.uid: pod for pod in report.pods} if report is not None else {}
    trainers = snapshot.trainers()
    outcome = job_outcome(snapshot, verdict.spec)
    suspended = outcome is None and is_suspended(snapshot, verdict.spec)
    # An operator that has just begun asks first: the rendezvous may say that pods train of which no kubelet tells.
    may_hear = outcome is None and not suspended and look_again_s(snapshot) is not None
    lost = frozenset(pod.uid for pod in snapshot.pods if _is_lost(pod, snapshot, members, settings, may_hear=may_hear))
    is_over = outcome is not None or _may_have_ended(snapshot, settings, lost, members)
    # Nobody is replaced for having ended well by what was heard before that.
    heard = report if snapshot.is_reachable else None
    alive = [pod for pod in trainers if _counts(pod, lost, members, heard, is_over=is_over)]
    outdated = outdated_pods(verdict.spec, alive)
    found = succession(
        snapshot,
        lost,
        settings_digest(settings),
        made_from(verdict.spec),
        can_stand_by=can_stand_by(verdict.spec, snapshot.options),
    )
    return Assessment(
        outcome=outcome,
        is_suspended=suspended,
        report=report,
        members=members,
        lost=lost,
        alive=tuple(sorted(alive, key=lambda pod: pod.ordinal)),
        outdated=outdated,
        troubled=leaving_for_update(verdict.spec, outdated) | troubled_pods(snapshot, verdict.spec.node_signals, alive),
        rendezvous=found.leader,
        is_rendezvous_outdated=found.is_outdated,
        stale_rendezvous=found.stale,
        succession=found,
        domains=find_domains(snapshot, verdict.spec, trainers, alive),
    )


def observation(snapshot: Snapshot, assessment: Assessment, settings: JobSettings) -> Observation:
    """Return what the rendezvous should know about the pods."""
    pods = {}
    for pod in sorted(snapshot.trainers(), key=lambda pod: pod.ordinal):
        # A pod that succeeded was ended on purpose: its connection closes by itself.
        pods[pod.uid] = PodObservation(
            pod=pod.name,
            node=pod.node,
            domains=assessment.domains.by_pod.get(pod.uid, ()) if settings.layers else (),
            role=Role.SPARE if pod.role == Role.SPARE.value else Role.ACTIVE,
            gone=_gone(pod, assessment.lost),
            # The time to pull an image counts no more against the script than the time without a node.
            is_waiting=pod.phase == "Pending",
            is_ended=_is_ended(pod, snapshot),
        )
    earlier, counted = earlier_time(snapshot), newest_counted(snapshot)
    return Observation(pods, _is_accounted(snapshot), snapshot.memory.gone, earlier, counted)


def _is_ended(pod: PodView, snapshot: Snapshot) -> bool:
    """Whether nothing of the pod can run any more; a node that is only not ready may train on."""
    if pod.has_ended or not pod.node:
        return pod.has_ended
    node = snapshot.nodes.get(pod.node)
    # Deleting a Node, or this taint, asserts that the machine is off: by an administrator or the cloud's controller.
    if node is None:
        return bool(snapshot.nodes) and pod.node not in snapshot.unseen_nodes
    return node.is_out_of_service


def _is_accounted(snapshot: Snapshot) -> bool:
    """Whether all pods that the job ever had exist, or were seen to end by this operator. No ordinal is used twice."""
    num_ever = snapshot.next_pod_ordinal
    num_unused = sum(ordinal < num_ever for ordinal in snapshot.memory.unused_ordinals)
    return len(snapshot.trainers()) + snapshot.num_ended + num_unused >= num_ever


def _gone(pod: PodView, lost: frozenset[str]) -> Cause | None:
    if pod.phase == "Failed" or (pod.is_deleting and pod.is_terminal):
        return Cause.POD_LOST
    if pod.uid in lost:
        return Cause.NODE_LOST
    return Cause.POD_LEAVING if pod.is_deleting or pod.leaving else None


def _is_lost(
    pod: PodView, snapshot: Snapshot, members: dict[str, PodStatus], settings: JobSettings, *, may_hear: bool
) -> bool:
    if not pod.node or pod.is_terminal or pod.node in snapshot.unseen_nodes:
        return False
    node = snapshot.nodes.get(pod.node)
    if node is not None and node.is_ready:
        return False
    is_off = node is None or node.is_out_of_service
    if may_hear and not is_off:
        return False
    # A node that only the API server cannot reach may train on: its agent's connection is the better witness.
    if snapshot.is_reachable and pod.uid == snapshot.report_from:
        return False
    return not _may_train(members.get(pod.uid), snapshot, settings, is_off=is_off)


def _may_train(member: PodStatus | None, snapshot: Snapshot, settings: JobSettings, *, is_off: bool) -> bool:
    """Whether a pod of the last report may train on, on a node that is not ready, or off."""
    if member is None:
        return False
    if not snapshot.is_reachable:
        return member.is_connected and not is_off and may_train_unheard_s(snapshot, settings) > 0
    if member.is_connected:
        return True
    # While an iteration runs with its ranks, the rendezvous alone says when a broken connection is a lost pod.
    is_at_work = snapshot.report is not None and snapshot.report.phase is JobPhase.RUNNING and bool(member.ranks)
    return is_at_work and not is_off


def may_train_unheard_s(snapshot: Snapshot, settings: JobSettings) -> float:
    """Return the seconds for which ranks may still train that no rendezvous watches: then they have left."""
    if snapshot.is_reachable or not has_run(snapshot):
        return 0.0
    return max(0.0, settings.timeouts.isolation_limit_s - snapshot.unheard_for_s)


def _counts(
    pod: PodView,
    lost: frozenset[str],
    members: dict[str, PodStatus],
    report: JobStatus | None,
    *,
    is_over: bool,
) -> bool:
    if pod.is_deleting or pod.uid in lost or pod.phase == "Failed":
        return False
    if pod.phase != "Succeeded" or is_over:
        return True
    # Pods end well when the training is over, which the API server may show before the report says so.
    member = members.get(pod.uid)
    return report is None or report.phase is JobPhase.ENDING or (member is not None and member.is_connected)


def _may_have_ended(
    snapshot: Snapshot, settings: JobSettings, lost: frozenset[str], members: dict[str, PodStatus]
) -> bool:
    """Whether a new rendezvous has yet to say that the job was ending, as all of its active pods are there or done."""
    report = snapshot.report
    if report is None or report.phase is not JobPhase.FORMING or snapshot.status.get("iteration", -1) < 0:
        return False
    there = [
        pod
        for pod in snapshot.trainers()
        if pod.role == Role.ACTIVE.value
        and pod.phase in ("Running", "Succeeded")
        and _gone(pod, lost) is None
        and not _has_yet_to_train(members.get(pod.uid))
    ]
    return len(there) >= settings.replicas and any(pod.phase == "Succeeded" for pod in there)


def _has_yet_to_train(member: PodStatus | None) -> bool:
    """Whether a pod was made after the last world: all that its workers did is to start."""
    if member is None or not member.is_connected or not member.workers:
        return False
    return all(phase in (WorkerPhase.STARTING, WorkerPhase.READY) for phase in member.workers)
