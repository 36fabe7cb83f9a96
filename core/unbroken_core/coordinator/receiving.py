"""What comes in: words of agents and observations of the operator become what is known of the pods."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Union

from unbroken_core.coordinator.adoption.previous_world import note_back
from unbroken_core.coordinator.adoption.taking_over import count_inherited, name_lost, note_ages
from unbroken_core.coordinator.cluster import observe_cluster
from unbroken_core.coordinator.consulting import ask
from unbroken_core.coordinator.contact import is_superseded, lose, start_over
from unbroken_core.coordinator.copying import note_return, repeat_buddies
from unbroken_core.coordinator.ending import finish_message, note_end
from unbroken_core.coordinator.events import Close, Send
from unbroken_core.coordinator.faults import inspect, interrupt_message, order_out
from unbroken_core.coordinator.forming import begin_adoption
from unbroken_core.coordinator.health.pairs import receive_pairs
from unbroken_core.coordinator.health.settling import receive_health
from unbroken_core.coordinator.health.stragglers import receive_paces
from unbroken_core.coordinator.limits import check_hello, check_report, most_pods, most_ranks
from unbroken_core.coordinator.memory.table import ReportingPod
from unbroken_core.coordinator.moves import note_halted, send_halt
from unbroken_core.coordinator.planning import master_endpoint, send_plan
from unbroken_core.coordinator.script import receive_exits, receive_fatal_lines, receive_script
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import OVER, Ending, Forming, Interrupted, Planned, Running
from unbroken_core.coordinator.state.places import Member, new_member, refusal
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    Observation,
    PodObservation,
    Refused,
    Report,
    Welcome,
    WorkerState,
)
from unbroken_core.vocabulary.checkpoints import Held
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

_MAX_REFUSED = 64
"""Refused pods that the status names."""
_MAX_GONE = 20_000
"""Names of pods that are gone: more than a job replaces in its life."""


def join(job: JobState, session: str, hello: Hello, can_halt: bool, now_s: float) -> None:
    """Take an agent in as a member, or refuse it."""
    known = job.members.by_uid.get(hello.pod_uid)
    refused = refusal(job.settings, hello, known) or _foreign_uid(job, hello) or check_hello(job, hello)
    if refused is not None:
        job.actions += [Send(session, Refused(refused)), Close(session)]
        _note_refusal(job, hello, refused)
        return
    _note_refusal(job, hello, None)
    if _is_gone(job, hello) and not _is_awaited(job, hello):
        # No names are used twice, so that nobody joins any more as a pod that was deleted. The status does not show it:
        # there is nothing to be done about a pod that is gone.
        job.actions += [Send(session, Refused(f"pod: {hello.pod} does not exist any more")), Close(session)]
        return
    if is_superseded(job, hello):
        start_over(job, f"pod {hello.pod} has obeyed term {hello.term}: takes over again", now_s)
        known = None
    _forget_other_uid(job, hello, now_s)
    _fence(job, hello)
    job.previous = note_back(job, hello.pod_uid, now_s)
    if known is not None and known.session is not None and known.session != session:
        job.close(known.session)
    if known is None and hello.plan is not None:
        note_return(job, now_s)
    member = _new_member(job, session, hello, now_s) if known is None else known
    job.members.connect(member, session, now_s)
    member.node = hello.node or member.node
    member.can_halt = can_halt
    _place(job, member, hello)
    _take_over_plan(member, hello)
    _receive_memory(job, member, hello.memory)
    receive_health(job, member, hello.health, now_s)
    receive_pairs(job, member, hello.pairs, now_s)
    note_ages(member, hello, now_s)
    _note_stall(job, hello.workers, hello.checkpoint_s, now_s)
    _update(job, member, hello.workers, now_s, hello.step_ago_s)
    interval_s = heartbeat_interval_s(job.settings.timeouts)
    job.send(member, Welcome(PROTOCOL, job.numbers.term, interval_s, _over(job), job.settings.copies))
    repeat_buddies(job, member)
    if hello.plan is not None:
        begin_adoption(job, hello.plan, now_s)
    receive_script(job, member)
    receive_exits(job, member)
    receive_fatal_lines(job, member)
    job.members.sort(member)
    ask(job, member)
    inspect(job, member, now_s)
    note_end(job, member)
    bring_up_to_date(job, member, now_s)
    note_halted(job, member, now_s)


def _foreign_uid(job: JobState, hello: Hello) -> str | None:
    """Return what is wrong with a pod that says another uid than the operator; a token proves the name alone."""
    observed = job.cluster.pods.get(hello.pod_uid)
    if observed is not None and observed.pod != hello.pod:
        return f"pod_uid: {hello.pod_uid} belongs to pod {observed.pod}, got pod {hello.pod}"
    if observed is None and hello.pod in job.named:
        return f"pod_uid: want that of pod {hello.pod} which the operator names, got {hello.pod_uid[:64]!r}"
    return None


def _forget_other_uid(job: JobState, hello: Hello, now_s: float) -> None:
    """A pod has one uid, so that nobody counts twice. The newest counts where the operator has named none."""
    other = job.members.by_pod.get(hello.pod)
    if other is not None and other.uid != hello.pod_uid:
        detail = f"it came back with another uid, {hello.pod_uid[:64]!r}"
        lose(job, other, Cause.POD_LOST, now_s, detect_s=0.0, detail=detail)


def _is_gone(job: JobState, hello: Hello) -> bool:
    """Whether the pod was deleted. Of those that went before this coordinator their ordinals tell.

    While the operator accounts for all pods, each ordinal up to its newest pod's is one that it names, or has ended.
    """
    if hello.pod in job.gone:
        return True
    if not job.cluster.is_accounted or hello.pod_uid in job.cluster.pods:
        return False
    return 0 <= _ordinal(job, hello.pod) <= job.newest_ordinal and hello.pod not in job.named


def _ordinal(job: JobState, pod: str) -> int:
    """Return the number at the end of a training pod's name, -1 for any other name."""
    job_name, dash, digits = pod.rpartition("-")
    is_ours = dash and job_name == job.settings.job and digits.isdecimal() and digits.isascii() and len(digits) < 10
    return int(digits) if is_ours else -1


