"""New processes for those that have ended: at once, or a moment later where a recovery goes on without them.

And for those without a rank that do not leave what they were told to leave, which no recovery waits for.
"""

from unbroken_core.coordination.interruption import possible_rungs
from unbroken_core.coordination.members import Member, Place, needs_order
from unbroken_core.coordination.planning import condemn
from unbroken_core.coordination.state import Interruption, Job
from unbroken_core.messages import Respawn
from unbroken_core.reasons import Cause, JobPhase, Rung, WorkerPhase

MAX_HOLD_S = 1.0
"""So long at most a new process waits for a recovery that goes on without it."""
SETTLE_S = 0.25
"""So long it waits after that: the workers that were told to enter have yet to find each other."""


def heal(job: Job, now_s: float) -> None:
    """Start processes again where none is left, with a back-off for those that never get ready."""
    _end_lingering(job, now_s)
    held_until_s = _held_until_s(job, now_s) if job.census.healing else None
    if held_until_s is not None and now_s < held_until_s:
        job.wake(held_until_s)
        return
    for uid in list(job.census.healing):
        member = job.census.by_uid[uid]
        due = [place for place in member.places.values() if needs_order(place)]
        for place in due:
            if place.retry_at_s > now_s:
                job.wake(place.retry_at_s)
        now = [place for place in due if place.retry_at_s <= now_s]
        if not now:
            continue
        for place in now:
            place.replacing = place.state.incarnation if place.replacing is None else place.replacing
            place.is_order_sent = True
        if job.interruption is not None and member.ranks:
            job.interruption.respawned.setdefault(uid, set()).update(place.state.local_rank for place in now)
        orders = tuple((place.state.local_rank, place.replacing) for place in now if place.replacing is not None)
        job.send(member, Respawn(job.generation, orders, _cause_of(job, member, now[0])))
        job.sort(member)


def _end_lingering(job: Job, now_s: float) -> None:
    """Give up those that have not left an earlier iteration in the time that ranks have for it."""
    lingering = job.census.lingering
    while lingering and job.phase is not JobPhase.FORMING:
        member = job.census.by_uid[next(iter(lingering))]
        late = [place for rank, place in member.places.items() if rank not in member.ranks and place.lingers]
        due_s = max([job.planned_s, *(place.since_s for place in late)]) + job.settings.timeouts.barrier_s
        if now_s < due_s:
            job.wake(due_s)
            return
        for place in late:
            if place.state.phase is WorkerPhase.READY:
                place.told_incarnation = -1  # It never entered what it was told, or it would have said so by now.
            else:
                condemn(job, member, place)
        job.sort(member)


def _held_until_s(job: Job, now_s: float) -> float | None:
    """Return when processes may be started that the recovery under way does not need; None: now.

    A start takes seconds of a core, and those who recover at this moment may need it.
    """
    interruption = job.interruption
    if not job.settings.is_in_process:
        return None
    if job.phase is JobPhase.RUNNING:
        return None if job.running_s is None else job.running_s + SETTLE_S
    if job.history.running is None:
        return None
    if job.phase is JobPhase.PLANNED:
        return job.planned_s + MAX_HOLD_S
    if job.phase is not JobPhase.INTERRUPTED or interruption is None or interruption.job_rung_began is not None:
        return None
    if interruption.does_hold is None:
        interruption.does_hold = not _needs_processes(job, interruption, now_s)
    return interruption.at_s + MAX_HOLD_S if interruption.does_hold else None


def _needs_processes(job: Job, interruption: Interruption, now_s: float) -> bool:
    """Return whether the recovery may wait for new processes: where it may at all, and no spares are in their place."""
    census = job.census
    num_spares = sum(uid not in census.active for uid in census.ready)
    is_possible = Rung.PROCESS in possible_rungs(job, interruption, now_s)
    return is_possible and num_spares < sum(uid in census.active for uid in census.broken)


def _cause_of(job: Job, member: Member, place: Place) -> Cause:
    incident = job.history.running
    local_rank = place.state.local_rank
    if incident is not None and (member.uid, local_rank) in incident.faults:
        return incident.faults[member.uid, local_rank].cause
    if place.state.fault is not None:
        return place.state.fault.cause
    return Cause.PROCESS_EXIT if incident is None else incident.culprit.cause
