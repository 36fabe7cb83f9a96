"""The coordinator's state, and the few verbs that all of its parts share."""

import math
from dataclasses import dataclass, field

from unbroken_core.coordination.events import Action, Close, Send
from unbroken_core.coordination.members import Census, Member
from unbroken_core.coordination.pod_clock import PodClock
from unbroken_core.messages import Halt, Plan, PodObservation, Policy, Question, RendezvousMessage
from unbroken_core.pod.stacks import bounded
from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.worlds import Shortage, Worker
from unbroken_core.reasons import JobPhase, Reason, Rung, Word
from unbroken_core.recoveries.budgets import Ladder
from unbroken_core.recoveries.history import FaultRecord, History, Progress
from unbroken_core.settings import JobSettings, Timeouts

OVER = (JobPhase.COMPLETE, JobPhase.FAILED)


@dataclass
class Adoption:
    """A job that runs already is being taken over from its agents."""

    since_s: float
    newest: tuple[int, int] = (-1, -1)
    """Iteration and generation of the newest plan at the last look at all pods."""
    num_joins: int = 0
    """Pods that came with a plan since that look."""
    num_awaited: int = 0
    """So many are to come before the next look: one at each of thousands would cost the square of their number."""
    num_members: int = 0


@dataclass
class Script:
    """What the workers' script asks for."""

    policy: Policy | None = None
    source: str = ""
    """Worker that asked first; "" before any has spoken."""
    iteration: int = -1
    """Highest iteration of those who ask for it."""
    silent_began: float | None = None
    """Reading of the pod clock when a worker that did not answer was last given a new process."""
    keys: dict[Worker, tuple[str, ...]] = field(default_factory=dict)
    """What the key functions of code have said in each worker, those included that were lost since the last plan."""

    @property
    def names_domains(self) -> bool:
        """Whether the script, not the operator, says where pods are."""
        return self.policy is not None and bool(self.policy.layers)


@dataclass
class Consultation:
    """One question about ranks, until it is answered."""

    version: int
    """Of the ranking that it was asked about."""
    question: Question
    workers: list[Worker]
    """By their number in the question."""
    uid: str
    local_rank: int
    incarnation: int
    asked_at_s: float


@dataclass(frozen=True)
class Objection:
    """Too few workers have a rank, as the script sees it: no world until something changes."""

    version: int
    """Of the ranking that was judged."""
    shortage: Shortage


@dataclass
class Interruption:
    """One interrupted iteration, until its plan is cut."""

    at_s: float
    began: float
    """Reading of the job's pod clock then."""
    charged: set[Rung] = field(default_factory=set)
    """Rungs that this interruption has paid for."""
    respawned: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks at which a process was started again, by uid of the pods with ranks in the iteration."""
    left_at_s: float | None = None
    """When the survivors had left the iteration."""
    believed_at_s: float = -math.inf
    """When those who said to be ready long after the order were believed last."""
    shortage_began: float | None = None
    """Reading of the pod clock when too few pods were there; None while it has not come to that."""
    was_short: bool = False
    """Whether pods were waited for when no world could be made of what was ready.

    They are also waited for where no rung allows the world, and before that too few may be ready for want of processes.
    """
    enough_at_s: float | None = None
    """When there were enough pods again after a shortage."""
    does_hold: bool | None = None
    """Whether new processes wait until spares have taken over; None before the first was asked for."""
    job_rung_began: float | None = None
    """Reading of the pod clock when every process was ordered to start again; None while none was."""
    has_judged: bool = False
    """Whether the culprit's process was looked at, after the survivors had left."""


class Awaited(Word):
    """What every worker is to do about the newest Halt."""

    ANSWER = "answer"
    STAND = "stand"
    SAVE = "save"


