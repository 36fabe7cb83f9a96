"""The state machine that decides everything about a running job. Pure: events and the time come in, actions go out.

     FORMING ──enough pods READY──────────────> PLANNED ──all active RUNNING──> RUNNING ──all COMPLETED──> COMPLETE
      │    └──agents come with a plan: adopt──>  │   ^                            │
      │                                          │   └─recovery.choose: Cut─┐     │
      │ startup over, or hopeless                └──────fault──────> INTERRUPTED <┘ fault
      └──────────────> FAILED <──────────────nothing left to try───────────┘

Level, not edge: what counts is the last known state of every worker. A message that is repeated changes nothing, one
that is lost is made up for by the next Hello.

Every wait has an end: FORMING timeouts.startup; PLANNED timeouts.barrier, then those who did not enter are replaced;
INTERRUPTED timeouts.barrier for the survivors to leave, then those who did not are replaced, and timeouts.startup
for new processes and pods; a pod that is away timeouts.reconnect (or 1 s), one that is silent timeouts.heartbeat.
Only the cluster may take as long as it wants to run pods: timeouts.startup is time of the pod clock (pod_clock.py).
"""

from collections.abc import Callable, Iterable
from typing import Union

from unbroken_core.consulting import ask_again
from unbroken_core.contact import is_deaf, is_superseded, start_over
from unbroken_core.errors import assert_never
from unbroken_core.events import (
    Action,
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Close,
    Event,
    Observed,
    Send,
    Tick,
)
from unbroken_core.exits import hear_exits
from unbroken_core.forming import begin_adoption, consider_adoption, while_forming
from unbroken_core.history import FaultRecord, History, Progress
from unbroken_core.interrupting import heal, inspect, interrupt_message, take_fault, while_interrupted
from unbroken_core.job import Job
from unbroken_core.liveness import heartbeat_interval_s, reconnect_grace_s
from unbroken_core.membership import Member, new_member, refusal
from unbroken_core.messages import (
    PROTOCOL,
    Finish,
    Heartbeat,
    Hello,
    JobStatus,
    Observation,
    PodObservation,
    Refused,
    Report,
    Welcome,
    WorkerState,
)
from unbroken_core.one_world import first_world, note_back, note_lost
from unbroken_core.planning import condemn, late_fault, master_endpoint, send_plan, while_planned, while_running
from unbroken_core.rank_tree import RankTree
from unbroken_core.reasons import Cause, JobPhase, Rung, WorkerPhase
from unbroken_core.script import hear_script
from unbroken_core.settings import JobSettings
from unbroken_core.status import build_status

_OVER = (JobPhase.COMPLETE, JobPhase.FAILED)
_MAX_REFUSED = 64
"""Refused pods that the status names."""
_MAX_TURNS = 8


class Coordinator:
    """One job's only writer of the plan. Not thread-safe; all times are monotonic seconds of one clock."""

    def __init__(
        self,
        settings: JobSettings,
        now_s: float,
        generation: int = 1,
        highest_iteration: int = -1,
        uses: Iterable[tuple[Rung, float]] = (),
    ) -> None:
        """Begin a job, or take one over.

        `generation` is the lowest one to use, `highest_iteration` that of earlier coordinators; `uses` are the rungs
        that they have used, oldest first, and count in the budgets.
        """
        self._job = Job(settings, generation, now_s)
        self._job.highest_iteration = highest_iteration
        self._job.former = first_world(self._job, now_s)
        for rung, at_s in uses:
            self._job.ladder.charge(rung, at_s)
        self._revision = 0
        self._job.wake(now_s + settings.timeouts.startup_s)

    @property
    def generation(self) -> int:
        """Fencing number; rises when an agent knows a higher one."""
        return self._job.generation

    @property
    def past(self) -> tuple[int, int]:
        """Generation and highest iteration: what the next coordinator should begin with."""
        return self._job.generation, self._job.highest_iteration

    @property
    def revision(self) -> int:
        """+1 on every change of the status; progress alone is no change."""
        return self._revision

    @property
    def phase(self) -> JobPhase:
        """State of the job."""
        return self._job.phase

    def next_deadline_s(self) -> float | None:
        """Return when a Tick is due, unless another event comes first; None when only an event can change anything."""
        return self._job.next_deadline_s

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event and return what to do, in order. `now_s` never goes back."""
        job = self._job
        job.actions = []
        job.is_changed = False
        match event:
            case AgentJoined(session=session, hello=hello):
                _join(job, session, hello, now_s)
            case AgentReported(session=session, message=message):
                _hear(job, session, message, now_s)
            case AgentDisconnected(session=session):
                _lose_connection(job, session, now_s)
            case Observed(observation=observation):
                _observe(job, observation, now_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        _advance(job, now_s)
        if job.is_changed:
            self._revision += 1
        return job.actions

    def plan_took(self, seconds: float) -> None:
        """Add to the PLAN phase of the running recovery what only the shell can measure: cutting and sending."""
        incident = self._job.history.running
        if incident is not None:
            incident.phase_s["plan"] = incident.phase_s.get("plan", 0.0) + seconds

    @property
    def settings(self) -> JobSettings:
        """What was asked for."""
        return self._job.settings

    @property
    def wanted_ranks(self) -> int:
        """Active ranks of the job in full health."""
        return self._job.rules.wanted_ranks

    @property
    def history(self) -> History:
        """Recoveries, to look at until the next step."""
        return self._job.history

    @property
    def progress(self) -> Progress:
        """How much of the time was progress, to look at until the next step."""
        return self._job.progress

    @property
    def tree(self) -> Union[RankTree, None]:
        """Who has which rank and where, to look at until the next step; None before the first plan."""
        return self._job.census.ranking.tree

    def explanation(self) -> list[str]:
        """Return what the last plan has changed and why, in sentences; empty where a script's own code made it."""
        return self._job.census.ranking.explanation()

    def status(self, now_s: float, wall: Callable[[float], str]) -> JobStatus:
        """Return what is known now. `wall` turns a time of the coordinator's clock into RFC 3339 UTC."""
        return build_status(self._job, self._revision, now_s, wall)


