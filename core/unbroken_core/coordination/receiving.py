"""What comes in: words of agents and observations of the operator become what is known of the pods."""

from typing import Union

from unbroken_core.coordination.consulting import ask_again, forget_asked
from unbroken_core.coordination.contact import is_superseded, start_over
from unbroken_core.coordination.events import Close, Send
from unbroken_core.coordination.exits import hear_exits
from unbroken_core.coordination.forming import begin_adoption
from unbroken_core.coordination.interruption import inspect, interrupt_message, order_out, take_fault
from unbroken_core.coordination.members import Member, new_member, refusal
from unbroken_core.coordination.moves import note_halted, send_halt
from unbroken_core.coordination.planning import master_endpoint, send_plan
from unbroken_core.coordination.previous_world import note_back, note_lost
from unbroken_core.coordination.script import hear_script
from unbroken_core.coordination.state import OVER, Job
from unbroken_core.messages import (
    PROTOCOL,
    Finish,
    Heartbeat,
    Hello,
    Observation,
    PodObservation,
    Refused,
    Report,
    Welcome,
    WorkerState,
)
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.reasons import Cause, JobPhase, WorkerPhase
from unbroken_core.recoveries.history import FaultRecord

_MAX_REFUSED = 64
"""Refused pods that the status names."""


def join(job: Job, session: str, hello: Hello, can_halt: bool, now_s: float) -> None:
    """Take an agent in as a member, or refuse it."""
    known = job.census.by_uid.get(hello.pod_uid)
    refused = refusal(job.settings, hello, known)
    if refused is not None:
        job.actions += [Send(session, Refused(refused)), Close(session)]
        _note_refusal(job, hello, refused)
        return
    _note_refusal(job, hello, None)
    if is_superseded(job, hello):
        start_over(job, f"pod {hello.pod} has obeyed generation {hello.generation}: takes over again", now_s)
        known = None
    _fence(job, hello)
    note_back(job, hello.pod_uid, now_s)
    job.is_changed = True
    if known is not None and known.session is not None and known.session != session:
        old = known.session
        job.census.disconnect(known, now_s)
        job.close(old)
    member = _new_member(job, session, hello, now_s) if known is None else known
    job.census.connect(member, session, now_s)
    member.node = hello.node or member.node
    member.can_halt = can_halt
    _place(job, member, hello)
    _take_over_plan(member, hello)
    _update(job, member, hello.workers, now_s)
    job.send(member, Welcome(PROTOCOL, job.generation, heartbeat_interval_s(job.settings.timeouts), _over(job)))
    if hello.plan is not None:
        begin_adoption(job, hello.plan, now_s)
    hear_script(job, member)
    hear_exits(job, member)
    job.sort(member)
    ask_again(job, member)
    inspect(job, member, now_s)
    bring_up_to_date(job, member, now_s)
    note_halted(job, member)


def _new_member(job: Job, session: str, hello: Hello, now_s: float) -> Member:
    """Return a member that is not new to this job if its pod was in it before."""
    member = new_member(session, hello, now_s)
    limit = job.settings.max_faults_per_rank
    if limit is not None:
        for local_rank, place in member.places.items():
            place.num_faults = job.history.by_place.get((member.uid, local_rank), 0)
            place.is_retired = place.num_faults > limit
    return member


def _over(job: Job) -> int:
    """Return the highest iteration that no worker may enter any more."""
    if job.phase is JobPhase.FORMING:
        # A former coordinator's newest plan may hold; none before it does.
        return max(job.highest_iteration, 0) - 1
    return job.iteration - 1 if job.phase in (JobPhase.PLANNED, JobPhase.RUNNING) else job.iteration


def _note_refusal(job: Job, hello: Hello, why: str | None) -> None:
    key = (hello.pod_uid, hello.pod)
    if why is None:
        job.refused.pop(key, None)
    elif job.refused.get(key) != why and len(job.refused) < _MAX_REFUSED:
        job.refused[key] = why
        job.is_changed = True


def _fence(job: Job, hello: Hello) -> None:
    """Make sure that our generation is above all that this agent has obeyed, unless it was ours."""
    is_ours = hello.generation == 0 or hello.pod_uid in job.welcomed
    if hello.generation > job.generation or (hello.generation == job.generation and not is_ours):
        job.generation = hello.generation + 1
    job.welcomed.add(hello.pod_uid)
    seen = [hello.plan.iteration] if hello.plan is not None else []
    seen += [worker.iteration for worker in hello.workers]
    job.highest_iteration = max(job.highest_iteration, *seen, -1)


def _place(job: Job, member: Member, hello: Hello) -> None:
    observed = (job.observed or {}).get(member.uid)
    if observed is not None:
        member.gone = observed.gone
    planned = hello.plan.domains if hello.plan is not None else ()
    domains = (observed.domains if observed is not None else ()) or hello.domains or planned
    if job.script.names_domains:
        domains = () if member.has_domains else planned
    if domains or not member.has_domains:
        member.has_domains = bool(domains)
        job.census.ranking.place(member.uid, member.pod, domains)


