"""From a fault to the next plan."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from unbroken_core.coordination.consulting import consult, objection
from unbroken_core.coordination.forming import first_outcome, hopeless_text
from unbroken_core.coordination.members import Member, Place, evidence
from unbroken_core.coordination.moves import may_wait
from unbroken_core.coordination.newcomers import newcomers
from unbroken_core.coordination.planning import condemn, cut_plan, finish, late_fault
from unbroken_core.coordination.previous_world import is_held
from unbroken_core.coordination.state import Interruption, Job
from unbroken_core.errors import assert_never
from unbroken_core.messages import Interrupt
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.ranks.worlds import Outcome, Shortage
from unbroken_core.reasons import Cause, JobPhase, Reason, Rung, WorkerPhase
from unbroken_core.recoveries.history import FaultRecord, Incident
from unbroken_core.recoveries.ladder import Cut, Fail, RestartJob, Situation, Wait, choose

MAX_PLANS = 8
"""Plans of one recovery; a fault in the next one begins a new recovery, so that the limit of those without progress
also ends a job whose workers never get as far as running."""
_READY = WorkerPhase.READY
_LIVE = (JobPhase.PLANNED, JobPhase.RUNNING, JobPhase.INTERRUPTED)


def inspect(job: Job, member: Member, now_s: float, is_adoption: bool = False) -> None:
    """Look for faults of one member; interrupt the iteration when there is one."""
    if job.phase not in _LIVE or not member.ranks:
        return
    if member.out is not None and not may_wait(job, member, is_adoption):
        take_fault(job, job.fault(member, FaultRecord(member.out, member.uid, None, now_s)), now_s)
    for local_rank in member.ranks:
        place = member.places[local_rank]
        is_firm = _is_firm(place, job.iteration)
        if job.phase is JobPhase.INTERRUPTED and not is_firm and not is_adoption:
            continue
        found = evidence(place, job.iteration, is_adoption)
        if found is None:
            continue
        if is_adoption and not is_firm:
            # The rendezvous before this one had ended the iteration, or was away when it ended. What the others tell
            # may be consequences: only stronger evidence names a culprit.
            detail = "the iteration had ended when the rendezvous was restarted"
            take_fault(job, FaultRecord(found.cause, "", None, _unknown_instant_s(job, now_s), detail=detail), now_s)
            continue
        is_told = found is place.state.fault
        at_s, detect_s = (place.fault_at_s, place.fault_detect_s) if is_told else (now_s, 0.0)
        record = FaultRecord(
            found.cause,
            member.uid,
            local_rank,
            at_s,
            detect_s,
            place.state.incarnation,
            detail=found.detail,
            stack=found.stack,
        )
        if take_fault(job, job.fault(member, record), now_s):
            _count_fault(job, member, place)


def _unknown_instant_s(job: Job, now_s: float) -> float:
    """Return when that was which is told of after a restart: before all that is told now, after all known before."""
    incident = job.history.running
    return incident.started_s if incident is not None and incident.started_s < now_s else -math.inf


def take_fault(job: Job, fault: FaultRecord, now_s: float) -> bool:
    """Collect a fault of the current iteration. Return whether it is news."""
    if job.phase is JobPhase.INTERRUPTED and job.history.running is not None:
        job.is_changed = True
        return job.history.running.add(fault)
    if job.phase not in _LIVE:
        return False
    move, job.move = job.move, None
    incident = _open_incident(job, now_s)
    incident.add(fault)
    job.progress.stop(now_s)
    job.interruption = Interruption(now_s, job.pod_clock.read(now_s))
    message = f"iteration {job.iteration} was interrupted: {_fault_text(fault)}"
    job.enter_phase(JobPhase.INTERRUPTED, Reason.RECOVERING, message)
    order_out(job, job.census.by_uid.values())
    for planned in () if move is None else move.faults.values():
        # It may have been the end of that pod that the fault was a consequence of.
        incident.add(planned)
    return True


def order_out(job: Job, members: Iterable[Member]) -> None:
    """Tell agents that the iteration is over; each in the words of a plan that it has.

    One that was told of an iteration without its plan would keep that to itself: were this rendezvous lost, the next
    one might never hear of it, begin with the same number, and be ignored.
    """
    message = interrupt_message(job, job.history.running, job.iteration)
    for member in members:
        has_plan = member.plan is not None and member.plan.iteration >= job.iteration
        known = job.iteration if has_plan else min(member.newest_iteration, job.iteration)
        if known >= 0:
            job.send(member, message if known == job.iteration else replace(message, iteration=known))


def interrupt_message(job: Job, incident: Incident | None, iteration: int) -> Interrupt:
    """Return the order to leave an iteration."""
    if incident is None:
        return Interrupt(job.generation, iteration, Cause.POD_LOST, None, "", "the job went on without this pod")
    culprit = incident.culprit
    return Interrupt(job.generation, iteration, culprit.cause, culprit.rank, culprit.pod, culprit.detail)


def while_interrupted(job: Job, now_s: float) -> None:
    """Wait for the survivors, then follow the choice of the ladder."""
    interruption = job.interruption
    if interruption is None or _is_waiting_for_leavers(job, interruption, now_s):
        return
    if interruption.left_at_s is None:
        interruption.left_at_s = now_s
    _judge_culprit(job, interruption, now_s)
    view = _situation(job, interruption, now_s)
    choice = choose(view)
    match choice:
        case Wait():
            _wait(job, interruption, choice, view.outcome, now_s)
        case Cut():
            _cut(job, interruption, choice.rung, now_s)
        case RestartJob():
            _restart_job(job, interruption, now_s)
        case Fail():
            job.progress.end(now_s)
            finish(job, JobPhase.FAILED, choice.reason, choice.message)
        case _:
            assert_never(choice)


def _cut(job: Job, interruption: Interruption, rung: Rung, now_s: float) -> None:
    if is_held(job, now_s):
        return
    order = consult(job, now_s) if job.rules.has_code else None
    if job.rules.has_code and order is None:
        if job.phase is JobPhase.INTERRUPTED and job.consultation is None:
            while_interrupted(job, now_s)  # Nobody was left to wait for: the next one is asked.
        return
    _charge(job, interruption, rung, now_s)
    cut_plan(job, rung, now_s, order)


def _is_firm(place: Place, iteration: int) -> bool:
    """Return whether the evidence is more than having left the iteration, which everybody is told to do."""
    state = place.state
    return (state.fault is not None and state.fault.iteration == iteration) or state.phase is WorkerPhase.GONE


def _count_fault(job: Job, member: Member, place: Place) -> None:
    key = (member.uid, place.state.local_rank)
    limit = job.settings.max_faults_per_rank
    if limit is not None:
        faults = job.history.by_place
        place.num_faults = faults[key] = faults.get(key, 0) + 1
        place.is_retired = place.num_faults > limit
    job.sort(member)


def _open_incident(job: Job, now_s: float) -> Incident:
    incident = job.history.running
    if incident is not None and incident.num_plans >= MAX_PLANS:
        job.history.abandon()
        incident = None
    if incident is None:
        is_barren = not job.progress.has_gained(now_s)
        incident = job.history.open(now_s, job.iteration, job.world_size, is_barren)
    return incident


def _is_waiting_for_leavers(job: Job, interruption: Interruption, now_s: float) -> bool:
    census = job.census
    if not census.leaving or interruption.job_rung_began is not None:
        return False
    _release_passed_over(job, interruption, now_s)
    if not census.leaving:
        return False
    deadline_s = interruption.at_s + job.settings.timeouts.barrier_s
    if now_s < deadline_s:
        job.wake(deadline_s)
        culprit = "" if job.history.running is None else _fault_text(job.history.running.culprit)
        first = census.by_uid[next(iter(census.leaving))].pod
        others = f" and {len(census.leaving) - 1} more pods" if len(census.leaving) > 1 else ""
        message = f"iteration {job.iteration}: {culprit}; waits for {first}{others} to leave"
        job.say(Reason.RECOVERING, message)
        return True
    for uid in list(census.leaving):
        member = census.by_uid[uid]
        for local_rank in member.ranks:
            place = member.places[local_rank]
            if place.lingers:
                waited_s = now_s - interruption.at_s
                take_fault(job, job.fault(member, late_fault(member, place, waited_s, now_s)), now_s)
                condemn(job, member, place)
    # What is left is away and has its own, shorter grace.
    return bool(census.leaving)


def _release_passed_over(job: Job, interruption: Interruption, now_s: float) -> None:
    """Believe those to be ready who say so long after they were told to leave.

    An agent that takes a Plan and the Interrupt of that plan at once never enters it, and its workers stay READY
    without having been in the iteration. A word of the agent from well after the order shows that this was so.
    """
    patience_s = heartbeat_interval_s(job.settings.timeouts)
    heard_from_s = interruption.at_s + patience_s
    if now_s < heard_from_s + patience_s:
        job.wake(heard_from_s + patience_s)
        return
    for member in _heard_since(job, heard_from_s, interruption.believed_at_s):
        waits = [place for place in member.places.values() if place.state.phase is _READY and not place.is_dead]
        for place in waits:
            place.told_incarnation = -1
        if waits:
            job.sort(member)
    interruption.believed_at_s = now_s


def _heard_since(job: Job, from_s: float, looked_at_s: float) -> list[Member]:
    """Return the pods that are waited for and were heard from then on, after the last look; no others are looked at."""
    census = job.census
    newest_first = (census.by_uid[uid] for uid in reversed(census.heard))
    # Who has just spoken is the newest; others may have done so at the same instant.
    newest = next(newest_first, None)
    heard = takewhile(lambda member: member.heard_at_s > looked_at_s, newest_first)
    candidates = [] if newest is None else [newest, *heard]
    return [member for member in candidates if member.heard_at_s >= from_s and member.uid in census.leaving]


def _judge_culprit(job: Job, interruption: Interruption, now_s: float) -> None:
    """Replace the culprit's process where its own process may not go on: the cheapest rung is not listed or used up."""
    incident = job.history.running
    is_enough = Rung.IN_PROCESS in possible_rungs(job, interruption, now_s)
    if interruption.has_judged or incident is None or is_enough or not job.settings.is_in_process:
        return
    interruption.has_judged = True
    culprit = incident.culprit
    member = job.census.by_uid.get(culprit.pod_uid)
    place = None if member is None or culprit.local_rank is None else member.places[culprit.local_rank]
    if member is not None and place is not None and place.state.incarnation == culprit.incarnation:
        condemn(job, member, place)


