"""Ranks that move as planned (a pod is deleted, its node cordoned, the template changed) do so between two steps.

    none ──a pod is to leave──> ASKED ──all have answered──> NAMED ──all stand after one step──> COMMON ──all done──┐
     ^                           │ a worker tells no steps, or timeouts.drain is over                               v
     └──nobody leaves any more───┴──────────────────────────────────────────────────────────────────────────> TakeFaults

Every worker that is asked waits in its next ping, and answers which step it told last: so the highest step that is told
or waited at is one that all can reach and none can pass. Those below it go on to there. A rank that skips a step, or
was faster, only raises the step; at worst the time is up, and the iteration is interrupted as by a fault. A fault
meanwhile is handled at once, as any other. See docs/design/0014-moves-between-steps.md.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from unbroken_core.coordinator.adoption.previous_world import new_world
from unbroken_core.coordinator.decisions import Decision, Learn, NoteProgress, Order, ReleaseAll, TakeFaults, Wait
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.phases import Awaited, Planned, PlannedMove, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.messages import NO_STEP, Halt, Halted, WorkerState
from unbroken_core.ranks.worlds import World
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.recovery.ladder import shorten_names
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, Phase, Reason, Rung, WorkerPhase

GROWTH = ""
"""In place of a pod's uid where ranks move to grow: nobody in particular leaves."""
_AT_ONCE = "moves at once: "
_MAX_WHY = 300
"""Characters of a fault in a status."""
_Goal = tuple[int, Awaited]
"""A step, and what is to be done after it."""
_GO_ON: _Goal = (NO_STEP, Awaited.STAND)
_FOUND = (Cause.DEVICE_FAULT, Cause.STRAGGLER)
_PLANNED = (Cause.POD_LEAVING, *_FOUND)
_IN_VAIN_S = 600.0
"""So long a job is left alone after it was to grow and has not: the pods that were ready are gone, say."""
_SLACK_S = 2.0
"""So much longer than the coordinator workers wait: it is the one that ends the wait, unless it is gone."""


def decide_running(job: JobState, phase: Running, now_s: float) -> Decision:
    """Release all workers when all have completed; else lead them to one step while ranks are to move."""
    if not job.members.not_completed:
        return ReleaseAll()
    if _is_first_progress(job):
        return NoteProgress()
    faults: dict[str, FaultRecord] = {}
    if job.members.out:
        leaving = [member for uid in job.members.out if (member := job.members.by_uid[uid]).ranks]
        faults = {
            member.uid: FaultRecord(member.out or Cause.POD_LEAVING, member.uid, None, now_s, detail=member.out_detail)
            for member in leaving
        }
        if not all(may_wait(job, member, is_adoption=False) for member in leaving):
            return TakeFaults(tuple(faults.values()))
    if job.settings.grow_back_s is None:
        until_s, more = math.inf, None
    else:
        phase, until_s, more = _grow(job, phase, job.settings.grow_back_s, now_s)
    if more is not None and phase.move is None and not all(_can_halt(job)):
        phase = replace(phase, may_grow_again_s=math.inf)
    elif more is not None:
        faults[GROWTH] = more
    if not faults:
        return _call_off(job, phase, until_s, now_s)
    return _lead(job, phase, faults, until_s, now_s)


def begin_running(job: JobState, now_s: float) -> None:
    """All active workers are in the iteration: a recovery, if one was under way, is over."""
    incident, planned_s = job.history.running, job.world.planned_s
    may_grow_again_s = -math.inf
    if incident is not None:
        is_growth = incident.culprit.cause is Cause.CAPACITY_RETURNED
        if is_growth and job.world.size <= incident.world_size_before:
            may_grow_again_s = now_s + _IN_VAIN_S
        entered_s = job.progress.entered_s(planned_s, now_s)
        incident.add_phase(Phase.ENTER, entered_s - planned_s)
        job.history.close(entered_s)
    job.repair = None
    if job.inherited is not None and job.inherited.iteration == job.world.iteration:
        job.inherited = job.inherited._replace(has_run=True)
    job.previous = new_world(job)  # Also one that was taken over: all of its ranks are in it.
    job.progress.run(now_s, job.world.size, job.world.iteration)
    is_held = any(_stands(job.members.by_uid[uid]) for uid in job.members.active)
    job.phase = Running(now_s, may_grow_again_s=may_grow_again_s, is_held=is_held)
    job.report = StatusText(Reason.TRAINING, _running_text(job))