def _is_awaited(job: JobState, hello: Hello) -> bool:
    """Whether the next world waits for the word of this very pod that it has left the one before."""
    return not job.previous.is_over and job.previous.lost.get(hello.pod_uid) == hello.pod


def _new_member(job: JobState, session: str, hello: Hello, now_s: float) -> Member:
    """Return a member that is not new to this job if its pod was in it before."""
    member = new_member(session, hello, now_s)
    limit = job.settings.max_faults_per_rank
    if limit is not None:
        for local_rank, place in member.places.items():
            place.num_faults = job.history.by_place.get((member.uid, local_rank), 0)
            place.is_retired = place.num_faults > limit
    return member


def _over(job: JobState) -> int:
    """Return the highest iteration that no worker may enter any more."""
    if isinstance(job.phase, Forming):
        # A previous coordinator's newest plan may hold; none before it does.
        return max(job.numbers.highest_iteration, 0) - 1
    iteration = job.world.iteration
    return iteration - 1 if isinstance(job.phase, (Planned, Running)) else iteration


def _note_refusal(job: JobState, hello: Hello, why: str | None) -> None:
    key = (hello.pod_uid, hello.pod)
    if why is None:
        if key in job.refused:
            job.refused = {other: text for other, text in job.refused.items() if other != key}
    elif job.refused.get(key) != why and len(job.refused) < _MAX_REFUSED:
        job.refused = {**job.refused, key: why}


def _fence(job: JobState, hello: Hello) -> None:
    """Make sure that our term is above all that this agent has obeyed, unless it was ours."""
    numbers, term = job.numbers, job.numbers.term
    is_ours = hello.term == 0 or hello.pod_uid in job.welcomed
    if hello.term > term or (hello.term == term and not is_ours):
        term = hello.term + 1
    if len(job.welcomed) > 2 * most_pods(job.settings):
        job.welcomed.intersection_update(job.members.by_uid)  # The others get a new term when they come back.
    job.welcomed.add(hello.pod_uid)
    seen = [hello.plan.iteration] if hello.plan is not None else []
    seen += [worker.iteration for worker in hello.workers]
    highest = max(numbers.highest_iteration, *seen, -1)
    if (term, highest) != (numbers.term, numbers.highest_iteration):
        job.numbers = replace(numbers, term=term, highest_iteration=highest)


