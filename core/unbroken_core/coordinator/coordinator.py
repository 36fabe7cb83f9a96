"""The state machine that decides everything about a running job. Pure: events and the time come in, actions go out.

     FORMING ──enough pods READY──────────────> PLANNED ──all active RUNNING──> RUNNING ──all COMPLETED──> ENDING
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

import math
from collections.abc import Callable, Iterable
from typing import Union

from unbroken_core.coordinator.adoption.previous_world import first_world
from unbroken_core.coordinator.copying import settle_copies
from unbroken_core.coordinator.events import (
    Action,
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Event,
    Observed,
    Tick,
)
from unbroken_core.coordinator.health.pairs import settle_pairs
from unbroken_core.coordinator.health.settling import is_settled, settle_health
from unbroken_core.coordinator.receiving import join, lose_connection, observe, receive
from unbroken_core.coordinator.resolver import resolve
from unbroken_core.coordinator.state.job import JobState, Numbers
from unbroken_core.coordinator.status import build_pods, build_status, note_time
from unbroken_core.protocol.messages import JobStatus, PodStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree import RankTree
from unbroken_core.recovery.history import History
from unbroken_core.recovery.progress import Progress
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.reasons import JobPhase, Rung

_MAX_TURNS = 6
"""Judgements of findings in one step."""


class Coordinator:
    """One job's only writer of the plan. Not thread-safe; all times are monotonic seconds of one clock."""

    def __init__(
        self,
        settings: JobSettings,
        now_s: float,
        term: int = 1,
        highest_iteration: int = -1,
        uses: Iterable[tuple[Rung, float]] = (),
    ) -> None:
        """Begin a job, or take one over.

        `term` is the lowest one to use, `highest_iteration` that of earlier coordinators; `uses` are the rungs
        that they have used, oldest first, and count in the budgets.
        """
        self._job = JobState(settings, Numbers(term, highest_iteration), now_s)
        self._job.previous = first_world(self._job, now_s)
        for rung, at_s in uses:
            self._job.budgets.charge(rung, at_s)
        self._revision = 0
        self._pods: tuple[PodStatus, ...] = ()
        self._pods_revision = -1
        """The revision that `_pods` shows: scrapes and pollers come far more often than another one."""
        self._deadline_s = now_s + settings.timeouts.startup_s

    @property
    def term(self) -> int:
        """Fencing number; rises when an agent knows a higher one."""
        return self._job.numbers.term

    @property
    def past(self) -> tuple[int, int]:
        """Term and highest iteration: what the next coordinator should begin with."""
        return self._job.numbers.term, self._job.numbers.highest_iteration

    @property
    def revision(self) -> int:
        """+1 on every change of the status; progress alone is no change."""
        return self._revision

    @property
    def phase(self) -> JobPhase:
        """State of the job."""
        return self._job.phase.kind

    def is_named(self, uid: str, pod: str) -> bool:
        """Return whether the operator says that the pod of this name has this uid."""
        seen = self._job.cluster.pods.get(uid)
        return seen is not None and seen.pod == pod

    def next_deadline_s(self) -> float | None:
        """Return when a Tick is due, unless another event comes first; None when only an event can change anything."""
        return None if self._deadline_s == math.inf else self._deadline_s

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event and return what to do, in order. `now_s` never goes back."""
        job = self._job
        job.actions = []
        version = job.version
        match event:
            case AgentJoined(session=session, hello=hello, can_halt=can_halt):
                join(job, session, hello, can_halt, now_s)
            case AgentReported(session=session, message=message):
                receive(job, session, message, now_s)
            case AgentDisconnected(session=session):
                lose_connection(job, session, now_s)
            case Observed(observation=observation):
                observe(job, observation, now_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        for _turn in range(_MAX_TURNS):
            look_again_s = settle_health(job, now_s)
            until_s = resolve(job, now_s)
            tested = job.pairs.progress
            pairs_s = settle_pairs(job, now_s)
            # Whom one phase lets nobody blame, the next one may; and who was blamed may be lost. The first plan waits
            # for tests of pairs, or no longer, and who was named by them is judged.
            if tested == job.pairs.progress and is_settled(job, now_s):
                break
        self._deadline_s = min(until_s, settle_copies(job, now_s), look_again_s, pairs_s)
        note_time(job, now_s)
        if job.version != version:
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
        return self._job.members.ranking.tree

    def explanation(self) -> list[str]:
        """Return what the last plan has changed and why, in sentences; empty where a script's own code made it."""
        return self._job.members.ranking.explanation()

    def status(self, now_s: float, wall: Callable[[float], str]) -> JobStatus:
        """Return what is known now. `wall` turns a time of the coordinator's clock into RFC 3339 UTC."""
        if self._pods_revision != self._revision:
            self._pods, self._pods_revision = build_pods(self._job), self._revision
        return build_status(self._job, self._revision, now_s, wall, self._pods)
