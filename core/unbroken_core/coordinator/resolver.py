"""Carries decisions out, one at a time, until a decider waits.

    decide(phase) ──Wait──> processes that are due are started; the next tick is known
       ^      │
       └──────┘ anything else: it is done, and the phase decides again

The deciders are `decide_forming`, `decide_planned`, `decide_running`, `decide_interrupted` and `decide_ending`. They
change nothing: the ranking that they ask "what if" keeps its scratch to itself. An event may change the phase before
that: a fault ends it (`faults`), so does lost contact (`contact`), and a pod that joins or halts adds to it (`forming`,
`moves`).
"""

import math
from dataclasses import replace

from unbroken_core.coordinator.adoption.previous_world import adopted_world
from unbroken_core.coordinator.adoption.taking_over import entered_s, inherit, loss_s, num_held, told_step, with_name
from unbroken_core.coordinator.cluster import run_pod_clock
from unbroken_core.coordinator.consulting import ask
from unbroken_core.coordinator.contact import lose_overdue
from unbroken_core.coordinator.decisions import (
    Adopt,
    Ask,
    BeginRunning,
    Believe,
    Change,
    CutPlan,
    Decision,
    Deed,
    EndJob,
    Learn,
    Name,
    NoteProgress,
    Order,
    ReleaseAll,
    Replace,
    ReplaceAll,
    TakeFaults,
    Wait,
)
from unbroken_core.coordinator.ending import decide_ending, finish, note_end, release_all
from unbroken_core.coordinator.faults import acquit, count_fault, inspect, take_fault, with_pod
from unbroken_core.coordinator.forming import decide_forming
from unbroken_core.coordinator.interruption import charge, decide_interrupted
from unbroken_core.coordinator.moves import begin_running, decide_running, note_halted
from unbroken_core.coordinator.planning import cut_plan, decide_planned, note_seats
from unbroken_core.coordinator.receiving import bring_up_to_date, lacks_plan
from unbroken_core.coordinator.respawning import replace_process, respawn
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import ActiveWorld
from unbroken_core.coordinator.state.phases import Ending, Forming, Interrupted, Over, Planned, Running
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, Reason, Rung

_MAX_TURNS = 8
"""Changes of the phase in one step."""


def resolve(job: JobState, now_s: float) -> float:
    """Do what is to be done now. Return when a tick is due; inf when only an event can change anything."""
    if isinstance(job.phase, Over):
        return _end(job, now_s)
    until_s = waits_until_s = math.inf
    for _turn in range(_MAX_TURNS):
        until_s = lose_overdue(job, now_s)  # Who is away is waited for less long in an interruption.
        if job.members.hopeless or job.pod_clock.is_standing:
            run_pod_clock(job, now_s)  # A turn that loses the pod for which it stood must not leave it standing.
        before = job.phase.kind
        waits_until_s = _settle_phase(job, now_s)
        if job.phase.kind is before:
            break
    if isinstance(job.phase, Over):
        return _end(job, now_s)
    if not isinstance(job.phase, Ending) and (job.members.respawning or job.members.lingering):
        until_s = min(until_s, respawn(job, now_s))
    return min(until_s, waits_until_s)


def _end(job: JobState, now_s: float) -> float:
    job.progress.end(now_s)
    return math.inf


def _settle_phase(job: JobState, now_s: float) -> float:
    """Carry out what the phase decides until it waits, or is another one. Return how long it waits."""
    kind = job.phase.kind
    while job.phase.kind is kind:
        decision = _decide(job, now_s)
        if isinstance(decision, Wait):
            job.phase, job.report = decision.phase or job.phase, decision.report or job.report
            if decision.rung is not None and isinstance(job.phase, Interrupted):
                job.phase = charge(job, job.phase, decision.rung, now_s)
            return decision.until_s
        if isinstance(decision, (CutPlan, Adopt, BeginRunning, TakeFaults, ReleaseAll, EndJob)):
            _change(job, decision, now_s)
        else:
            _do(job, decision, now_s)
    return math.inf


def _decide(job: JobState, now_s: float) -> Decision:
    match job.phase:
        case Forming():
            return decide_forming(job, job.phase, now_s)
        case Planned():
            return decide_planned(job, now_s)
        case Running():
            return decide_running(job, job.phase, now_s)
        case Interrupted():
            return decide_interrupted(job, job.phase, now_s)
        case Ending():
            return decide_ending(job, job.phase, now_s)
        case Over():
            return Wait()


def _change(job: JobState, decision: Change, now_s: float) -> None:
    match decision:
        case CutPlan():
            _begin_recovery(job, decision, now_s)
            cut_plan(job, decision, now_s)
        case Adopt():
            _adopt(job, decision, now_s)
        case BeginRunning():
            begin_running(job, now_s)
        case TakeFaults():
            for number, fault in enumerate(decision.faults):
                take_fault(job, fault, now_s, together=decision.faults)
                if decision.failed:
                    replace_process(job, *decision.failed[number])
        case ReleaseAll():
            release_all(job, now_s)
        case EndJob():
            finish(job, decision.outcome, decision.reason, decision.message)
        case _:
            assert_never(decision)


