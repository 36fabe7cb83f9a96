"""From what is known of a pod to an interruption: which faults its workers have, and the order to leave."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unbroken_core.coordinator.hangs import begin_inquiry, has_waited, note_answers
from unbroken_core.coordinator.moves import is_suspicion, may_wait
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import Members
from unbroken_core.coordinator.state.phases import Interrupted, Planned, Running
from unbroken_core.coordinator.state.places import Member, WorkerPlace, evidence
from unbroken_core.pod.stacks import bounded
from unbroken_core.protocol.bounds import MAX_DETAIL
from unbroken_core.protocol.messages import Fault, Interrupt
from unbroken_core.recovery.history import FaultRecord, Incident
from unbroken_core.vocabulary.reasons import Cause, Phase, Reason, WorkerPhase

MAX_PLANS = 8
"""Plans of one recovery; a fault in the next one begins a new recovery, so that the limit of those without progress
also ends a job whose workers never get as far as running."""


def inspect(
    job: JobState, member: Member, now_s: float, is_adoption: bool = False, lost_s: float | None = None
) -> None:
    """Look for faults of one member; interrupt the iteration when there is one.

    `lost_s`: when a world that is taken over was lost, for its first fault.
    """
    if not isinstance(job.phase, (Planned, Running, Interrupted)) or not member.ranks:
        return
    note_answers(job, member)
    if member.out is not None and not may_wait(job, member, is_adoption):
        record = FaultRecord(member.out, member.uid, None, now_s, detail=member.out_detail)
        take_fault(job, record, now_s, lost_s)
    iteration = job.members.world.iteration
    for local_rank in member.ranks:
        place = member.places[local_rank]
        is_firm = _is_firm(place, iteration)
        if isinstance(job.phase, Interrupted) and not is_firm and not is_adoption:
            continue
        found = evidence(place, iteration, is_adoption)
        if found is None:
            continue
        if is_adoption and not is_firm:
            # The rendezvous before this one had ended the iteration, or was away when it ended. What the others say
            # may be consequences: only stronger evidence names a culprit.
            detail = "the iteration had ended when the rendezvous was restarted"
            unnamed = FaultRecord(found.cause, "", None, _unknown_instant_s(job, now_s), detail=detail)
            take_fault(job, unnamed, now_s, lost_s)
            continue
        record = _record(member, place, found, now_s, has_waited(job, member, local_rank))
        is_news = take_fault(job, record, now_s, lost_s)
        if is_news and not (record.is_hang or record.waited or record.is_agents):
            count_fault(job, member, place)


def take_fault(
    job: JobState,
    fault: FaultRecord,
    now_s: float,
    lost_s: float | None = None,
    together: Sequence[FaultRecord] = (),
) -> bool:
    """Collect a fault of the current iteration, and interrupt it at the first. Return whether it is news.

    `lost_s`: when the world was lost, if that was before this coordinator took it over. `together`: the faults that
    are taken with it.
    """
    phase = job.phase
    if not isinstance(phase, (Planned, Running, Interrupted)):
        return False
    fault = with_pod(job.members, fault)
    if isinstance(phase, Interrupted) and job.history.running is not None:
        if fault.is_hang and phase.inquiry is None:
            job.phase = replace(phase, inquiry=begin_inquiry(job, now_s))
        return job.history.add(fault)
    again = job.history.running
    _open_incident(job, now_s, lost_s)
    if again is not None and again is job.history.running:
        again.repeat(fault)
        if isinstance(phase, Planned):
            again.add_phase(Phase.ENTER, now_s - job.world.planned_s)  # Not all have entered: it was in vain.
    job.history.add(fault)
    job.progress.stop(now_s, fault.at_s if lost_s is None else lost_s, fault.is_hang)
    inquiry = begin_inquiry(job, now_s) if fault.is_hang else None
    job.phase = Interrupted(now_s, job.pod_clock.read(now_s), inquiry=inquiry)
    incident = job.history.running
    culprit = fault if incident is None else incident.culprit
    job.report = StatusText(Reason.RECOVERING, f"iteration {job.world.iteration} was interrupted: {culprit.text}")
    order_out(job, job.members.by_uid.values())
    move = phase.move if isinstance(phase, Running) else None
    taken = {(each.pod_uid, each.cause) for each in (fault, *together)}
    for uid, planned in () if move is None else move.faults.items():
        if (uid, planned.cause) not in taken and is_suspicion(job, planned):
            # It explains nothing. Whether ranks move for it is judged anew once all train.
            acquit(job, uid, now_s)
        else:
            # It may have been the end of that pod that the fault was a consequence of.
            job.history.add(with_pod(job.members, planned))
    return True


def acquit(job: JobState, uid: str, now_s: float) -> None:
    """Take the blame of a pod back: it keeps its ranks, and may be blamed again."""
    job.health.give_back(uid, now_s)
    job.members.note_unfit(job.members.by_uid[uid], "")


def with_pod(members: Members, fault: FaultRecord) -> FaultRecord:
    """Return a fault with what is known of its pod, and as much of its text as is kept."""
    member = members.by_uid.get(fault.pod_uid)
    if member is None:
        return fault
    domains = members.ranking.names(member.uid)
    return replace(
        fault,
        rank=None if fault.local_rank is None else member.ranks.get(fault.local_rank),
        pod=member.pod,
        node=member.node,
        domain=domains[-1] if domains else "",
        detail=fault.detail[:MAX_DETAIL],
        stack=bounded(fault.stack),
    )


def order_out(job: JobState, members: Iterable[Member]) -> None:
    """Tell agents that the iteration is over, each with the number of a plan that it has.

    An agent cannot report an iteration whose plan it does not have. If this rendezvous were lost, the next one could
    reuse the number, and agents would ignore it.
    """
    iteration = job.world.iteration
    message = interrupt_message(job, job.history.running, iteration)
    for member in members:
        has_plan = member.plan is not None and member.plan.iteration >= iteration
        known = iteration if has_plan else min(member.newest_iteration, iteration)
        if known >= 0:
            job.send(member, message if known == iteration else replace(message, iteration=known))


def interrupt_message(job: JobState, incident: Incident | None, iteration: int) -> Interrupt:
    """Return the order to leave an iteration."""
    term = job.numbers.term
    if incident is None:
        return Interrupt(term, iteration, Cause.POD_LOST, None, "", "the job went on without this pod")
    culprit = incident.culprit
    return Interrupt(term, iteration, culprit.cause, culprit.rank, culprit.pod, culprit.detail)


def _record(member: Member, place: WorkerPlace, found: Fault, now_s: float, waited: bool) -> FaultRecord:
    is_told = found is place.state.fault
    return FaultRecord(
        found.cause,
        member.uid,
        place.state.local_rank,
        at_s=place.fault_at_s if is_told else now_s,
        detect_s=place.fault_detect_s if is_told else 0.0,
        incarnation=place.state.incarnation,
        detail=found.detail,
        stack=found.stack,
        is_certain=found.is_certain,
        is_hang=found.is_hang and found.cause is Cause.SOFT_TIMEOUT,
        waited=waited and found.cause is Cause.HARD_TIMEOUT,
        rule=found.rule,
    )


def _unknown_instant_s(job: JobState, now_s: float) -> float:
    """Return the instant of a fault from before this rendezvous: before all reported now, after all known before."""
    incident = job.history.running
    is_known = incident is not None and incident.found_s is None and incident.started_s < now_s
    return incident.started_s if incident is not None and is_known else -math.inf


def _is_firm(place: WorkerPlace, iteration: int) -> bool:
    """Return whether the evidence is more than having left the iteration, which everybody is told to do."""
    state = place.state
    return (state.fault is not None and state.fault.iteration == iteration) or state.phase is WorkerPhase.GONE


def count_fault(job: JobState, member: Member, place: WorkerPlace) -> None:
    """Count a fault of a worker where a rank may have only so many."""
    limit = job.settings.max_faults_per_rank
    if limit is not None:
        key = (member.uid, place.state.local_rank)
        num_faults = job.history.by_place[key] = job.history.by_place.get(key, 0) + 1
        job.members.count_fault(member, place, num_faults, limit)


def _open_incident(job: JobState, now_s: float, lost_s: float | None) -> None:
    incident = job.history.running
    if incident is not None and incident.num_plans >= MAX_PLANS:
        job.history.abandon()
        incident = None
    if incident is None:
        is_barren = not job.progress.has_gained(now_s)
        job.growth = job.growth if is_barren else None
        job.history.open(now_s, job.world.iteration, job.world.size, is_barren, lost_s)
