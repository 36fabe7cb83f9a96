"""From a fault to the next plan: what an interrupted job waits for, and what the ladder makes of what is there."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import takewhile

from unbroken_core.coordinator.consulting import first_outcome, plan_when_ready
from unbroken_core.coordinator.copying import await_keepers
from unbroken_core.coordinator.decisions import (
    Believe,
    Decision,
    EndJob,
    Replace,
    ReplaceAll,
    Wait,
    at_latest,
    replace_late,
)
from unbroken_core.coordinator.hangs import name_who_hangs, named_by_s
from unbroken_core.coordinator.state.job import JobState, StatusText
from unbroken_core.coordinator.state.members import Newcomers
from unbroken_core.coordinator.state.phases import Interrupted
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.ranks.worlds import Outcome, Shortage, World
from unbroken_core.recovery.ladder import (
    MAX_MISTAKES,
    MAX_SAME_IN_PROCESS,
    Choice,
    Fail,
    RestartJob,
    Situation,
    TakeWorld,
    WaitForHelp,
    choose,
)
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Rung, WorkerPhase

_READY = WorkerPhase.READY


def decide_interrupted(job: JobState, phase: Interrupted, now_s: float) -> Decision:
    """Wait for the survivors, then follow the choice of the ladder."""
    name = name_who_hangs(job, phase, now_s)
    if name is not None:
        return name
    waits = _wait_for_leavers(job, phase, now_s)
    if waits is not None:
        return at_latest(waits, named_by_s(phase))
    if not phase.has_replaced_culprit and job.settings.is_in_process and job.history.running is not None:
        possible = possible_rungs(job, phase, now_s)
        is_worn = Rung.PROCESS in possible and _comes_back(job)
        if is_worn or Rung.IN_PROCESS not in possible:
            # The culprit's own process may not go on where the cheapest rung is not listed, or used up.
            return Replace(tuple(_culprits_place(job)), replace(phase, has_replaced_culprit=True), is_renewal=is_worn)
    newcomers = job.members.newcomers(now_s, job.settings.timeouts.last_call_s)
    view, phase = _situation(job, phase, newcomers, now_s)
    return at_latest(_follow(job, phase, view, choose(view), now_s), newcomers.until_s)


def possible_rungs(job: JobState, phase: Interrupted, now_s: float) -> frozenset[Rung]:
    """Return the rungs that may be taken: those with budget left, and all listed ones where no budget is asked for."""
    free = job.budgets.allowed if _is_free(job) else frozenset()
    return job.budgets.possible(now_s) | phase.charged | free


def charge(job: JobState, phase: Interrupted, rung: Rung, now_s: float) -> Interrupted:
    """Pay for a rung, once an interruption."""
    if rung not in phase.charged:
        phase = replace(phase, charged=phase.charged | {rung})
        if not _is_free(job):
            job.budgets.charge(rung, now_s)
    if job.history.running is not None:
        job.history.running.raise_rung(rung)
    return phase


def _comes_back(job: JobState) -> bool:
    """Return whether one worker had the fault so often, and it alone, that its process may be what is broken."""
    history = job.history
    if history.running is None or history.num_same <= MAX_SAME_IN_PROCESS or history.was_renewed:
        return False
    is_lone = history.who_failed(MAX_SAME_IN_PROCESS + 1) == {history.running.culprit.pod_uid}
    return is_lone and len(history.culprits) == 1


def _is_free(job: JobState) -> bool:
    """Return whether the recovery counts in no budget, because of its cause as far as that is known."""
    incident = job.history.running
    return incident is not None and not job.settings.counts(incident.culprit.cause)


def _follow(job: JobState, phase: Interrupted, view: Situation, choice: Choice, now_s: float) -> Decision:
    """Return what a choice of the ladder means for the job."""
    match choice:
        case WaitForHelp():
            if choice.reason is Reason.BELOW_MINIMUM:
                began = job.pod_clock.read(now_s) if phase.shortage_began is None else phase.shortage_began
                was_short = phase.was_short or isinstance(view.outcome, Shortage)
                if (was_short, began) != (phase.was_short, phase.shortage_began):
                    phase = replace(phase, was_short=was_short, shortage_began=began)
            report = StatusText(choice.reason, f"iteration {job.world.iteration}: {choice.message}")
            return Wait(choice.until_s, report, phase, choice.rung)
        case TakeWorld():
            return await_keepers(job, phase, choice.world, now_s) or plan_when_ready(job, phase, choice.rung, now_s)
        case RestartJob():
            return ReplaceAll(replace(phase, job_rung_began=job.pod_clock.read(now_s)))
        case Fail():
            return EndJob(JobPhase.FAILED, choice.reason, choice.message)


def _wait_for_leavers(job: JobState, phase: Interrupted, now_s: float) -> Decision | None:
    """Return what to do while survivors have yet to leave the iteration; None once nobody is waited for."""
    members = job.members
    if not members.leaving or phase.job_rung_began is not None:
        return None
    patience_s = heartbeat_interval_s(job.settings.timeouts)
    believes_at_s = phase.at_s + 2 * patience_s
    until_s = math.inf
    if now_s < believes_at_s:
        until_s = believes_at_s
    else:
        passed_over = tuple(_passed_over(job, phase, phase.at_s + patience_s))
        phase = replace(phase, believed_at_s=now_s)
        if passed_over:
            return Believe(passed_over, phase)
    deadline_s = phase.at_s + job.settings.timeouts.barrier_s
    if now_s < deadline_s:
        culprit = "" if job.history.running is None else job.history.running.culprit.text
        first = members.by_uid[next(iter(members.leaving))].pod
        num_more = len(members.leaving) - 1
        others = f" and {num_more} more pod{'s' * (num_more > 1)}" if num_more else ""
        message = f"iteration {job.world.iteration}: {culprit}; waits for {first}{others} to leave"
        return Wait(min(until_s, deadline_s), StatusText(Reason.RECOVERING, message), phase)
    late = tuple(_late_leavers(job))
    if late:
        return replace_late(late, now_s - phase.at_s, now_s)
    # What is left is away and has its own, shorter grace.
    return Wait(until_s, phase=phase)


def _late_leavers(job: JobState) -> Iterator[tuple[Member, WorkerPlace]]:
    for uid in job.members.leaving:
        member = job.members.by_uid[uid]
        yield from ((member, member.places[rank]) for rank in member.ranks if member.places[rank].lingers)


def _passed_over(job: JobState, phase: Interrupted, heard_from_s: float) -> Iterator[tuple[Member, WorkerPlace]]:
    """Yield those that say READY long after they were told to leave, and are taken for some that have yet to leave.

    An agent that takes a Plan and the Interrupt of that plan at once never enters it, and its workers stay READY
    without having been in the iteration. A word of the agent from well after the order shows that this was so.
    """
    for member in _heard_since(job, heard_from_s, phase.believed_at_s):
        for place in member.places.values():
            if place.state.phase is _READY and not place.is_dead and place.told_incarnation != -1:
                yield member, place


def _heard_since(job: JobState, from_s: float, looked_at_s: float) -> list[Member]:
    """Return the pods that are waited for and were heard from then on, after the last look; no others are looked at."""
    members = job.members
    newest_first = (members.by_uid[uid] for uid in reversed(members.heard))
    # Who has just spoken is the newest; others may have done so at the same instant.
    newest = next(newest_first, None)
    heard = takewhile(lambda member: member.heard_at_s > looked_at_s, newest_first)
    candidates = [] if newest is None else [newest, *heard]
    return [member for member in candidates if member.heard_at_s >= from_s and member.uid in members.leaving]


def _culprits_place(job: JobState) -> Iterator[tuple[Member, WorkerPlace]]:
    """Yield the place of the culprit, while the process is there that caused the fault."""
    if job.history.running is None:
        return
    culprit = job.history.running.culprit
    member = job.members.by_uid.get(culprit.pod_uid)
    if member is not None and culprit.local_rank is not None and not culprit.is_agents:
        place = member.places[culprit.local_rank]
        if place.state.incarnation == culprit.incarnation:
            yield member, place


def _situation(job: JobState, phase: Interrupted, newcomers: Newcomers, now_s: float) -> tuple[Situation, Interrupted]:
    """Return all that the choice depends on, and the phase with what was learned."""
    settings, members = job.settings, job.members
    possible = possible_rungs(job, phase, now_s)
    is_job_rung = phase.job_rung_began is not None
    outcome = _outcome(job, phase, possible, newcomers, now_s)
    phase = _note_end_of_shortage(phase, outcome, now_s)
    respawn_began = phase.began if phase.job_rung_began is None else phase.job_rung_began
    shortage_began = job.pod_clock.read(now_s) if phase.shortage_began is None else phase.shortage_began
    last_call_s = None if phase.enough_at_s is None else phase.enough_at_s + settings.timeouts.last_call_s
    situation = Situation(
        now_s=now_s,
        possible=possible,
        is_in_process=settings.is_in_process,
        is_job_rung=is_job_rung,
        # After the job rung nobody asks for them, and they are all pods of the job.
        respawning=[] if is_job_rung else _respawning(job),
        respawn_until_s=job.startup_due_s(respawn_began),
        outcome=outcome,
        has_respawned=any(
            members.ranking.has_rank(uid, local_rank)
            for uid, local_ranks in phase.respawned.items()
            for local_rank in local_ranks
        ),
        num_living_pods=members.num_living,
        num_starting_pods=sum(uid not in members.hopeless for uid in members.coming) + len(newcomers.places),
        num_possible_pods=settings.replicas + settings.spares - sum(uid not in members.out for uid in members.hopeless),
        replicas=settings.replicas,
        minimum_replicas=settings.minimum_replicas,
        shortage_until_s=job.startup_due_s(shortage_began),
        startup_s=settings.timeouts.startup_s,
        is_kept_apart=_is_kept_apart(job, outcome, possible),
        standing=job.pod_clock.why,
        last_call_until_s=last_call_s,
        spent=job.budgets.spent(now_s),
        hopeless=members.hopeless_text,
        num_barren=job.history.num_barren,
        no_progress_limit=settings.no_progress_limit,
        num_same=job.history.num_same,
        num_again=job.history.num_again,
        is_mistake=_is_mistake(job),
        culprit="" if job.history.running is None else job.history.running.culprit.text,
    )
    return situation, phase


def _is_mistake(job: JobState) -> bool:
    if job.history.num_same <= MAX_MISTAKES:
        return False
    by_uid = job.members.by_uid
    return job.history.is_mistake(
        lambda uid, local_rank: uid in by_uid and local_rank in by_uid[uid].ranks, job.world.size
    )


def _respawning(job: JobState) -> list[str]:
    """Return the names of pods that lost ranks and start a process at their places."""
    members = job.members
    waitable = (uid for uid in members.broken if uid in members.active and uid not in members.hopeless)
    return [members.by_uid[uid].pod for uid in waitable if uid not in members.out and uid not in members.away]


def _is_kept_apart(job: JobState, outcome: Outcome, possible: frozenset[Rung]) -> bool:
    settings, num_ready = job.settings, len(job.members.ready)
    is_enough = num_ready >= settings.minimum_replicas and Rung.POD in possible and bool(job.rules.layers)
    is_replaced = job.members.num_living < settings.replicas + settings.spares
    return isinstance(outcome, Shortage) and not outcome.is_objection and is_enough and is_replaced


def _least_without(job: JobState, lone: Collection[str], possible: Collection[Rung]) -> int:
    """Return how many ranks there have to be without these pods: as many as before the last growth, if it is theirs."""
    growth = job.growth
    may_shrink = growth is not None and growth.pods.issuperset(lone) and Rung.WORLD in possible
    return growth.size_before if growth is not None and may_shrink else job.world.size


def _note_end_of_shortage(phase: Interrupted, outcome: Outcome, now_s: float) -> Interrupted:
    is_enough = phase.was_short and not isinstance(outcome, Shortage)
    if is_enough == (phase.enough_at_s is not None):
        return phase
    return replace(phase, enough_at_s=now_s if is_enough else None)


def _outcome(
    job: JobState, phase: Interrupted, possible: frozenset[Rung], newcomers: Newcomers, now_s: float
) -> Outcome:
    ranking = job.members.ranking
    if phase.job_rung_began is not None:
        num_ready, replicas = len(job.members.ready), job.settings.replicas
        if num_ready < replicas and now_s < job.startup_due_s(phase.job_rung_began):
            # All are waited for: there is nothing to choose, and every pod that gets ready would cost a first plan.
            text = f"{num_ready} of {counted(replicas, 'pod is', 'pods are')} ready"
            return Shortage(num_ready, num_ready * job.settings.ranks_per_pod, text)
        return first_outcome(job, phase, newcomers)
    # A new process at an old place is the process rung: such places are spares of the next interruption at best.
    respawned: dict[str, set[int]] = {} if Rung.PROCESS in possible else phase.respawned
    worn = job.worn_spares()
    lone = job.failing_alone()
    if lone:
        others = {uid: set(job.members.by_uid[uid].places) for uid in lone}
        ranking.exclude({**respawned, **newcomers.places, **worn, **others})
        without = ranking.following(may_promote=Rung.POD in possible, may_grow=Rung.WORLD in possible)
        if isinstance(without, World) and without.world_size >= _least_without(job, lone, possible):
            return without
    if worn:
        # Whose devices are worn, or suspect, is promoted only where nobody else can be.
        ranking.exclude({**respawned, **newcomers.places, **worn})
        better = ranking.following(may_promote=Rung.POD in possible, may_grow=Rung.WORLD in possible)
        if isinstance(better, World) and better.world_size >= job.world.size:
            return better
    ranking.exclude({**respawned, **newcomers.places})
    shortage = phase.consulting.shortage(ranking.version)
    return shortage or ranking.following(may_promote=Rung.POD in possible, may_grow=Rung.WORLD in possible)
