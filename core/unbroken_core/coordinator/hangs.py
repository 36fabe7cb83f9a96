"""Who hangs: what every rank did is gathered while all leave the iteration, and then a name is given, or none.

Nothing waits for it. Everybody was told to leave at once, agents answer that order with what their workers did, and who
has left has answered. The name is needed when nobody has to leave any more; it is given earlier once all have answered,
or with the answers that are there after ANSWERS_WITHIN_S, so that people need not wait for a rank that cannot leave.
"""

import math
from dataclasses import replace

from unbroken_core.coordinator.decisions import Name
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import Inquiry, Interrupted, Running
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.recovery.hangs import HangVerdict, Witness, judge
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.vocabulary.reasons import Cause, Doing, WorkerPhase

ANSWERS_WITHIN_S = 2.0


def begin_inquiry(job: JobState, now_s: float) -> Inquiry:
    """Return the inquiry for the iteration in force, with what is known already."""
    returned = frozenset(
        rank
        for uid in job.members.active
        for local_rank, rank in job.members.by_uid[uid].ranks.items()
        if job.members.by_uid[uid].places[local_rank].state.phase is WorkerPhase.COMPLETED
    )
    released_s = job.phase.released_s if isinstance(job.phase, Running) else -math.inf
    pending = dict.fromkeys(job.members.active)
    inquiry = Inquiry(now_s + ANSWERS_WITHIN_S, pending, returned=returned, free_s=now_s - released_s)
    for uid in job.members.active:
        _note(job, inquiry, job.members.by_uid[uid])
    return inquiry


def note_answers(job: JobState, member: Member) -> None:
    """Note what a member's workers did."""
    phase = job.phase
    if isinstance(phase, Interrupted) and phase.inquiry is not None and member.uid in phase.inquiry.pending:
        _note(job, phase.inquiry, member)


def has_waited(job: JobState, member: Member, local_rank: int) -> bool:
    """Return whether this worker is known to have waited for others when it was told to leave."""
    phase, rank = job.phase, member.ranks.get(local_rank)
    if not isinstance(phase, Interrupted) or phase.inquiry is None or rank is None:
        return False
    activity = phase.inquiry.answers.get(rank)
    return activity is not None and activity.doing in (Doing.COLLECTIVE, Doing.WAITING)


def named_by_s(phase: Interrupted) -> float:
    """Return when a name is due, whoever has answered until then; inf where none is."""
    inquiry = phase.inquiry
    return inquiry.until_s if inquiry is not None and inquiry.num_judged < 0 else math.inf


def name_who_hangs(job: JobState, phase: Interrupted, now_s: float) -> Name | None:
    """Return whom to name now; None while that is not due, or nothing new is known."""
    inquiry = phase.inquiry
    if inquiry is None:
        return None
    is_complete = not inquiry.pending or not job.members.leaving
    is_due = is_complete or (inquiry.num_judged < 0 and now_s >= inquiry.until_s)
    if not is_due or inquiry.num_judged >= len(inquiry.answers):
        return None
    witnesses = [
        Witness(rank, uid, inquiry.answers.get(rank), rank in inquiry.returned)
        for uid in job.members.active
        for rank in job.members.by_uid[uid].ranks.values()
    ]
    verdict = judge(witnesses, job.settings.timeouts.soft_s, inquiry.free_s)
    judged = replace(inquiry, num_judged=len(inquiry.answers), is_final=inquiry.is_final or is_complete)
    places = _places(job, verdict)
    counted = places if is_complete and not inquiry.is_final else ()
    return Name(_record(job, inquiry, verdict, places, now_s), replace(phase, inquiry=judged), counted)


def _note(job: JobState, inquiry: Inquiry, member: Member) -> None:
    iteration, has_answered = job.world.iteration, True
    for local_rank, rank in member.ranks.items():
        place = member.places[local_rank]
        activity = place.state.activity
        if activity is not None and activity.iteration == iteration:
            inquiry.answers.setdefault(rank, activity)
        elif place.state.phase in (WorkerPhase.RUNNING, WorkerPhase.STOPPING) and not place.is_dead:
            has_answered = has_answered and rank in inquiry.answers
    if has_answered:
        inquiry.pending.pop(member.uid, None)


def _places(job: JobState, verdict: HangVerdict) -> tuple[tuple[Member, WorkerPlace], ...]:
    if not verdict.ranks:
        return ()
    named = frozenset(verdict.ranks)
    members = [job.members.by_uid[uid] for uid in job.members.active]
    return tuple(
        (member, member.places[local_rank])
        for member in members
        for local_rank, rank in member.ranks.items()
        if rank in named
    )


def _record(
    job: JobState, inquiry: Inquiry, verdict: HangVerdict, places: tuple[tuple[Member, WorkerPlace], ...], now_s: float
) -> FaultRecord:
    """Return the verdict as a fault: of a rank, of a pod where several of its ranks hang, else of nobody."""
    incident = job.history.running
    told = None if incident is None else incident.culprit
    at_s, detect_s = (now_s, 0.0) if told is None else (told.at_s, told.detect_s)
    by_rule = None if incident is None else incident.rule
    text = verdict.text if by_rule is None else f"{by_rule.detail}; {verdict.text}"
    activity = inquiry.answers.get(verdict.ranks[0]) if verdict.ranks else None
    record = FaultRecord(
        Cause.SOFT_TIMEOUT,
        "",
        None,
        at_s,
        detect_s,
        detail=text[:2000],
        rule="" if by_rule is None else by_rule.rule,
        stack=() if activity is None else activity.stack,
        is_hang=True,
    )
    if len({member.uid for member, _place in places}) != 1:
        return record
    member, place = places[0]
    if len(places) == 1:
        record = replace(record, local_rank=place.state.local_rank, incarnation=place.state.incarnation)
    return replace(record, pod_uid=member.uid)