@dataclass
class Move:
    """Ranks that are to move as planned, until all workers stand after the same step."""

    until_s: float
    """When the iteration is interrupted wherever they are."""
    faults: dict[str, FaultRecord] = field(default_factory=dict)
    """By uid of the pods that are to give their ranks away."""
    order: Halt | None = None
    """The one in force; None before the first."""
    wants: Awaited = Awaited.ANSWER
    is_ending: bool = False
    """Whether a worker has completed: the others shall do so, too, rather than stop."""
    pending: dict[str, None] = field(default_factory=dict)
    """Pods of which that is not known yet."""


@dataclass
class Growing:
    """What is known of pods that are ready for ranks that are missing."""

    since_s: float | None = None
    """Since when there were some; None while there are none."""
    given_up_in: int = -1
    """The iteration that has found no common step to grow after."""
    given_up_until_s: float = math.inf
    """When it may be asked again."""

    def give_up(self, iteration: int, until_s: float = math.inf) -> None:
        """Ask nobody in this iteration for a step to grow after, until then."""
        self.given_up_in, self.given_up_until_s = iteration, until_s


@dataclass
class Former:
    """What is known of the end of the world of the iteration in force, or of the last one before this coordinator."""

    is_over: bool = False
    """Whether it has stopped, or stops in time by itself: another one may begin."""
    is_newest: bool = True
    """Whether no later world than that of the iteration in force can be: what its pods tell is to the point."""
    has_unknown: bool = False
    """Whether it may have pods that this coordinator has never heard."""
    is_lone: bool = False
    """Whether all of it is in one pod, which leaves within timeouts.heartbeat."""
    lone_until_s: float | None = None
    """When it has left at the latest, as far as that follows from the end of its connection."""
    lost: dict[str, str] = field(default_factory=dict)
    """Names of those of its pods that were given up, by uid."""
    heard_at_s: float = 0.0
    """When the last of these and of the unknown may have been heard."""
    told_at_s: float = 0.0
    """When the last of those that were lost and came back was told to leave."""
    holds_until_s: float | None = None
    """Until when it holds the next plan, as long as nothing changes; None: its pods are to be looked at."""

    def limit_s(self, timeouts: Timeouts) -> float:
        """Return how long after its last word a pod has left by itself."""
        return timeouts.heartbeat_s if self.is_lone else timeouts.isolation_limit_s


@dataclass(frozen=True)
class Outage:
    """The coordinator lost sight of a running job."""

    at_s: float
    why: str
    iteration: int
    world_size: int