def _do(job: JobState, decision: Deed, now_s: float) -> None:
    if not isinstance(decision, NoteProgress):
        job.phase = decision.phase or job.phase
    match decision:
        case Learn() | Name():
            _learn(job, decision)
        case Ask():
            job.numbers = replace(job.numbers, question=decision.question.question.number)
            ask(job, job.members.by_uid[decision.question.uid])
        case NoteProgress():
            job.history.note_progress(now_s)
        case Replace():
            _replace_processes(job, decision)
        case Believe():
            job.members.believe_all(decision.places)
        case ReplaceAll():
            _restart_job(job, decision.phase, now_s)
        case Order():
            _give_order(job, decision, now_s)
        case _:
            assert_never(decision)


def _learn(job: JobState, decision: Learn | Name) -> None:
    if isinstance(decision, Learn):
        job.report, job.previous = decision.report or job.report, decision.previous or job.previous
        return
    job.history.name(with_pod(job.members, decision.fault) if decision.fault.pod_uid else decision.fault)
    for member, place in decision.places:
        count_fault(job, member, place)


def _replace_processes(job: JobState, decision: Replace) -> None:
    if decision.fault is not None:
        job.history.add(with_pod(job.members, decision.fault))
    if decision.is_renewal:
        job.history.note_renewal()
    for member, place in decision.places:
        replace_process(job, member, place)


def _begin_recovery(job: JobState, decision: CutPlan, now_s: float) -> None:
    """Pay for the rung of a plan; where a job that was out of sight starts again, that is no first start."""
    phase = decision.phase
    if isinstance(phase, Interrupted) and decision.rung is not None:
        charge(job, phase, decision.rung, now_s)
    outage = phase.outage if isinstance(phase, Forming) else None
    if outage is not None:
        # Nobody came back with the plan that was running.
        job.progress.give_up(now_s)
        if job.history.running is None:
            job.history.open(outage.at_s, outage.iteration, outage.world_size)
        job.history.add(FaultRecord(Cause.HEARTBEAT_LOST, "", None, outage.at_s, detail=outage.why))


def _restart_job(job: JobState, phase: Interrupted, now_s: float) -> None:
    job.phase = charge(job, phase, Rung.JOB, now_s)
    job.members.mark_all_failed(now_s)


def _give_order(job: JobState, decision: Order, now_s: float) -> None:
    for uid in decision.acquitted:
        acquit(job, uid, now_s)
    job.numbers = replace(job.numbers, halt=decision.halt.number)
    active = tuple(job.members.active)
    for uid in active:
        job.send(job.members.by_uid[uid], decision.halt)
    for uid in active if decision.phase.move is not None else ():
        note_halted(job, job.members.by_uid[uid], now_s)
    job.report = decision.report or job.report


def _adopt(job: JobState, decision: Adopt, now_s: float) -> None:
    """Take a running iteration over. Its ranks that did not come back are lost."""
    began_s, own_iteration = now_s, -1
    if isinstance(job.phase, Forming):
        began_s = job.phase.since_s
        own_iteration = -1 if job.phase.outage is None else job.phase.outage.iteration
    iteration, size, num_seen = decision.iteration, decision.world_size, len(decision.places)
    numbers, members = job.numbers, job.members
    job.numbers = replace(numbers, highest_iteration=max(numbers.highest_iteration, iteration))
    members.ranking.exclude({})
    ranks = members.ranking.adopt(size, decision.places)
    members.adopt(ActiveWorld(now_s, iteration, size), ranks)
    note_seats(job)
    job.previous = adopted_world(job, num_seen, began_s)
    job.phase = Planned()
    message = f"iteration {iteration}: taken over with {num_seen} of {counted(size, 'rank')}"
    job.report = StatusText(Reason.WAITING_FOR_WORKERS, message)
    ran_from_s = entered_s(job, decision.places, now_s)
    job.paces.taken_over = iteration, ran_from_s
    lost_s = loss_s(job, decision, ran_from_s, now_s)
    if iteration > own_iteration:  # Else it was out of touch only, and has counted what led to its own plans.
        inherit(job, decision, ran_from_s)
    step, made_s = told_step(job, decision, now_s)
    if iteration == own_iteration:
        job.progress.regain(step, made_s, now_s)
    else:
        job.progress.give_up(now_s)
    job.progress.adopt(iteration, step)
    held = num_held(job, decision) * job.rules.ranks_per_pod
    until_s = now_s if lost_s is None else lost_s
    job.progress.take_over(ran_from_s, until_s, now_s, size, held=held, wanted=job.rules.wanted_ranks)
    if decision.is_ending:
        job.history.close(ran_from_s)
        release_all(job, now_s)
        for member in members.by_uid.values():
            note_end(job, member)
        return
    for uid in [uid for uid in ranks if uid not in members.by_uid]:
        at_s = now_s if lost_s is None else lost_s
        detail, lost = "did not come back to a new rendezvous", tuple(ranks[uid].values())
        fault = FaultRecord(Cause.POD_LOST, uid, None, at_s, now_s - at_s, detail=detail, lost_ranks=lost)
        take_fault(job, with_name(job, fault), now_s, lost_s)
    for member in members.by_uid.values():
        inspect(job, member, now_s, is_adoption=True, lost_s=lost_s)
        if lacks_plan(job, member):
            bring_up_to_date(job, member, now_s)
