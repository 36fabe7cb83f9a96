"""Cutting a plan, and bringing the workers into it."""

from collections.abc import Iterable
from dataclasses import replace

from unbroken_core.coordinator.adoption.previous_world import new_world
from unbroken_core.coordinator.decisions import BeginRunning, CutPlan, Decision, Wait, replace_late
from unbroken_core.coordinator.ending import finish
from unbroken_core.coordinator.memory.choosing import Ended, recall
from unbroken_core.coordinator.memory.holders import Run, named_fetches
from unbroken_core.coordinator.memory.table import StepKey
from unbroken_core.coordinator.state.job import Growth, JobState, StatusText
from unbroken_core.coordinator.state.members import ActiveWorld
from unbroken_core.coordinator.state.phases import Forming, Interrupted, Planned
from unbroken_core.coordinator.state.places import Member
from unbroken_core.protocol.bounds import MAX_KEYS, MAX_NAME, MAX_SECONDS
from unbroken_core.protocol.messages import Plan, Repair
from unbroken_core.ranks.worlds import World
from unbroken_core.recovery.ladder import shorten_names
from unbroken_core.vocabulary.checkpoints import MAX_SOURCES, Candidate, Restore
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Phase, Reason, Rung

_MAX_TOLD = 300
"""Characters of a fault's detail that each pod of a plan is told."""


def decide_planned(job: JobState, now_s: float) -> Decision:
    """Go on when all have entered, and replace the processes of those that did not in time."""
    members, world = job.members, job.members.world
    if not members.not_entered:
        return BeginRunning()
    iteration, barrier_s = world.iteration, job.settings.timeouts.barrier_s
    deadline_s = world.planned_s + barrier_s
    if now_s < deadline_s:
        names = shorten_names(members.not_entered, members.name)
        message = f"iteration {iteration}: waits for {names} to enter the training function"
        return Wait(deadline_s, StatusText(job.report.reason, message))
    late = []
    for uid in members.not_entered:
        member = members.by_uid[uid]
        places = (member.places[local_rank] for local_rank in member.ranks)
        late += [(member, place) for place in places if place.is_ready or place.state.iteration < iteration]
    return replace_late(late, barrier_s, now_s) if late else Wait()


def cut_plan(job: JobState, decision: CutPlan, now_s: float) -> None:
    """Make the world that was asked for last the next iteration, and send each pod its part.

    With an order of the script these workers are rank 0, 1, ... instead; the job fails when that breaks a limit of the
    spec.
    """
    ranking = job.members.ranking
    try:
        cut = ranking.take() if decision.order is None else ranking.assign(decision.order)
    except InputError as error:
        finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, f"rank_assignment: {error}")
        return
    ranking.exclude({})
    if decision.order is not None:
        by_uid = job.members.by_uid
        job.script.keys = {worker: keys for worker, keys in job.script.keys.items() if worker[0] in by_uid}
    iteration = job.numbers.highest_iteration + 1
    job.numbers = replace(job.numbers, highest_iteration=iteration)
    world = ActiveWorld(now_s, iteration, cut.world.world_size, ranking.num_spare_ranks)
    lone, before, active = job.failing_alone(), job.world, frozenset(job.members.active)
    job.history.num_broken_spares += cut.world.num_broken
    ended = Ended(job.world.iteration, _cause(job), job.progress.max_step)
    job.members.begin(world, cut)
    _note_who_came_and_left(job, lone, before, active)
    if job.checkpoints.is_used:
        job.recall = recall(job.checkpoints, job.recall, ended, note_seats(job))
    if decision.rung is not None:
        _note_plan(job, cut.world, decision.rung, _stopped_at_s(decision.phase, now_s), now_s)
    job.repair = _repair(job, now_s)
    master = master_endpoint(job)
    for member in job.members.by_uid.values():
        send_plan(job, member, master)
    job.previous = new_world(job)
    job.phase = Planned()
    reason = Reason.RECOVERING if decision.rung else Reason.WAITING_FOR_WORKERS
    job.report = StatusText(
        reason, f"iteration {iteration}: waits for {counted(world.size, 'rank')} to enter the training function"
    )


def _note_who_came_and_left(job: JobState, lone: Iterable[str], before: ActiveWorld, active: frozenset[str]) -> None:
    """Note which pods the new world leaves out for what they did, and which have come in if it has grown."""
    members, incident = job.members, job.history.running
    if incident is not None and lone:
        left = (uid for uid in lone if uid in members.by_uid and not members.by_uid[uid].ranks)
        known = {uid: why for uid, why in job.set_aside.items() if uid in members.by_uid}
        said = {fault.pod_uid: fault.text for fault in incident.faults.values()}
        job.set_aside = known | {uid: said.get(uid, incident.culprit.text) for uid in left}
    if before.iteration >= 0 and job.world.size > before.size > 0:
        came = frozenset(uid for uid, member in members.by_uid.items() if member.ranks and uid not in active)
        # Where it has grown twice since it got on, it can do without all that have come in.
        earlier = job.growth or Growth(before.size, frozenset())
        job.growth = Growth(min(before.size, earlier.size_before), came | earlier.pods)


