"""What is known of one pod and of the places for workers in it: told by its agent, and noted of what it was told."""

from dataclasses import dataclass, field, replace

from unbroken_core.coordinator.state.mistakes import is_mistake, is_same, remedy
from unbroken_core.protocol.messages import PROTOCOL, Fault, Hello, Plan, RankPlan, WorkerState
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.worlds import Move
from unbroken_core.recovery.history import NEVER_GOT_PLAN
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, RankReason, Role, WorkerPhase

MAX_START_ATTEMPTS = 5
"""Processes in a row that may end at one place before they were ready."""
MAX_BACK_OFF_S = 30.0
# A name of the module is found faster than a member of an Enum, and places are looked at by the ten thousand.
_STARTING, _READY, _GONE = WorkerPhase.STARTING, WorkerPhase.READY, WorkerPhase.GONE
YOUNG_S = 10.0
"""Without in-process restarts nobody says READY: a script that exits earlier than this has not started."""


@dataclass
class WorkerPlace:
    """One place for a worker, and what was said to it."""

    state: WorkerState
    told_iteration: int = -1
    """The last iteration for which it was given an active rank."""
    told_incarnation: int = -1
    planned_incarnation: int = 0
    """The process for which the last plan with a rank for it was made. The first, if that plan was another life's."""
    replacing: int | None = None
    """The incarnation that was ordered to be replaced, until a newer one is seen."""
    is_order_sent: bool = False
    num_short_lives: int = 0
    """Processes in a row that ended before they were ready."""
    retry_at_s: float = 0.0
    fault_at_s: float = 0.0
    """When the fault in `state` happened: when it was told first, less the age that it had then."""
    fault_detect_s: float = 0.0
    """That age."""
    since_s: float = 0.0
    """When its process was first reported in this phase of this iteration."""
    num_faults: int = 0
    last_words: str = ""
    """How the last process that ended too early has ended."""
    is_pointless: bool = False
    """Whether it ended as the one before it, in a way that only another script or other settings change."""
    is_retired: bool = False
    """It had more faults than a rank may have."""
    refusal: str = ""
    """Why the script of its process can have no part in the job; "" when it can."""

    @property
    def is_sound(self) -> bool:
        """Whether it is neither dead nor hopeless, as nearly all are: asked first."""
        phase = self.state.phase
        if phase is _GONE or phase is _STARTING or self.replacing is not None or self.num_short_lives:
            return not (self.is_dead or self.is_hopeless)
        return not (self.is_retired or self.is_pointless or self.refusal)

    @property
    def is_hopeless(self) -> bool:
        """Whether no further process is started here."""
        if self.is_pointless or self.is_retired or self.refusal:
            return True
        return self.num_short_lives >= MAX_START_ATTEMPTS

    @property
    def is_dead(self) -> bool:
        """Whether only a new process could be ready."""
        phase = self.state.phase
        if phase is _GONE or phase is _STARTING:
            return True
        return self.replacing is not None or self.is_retired or bool(self.refusal)

    @property
    def has_left(self) -> bool:
        """Whether its process says READY, and has left every iteration that it was told to enter."""
        state = self.state
        if state.phase is not _READY:
            return False
        return state.incarnation != self.told_incarnation or state.iteration >= self.told_iteration

    @property
    def is_ready(self) -> bool:
        """Whether it waits for a plan."""
        return self.has_left and not self.is_dead

    @property
    def lingers(self) -> bool:
        """Whether it has a process that has yet to leave."""
        return not (self.has_left or self.is_dead)

    @property
    def needs_order(self) -> bool:
        """Whether a process is to be started here and nobody was told."""
        if self.is_hopeless or self.is_order_sent:
            return False
        return self.replacing is not None or self.state.phase is _GONE

    def back_off_s(self) -> float:
        """Return how long to wait before the next process is started: 0, 1, 2, 4, ... s."""
        return 0.0 if self.num_short_lives == 0 else min(2.0 ** (self.num_short_lives - 1), MAX_BACK_OFF_S)