def _situation(job: Job, interruption: Interruption, now_s: float) -> Situation:
    settings, census = job.settings, job.census
    possible = possible_rungs(job, interruption, now_s)
    is_job_rung = interruption.job_rung_began is not None
    outcome = _outcome(job, interruption, possible, now_s)
    refused = objection(job)
    # After the job rung nobody asks for them, and they are all pods of the job.
    broken = () if is_job_rung else census.broken
    waitable = [uid for uid in broken if uid in census.active and uid not in census.hopeless]
    healing = [census.by_uid[uid].pod for uid in waitable if uid not in census.out and uid not in census.away]
    heal_began = interruption.began if interruption.job_rung_began is None else interruption.job_rung_began
    shortage_began = interruption.shortage_began
    if shortage_began is None:
        shortage_began = job.pod_clock.read(now_s)
    return Situation(
        now_s=now_s,
        possible=possible,
        is_in_process=settings.is_in_process,
        is_job_rung=is_job_rung,
        healing=healing,
        heal_until_s=job.startup_due_s(heal_began),
        outcome=outcome,
        has_respawned=any(
            census.ranking.has_rank(uid, local_rank)
            for uid, local_ranks in interruption.respawned.items()
            for local_rank in local_ranks
        ),
        num_living_pods=job.num_living,
        num_starting_pods=sum(uid not in census.hopeless for uid in census.coming) + len(newcomers(job, now_s)),
        num_possible_pods=settings.replicas + settings.spares - sum(uid not in census.out for uid in census.hopeless),
        replicas=settings.replicas,
        minimum_replicas=settings.minimum_replicas,
        shortage_until_s=job.startup_due_s(shortage_began),
        startup_s=settings.timeouts.startup_s,
        is_kept_apart=refused is None and _is_kept_apart(job, outcome, possible),
        objection="" if refused is None else refused.detail,
        standing=job.standing_text(),
        last_call_until_s=_last_call_until_s(interruption, outcome, settings.timeouts.last_call_s, now_s),
        spent=job.ladder.spent(now_s),
        hopeless=hopeless_text(job),
        num_barren=job.history.num_barren,
        no_progress_limit=settings.no_progress_limit,
        culprit=_fault_text(job.history.running.culprit) if job.history.running is not None else "",
    )