# ---------------------------------------------------------------------------------------------------- what comes in


def _join(job: Job, session: str, hello: Hello, now_s: float) -> None:
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
    member = new_member(session, hello, now_s) if known is None else known
    job.census.connect(member, session, now_s)
    member.node = hello.node or member.node
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
    _bring_up_to_date(job, member)


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


def _bring_up_to_date(job: Job, member: Member) -> None:
    """Tell an agent that (re)joined what it may have missed."""
    if job.phase in _OVER:
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
        # An agent without a plan must not learn of an iteration: were this rendezvous lost, the next one would never
        # hear of it, begin with the same number, and be ignored.
        if member.plan is not None:
            job.send(member, interrupt_message(job, job.history.running, job.iteration))
    elif member.plan is None or member.plan.iteration != job.iteration:
        send_plan(job, member, master_endpoint(job))
        job.sort(member)


def _hear(job: Job, session: str, message: Union[Report, Heartbeat], now_s: float) -> None:
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
    _update(job, member, message.workers, now_s)
    hear_script(job, member)
    hear_exits(job, member)
    job.sort(member)
    inspect(job, member, now_s)


def _update(job: Job, member: Member, workers: tuple[WorkerState, ...], now_s: float) -> None:
    member.update(workers, now_s, None if job.settings.is_in_process else job.planned_s)
    job.progress.step(max((w.step for w in workers if w.iteration == job.iteration), default=-1), now_s)


def _lose_connection(job: Job, session: str, now_s: float) -> None:
    member = job.census.by_session.get(session)
    if member is not None:
        job.census.disconnect(member, now_s)
        job.sort(member)
        job.is_changed = True


def _observe(job: Job, observation: Observation, now_s: float) -> None:
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


# ------------------------------------------------------------------------------------------------ what follows from it


def _advance(job: Job, now_s: float) -> None:
    job.reset_wake()
    if job.phase in _OVER:
        return
    _expire(job, now_s)
    for _turn in range(_MAX_TURNS):
        phase = job.phase
        _turn_once(job, now_s)
        if job.phase is phase:
            break
    if job.phase not in _OVER:
        heal(job, now_s)
    else:
        job.reset_wake()


def _turn_once(job: Job, now_s: float) -> None:
    match job.phase:
        case JobPhase.FORMING:
            if job.adoption is None:
                while_forming(job, now_s)
            else:
                _adopt(job, now_s)
        case JobPhase.PLANNED:
            for member, place in while_planned(job, now_s):
                late = late_fault(member, place, job.settings.timeouts.barrier_s, now_s)
                take_fault(job, job.fault(member, late), now_s)
                condemn(job, member, place)
        case JobPhase.RUNNING:
            while_running(job, now_s)
        case JobPhase.INTERRUPTED:
            while_interrupted(job, now_s)
        case JobPhase.COMPLETE | JobPhase.FAILED:
            pass
        case _:
            assert_never(job.phase)


def _adopt(job: Job, now_s: float) -> None:
    faults = consider_adoption(job, now_s)
    if job.phase is JobPhase.FORMING:
        if job.adoption is None:
            while_forming(job, now_s)
        return
    for fault in faults:
        take_fault(job, fault, now_s)
    for member in job.census.by_uid.values():
        inspect(job, member, now_s, is_adoption=True)
        if member.plan is None or member.plan.iteration != job.iteration:
            _bring_up_to_date(job, member)


def _expire(job: Job, now_s: float) -> None:
    timeouts = job.settings.timeouts
    grace_s = reconnect_grace_s(timeouts, job.phase is JobPhase.INTERRUPTED)
    for uid in list(job.census.away):
        member = job.census.by_uid[uid]
        away_s = now_s - member.away_since_s
        # Compared as a deadline is computed: rounding must not put the decision behind its tick.
        if now_s >= member.away_since_s + grace_s:
            detail = f"its connection was broken for {away_s:.1f} s"
            lose(job, member, Cause.POD_LOST, now_s, detect_s=away_s, detail=detail)
        else:
            job.wake(member.away_since_s + grace_s)
    while job.census.heard:
        member = job.census.by_uid[next(iter(job.census.heard))]
        silent_s = now_s - member.heard_at_s
        if now_s < member.heard_at_s + timeouts.heartbeat_s:
            job.wake(member.heard_at_s + timeouts.heartbeat_s)
            return
        if is_deaf(job, now_s):
            start_over(job, f"no pod was heard for {timeouts.heartbeat_s:g} s: waits for them to come back", now_s)
            return
        detail = f"it was silent for {silent_s:.1f} s"
        lose(job, member, Cause.HEARTBEAT_LOST, now_s, detect_s=silent_s, detail=detail)


def lose(job: Job, member: Member, cause: Cause, now_s: float, *, detect_s: float, detail: str) -> None:
    """Take a pod out of the job."""
    if member.session is not None:
        job.close(member.session)
    job.is_changed = True
    if member.ranks:
        record = FaultRecord(cause, member.uid, None, now_s - detect_s, detect_s, detail=detail)
        take_fault(job, job.fault(member, record), now_s)
    note_lost(job, member)
    job.census.drop(member, job.iteration)