def note_seats(job: JobState) -> dict[int, str]:
    """Return which pod has which rank of the world in force, and tell the table of checkpoints in memory."""
    if not job.checkpoints.is_used:
        return {}
    by_uid = job.members.by_uid
    seats = {rank: uid for uid, member in by_uid.items() for rank in member.ranks.values()}
    job.checkpoints.begin(job.world.iteration, seats)
    return seats


def _cause(job: JobState) -> Cause | None:
    incident = job.history.running
    return None if incident is None or not incident.faults else incident.culprit.cause


def master_endpoint(job: JobState) -> tuple[str, int]:
    """Return where active rank 0 listens; ("", 0) when it is not known."""
    if job.world.size:
        uid, local_rank = job.members.ranking.rank_0
        member = job.members.by_uid.get(uid)
        if member is not None:
            state = member.places[local_rank].state
            return state.host, state.port
    return "", 0


def send_plan(job: JobState, member: Member, master: tuple[str, int]) -> None:
    """Send a pod its part of the plan, and note which workers were told."""
    plan = None if member.session is None else _build_plan(job, member, master)
    job.members.note_plan(member, plan)
    if plan is not None:
        job.send(member, plan)


def _build_plan(job: JobState, member: Member, master: tuple[str, int]) -> Plan:
    """Return a pod's part of the current plan."""
    world = job.world
    return Plan(
        term=job.numbers.term,
        iteration=world.iteration,
        role=member.role,
        world_size=world.size,
        master_host=master[0],
        master_port=master[1],
        ranks=member.rank_plans(),
        domains=job.members.ranking.domains(member.uid) if member.has_domains else (),
        spare_ranks=world.num_spare_ranks,
        origins=tuple((local_rank, move.origin) for local_rank, move in member.moves.items() if move.origin),
        restore=_restore(job, member),
        repair=job.repair,
    )


def _repair(job: JobState, now_s: float) -> Repair | None:
    """Return what the next rendezvous must know of the recovery under way, should this one not live to count it."""
    incident = job.history.running
    if incident is None or incident.rung is None:
        return None
    culprit, took_over = incident.culprit, list(incident.replaced_by)[:MAX_KEYS]
    return Repair(
        number=incident.number,
        cause=culprit.cause,
        rung=incident.rung,
        rank=culprit.rank,
        pod=culprit.pod,
        node=culprit.node,
        domain=culprit.domain[:MAX_NAME],
        detail=culprit.detail[:_MAX_TOLD],
        iteration=incident.iteration_before,
        world_size=incident.world_size_before,
        ago_s=min(max(now_s - incident.started_s, 0.0), MAX_SECONDS),
        detect_s=min(max(culprit.detect_s, 0.0), MAX_SECONDS),
        stop_s=min(incident.phase_s.get(Phase.STOP.value, 0.0), MAX_SECONDS),
        replaced_by=tuple(took_over),
    )


def _restore(job: JobState, member: Member) -> Restore | None:
    """Return what the ranks of a pod go back to, and where it finds what it does not have itself."""
    choice = job.recall.choice
    if choice is None:
        return None

    table, uid = job.checkpoints, member.uid
    candidates, runs = [], []
    for key in (*choice.keys, *choice.given_up):
        is_same_size = key.world_size == job.world.size
        ranks = sorted(member.ranks.values()) if is_same_size else range(key.world_size)
        sources = table.sources(key, uid, ranks)[:MAX_SOURCES]
        is_given_up = key in choice.given_up
        candidates.append(Candidate(key.term, key.iteration, key.step, key.world_size, tuple(sources), is_given_up))
        runs.append(table.fetches(key, uid, ranks, job.members.out) if is_same_size else _of_all(job, key, uid))
    fetches, peers = named_fetches(runs, table.peers())
    job.copying.name(job.world.iteration, peers)
    found = (replace(one, fetches=fetched) for one, fetched in zip(candidates, fetches, strict=True))
    return Restore(tuple(found), choice.reason, choice.floors, choice.avoided, peers)


def _of_all(job: JobState, key: StepKey, uid: str) -> tuple[list[Run], list[Run]]:
    """Return what a pod of a world of another size has others hand out: it is found once for all pods of a plan."""
    of, known = job.copying.whole
    if of != job.world.iteration:
        job.copying.whole = of, known = job.world.iteration, {}
    if key not in known:
        known[key] = job.checkpoints.fetches(key, "", range(key.world_size), job.members.out)
    if not job.checkpoints.is_reached(uid):
        return [], []
    first, others = known[key]
    return [run for run in first if run[3] != uid], [run for run in others if run[3] != uid]


def _stopped_at_s(phase: object, now_s: float) -> float:
    if isinstance(phase, Interrupted):
        return phase.at_s
    return phase.outage.at_s if isinstance(phase, Forming) and phase.outage is not None else now_s


def _note_plan(job: JobState, world: World, rung: Rung, stopped_at_s: float, now_s: float) -> None:
    incident, by_uid = job.history.running, job.members.by_uid
    if incident is None:
        return
    incident.raise_rung(rung)
    incident.iteration_after = job.world.iteration
    incident.world_size_after = world.world_size
    incident.num_plans += 1
    for member in (by_uid[uid] for uid in world.promoted if uid in by_uid):
        incident.note_taker(member.pod, member.ranks.values())
    incident.add_phase(Phase.STOP, now_s - stopped_at_s)
    incident.add_phase(Phase.PLAN, 0.0)
