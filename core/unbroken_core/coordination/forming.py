"""Before the first plan: waiting for the pods, or taking over a job that runs already."""

from unbroken_core.coordination.consulting import consult, objection
from unbroken_core.coordination.newcomers import newcomers
from unbroken_core.coordination.planning import cut_plan, finish
from unbroken_core.coordination.previous_world import adopted_world, is_held
from unbroken_core.coordination.state import Adoption, Interruption, Job
from unbroken_core.messages import Plan
from unbroken_core.ranks.worlds import Outcome, Shortage
from unbroken_core.reasons import Cause, JobPhase, Reason, Role, Rung
from unbroken_core.recoveries.history import FaultRecord
from unbroken_core.recoveries.ladder import shorten_names


def while_forming(job: Job, now_s: float) -> None:
    """Cut the first plan when it is time, or give up when the startup timeout is over."""
    settings, census = job.settings, job.census
    num_ready = len(census.ready)
    if num_ready < settings.replicas:
        job.last_call_s = None
    elif job.last_call_s is None:
        job.last_call_s = now_s
    startup_end_s = job.startup_due_s(job.forming_began)
    if now_s < startup_end_s:
        job.wake(startup_end_s)
    if _is_hopeless(job):
        finish(job, JobPhase.FAILED, Reason.FAILED_BEFORE_READY, hopeless_text(job) + "; " + _count_text(job))
    elif job.last_call_s is not None and _is_complete(job, job.last_call_s, now_s):
        outcome = first_outcome(job, now_s)
        if not isinstance(outcome, Shortage):
            _form(job, now_s)
        elif now_s >= startup_end_s:
            finish(job, JobPhase.FAILED, Reason.STARTUP_TIMEOUT, outcome.detail)
        else:
            job.say(Reason.WAITING_FOR_PODS, f"cannot place the ranks: {outcome.detail}")
    elif job.last_call_s is None:
        _wait_or_give_up(job, startup_end_s, now_s)


def _form(job: Job, now_s: float) -> None:
    if is_held(job, now_s):
        return
    order = consult(job, now_s) if job.rules.has_code else None
    if job.rules.has_code and order is None:
        if job.phase is JobPhase.FORMING and job.consultation is None:
            while_forming(job, now_s)  # Nobody was left to wait for: the next one is asked.
        return
    outage, job.outage = job.outage, None
    if outage is None:
        cut_plan(job, None, now_s, order)
        return
    # Nobody came back with the plan that was running: everything starts again, and that is no first start.
    incident = job.history.running
    if incident is None:
        incident = job.history.open(outage.at_s, outage.iteration, outage.world_size)
    incident.add(FaultRecord(Cause.HEARTBEAT_LOST, "", None, outage.at_s, detail=outage.why))
    job.interruption = Interruption(outage.at_s, job.pod_clock.read(now_s))
    cut_plan(job, Rung.JOB, now_s, order)


def first_outcome(job: Job, now_s: float) -> Outcome:
    """Return the world of what is ready now, regardless of earlier ones."""
    job.census.ranking.exclude(newcomers(job, now_s))
    observed = job.observed or {}
    preferred = {uid for uid, pod in observed.items() if pod.role is Role.ACTIVE}
    return objection(job) or job.census.ranking.first(preferred)


def hopeless_text(job: Job) -> str:
    """Return how the processes of a place that was given up have ended; "" when there is none."""
    for uid in job.census.hopeless:
        member = job.census.by_uid[uid]
        for local_rank, place in member.places.items():
            if place.refusal:
                return f"{member.pod} worker {local_rank}: {place.refusal}"
            if place.is_retired:
                return f"{member.pod} worker {local_rank}: {place.num_faults} faults, more than maxFaultsPerRank"
            if place.is_hopeless:
                return f"{member.pod} worker {local_rank} ended {place.num_short_lives} times: {place.last_words}"
    return ""


def consider_adoption(job: Job, now_s: float) -> list[FaultRecord]:
    """Take over the iteration that the agents are in, when all of its ranks are there or have had their time.

    Returns the faults of the ranks that did not come back.
    """
    adoption = job.adoption
    if adoption is None:
        return []
    deadline_s = adoption.since_s + job.settings.timeouts.heartbeat_s
    if now_s < deadline_s and not _may_be_complete(adoption, len(job.census.by_uid)):
        job.wake(deadline_s)
        return []
    plans = [(member.uid, member.plan) for member in job.census.by_uid.values() if member.plan is not None]
    if not plans:
        job.adoption = None  # Those who came with a plan are lost again.
        return []
    plans.sort(key=lambda held: (held[1].iteration, held[1].generation))
    newest = plans[-1][1]
    places: dict[int, tuple[str, int]] = {}
    for uid, plan in plans:
        # A number may have been used again by a coordinator without memory: the last one holds.
        if plan.iteration == newest.iteration:
            places.update({part.rank: (uid, part.local_rank) for part in plan.ranks if part.rank is not None})
    is_complete = all(rank in places for rank in range(newest.world_size))
    if not is_complete and now_s < deadline_s:
        adoption.newest = (newest.iteration, newest.generation)
        adoption.num_joins, adoption.num_awaited = 0, _num_awaited(job, newest.world_size - len(places))
        job.wake(deadline_s)
        message = f"takes over iteration {newest.iteration}: {len(places)} of {newest.world_size} ranks have come back"
        job.say(Reason.WAITING_FOR_PODS, message)
        return []
    return _adopt(job, newest.iteration, newest.world_size, places, now_s)


