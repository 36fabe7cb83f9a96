"""New processes for those that have ended: at once, or a moment later where a recovery goes on without them.

And for those without a rank that do not leave what they were told to leave, which no recovery waits for.
"""

import math
from dataclasses import replace

from unbroken_core.coordinator.interruption import possible_rungs
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Forming, Interrupted, Planned, Running
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.protocol.messages import Respawn
from unbroken_core.vocabulary.reasons import Cause, Rung, WorkerPhase

MAX_HOLD_S = 1.0
"""So long at most a new process waits for a recovery that goes on without it."""
SETTLE_S = 0.25
"""So long it waits after that: the workers that were told to enter have yet to find each other."""


def respawn(job: JobState, now_s: float) -> float:
    """Start processes again where none is left, with a back-off for those that never get ready.

    Returns when to look again; inf: at the next event.
    """
    members = job.members
    until_s = _end_lingering(job, now_s) if members.lingering else math.inf
    if not members.respawning:
        return until_s
    held_until_s = _held_until_s(job, now_s)
    if held_until_s is not None and now_s < held_until_s:
        return min(until_s, held_until_s)
    for uid in list(members.respawning):
        member = members.by_uid[uid]
        due = [place for place in member.places.values() if place.needs_order]
        until_s = min([until_s, *(place.retry_at_s for place in due if place.retry_at_s > now_s)])
        now = [place for place in due if place.retry_at_s <= now_s]
        if now:
            _order(job, member, now)
    return until_s


def replace_process(job: JobState, member: Member, place: WorkerPlace) -> None:
    """Note that the process of a place is to be replaced; the order follows."""
    _note_respawned(job, member, [place])
    job.members.mark_failed(member, place)


def _order(job: JobState, member: Member, places: list[WorkerPlace]) -> None:
    cause = _cause_of(job, member, places[0])
    _note_respawned(job, member, places)
    job.members.note_respawn(member, places)
    orders = tuple((place.state.local_rank, place.replacing) for place in places if place.replacing is not None)
    job.send(member, Respawn(job.numbers.term, orders, cause))


def _note_respawned(job: JobState, member: Member, places: list[WorkerPlace]) -> None:
    """Note which of the processes with ranks are new in this interruption."""
    if isinstance(job.phase, Interrupted) and member.ranks:
        numbers = (place.state.local_rank for place in places)
        job.phase.respawned.setdefault(member.uid, set()).update(numbers)


def _end_lingering(job: JobState, now_s: float) -> float:
    """Give up those that have not left an earlier iteration in the time that ranks have for it."""
    members = job.members
    while members.lingering and not isinstance(job.phase, Forming):
        member = members.by_uid[next(iter(members.lingering))]
        late = [place for rank, place in member.places.items() if rank not in member.ranks and place.lingers]
        since_s = max([job.world.planned_s, *(place.since_s for place in late)])
        due_s = since_s + job.settings.timeouts.barrier_s
        if now_s < due_s:
            return due_s
        for place in late:
            if place.state.phase is WorkerPhase.READY:
                members.believe(member, place)  # It never entered what it was told, or it would have said so by now.
            else:
                replace_process(job, member, place)
    return math.inf


def _held_until_s(job: JobState, now_s: float) -> float | None:
    """Return when processes may be started that the recovery under way does not need; None: now.

    A start takes seconds of a core, and those who recover at this moment may need it.
    """
    phase = job.phase
    if not job.settings.is_in_process:
        return None
    if isinstance(phase, Running):
        return phase.since_s + SETTLE_S
    if job.history.running is None:
        return None
    if isinstance(phase, Planned):
        return job.world.planned_s + MAX_HOLD_S
    if not isinstance(phase, Interrupted) or phase.job_rung_began is not None:
        return None
    if phase.holds_respawns is None:
        phase = job.phase = replace(phase, holds_respawns=not _needs_processes(job, phase, now_s))
    return phase.at_s + MAX_HOLD_S if phase.holds_respawns else None


def _needs_processes(job: JobState, phase: Interrupted, now_s: float) -> bool:
    """Return whether the recovery may wait for new processes: where it may at all, and no spares are in their place."""
    members = job.members
    num_spares = sum(uid not in members.active for uid in members.ready)
    is_possible = Rung.PROCESS in possible_rungs(job, phase, now_s)
    return is_possible and num_spares < sum(uid in members.active for uid in members.broken)


def _cause_of(job: JobState, member: Member, place: WorkerPlace) -> Cause:
    incident = job.history.running
    local_rank = place.state.local_rank
    if incident is not None and (member.uid, local_rank) in incident.faults:
        return incident.faults[member.uid, local_rank].cause
    if place.state.fault is not None:
        return place.state.fault.cause
    return Cause.PROCESS_EXIT if incident is None else incident.culprit.cause