def may_wait(job: JobState, member: Member, is_adoption: bool) -> bool:
    """Return whether a pod that is to leave can wait for a common step; a move that began already takes it in.

    While a job is taken over the pods may be known that leave, before it runs: then the answer is put off.
    """
    if member.out not in _PLANNED or job.settings.timeouts.drain_s <= 0 or not job.settings.is_in_process:
        return False
    phase = job.phase
    if isinstance(phase, Planned):
        return is_adoption and not job.members.not_entered
    return isinstance(phase, Running) and (phase.move is not None or all(_can_halt(job)))


def is_suspicion(job: JobState, planned: FaultRecord) -> bool:
    """Return whether a pod is to give its ranks away for no more than a suspicion."""
    return planned.cause in _FOUND and job.health.is_suspected(planned.pod_uid)


def stays_until_s(job: JobState, uid: str) -> float:
    """Return until when the ranks of a suspect pod stay, as no common step was found; -inf: none was sought in vain.

    A suspicion that came later is another one.
    """
    stayed_s = job.phase.stayed_s.get(uid, -math.inf) if isinstance(job.phase, Running) else -math.inf
    is_same = job.health.since_s.get(uid, math.inf) <= stayed_s
    return stayed_s + job.settings.timeouts.hard_s if is_same else -math.inf


def note_halted(job: JobState, member: Member, now_s: float) -> None:
    """Note what a pod has said while ranks are about to move; let it go on where none are.

    Its workers may come to stand for the order of an earlier coordinator, which its agent has.
    """
    phase = job.phase
    if not isinstance(phase, Running) or member.uid not in job.members.active:
        return
    move = phase.move
    if move is None and not phase.is_held and _stands(member, below_term=job.numbers.term):
        _let_go(job, phase, member, now_s)
    if move is None or move.order is None:
        return
    states = [member.places[local_rank].state for local_rank in member.ranks]
    if any(state.phase is WorkerPhase.COMPLETED for state in states):
        # Also one that has answered before: it stands after no step any more.
        if not move.is_ending:
            job.phase = replace(phase, move=replace(move, is_ending=True))
    elif member.uid in move.pending and all(_has_obeyed(state, move.order, move.wants) for state in states):
        del move.pending[member.uid]


def send_halt(job: JobState, member: Member, now_s: float) -> None:
    """Tell a pod that came back what it may have missed."""
    phase = job.phase
    move = phase.move if isinstance(phase, Running) else None
    if move is not None and move.order is not None and member.ranks:
        job.send(member, replace(move.order, within_s=_within_s(move, now_s)))
    elif isinstance(phase, Running) and move is None and not phase.is_held and _stands(member):
        _let_go(job, phase, member, now_s)


def _let_go(job: JobState, phase: Running, member: Member, now_s: float) -> None:
    # No number of its own: it may have been told already, and then its agent passes nothing on.
    job.send(member, _go_on_order(job, job.numbers.halt))
    job.phase = replace(phase, released_s=now_s)


def _grow(job: JobState, phase: Running, after_s: float, now_s: float) -> tuple[Running, float, FaultRecord | None]:
    """Look whether a job that shrank takes in what is ready while all is well (restart.growBackSeconds).

    Returns what is known now, when to look again, and for what the iteration is to end after a common step.
    """
    world, until_s = _larger_world(job, phase, now_s)
    if world is None:
        return replace(phase, can_grow_since_s=None) if phase.can_grow_since_s is not None else phase, until_s, None
    if phase.can_grow_since_s is None:
        phase = replace(phase, can_grow_since_s=now_s)
    due_s = max(phase.can_grow_since_s or now_s, phase.since_s) + after_s
    is_under_way = phase.move is not None and GROWTH in phase.move.faults
    if not is_under_way and now_s < due_s:
        return phase, min(until_s, due_s), None
    detail = f"pods are ready for {world.world_size - job.world.size} of the ranks that are missing"
    return phase, until_s, FaultRecord(Cause.CAPACITY_RETURNED, GROWTH, None, now_s, detail=detail)


def _larger_world(job: JobState, phase: Running, now_s: float) -> tuple[World | None, float]:
    """Return the world that the next recovery would make, where it has more ranks than this one, and when to ask."""
    settings, ranking = job.settings, job.members.ranking
    is_full = job.world.size >= job.rules.wanted_ranks
    if is_full or now_s < phase.may_grow_again_s:
        ranking.exclude({})
        return None, math.inf if is_full else phase.may_grow_again_s
    # Nothing may be lost by it, so only after a common step; and where the script's own code makes the plan, nobody
    # knows it before.
    is_lossless = settings.is_in_process and settings.timeouts.drain_s > 0
    if not is_lossless or job.rules.has_code or Rung.POD not in job.budgets.allowed:
        return None, math.inf
    newcomers = job.members.newcomers(now_s, settings.timeouts.last_call_s)
    # Of whom something was found is promoted only where ranks would else be lost: the plan would leave them out, too.
    ranking.exclude({**newcomers.places, **job.worn_spares()})
    outcome = ranking.following(may_promote=True, may_grow=True)
    is_larger = isinstance(outcome, World) and outcome.world_size > job.world.size
    return outcome if isinstance(outcome, World) and is_larger else None, newcomers.until_s