def _is_kept_apart(job: Job, outcome: Outcome, possible: frozenset[Rung]) -> bool:
    settings, num_ready = job.settings, len(job.census.ready)
    is_enough = num_ready >= settings.minimum_replicas and Rung.POD in possible and bool(job.rules.layers)
    is_replaced = job.num_living < settings.replicas + settings.spares
    return isinstance(outcome, Shortage) and is_enough and is_replaced


def _last_call_until_s(interruption: Interruption, outcome: Outcome, last_call_s: float, now_s: float) -> float | None:
    if not interruption.was_short or isinstance(outcome, Shortage):
        interruption.enough_at_s = None
        return None
    if interruption.enough_at_s is None:
        interruption.enough_at_s = now_s
    return interruption.enough_at_s + last_call_s


def _outcome(job: Job, interruption: Interruption, possible: frozenset[Rung], now_s: float) -> Outcome:
    ranking = job.census.ranking
    if interruption.job_rung_began is not None:
        num_ready, replicas = len(job.census.ready), job.settings.replicas
        if num_ready < replicas and now_s < job.startup_due_s(interruption.job_rung_began):
            # All are waited for: there is nothing to choose, and every pod that gets ready would cost a first plan.
            return Shortage(
                num_ready, num_ready * job.settings.ranks_per_pod, f"{num_ready} of {replicas} pods are ready"
            )
        return first_outcome(job, now_s)
    # A new process at an old place is the process rung: such places are spares of the next interruption at best.
    respawned: dict[str, set[int]] = {} if Rung.PROCESS in possible else interruption.respawned
    ranking.exclude({**respawned, **newcomers(job, now_s)})
    return objection(job) or ranking.following(may_promote=Rung.POD in possible, may_grow=Rung.WORLD in possible)