def _place(job: JobState, member: Member, hello: Hello) -> None:
    observed = job.cluster.pods.get(member.uid)
    if observed is not None:
        member.gone, member.node = observed.gone, observed.node or member.node
    planned = hello.plan.domains if hello.plan is not None else ()
    domains = (observed.domains if observed is not None else ()) or hello.domains or planned
    if job.script.names_domains:
        domains = () if member.has_domains else planned
    if domains or not member.has_domains:
        member.has_domains = bool(domains)
        job.members.ranking.place(member.uid, member.pod, domains)


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
        # An agent that holds the plan has passed it to its ready workers. A worker that is not in it by now never will
        # be: the plan was interrupted before, or made for the previous process.
        is_passed_over = state.iteration < iteration
        if is_passed_over or place.told_iteration != iteration:
            place.told_incarnation = -1 if is_passed_over else state.incarnation
        place.told_iteration = iteration


def bring_up_to_date(job: JobState, member: Member, now_s: float) -> None:
    """Tell an agent that (re)joined what it may have missed."""
    if isinstance(job.phase, Ending) or job.phase.kind in OVER:
        job.send(member, finish_message(job))
        return
    if isinstance(job.phase, Forming):
        return
    stale = [
        place.state.iteration
        for place in member.places.values()
        if place.state.phase in (WorkerPhase.RUNNING, WorkerPhase.COMPLETED)
        and (place.state.iteration != job.world.iteration or place.state.local_rank not in member.ranks)
    ]
    if stale:
        job.send(member, interrupt_message(job, None, max(stale)))
    if isinstance(job.phase, Interrupted):
        order_out(job, [member])
    elif lacks_plan(job, member):
        send_plan(job, member, master_endpoint(job))
    else:
        send_halt(job, member, now_s)


def lacks_plan(job: JobState, member: Member) -> bool:
    """Return whether the plan that an agent holds is another one than that in force.

    The number alone does not say so: a coordinator without memory that first meets the pods of an older plan uses the
    number of a newer one again. An agent that kept such a plan would report its ranks to the next coordinator.
    """
    plan = member.plan
    if plan is None or plan.iteration != job.world.iteration:
        return True
    return any(part.rank not in (None, member.ranks.get(part.local_rank)) for part in plan.ranks)


def receive(job: JobState, session: str, message: Union[Report, Heartbeat], now_s: float) -> None:
    """Take what a member says of its pod; what is older than the last word is ignored, what cannot be is refused."""
    member = job.members.by_session.get(session)
    if member is None or message.seq <= member.seq:
        return
    impossible = check_report(job, message) if isinstance(message, Report) else None
    if impossible is not None:
        job.actions.append(Close(session, f"Report.{impossible}"))
        return
    member.seq = message.seq
    job.members.receive(member, now_s)
    if message.paces:
        receive_paces(job, member, message.paces, now_s)
    if isinstance(message, Heartbeat):
        workers = [place.state for place in member.places.values()]
        _note_stall(job, workers, message.checkpoint_s - message.checkpoint_after_s, now_s)
        newest = max((worker.iteration for worker in workers), default=-1)
        if newest == job.world.iteration:  # Else it tells of one that is over.
            job.progress.step(message.max_step, now_s - max(message.step_ago_s, 0.0), now_s)
        _note_stall(job, workers, message.checkpoint_s, now_s)
        return
    if message.is_leaving and not member.is_leaving:
        member.is_leaving = True
    if message.memory is not None:
        _receive_memory(job, member, message.memory)
    if message.health is not None:
        receive_health(job, member, message.health, now_s)
    receive_pairs(job, member, message.pairs, now_s)
    is_entering = member.uid in job.members.not_entered
    _note_stall(job, message.workers, message.checkpoint_s - message.checkpoint_after_s, now_s)
    _update(job, member, message.workers, now_s, message.step_ago_s)
    _note_stall(job, message.workers, message.checkpoint_s, now_s)
    receive_script(job, member)
    receive_exits(job, member)
    receive_fatal_lines(job, member)
    job.members.sort(member)
    if is_entering and member.uid not in job.members.not_entered:
        # Not before the plan, whatever it says, and not in the future.
        job.progress.enter(min(max(now_s - message.entered_ago_s, job.world.planned_s), now_s))
    inspect(job, member, now_s)
    note_halted(job, member, now_s)
    note_end(job, member)