def _lead(job: JobState, phase: Running, faults: Mapping[str, FaultRecord], until_s: float, now_s: float) -> Decision:
    """Lead all workers to one step."""
    move = phase.move or PlannedMove(now_s + job.settings.timeouts.drain_s)
    move = replace(move, faults={uid: _newest(move.faults.get(uid, fault), fault) for uid, fault in faults.items()})
    phase = replace(phase, move=move)
    if now_s >= move.until_s:
        waited_s = job.settings.timeouts.drain_s
        why = f"not all ranks stood after the same step within {waited_s:g} s (timeouts.drainSeconds)"
        return _give_up(job, replace(phase, may_grow_again_s=math.inf), move, now_s, why)
    if move.order is None:
        return _demand(job, phase, move, now_s, (0, Awaited.ANSWER))
    if move.is_ending and move.order.step != NO_STEP:
        return _demand(job, phase, move, now_s, _GO_ON)
    if move.pending:
        return Wait(min(until_s, move.until_s), phase=phase)
    return _go_on(job, phase, move, move.order, now_s)


def _go_on(job: JobState, phase: Running, move: PlannedMove, order: Halt, now_s: float) -> Decision:
    """Name the next step, once all have done what the last order wanted."""
    if move.wants is Awaited.SAVE:
        return _depart(move, f"moves after step {order.step}")
    answers = list(_answers(job))
    told = [answer.step for answer in answers]
    has_run_s = now_s - phase.since_s
    if max(told) < 0 or (min(told) < 0 and has_run_s >= job.settings.timeouts.drain_s):
        # In a first step, however long, nobody has told one yet: that is no reason to stay small for good.
        again_s = now_s + max(has_run_s, job.settings.timeouts.drain_s) if max(told) < 0 else math.inf
        why = f"{_AT_ONCE}not all ranks tell their steps (ping(step=))"
        return _give_up(job, replace(phase, may_grow_again_s=again_s), move, now_s, why)
    goals = {answer.step if answer.is_held else answer.step + 1 for answer in answers}
    is_common = len(goals) == 1 and all(answer.is_held for answer in answers)
    return _demand(job, phase, move, now_s, (max(goals), Awaited.SAVE if is_common else Awaited.STAND))


def _demand(job: JobState, phase: Running, move: PlannedMove, now_s: float, goal: _Goal) -> Order:
    """Tell all workers of the iteration how far to go, and wait for them."""
    step, wants = goal
    order = _halt(job, move, goal, now_s)
    move = replace(move, order=order, wants=wants, pending=dict.fromkeys(job.members.active))
    phase = replace(phase, is_held=False, move=move)
    if step == NO_STEP:
        return Order(order, phase, None)
    where = {Awaited.ANSWER: "between two steps", Awaited.STAND: f"after step {step}"}.get(wants, f"now, at {step}")
    leaving = [uid for uid in move.faults if uid != GROWTH]
    who = f"those of {shorten_names(leaving, job.members.name)} move" if leaving else "more join"
    return Order(order, phase, StatusText(Reason.TRAINING, f"{_running_text(job)}; {who} {where}"))


def _call_off(job: JobState, phase: Running, until_s: float, now_s: float) -> Decision:
    """Let the workers go on: nobody leaves any more."""
    move = phase.move
    if move is None and phase.is_held:
        phase = replace(phase, is_held=False, released_s=now_s)
        return Order(_go_on_order(job, job.numbers.halt + 1), phase, None)
    if move is None:
        return Wait(until_s, phase=phase)
    return _release(job, phase, move, StatusText(Reason.TRAINING, _running_text(job)), now_s)


def _give_up(job: JobState, phase: Running, move: PlannedMove, now_s: float, why: str) -> Decision:
    """Find no common step: who must leave does so wherever the ranks are, but to grow is worth no lost step.

    Nor is a suspicion, the first time: the ranks may wait for one that hangs, which is found meanwhile as a fault.
    """
    fresh = {uid for uid in move.faults if stays_until_s(job, uid) == -math.inf}
    suspected = tuple(uid for uid, fault in move.faults.items() if uid in fresh and is_suspicion(job, fault))
    firm = {uid: fault for uid, fault in move.faults.items() if uid not in suspected}
    if any(fault.cause is not Cause.CAPACITY_RETURNED for fault in firm.values()):
        return _depart(replace(move, faults=firm), why)
    if suspected:
        who = shorten_names(suspected, job.members.name)
        stay = f"{_running_text(job)}; those of {who} stay for now: {why.removeprefix(_AT_ONCE)}"
        phase = replace(phase, stayed_s={**phase.stayed_s, **dict.fromkeys(suspected, now_s)})
        return _release(job, phase, move, StatusText(Reason.TRAINING, stay), now_s, acquitted=suspected)
    when = (
        "in the next recovery"
        if phase.may_grow_again_s == math.inf
        else "in the next recovery, or once steps are reported"
    )
    report = StatusText(Reason.TRAINING, f"{_running_text(job)}; those join {when}: {why.removeprefix(_AT_ONCE)}")
    return _release(job, phase, move, report, now_s)


