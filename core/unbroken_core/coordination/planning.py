"""Cutting a plan, and bringing the workers into it."""

from collections.abc import Sequence

from unbroken_core.coordination.members import Member, Place
from unbroken_core.coordination.previous_world import new_world
from unbroken_core.coordination.state import Job, build_plan
from unbroken_core.errors import InputError
from unbroken_core.messages import Finish
from unbroken_core.ranks.worlds import Cut, Worker, World
from unbroken_core.reasons import Cause, JobPhase, Phase, Reason, Rung
from unbroken_core.recoveries.history import FaultRecord
from unbroken_core.recoveries.ladder import shorten_names


def cut_plan(job: Job, rung: Rung | None, now_s: float, order: Sequence[Worker] | None = None) -> None:
    """Make the world that was asked for last the next iteration and tell everybody. `rung` is None for the first.

    With `order`, these workers are rank 0, 1, ... instead; the job fails when that breaks a limit of the spec.
    """
    ranking = job.census.ranking
    try:
        cut = ranking.take() if order is None else ranking.assign(order)
    except InputError as error:
        finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, f"rank_assignment: {error}")
        return
    ranking.exclude({})
    job.highest_iteration += 1
    job.iteration = job.highest_iteration
    job.world_size = cut.world.world_size
    job.planned_s = now_s
    job.num_spare_ranks = ranking.num_spare_ranks
    job.num_broken_spares += cut.world.num_broken
    _hand_out(job, cut)
    master = master_endpoint(job)
    for member in job.census.by_uid.values():
        send_plan(job, member, master)
        job.sort(member)
    job.former = new_world(job)
    if rung is not None:
        _note_plan(job, cut.world, rung, now_s)
    job.interruption = None
    message = f"iteration {job.iteration}: waits for {job.world_size} ranks to enter the training function"
    job.enter_phase(JobPhase.PLANNED, Reason.RECOVERING if rung else Reason.WAITING_FOR_WORKERS, message)


def master_endpoint(job: Job) -> tuple[str, int]:
    """Return where active rank 0 listens; ("", 0) when it is not known."""
    if job.world_size:
        uid, local_rank = job.census.ranking.rank_0
        member = job.census.by_uid.get(uid)
        if member is not None:
            state = member.places[local_rank].state
            return state.host, state.port
    return "", 0


def send_plan(job: Job, member: Member, master: tuple[str, int]) -> None:
    """Send a pod its part of the plan, and note which workers were told."""
    if member.session is None:
        return
    member.plan = build_plan(job, member, master)
    for local_rank in member.ranks:
        place = member.places[local_rank]
        place.told_iteration = job.iteration
        place.told_incarnation = place.state.incarnation
    job.send(member, member.plan)


def while_planned(job: Job, now_s: float) -> list[tuple[Member, Place]]:
    """Go on to RUNNING when all have entered. Return the workers that did not enter in time."""
    census = job.census
    if not census.not_entered:
        _run(job, now_s)
        return []
    deadline_s = job.planned_s + job.settings.timeouts.barrier_s
    if now_s < deadline_s:
        job.wake(deadline_s)
        names = shorten_names(census.not_entered, census.name)
        message = f"iteration {job.iteration}: waits for {names} to enter the training function"
        job.say(job.reason, message)
        return []
    late = []
    for uid in census.not_entered:
        member = census.by_uid[uid]
        for local_rank in member.ranks:
            place = member.places[local_rank]
            if place.is_ready or place.state.iteration < job.iteration:
                late.append((member, place))
    return late


def condemn(job: Job, member: Member, place: Place) -> None:
    """Order the process of a place to be replaced."""
    if place.replacing is None:
        place.replacing = place.state.incarnation
        place.is_order_sent = False
    if job.interruption is not None and member.ranks:
        job.interruption.respawned.setdefault(member.uid, set()).add(place.state.local_rank)
    job.sort(member)


def late_fault(member: Member, place: Place, seconds: float, now_s: float) -> FaultRecord:
    """Return the fault of a worker that did not do in time what it was told."""
    detail = f"did not follow for {seconds:.0f} s (timeouts.barrierSeconds); its process is replaced"
    incarnation = place.state.incarnation
    return FaultRecord(
        Cause.HARD_TIMEOUT, member.uid, place.state.local_rank, now_s - seconds, seconds, incarnation, detail=detail
    )


def while_running(job: Job, now_s: float) -> None:
    """Finish when all have completed; else note the first progress of the last recovery."""
    if not job.census.not_completed:
        job.progress.end(now_s)
        finish(job, JobPhase.COMPLETE, Reason.COMPLETED, f"all {job.world_size} ranks completed")
        return
    last = job.history.finished[-1] if job.history.finished else None
    is_measured = last is None or last.iteration_after != job.iteration or Phase.FIRST_PROGRESS.value in last.phase_s
    if last is not None and not is_measured and not job.census.not_progressed and last.ended_s is not None:
        last.add_phase(Phase.FIRST_PROGRESS, now_s - last.ended_s)
        job.is_changed = True


def finish(job: Job, outcome: JobPhase, reason: Reason, message: str) -> None:
    """End the job."""
    job.enter_phase(outcome, reason, message)
    job.interruption = job.move = None
    job.broadcast(Finish(job.generation, outcome, reason, message))


def _run(job: Job, now_s: float) -> None:
    incident = job.history.running
    if incident is not None:
        entered_s = job.progress.entered_s(job.planned_s, now_s)
        incident.add_phase(Phase.ENTER, entered_s - job.planned_s)
        job.history.close(entered_s)
    job.former = new_world(job)  # Also one that was taken over: all of its ranks are in it.
    job.progress.run(now_s, job.world_size)
    job.running_s = now_s
    job.enter_phase(JobPhase.RUNNING, Reason.TRAINING, running_text(job))


def running_text(job: Job) -> str:
    """Return what the status says of an iteration that runs."""
    world_size, wanted = job.world_size, job.rules.wanted_ranks
    fewer = "" if world_size >= wanted else f", {wanted - world_size} fewer than wanted"
    return f"iteration {job.iteration} runs with {world_size} ranks{fewer}"


def _hand_out(job: Job, cut: Cut) -> None:
    """Give the members their ranks; those that keep them are not looked at."""
    by_uid = job.census.by_uid
    for member in by_uid.values() if cut.is_first else job.moved:
        member.seat({} if cut.is_first else member.ranks, {})
    job.moved = [by_uid[uid] for uid in cut.ranks if uid in by_uid]
    for member in job.moved:
        member.seat(cut.ranks[member.uid], cut.moves.get(member.uid, {}))


def _note_plan(job: Job, world: World, rung: Rung, now_s: float) -> None:
    incident, interruption = job.history.running, job.interruption
    if incident is None or interruption is None:
        return
    incident.raise_rung(rung)
    incident.iteration_after = job.iteration
    incident.world_size_after = world.world_size
    incident.num_plans += 1
    incident.replaced_by.update(
        dict.fromkeys(job.census.by_uid[uid].pod for uid in world.promoted if uid in job.census.by_uid)
    )
    incident.add_phase(Phase.STOP, now_s - interruption.at_s)
    incident.add_phase(Phase.PLAN, 0.0)