@dataclass
class Member:
    """One pod."""

    uid: str
    pod: str
    node: str
    ranks_per_pod: int
    session: str | None
    """The connection; None while the agent is away."""
    heard_at_s: float
    away_since_s: float = 0.0
    seq: int = -1
    places: dict[int, WorkerPlace] = field(default_factory=dict)
    plan: Plan | None = None
    """The last plan that was sent, or that the agent came with."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Active rank by local rank in the current iteration."""
    moves: dict[int, Move] = field(default_factory=dict)
    """Why ranks are others than in the iteration before, by local rank."""
    parts: tuple[RankPlan, ...] = ()
    """What the workers are in the current iteration; kept while it stays the same, built when it is empty."""
    can_halt: bool = False
    """Whether its agent knows Halt."""
    is_leaving: bool = False
    unfit: str = ""
    """Why it can have no ranks by what was found of it; "" when it can."""
    unfit_cause: Cause = Cause.DEVICE_FAULT
    """DEVICE_FAULT or STRAGGLER, while it is unfit."""
    gone: Cause | None = None
    """Set while the operator says that the pod is gone."""
    has_domains: bool = False
    joined_at_s: float = 0.0
    standing: tuple[object, ...] = ()
    """What it counts for where ranks are to move, as it was sorted last."""
    entered_at_s: float | None = None
    """When its workers entered the iteration of the plan that it came with; None: it does not know."""
    over_at_s: float | None = None
    """Since when its agent knows that this iteration is over; None: it is not."""
    made_at_s: float = 0.0
    """When the last step was made that it came with."""

    @property
    def out(self) -> Cause | None:
        """Why this pod can have no ranks; None when it can."""
        if self.gone or self.is_leaving:
            return self.gone or Cause.POD_LEAVING
        return self.unfit_cause if self.unfit else None

    @property
    def out_detail(self) -> str:
        """What more there is to say about `out`; "" when that is all."""
        return self.unfit if self.unfit and self.out is self.unfit_cause else ""

    @property
    def role(self) -> Role:
        """Role in the current iteration."""
        return Role.ACTIVE if self.ranks else Role.SPARE

    @property
    def hopeless_text(self) -> str:
        """How the processes of a place that was given up have ended, for people; "" when there is none."""
        for local_rank, place in self.places.items():
            if place.refusal:
                return f"{self.pod} worker {local_rank}: {place.refusal}"
            if place.is_retired:
                faults = counted(place.num_faults, "fault")
                return f"{self.pod} worker {local_rank}: {faults}, more than maxFaultsPerRank"
            if place.is_hopeless:
                times = f"{place.num_short_lives} times" if place.num_short_lives > 1 else "once"
                words = f"{self.pod} worker {local_rank} ended {times}: {place.last_words}"
                advice = remedy(place.last_words)
                return f"{words}. {advice}" if advice else words
        return ""

    @property
    def newest_iteration(self) -> int:
        """Highest iteration that its agent knows of, from its plan or a worker; -1: none."""
        told = -1 if self.plan is None else self.plan.iteration
        return max([told, *(place.state.iteration for place in self.places.values())])

    def seat(self, ranks: dict[int, int], moves: dict[int, Move]) -> None:
        """Give the member its ranks of a new iteration."""
        self.ranks, self.moves, self.parts = ranks, moves, ()

    def rank_plans(self) -> tuple[RankPlan, ...]:
        """Return what each worker is in the current iteration, and why."""
        if self.parts:
            return self.parts
        parts = tuple(RankPlan(rank, self.ranks.get(rank), self._reason(rank)) for rank in range(self.ranks_per_pod))
        if len(self.ranks) == self.ranks_per_pod:
            self.parts = parts  # The health of those without a rank may change.
        return parts

    def _reason(self, local_rank: int) -> RankReason:
        if local_rank in self.moves:
            return self.moves[local_rank].reason
        if local_rank in self.ranks:
            return RankReason.KEPT
        return RankReason.LOST if self.places[local_rank].is_dead else RankReason.RESERVE

    def update(self, states: tuple[WorkerState, ...], now_s: float, ran_since_s: float | None) -> None:
        """Take over what the agent says of its workers; what is older than known is ignored.

        `ran_since_s` is the instant of the last plan in jobs where READY says nothing about the script, else None.
        """
        for state in states:
            place = self.places.get(state.local_rank)
            if place is not None and state.incarnation >= place.state.incarnation:
                _follow(place, state, now_s, ran_since_s)


def refusal(settings: JobSettings, hello: Hello, known: Member | None) -> str | None:
    """Return why this agent cannot be a member; None when it can."""
    if hello.protocol != PROTOCOL:
        return f"protocol: want {PROTOCOL}, got {hello.protocol}; agent and rendezvous must run the same image"
    if hello.job != settings.job:
        return f"job: want {settings.job!r}, got {hello.job!r}"
    if hello.ranks_per_pod != settings.ranks_per_pod:
        wanted = f"ranksPerPod: want {settings.ranks_per_pod} workers in each pod of the job"
        return f"{wanted}, got {hello.ranks_per_pod} in pod {hello.pod}"
    if not hello.pod_uid:
        return "pod_uid: want the uid of the pod, got an empty string"
    if known is not None and known.pod != hello.pod:
        return f"pod_uid: {hello.pod_uid} belongs to pod {known.pod}, got pod {hello.pod}"
    return None