class Job:
    """State of one job; changed only by the coordinator's parts, within one step."""

    def __init__(self, settings: JobSettings, generation: int, now_s: float) -> None:
        self.settings = settings
        self.rules = Rules.of(settings)
        self.script = Script()
        self.consultation: Consultation | None = None
        self.objection: Objection | None = None
        self.num_questions = self.num_halts = self.num_silent = 0
        """Questions and halts are numbered; silent are the workers in a row that did not answer in time."""
        self.generation = generation
        self.welcomed: set[str] = set()
        """Pods that have this coordinator's generation."""
        self.refused: dict[tuple[str, str], str] = {}
        """Why a pod cannot be a member, by uid and name."""
        self.num_broken_spares = 0
        self.phase = JobPhase.FORMING
        self.reason = Reason.WAITING_FOR_PODS
        self.message = "waits for the first pod"
        self.iteration = self.highest_iteration = -1
        """Highest iteration that any agent has heard of."""
        self.world_size = 0
        """Active ranks of the current iteration; 0 before the first."""
        self.moved: list[Member] = []
        """Members whose ranks changed in the last plan."""
        self.census = Census(self.rules)
        self.former = Former(is_over=True)
        self.outage: Outage | None = None
        """Set until the job was taken over again, or had to be formed anew."""
        self.num_spare_ranks = 0
        """Ready workers without a rank when the plan was cut."""
        self.observed: dict[str, PodObservation] | None = None
        self.is_accounted = False
        """Whether those that were never observed, or are no more, are known to have ended."""
        self.held_until_s: float | None = None
        """When the wait that the message tells of ends; None while it tells of none with a known end."""
        self.ladder = Ladder(settings.rungs)
        self.history = History()
        self.progress = Progress()
        self.adoption: Adoption | None = None
        self.interruption: Interruption | None = None
        self.move: Move | None = None
        self.growing = Growing()
        self.started_s = self.planned_s = now_s
        self.pod_clock = PodClock()
        self.num_running: int | None = None
        """Pods that run, as the operator sees it; None while it has told nothing."""
        self.forming_began = self.pod_clock.read(now_s)
        self.last_call_s: float | None = None
        self.running_s: float | None = None
        self.is_changed = True
        self.actions: list[Action] = []
        self._wake_s: float | None = None

    def forget_pods(self, now_s: float) -> None:
        """Begin to form again, with nothing known of the pods; budgets, history and numbers go on."""
        self.progress.stop(now_s)
        self.census = Census(self.rules)
        self.expect_pods()
        self.iteration = -1
        self.world_size = 0
        self.moved = []
        self.num_spare_ranks = 0
        self.adoption = None
        self.interruption = self.move = None
        self.growing = Growing()
        self.consultation = None
        self.objection = None
        self.started_s = self.planned_s = now_s
        self.forming_began = self.pod_clock.read(now_s)
        self.last_call_s = self.running_s = None

    def expect_pods(self) -> None:
        """Tell the census which pods the operator sees."""
        self.census.expect({uid: pod.pod for uid, pod in (self.observed or {}).items()})

    def count_pods(self, now_s: float) -> None:
        """Let the pod clock stand while the cluster runs too few pods."""
        if self.observed is not None:
            self.num_running = sum(pod.gone is None and not pod.is_waiting for pod in self.observed.values())
            self.run_pod_clock(now_s)

    def run_pod_clock(self, now_s: float) -> None:
        """Let the pod clock stand while the cluster runs too few pods whose processes can start, and may run more."""
        if self.num_running is None:
            return
        settings, least, num_stuck = self.settings, self.rules.least_pods, self.num_stuck
        num_possible = settings.replicas + settings.spares - num_stuck
        may_run_more = num_possible >= least
        num_running = self.num_running - (num_stuck if may_run_more else 0)
        lacks_ranks = may_run_more and self._lacks_ranks(num_running, num_possible)
        self.pod_clock.stand(num_running < least or lacks_ranks, now_s)

    def _lacks_ranks(self, num_running: int, num_possible: int) -> bool:
        """Whether the pods that run are too few to begin for places that were given up, and more pods may come."""
        if self.phase is not JobPhase.FORMING:
            return False  # Later a pod can be replaced: that must not wait for others.
        least, given_up = self.rules.least_ranks, self.num_given_up
        num_running_ranks, num_possible_ranks = (
            num_pods * self.settings.ranks_per_pod - given_up for num_pods in (num_running, num_possible)
        )
        return given_up > 0 and num_running_ranks < least <= num_possible_ranks

    @property
    def num_given_up(self) -> int:
        """Places that get no process any more, in pods that are ready without them."""
        census = self.census
        pods = (census.by_uid[uid] for uid in census.hopeless if uid in census.ready)
        return sum(place.is_hopeless and place.is_dead for pod in pods for place in pod.places.values())

    @property
    def num_stuck(self) -> int:
        """Pods that run and can never be ready: none of them stands for one that the cluster has yet to start."""
        census, observed = self.census, self.observed or {}
        stuck = (uid for uid in census.hopeless if uid not in census.ready and uid not in census.out)
        return sum(uid in observed and not observed[uid].is_waiting for uid in stuck)

    def startup_due_s(self, began: float) -> float:
        """Return when timeouts.startup is over for what began at this reading of the pod clock; inf while it stands."""
        return self.pod_clock.due_s(began, self.settings.timeouts.startup_s)

    def standing_text(self) -> str:
        """Return why the pod clock stands, for people; "" when it does not."""
        if not self.pod_clock.is_standing:
            return ""
        num_stuck = self.num_stuck
        stuck = f", {num_stuck} of them cannot start their processes" if num_stuck else ""
        given_up, least = self.num_given_up, f"{self.rules.least_pods}"
        if given_up:
            stuck += f", {given_up} of their processes cannot start"
            least += f" with {self.rules.least_ranks} ranks"
        return (
            f"{self.num_running} of {self.settings.replicas} pods run{stuck}, at least {least} are "
            "wanted; timeouts.startupSeconds does not count until the cluster has started them"
        )

    def send(self, member: Member, message: RendezvousMessage) -> None:
        """Send a message to a member; one that is away hears it all when it comes back."""
        if member.session is not None:
            self.actions.append(Send(member.session, message))

    def broadcast(self, message: RendezvousMessage) -> None:
        """Send one message to all connected members."""
        for member in self.census.by_uid.values():
            self.send(member, message)

    def close(self, session: str) -> None:
        """Close a connection."""
        self.actions.append(Close(session))

    def say(self, reason: Reason, message: str) -> None:
        """Set what the status tells."""
        if (self.reason, self.message, self.held_until_s) != (reason, message, None):
            self.reason, self.message, self.held_until_s = reason, message, None
            self.is_changed = True

    def hold(self, until_s: float, reason: Reason, message: str) -> None:
        """Set what the status tells of a wait that ends at a known time."""
        if (self.reason, self.message, self.held_until_s) != (reason, message, until_s):
            self.reason, self.message, self.held_until_s = reason, message, until_s
            self.is_changed = True

    def enter_phase(self, phase: JobPhase, reason: Reason, message: str) -> None:
        """Change the phase."""
        self.phase = phase
        self.is_changed = True
        self.say(reason, message)

    def reset_wake(self) -> None:
        """Forget all deadlines: the step that is under way sets them anew."""
        self._wake_s = None

    def wake(self, at_s: float) -> None:
        """Ask for a tick at this time; inf is never."""
        if at_s == math.inf:
            return
        self._wake_s = at_s if self._wake_s is None else min(self._wake_s, at_s)

    @property
    def next_deadline_s(self) -> float | None:
        """When the next tick is due; None when only messages can change anything."""
        return self._wake_s

    def sort(self, member: Member) -> None:
        """Sort one member into the census again."""
        self.census.sort(member, self.iteration)

    def fault(self, member: Member, record: FaultRecord) -> FaultRecord:
        """Return the record with what is known of the pod."""
        rank = None if record.local_rank is None else member.ranks.get(record.local_rank)
        names = self.census.ranking.names(member.uid)
        return FaultRecord(
            cause=record.cause,
            pod_uid=member.uid,
            local_rank=record.local_rank,
            at_s=record.at_s,
            detect_s=record.detect_s,
            incarnation=record.incarnation,
            rank=rank,
            pod=member.pod,
            node=member.node,
            domain=names[-1] if names else "",
            detail=record.detail[:2000],
            stack=bounded(record.stack),
        )

    @property
    def num_living(self) -> int:
        """Pods that are or can become ready."""
        census = self.census
        lost = {uid for uid in (*census.out, *census.hopeless) if uid not in census.ready}
        return len(census.by_uid) - len(lost)


def build_plan(job: Job, member: Member, master: tuple[str, int]) -> Plan:
    """Return a pod's part of the current plan."""
    return Plan(
        generation=job.generation,
        iteration=job.iteration,
        role=member.role,
        world_size=job.world_size,
        master_host=master[0],
        master_port=master[1],
        ranks=member.rank_plans(),
        domains=job.census.ranking.domains(member.uid) if member.has_domains else (),
        spare_ranks=job.num_spare_ranks,
        origins=tuple((local_rank, move.origin) for local_rank, move in member.moves.items() if move.origin),
    )
