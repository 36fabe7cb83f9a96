"""The state machine that decides everything about a running job. Pure: events and the time come in, actions go out.

     FORMING ──enough pods READY──────────────> PLANNED ──all active RUNNING──> RUNNING ──all COMPLETED──> COMPLETE
      │    └──agents come with a plan: adopt──>  │   ^                            │
      │                                          │   └─recovery.choose: Cut─┐     │
      │ startup over, or hopeless                └──────fault──────> INTERRUPTED <┘ fault
      └──────────────> FAILED <──────────────nothing left to try───────────┘

Level, not edge: what counts is the last known state of every worker. A message that is repeated changes nothing, one
that is lost is made up for by the next Hello.

Every wait has an end: FORMING timeouts.startup; PLANNED timeouts.barrier, then those who did not enter are replaced;
RUNNING timeouts.drain for a step after which ranks can move as planned (moves.py);
INTERRUPTED timeouts.barrier for the survivors to leave, then those who did not are replaced, and timeouts.startup
for new processes and pods; a pod that is away timeouts.reconnect (or 1 s), one that is silent timeouts.heartbeat.
Only the cluster may take as long as it wants to run pods: timeouts.startup is time of the pod clock (pod_clock.py).
"""

from collections.abc import Callable, Iterable
from typing import Union

from unbroken_core.coordination.contact import is_deaf, start_over
from unbroken_core.coordination.events import (
    Action,
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Event,
    Observed,
    Tick,
)
from unbroken_core.coordination.forming import consider_adoption, while_forming
from unbroken_core.coordination.interruption import inspect, take_fault, while_interrupted
from unbroken_core.coordination.moves import while_moving
from unbroken_core.coordination.planning import condemn, late_fault, while_planned, while_running
from unbroken_core.coordination.previous_world import first_world
from unbroken_core.coordination.receiving import (
    bring_up_to_date,
    hear,
    join,
    lacks_plan,
    lose,
    lose_connection,
    observe,
)
from unbroken_core.coordination.respawning import heal
from unbroken_core.coordination.state import OVER, Job
from unbroken_core.coordination.status import build_status
from unbroken_core.errors import assert_never
from unbroken_core.messages import JobStatus
from unbroken_core.pod.liveness import reconnect_grace_s
from unbroken_core.ranks.tree import RankTree
from unbroken_core.reasons import Cause, JobPhase, Rung
from unbroken_core.recoveries.history import History, Progress
from unbroken_core.settings import JobSettings

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
            case AgentJoined(session=session, hello=hello, can_halt=can_halt):
                join(job, session, hello, can_halt, now_s)
            case AgentReported(session=session, message=message):
                hear(job, session, message, now_s)
            case AgentDisconnected(session=session):
                lose_connection(job, session, now_s)
            case Observed(observation=observation):
                observe(job, observation, now_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        _advance(job, now_s)
        if job.is_changed:
            self._revision += 1
            job.former.holds_until_s = None
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


def _advance(job: Job, now_s: float) -> None:
    job.reset_wake()
    if job.phase in OVER:
        return
    _expire(job, now_s)
    for _turn in range(_MAX_TURNS):
        phase = job.phase
        if job.census.hopeless or job.pod_clock.is_standing:
            job.run_pod_clock(now_s)  # A turn that loses the pod for which it stood must not leave it standing.
        _turn_once(job, now_s)
        if job.phase is phase:
            break
    if job.phase not in OVER:
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
            faults = while_moving(job, now_s)
            for fault in faults:
                take_fault(job, fault, now_s)
            if faults:
                _expire(job, now_s)  # Who is away is waited for less long now.
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
        if lacks_plan(job, member):
            bring_up_to_date(job, member, now_s)


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