def _adopt(
    job: Job, iteration: int, world_size: int, places: dict[int, tuple[str, int]], now_s: float
) -> list[FaultRecord]:
    job.adoption = job.outage = None
    job.iteration = iteration
    job.highest_iteration = max(job.highest_iteration, iteration)
    job.world_size = world_size
    ranks = job.census.ranking.adopt(world_size, places)
    job.planned_s = now_s
    for member in job.census.by_uid.values():
        member.seat(ranks.get(member.uid, {}), {})
        job.sort(member)
    job.former = adopted_world(job, len(places))
    message = f"iteration {iteration}: taken over with {len(places)} of {world_size} ranks"
    job.enter_phase(JobPhase.PLANNED, Reason.WAITING_FOR_WORKERS, message)
    heartbeat_s = job.settings.timeouts.heartbeat_s
    lost = [uid for uid in ranks if uid not in job.census.by_uid]
    return [
        FaultRecord(
            Cause.POD_LOST, uid, None, now_s - heartbeat_s, heartbeat_s, detail="did not come back to a new rendezvous"
        )
        for uid in lost
    ]


def begin_adoption(job: Job, plan: Plan, now_s: float) -> None:
    """Note that an agent came with a plan."""
    if job.phase is not JobPhase.FORMING:
        return
    if job.adoption is None:
        job.adoption = Adoption(now_s)
    job.adoption.num_joins += 1
    if (plan.iteration, plan.generation) > job.adoption.newest:
        job.adoption.num_awaited = 0


def _may_be_complete(adoption: Adoption, num_members: int) -> bool:
    """Whether all ranks can be there that were not at the last look; a lost pod may have brought the newest plan."""
    is_lost = num_members < adoption.num_members
    adoption.num_members = num_members
    return is_lost or adoption.num_joins >= adoption.num_awaited


def _num_awaited(job: Job, num_missing: int) -> int:
    """Return how many pods must come before it is worth to look again; often enough to tell people how it goes on."""
    num_wanted = -(-num_missing // job.settings.ranks_per_pod)
    return max(min(num_wanted, len(job.census.by_uid) // 8), 1)


def _is_complete(job: Job, last_call_s: float, now_s: float) -> bool:
    settings, census = job.settings, job.census
    deadline_s = last_call_s + settings.timeouts.last_call_s
    if now_s >= deadline_s:
        return True
    num_wanted = settings.replicas + settings.spares
    if not census.homeless and len(census.ready) >= num_wanted:
        return True
    job.wake(deadline_s)
    if census.homeless:
        names = shorten_names(census.homeless, census.name)
        message = f"waits {settings.timeouts.last_call_s:.0f} s for the domains of {names}"
        job.say(Reason.WAITING_FOR_TOPOLOGY, message)
    else:
        message = f"{_count_text(job)}; waits {settings.timeouts.last_call_s:.0f} s for the others"
        job.say(Reason.WAITING_FOR_PODS, message)
    return False


def _wait_or_give_up(job: Job, startup_end_s: float, now_s: float) -> None:
    if now_s < startup_end_s:
        has_all_pods = len(job.census.by_uid) >= job.settings.replicas
        reason = Reason.WAITING_FOR_WORKERS if has_all_pods else Reason.WAITING_FOR_PODS
        standing = job.standing_text()
        job.say(reason, _count_text(job) + _missing_text(job) + (f"; {standing}" if standing else ""))
        return
    outcome = first_outcome(job, now_s)
    silent_began = job.script.silent_began
    if not isinstance(outcome, Shortage):
        _form(job, now_s)
    elif silent_began is not None and now_s < job.startup_due_s(silent_began):
        # However late it was asked, its new process has the time to get ready that every process has.
        job.wake(job.startup_due_s(silent_began))
        job.say(Reason.WAITING_FOR_WORKERS, _count_text(job) + _missing_text(job))
    else:
        waited_s = job.settings.timeouts.startup_s
        refused = objection(job)
        why = _missing_text(job) + (f"; {refused.detail}" if refused is not None else _hint(job))
        message = f"after {waited_s:.0f} s {_count_text(job)}{why}"
        finish(job, JobPhase.FAILED, Reason.STARTUP_TIMEOUT, message)


def _is_hopeless(job: Job) -> bool:
    if not job.census.hopeless:
        return False
    expected = max(len(job.census.by_uid), job.settings.replicas + job.settings.spares)
    num_lost = len(job.census.by_uid) - job.num_living
    return expected - num_lost < job.settings.minimum_replicas


def _count_text(job: Job) -> str:
    census, settings = job.census, job.settings
    return f"{len(census.ready)} of {settings.replicas} pods are ready, {len(census.by_uid)} have joined"


def _hint(job: Job) -> str:
    has_silent_workers = len(job.census.by_uid) > len(job.census.ready)
    if not (job.settings.is_in_process and has_silent_workers):
        return ""
    return (
        " (workers are ready when they call a function under unbroken.inprocess.Wrapper; "
        "a script without it wants restart.rungs without in-process)"
    )


def _missing_text(job: Job) -> str:
    census = job.census
    absent, unready = census.absent, census.unready
    text = f"; not joined: {shorten_names(absent.values())}" if absent else ""
    text += f"; not ready: {shorten_names(unready, census.name)}" if unready else ""
    refused = next(((pod, why) for (_uid, pod), why in job.refused.items()), None)
    return text + (f"; refused: {refused[0]}: {refused[1]}" if refused else "")