def _take_over_plan(member: Member, hello: Hello) -> None:
    """What was sent on an older connection may never have arrived: only what the agent says counts."""
    member.plan = hello.plan
    iteration = -1 if hello.plan is None else hello.plan.iteration
    told = {} if hello.plan is None else {part.local_rank: part.rank for part in hello.plan.ranks}
    states = {state.local_rank: state for state in hello.workers}
    for local_rank, place in member.places.items():
        place.is_order_sent = False
        state = states.get(local_rank)
        if told.get(local_rank) is None or state is None:
            place.told_iteration = -1
            continue
        # An agent that holds the plan has told its ready workers. Who is not in it now never will be: the plan was
        # interrupted before, or made for the process before.
        is_passed_over = state.iteration < iteration
        if is_passed_over or place.told_iteration != iteration:
            place.told_incarnation = -1 if is_passed_over else state.incarnation
        place.told_iteration = iteration


def bring_up_to_date(job: Job, member: Member, now_s: float) -> None:
    """Tell an agent that (re)joined what it may have missed."""
    if job.phase in OVER:
        job.send(member, Finish(job.generation, job.phase, job.reason, job.message))
        return
    if job.phase is JobPhase.FORMING:
        return
    stale = [
        place.state.iteration
        for place in member.places.values()
        if place.state.phase in (WorkerPhase.RUNNING, WorkerPhase.COMPLETED)
        and (place.state.iteration != job.iteration or place.state.local_rank not in member.ranks)
    ]
    if stale:
        job.send(member, interrupt_message(job, None, max(stale)))
    if job.phase is JobPhase.INTERRUPTED:
        order_out(job, [member])
    elif lacks_plan(job, member):
        send_plan(job, member, master_endpoint(job))
        job.sort(member)
    else:
        send_halt(job, member, now_s)


def lacks_plan(job: Job, member: Member) -> bool:
    """Return whether the plan that an agent holds is another one than that in force.

    The number alone does not tell: a coordinator without memory that hears the pods of an older plan first uses that of
    a newer one again. Whoever holds ranks by such a plan would tell the next coordinator of them.
    """
    plan = member.plan
    if plan is None or plan.iteration != job.iteration:
        return True
    return any(part.rank not in (None, member.ranks.get(part.local_rank)) for part in plan.ranks)


def hear(job: Job, session: str, message: Union[Report, Heartbeat], now_s: float) -> None:
    """Take what a member says of its pod; what is older than the last word is ignored."""
    member = job.census.by_session.get(session)
    if member is None or message.seq <= member.seq:
        return
    member.seq = message.seq
    job.census.hear(member, now_s)
    if isinstance(message, Heartbeat):
        job.progress.step(message.max_step, now_s)
        return
    if message.is_leaving and not member.is_leaving:
        member.is_leaving = True
    job.is_changed = True
    is_entering = member.uid in job.census.not_entered
    _update(job, member, message.workers, now_s)
    hear_script(job, member)
    hear_exits(job, member)
    job.sort(member)
    if is_entering and member.uid not in job.census.not_entered:
        # Not before the plan, whatever it says, and not in the future.
        job.progress.enter(min(max(now_s - message.entered_ago_s, job.planned_s), now_s))
    inspect(job, member, now_s)
    note_halted(job, member)


def _update(job: Job, member: Member, workers: tuple[WorkerState, ...], now_s: float) -> None:
    member.update(workers, now_s, None if job.settings.is_in_process else job.planned_s)
    job.progress.step(max((w.step for w in workers if w.iteration == job.iteration), default=-1), now_s)


def lose_connection(job: Job, session: str, now_s: float) -> None:
    """Note that a connection is broken: the pod has its time to come back."""
    member = job.census.by_session.get(session)
    if member is not None:
        job.census.disconnect(member, now_s)
        job.sort(member)
        job.is_changed = True


def observe(job: Job, observation: Observation, now_s: float) -> None:
    """Take what the operator sees of all pods."""
    before = job.observed or {}
    is_news = (before, job.is_accounted) != (observation.pods, observation.is_accounted)
    job.observed, job.is_accounted = observation.pods, observation.is_accounted
    job.count_pods(now_s)
    if is_news:
        job.expect_pods()
        job.is_changed = True
    for uid, name in list(job.refused):
        if uid not in observation.pods or observation.pods[uid].gone is not None:
            del job.refused[uid, name]
            job.is_changed = True
    for uid, pod in observation.pods.items():
        member = job.census.by_uid.get(uid)
        if member is not None and before.get(uid) != pod:
            _observe_pod(job, member, pod, now_s)
    for uid in [uid for uid in before if uid not in observation.pods]:
        member = job.census.by_uid.get(uid)
        if member is not None:
            lose(job, member, Cause.POD_LOST, now_s, detect_s=0.0, detail="the pod does not exist any more")


def _observe_pod(job: Job, member: Member, pod: PodObservation, now_s: float) -> None:
    member.gone = pod.gone
    member.node = pod.node or member.node
    if pod.domains and not job.script.names_domains:
        member.has_domains = True
        job.census.ranking.place(member.uid, member.pod, pod.domains)
    job.sort(member)
    inspect(job, member, now_s)


def lose(job: Job, member: Member, cause: Cause, now_s: float, *, detect_s: float, detail: str) -> None:
    """Take a pod out of the job."""
    if member.session is not None:
        job.close(member.session)
    job.is_changed = True
    if member.ranks:
        record = FaultRecord(cause, member.uid, None, now_s - detect_s, detect_s, detail=detail)
        take_fault(job, job.fault(member, record), now_s)
    note_lost(job, member)
    forget_asked(job, member)
    job.census.drop(member, job.iteration)
