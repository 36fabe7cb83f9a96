"""Ranks that move as planned (a pod is deleted, its node cordoned, the template changed) do so between two steps.

    none ──a pod is to leave──> ASKED ──all have answered──> NAMED ──all stand after one step──> COMMON ──all done──┐
     ^                           │ a worker tells no steps, or timeouts.drain is over                               v
     └──nobody leaves any more───┴──────────────────────────────────────────────────────────────────────────> Interrupt

Every worker that is asked waits in its next ping, and answers which step it told last: so the highest step that is told
or waited at is one that all can reach and none can pass. Those below it go on to there. A rank that skips a step, or
was faster, only raises the step; at worst the time is up, and the iteration is interrupted as by a fault. A fault
meanwhile is handled at once, as any other. See docs/design/0014-moves-between-steps.md.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from unbroken_core.coordination.growth import growth
from unbroken_core.coordination.members import Member
from unbroken_core.coordination.planning import running_text
from unbroken_core.coordination.state import Awaited, Job, Move
from unbroken_core.messages import NO_STEP, Halt, Halted, WorkerState
from unbroken_core.reasons import Cause, JobPhase, Reason, WorkerPhase
from unbroken_core.recoveries.history import FaultRecord
from unbroken_core.recoveries.ladder import shorten_names

_AT_ONCE = "moves at once: "
_SLACK_S = 2.0
"""So much longer than the coordinator workers wait: it is the one that ends the wait, unless it is gone."""


def may_wait(job: Job, member: Member, is_adoption: bool) -> bool:
    """Return whether a pod that is to leave can wait for a common step; a move that began already takes it in.

    While a job is taken over the pods may be known that leave, before it runs: then the answer is put off.
    """
    if member.out is not Cause.POD_LEAVING or job.settings.timeouts.drain_s <= 0 or not job.settings.is_in_process:
        return False
    if job.phase is JobPhase.PLANNED:
        return is_adoption and not job.census.not_entered
    return job.phase is JobPhase.RUNNING and (job.move is not None or all(_can_halt(job)))


def _can_halt(job: Job) -> Iterator[bool]:
    return (job.census.by_uid[uid].can_halt for uid in job.census.active)


def note_halted(job: Job, member: Member) -> None:
    """Note what a pod has said while ranks are about to move."""
    move = job.move
    if move is None or move.order is None or member.uid not in job.census.active:
        return
    states = [member.places[local_rank].state for local_rank in member.ranks]
    if any(state.phase is WorkerPhase.COMPLETED for state in states):
        # Also one that has answered before: it stands after no step any more.
        move.is_ending = True
    elif member.uid in move.pending and all(_has_obeyed(state, move.order, move.wants) for state in states):
        del move.pending[member.uid]


def while_moving(job: Job, now_s: float) -> list[FaultRecord]:
    """Lead all workers to one step. Return the faults with which the iteration is to be interrupted now, if any."""
    if job.phase is not JobPhase.RUNNING:
        return []
    leaving = [member for uid in job.census.out if (member := job.census.by_uid[uid]).ranks]
    faults = {member.uid: _fault(job, member, now_s) for member in leaving}
    if not all(may_wait(job, member, is_adoption=False) for member in leaving):
        return list(faults.values())
    more = growth(job, now_s)
    if more is not None and job.move is None and not all(_can_halt(job)):
        job.growing.give_up(job.iteration)
    elif more is not None:
        faults[more.pod_uid] = more
    if not faults:
        _call_off(job, now_s)
        return []
    if job.move is None:
        job.move = Move(now_s + job.settings.timeouts.drain_s)
    move = job.move
    move.faults = {uid: move.faults.get(uid, fault) for uid, fault in faults.items()}
    if now_s >= move.until_s:
        waited_s = job.settings.timeouts.drain_s
        why = f"not all ranks stood after the same step within {waited_s:g} s (timeouts.drainSeconds)"
        return _give_up(job, move, why, now_s)
    job.wake(move.until_s)
    if move.order is None:
        _demand(job, move, 0, Awaited.ANSWER, now_s)
    if move.is_ending and move.order is not None and move.order.step != NO_STEP:
        _demand(job, move, NO_STEP, Awaited.STAND, now_s)
    return [] if move.pending else _go_on(job, move, now_s)


def send_halt(job: Job, member: Member, now_s: float) -> None:
    """Tell a pod that came back what it may have missed."""
    if job.move is not None and job.move.order is not None and member.ranks:
        within_s = job.move.until_s + _SLACK_S - now_s
        job.send(member, replace(job.move.order, within_s=within_s))


def _go_on(job: Job, move: Move, now_s: float) -> list[FaultRecord]:
    """Name the next step, once all have done what the last order wanted."""
    if move.wants is Awaited.SAVE:
        return _depart(move, "" if move.order is None else f"moves after step {move.order.step}")
    answers = list(_answers(job))
    told = [answer.step for answer in answers]
    has_run_s = 0.0 if job.running_s is None else now_s - job.running_s
    if max(told) < 0 or (min(told) < 0 and has_run_s >= job.settings.timeouts.drain_s):
        # In a first step, however long, nobody has told one yet: that is no reason to stay small for good.
        again_s = now_s + max(has_run_s, job.settings.timeouts.drain_s) if max(told) < 0 else math.inf
        return _give_up(job, move, f"{_AT_ONCE}not all ranks tell their steps (ping(step=))", now_s, again_s)
    goals = {answer.step if answer.is_held else answer.step + 1 for answer in answers}
    is_common = len(goals) == 1 and all(answer.is_held for answer in answers)
    _demand(job, move, max(goals), Awaited.SAVE if is_common else Awaited.STAND, now_s)
    return []


def _demand(job: Job, move: Move, step: int, wants: Awaited, now_s: float) -> None:
    """Tell all workers of the iteration how far to go, and wait for them."""
    job.num_halts += 1
    within_s = move.until_s + _SLACK_S - now_s
    order = Halt(job.generation, job.num_halts, job.iteration, step, wants is Awaited.SAVE, within_s)
    move.order, move.wants, move.pending = order, wants, dict.fromkeys(job.census.active)
    for uid in move.pending:
        job.send(job.census.by_uid[uid], order)
    for uid in tuple(move.pending):
        note_halted(job, job.census.by_uid[uid])
    if step != NO_STEP:
        where = {Awaited.ANSWER: "between two steps", Awaited.STAND: f"after step {step}"}.get(wants, f"now, at {step}")
        names = [fault.pod for fault in move.faults.values() if fault.pod]
        who = f"those of {shorten_names(names)} move" if names else "more join"
        job.say(Reason.TRAINING, f"{running_text(job)}; {who} {where}")


def _call_off(job: Job, now_s: float) -> None:
    """Let the workers go on: nobody leaves any more."""
    move, job.move = job.move, None
    if move is None:
        return
    if move.order is not None:
        _demand(job, move, NO_STEP, Awaited.STAND, now_s)
    job.say(Reason.TRAINING, running_text(job))


def _give_up(job: Job, move: Move, why: str, now_s: float, again_s: float = math.inf) -> list[FaultRecord]:
    """Find no common step: who must leave does so wherever the ranks are, but to grow is worth no lost step."""
    if any(fault.cause is not Cause.CAPACITY_RETURNED for fault in move.faults.values()):
        return _depart(move, why)
    job.growing.give_up(job.iteration, again_s)
    job.wake(again_s)
    _call_off(job, now_s)
    when = "in the next recovery" if again_s == math.inf else "in the next recovery, or once steps are told"
    job.say(Reason.TRAINING, f"{running_text(job)}; those join {when}: {why.removeprefix(_AT_ONCE)}")
    return []


def _depart(move: Move, detail: str) -> list[FaultRecord]:
    return [replace(fault, detail=detail) for fault in move.faults.values()]


def _fault(job: Job, member: Member, now_s: float) -> FaultRecord:
    return job.fault(member, FaultRecord(member.out or Cause.POD_LEAVING, member.uid, None, now_s))


def _answers(job: Job) -> Iterator[Halted]:
    for uid in job.census.active:
        member = job.census.by_uid[uid]
        for local_rank in member.ranks:
            halted = member.places[local_rank].state.halted
            if halted is not None:
                yield halted


def _has_obeyed(state: WorkerState, order: Halt, wants: Awaited) -> bool:
    halted = state.halted
    if halted is None or (halted.generation, halted.number) != (order.generation, order.number):
        return False
    return halted.is_done if wants is Awaited.SAVE else halted.is_held or wants is Awaited.ANSWER