def _update(job: JobState, member: Member, workers: tuple[WorkerState, ...], now_s: float, step_ago_s: float) -> None:
    ran_since_s = None if job.settings.is_in_process else job.world.planned_s
    job.members.update(member, workers, now_s, ran_since_s)
    iteration = job.world.iteration
    # The last step may be told together with the hang after it: it was made before that began. Older agents do not say
    # when.
    hangs = (
        member.places[w.local_rank].fault_at_s
        for w in workers
        if w.fault is not None and w.fault.is_hang and w.fault.iteration == iteration and w.local_rank in member.places
    )
    made_s = now_s - step_ago_s if step_ago_s > 0.0 else min(min(hangs, default=now_s), now_s)
    job.progress.step(max((w.step for w in workers if w.iteration == iteration), default=-1), made_s, now_s)


def _note_stall(job: JobState, workers: Iterable[WorkerState], checkpoint_s: float, now_s: float) -> None:
    """Note for how long workers of a pod have stood still for checkpoints in their newest iteration."""
    if checkpoint_s > 0.0:
        job.progress.stall(max((worker.iteration for worker in workers), default=-1), checkpoint_s, now_s)


def _receive_memory(job: JobState, member: Member, held: Held | None) -> None:
    if held is None:
        job.checkpoints.lose(member.uid)  # Another agent of this pod knew of its keeper.
        return
    reporter = ReportingPod(
        member.uid,
        member.pod,
        job.numbers.highest_iteration,
        most_ranks(job.settings),
        lambda uid: uid in job.members.by_uid,
    )
    job.checkpoints.receive(reporter, held)


def lose_connection(job: JobState, session: str, now_s: float) -> None:
    """Note that a connection is broken: the pod has its time to come back."""
    member = job.members.by_session.get(session)
    if member is not None:
        job.members.disconnect(member, now_s)


def observe(job: JobState, observation: Observation, now_s: float) -> None:
    """Take what the operator sees of all pods."""
    before = job.cluster.pods
    if observe_cluster(job, observation, now_s):
        job.members.expect({uid: pod.pod for uid, pod in observation.pods.items()})
        _note_gone_names(job, before, observation.pods)
    if observation.gone:
        job.gone_before = tuple((pod, now_s - pod.ago_s) for pod in observation.gone)
        name_lost(job)
    if observation.earlier is not None:
        job.progress.follow(observation.earlier, now_s)
    count_inherited(job, observation.counted)
    pods = observation.pods
    if any(uid not in pods or pods[uid].gone is not None for uid, _name in job.refused):
        is_there = {uid for uid, pod in pods.items() if pod.gone is None}
        job.refused = {key: why for key, why in job.refused.items() if key[0] in is_there}
    for uid, pod in pods.items():
        member = job.members.by_uid.get(uid)
        if member is not None and member.pod != pod.pod:
            # It joined before the operator had named the pod. Nobody keeps another one's place.
            detail = f"it claimed the uid that the operator reports for pod {pod.pod}"
            lose(job, member, Cause.POD_LOST, now_s, detect_s=0.0, detail=detail)
        elif member is not None and before.get(uid) != pod:
            job.members.observe(member, pod, job.script.names_domains)
            inspect(job, member, now_s)
    for uid in [uid for uid in before if uid not in pods]:
        member = job.members.by_uid.get(uid)
        if member is not None:
            lose(job, member, Cause.POD_LOST, now_s, detect_s=0.0, detail="the pod does not exist any more")


def _note_gone_names(job: JobState, before: Mapping[str, PodObservation], pods: Mapping[str, PodObservation]) -> None:
    """Note whom the operator does not name any more. Whom it has not named yet may be there all the same."""
    if before.keys() == pods.keys():
        return
    job.named = frozenset(pod.pod for pod in pods.values())
    job.newest_ordinal = max((_ordinal(job, pod) for pod in job.named), default=-1)
    for uid, pod in before.items():
        if uid not in pods:
            job.gone[pod.pod] = None
    for pod in pods.values():
        job.gone.pop(pod.pod, None)
    while len(job.gone) > _MAX_GONE:
        del job.gone[next(iter(job.gone))]