def new_member(session: str, hello: Hello, now_s: float) -> Member:
    """Return a member whose workers are not known yet."""
    member = Member(hello.pod_uid, hello.pod, hello.node, hello.ranks_per_pod, session, now_s, joined_at_s=now_s)
    for local_rank in range(hello.ranks_per_pod):
        member.places[local_rank] = WorkerPlace(WorkerState(local_rank, -1, WorkerPhase.STARTING))
    return member


def _follow(place: WorkerPlace, state: WorkerState, now_s: float, ran_since_s: float | None) -> None:
    before, place.state = place.state, state
    if (before.incarnation, before.phase, before.iteration) != (state.incarnation, state.phase, state.iteration):
        place.since_s = now_s
    if state.fault is not None and not _is_repeated(state, before):
        place.fault_at_s, place.fault_detect_s = now_s - state.fault.detect_s, state.fault.detect_s
    if state.incarnation > before.incarnation:
        place.refusal = ""
    if place.replacing is not None and state.incarnation > place.replacing:
        place.replacing = None
        place.is_order_sent = False
    has_ended = state.phase is WorkerPhase.GONE and (
        before.phase is not WorkerPhase.GONE or before.incarnation < state.incarnation
    )
    if has_ended and place.replacing is None:
        _count_life(place, before, now_s, ran_since_s)
    elif ran_since_s is None and state.phase not in (WorkerPhase.STARTING, WorkerPhase.GONE):
        place.num_short_lives, place.is_pointless = 0, False


def _is_repeated(state: WorkerState, before: WorkerState) -> bool:
    """Whether the fault is the one that was told before; only when it joins, an agent says how old a fault is."""
    if state.fault is None or before.fault is None or state.incarnation != before.incarnation:
        return False
    return replace(state.fault, detect_s=0.0) == replace(before.fault, detect_s=0.0)


def _count_life(place: WorkerPlace, before: WorkerState, now_s: float, ran_since_s: float | None) -> None:
    fault = place.state.fault
    if ran_since_s is None:
        was_ready = before.incarnation == place.state.incarnation and before.phase is not WorkerPhase.STARTING
        is_short = not was_ready
    else:
        is_exit = fault is not None and fault.cause is Cause.PROCESS_EXIT
        is_short = is_exit and now_s - ran_since_s < YOUNG_S and not before.has_progress
    place.num_short_lives = place.num_short_lives + 1 if is_short else 0
    if is_short:
        words, before_words = fault.detail if fault is not None else "", place.last_words
        place.is_pointless = place.num_short_lives > 1 and is_same(words, before_words) and is_mistake(words)
        place.last_words = fault.detail if fault is not None and fault.detail else "the process ended"
    place.retry_at_s = now_s + place.back_off_s()


def evidence(place: WorkerPlace, iteration: int, is_adoption: bool = False) -> Fault | None:
    """Return what is wrong with a worker that has an active rank in a running iteration; None when nothing is."""
    state = place.state
    # Its end is our own doing, unless it came before the iteration was taken over: then it was only to be replaced.
    if place.replacing is not None and not (is_adoption and state.phase is WorkerPhase.GONE):
        return None
    if state.fault is not None and state.fault.iteration == iteration:
        return state.fault
    if state.phase is WorkerPhase.GONE:
        cause = state.fault.cause if state.fault is not None else Cause.PROCESS_EXIT
        return Fault(cause, iteration, state.fault.detail if state.fault is not None else "the process has ended")
    is_untold = state.phase is WorkerPhase.READY and state.incarnation != place.told_incarnation
    if is_untold and (state.iteration >= 0 or state.incarnation == place.planned_incarnation):
        # A process that took the place of another one would be newer, and in no iteration yet.
        return Fault(Cause.EXCEPTION, iteration, NEVER_GOT_PLAN)
    if is_untold or state.phase is WorkerPhase.STARTING:
        return Fault(Cause.PROCESS_EXIT, iteration, "another process took its place")
    has_left = state.phase in (WorkerPhase.READY, WorkerPhase.STOPPING) and state.iteration >= iteration
    return Fault(Cause.EXCEPTION, iteration, "left the training function without a word") if has_left else None
