"""The coordinator's state, and the few verbs that all of its parts share."""

from dataclasses import dataclass, field

from unbroken_core.events import Action, Close, Send
from unbroken_core.history import FaultRecord, History, Progress
from unbroken_core.ladder import Ladder
from unbroken_core.membership import Census, Member
from unbroken_core.messages import Plan, PodObservation, Policy, RendezvousMessage
from unbroken_core.reasons import JobPhase, Reason, Rung
from unbroken_core.rules import Rules
from unbroken_core.settings import JobSettings


@dataclass
class Adoption:
    """A job that runs already is being taken over from its agents."""

    since_s: float


@dataclass
class Script:
    """What the workers' script asks for."""

    policy: Policy | None = None
    source: str = ""
    """Worker that asked first; "" before any has spoken."""
    iteration: int = -1
    """Highest iteration of those who ask for it."""

    @property
    def names_domains(self) -> bool:
        """Whether the script, not the operator, says where pods are."""
        return self.policy is not None and bool(self.policy.layers)


@dataclass
class Interruption:
    """One interrupted iteration, until its plan is cut."""

    at_s: float
    charged: set[Rung] = field(default_factory=set)
    """Rungs that this interruption has paid for."""
    respawned: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks at which a process was started again, by uid of the pods with ranks in the iteration."""
    left_at_s: float | None = None
    """When the survivors had left the iteration."""
    shortage_at_s: float | None = None
    enough_at_s: float | None = None
    """When there were enough pods again after a shortage."""
    job_rung_at_s: float | None = None
    does_hold: bool | None = None
    """Whether new processes wait until spares have taken over; None before the first was asked for."""
    has_judged: bool = False
    """Whether the culprit's process was looked at, after the survivors had left."""


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
        self.generation = generation
        self.welcomed: set[str] = set()
        """Pods that have this coordinator's generation."""
        self.phase = JobPhase.FORMING
        self.reason = Reason.WAITING_FOR_PODS
        self.message = "waits for the first pod"
        self.iteration = -1
        self.highest_iteration = -1
        """Highest iteration that any agent has heard of."""
        self.world_size = 0
        """Active ranks of the current iteration; 0 before the first."""
        self.moved: list[Member] = []
        """Members whose ranks changed in the last plan."""
        self.census = Census(self.rules)
        self.outage: Outage | None = None
        """Set until the job was taken over again, or had to be formed anew."""
        self.num_spare_ranks = 0
        """Ready workers without a rank when the plan was cut."""
        self.observed: dict[str, PodObservation] | None = None
        self.ladder = Ladder(settings.rungs)
        self.history = History()
        self.progress = Progress()
        self.adoption: Adoption | None = None
        self.interruption: Interruption | None = None
        self.started_s = now_s
        self.last_call_s: float | None = None
        self.planned_s = now_s
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
        self.interruption = None
        self.started_s = self.planned_s = now_s
        self.last_call_s = self.running_s = None

    def expect_pods(self) -> None:
        """Tell the census which pods the operator sees."""
        self.census.expect({uid: pod.pod for uid, pod in (self.observed or {}).items()})

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
        if (self.reason, self.message) != (reason, message):
            self.reason, self.message = reason, message
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
        """Ask for a tick at this time."""
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