def _wait(job: Job, interruption: Interruption, choice: Wait, outcome: Outcome, now_s: float) -> None:
    if choice.rung is not None:
        _charge(job, interruption, choice.rung, now_s)
    if choice.reason is Reason.BELOW_MINIMUM:
        interruption.was_short = interruption.was_short or isinstance(outcome, Shortage)
        if interruption.shortage_began is None:
            interruption.shortage_began = job.pod_clock.read(now_s)
    job.wake(choice.until_s)
    job.say(choice.reason, f"iteration {job.iteration}: {choice.message}")


def _charge(job: Job, interruption: Interruption, rung: Rung, now_s: float) -> None:
    if rung not in interruption.charged:
        interruption.charged.add(rung)
        if not _is_free(job):
            job.ladder.charge(rung, now_s)
    if job.history.running is not None:
        job.history.running.raise_rung(rung)


def possible_rungs(job: Job, interruption: Interruption, now_s: float) -> frozenset[Rung]:
    """Return the rungs that may be taken: those with budget left, and all listed ones where no budget is asked for."""
    free = job.ladder.allowed if _is_free(job) else frozenset()
    return job.ladder.possible(now_s) | interruption.charged | free


def _is_free(job: Job) -> bool:
    """Return whether the recovery counts in no budget, because of its cause as far as that is known."""
    incident = job.history.running
    return incident is not None and not job.settings.counts(incident.culprit.cause)


def _restart_job(job: Job, interruption: Interruption, now_s: float) -> None:
    interruption.job_rung_began = job.pod_clock.read(now_s)
    _charge(job, interruption, Rung.JOB, now_s)
    for member in job.census.by_uid.values():
        for place in member.places.values():
            place.num_short_lives = 0
            place.retry_at_s = now_s
            if not place.is_retired:
                condemn(job, member, place)
        job.sort(member)
    while_interrupted(job, now_s)


def _fault_text(fault: FaultRecord) -> str:
    who = f"rank {fault.rank} of {fault.pod}" if fault.rank is not None else fault.pod or "a pod"
    detail = f" ({fault.detail})" if fault.detail else ""
    return f"{fault.cause} of {who}{detail}"