def _release(
    job: JobState,
    phase: Running,
    move: PlannedMove,
    report: StatusText,
    now_s: float,
    *,
    acquitted: tuple[str, ...] = (),
) -> Decision:
    phase = replace(phase, move=None)
    if move.order is None:
        return Learn(phase, report=report)
    phase = replace(phase, released_s=now_s)
    return Order(_halt(job, move, _GO_ON, now_s), phase, report, acquitted)


def _halt(job: JobState, move: PlannedMove, goal: _Goal, now_s: float) -> Halt:
    numbers, (step, wants) = job.numbers, goal
    if step == NO_STEP:
        return _go_on_order(job, numbers.halt + 1)
    is_common = wants is Awaited.SAVE
    return Halt(numbers.term, numbers.halt + 1, job.world.iteration, step, is_common, _within_s(move, now_s))


def _go_on_order(job: JobState, number: int) -> Halt:
    """Return the order to wait no longer; the same for all, so that nobody obeys it twice."""
    return Halt(job.numbers.term, number, job.world.iteration, NO_STEP, False, 0.0)


def _stands(member: Member, below_term: float = math.inf) -> bool:
    """Return whether a worker of this pod has said that it waits after a step, as a coordinator below has ordered."""
    answers = (member.places[local_rank].state.halted for local_rank in member.ranks)
    return any(answer is not None and answer.is_held and answer.term < below_term for answer in answers)


def _within_s(move: PlannedMove, now_s: float) -> float:
    return move.until_s + _SLACK_S - now_s


def _depart(move: PlannedMove, detail: str) -> TakeFaults:
    return TakeFaults(tuple(_with_end(fault, detail) for fault in move.faults.values()))


def _newest(known: FaultRecord, now: FaultRecord) -> FaultRecord:
    """Return why a pod is to leave: the reason that was first, unless a slow one is known to be broken since."""
    is_broken = (known.cause, now.cause) == (Cause.STRAGGLER, Cause.DEVICE_FAULT)
    return replace(known, cause=now.cause, detail=now.detail) if is_broken else known


def _with_end(fault: FaultRecord, how: str) -> FaultRecord:
    """Return a fault that says how the move ended; of what was found of a pod, that comes first."""
    is_found = fault.cause in _FOUND and fault.detail
    return replace(fault, detail=f"{fault.detail}; {how}" if is_found else how)


def _running_text(job: JobState) -> str:
    """Return what the status says of an iteration that runs."""
    size, wanted = job.world.size, job.rules.wanted_ranks
    fewer = "" if size >= wanted else f", {wanted - size} fewer than wanted"
    left = [uid for uid in job.set_aside if uid in job.members.by_uid and uid not in job.members.active]
    aside = ""
    if left:
        names, why = shorten_names(left, job.members.name), job.set_aside[left[-1]][:_MAX_WHY]
        aside = f"; {names} failed alone, again and again, and is the last choice for ranks: {why}"
    return f"iteration {job.world.iteration} runs with {counted(size, 'rank')}{fewer}{aside}"


def _is_first_progress(job: JobState) -> bool:
    """Whether all workers have made a step since the last recovery, and that was not noted."""
    last = job.history.finished[-1] if job.history.finished else None
    if last is None or last.iteration_after != job.world.iteration or Phase.FIRST_PROGRESS.value in last.phase_s:
        return False
    return not job.members.not_progressed and last.ended_s is not None


def _can_halt(job: JobState) -> Iterator[bool]:
    return (job.members.by_uid[uid].can_halt for uid in job.members.active)


def _answers(job: JobState) -> Iterator[Halted]:
    for uid in job.members.active:
        member = job.members.by_uid[uid]
        for local_rank in member.ranks:
            halted = member.places[local_rank].state.halted
            if halted is not None:
                yield halted


def _has_obeyed(state: WorkerState, order: Halt, wants: Awaited) -> bool:
    halted = state.halted
    if halted is None or (halted.term, halted.number) != (order.term, order.number):
        return False
    return halted.is_done if wants is Awaited.SAVE else halted.is_held or wants is Awaited.ANSWER
