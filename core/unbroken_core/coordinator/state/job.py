"""What the coordinator knows of a job, and where the job is: a few values, each replaced whole.

    rules, script   what spec and script ask for
    cluster         what the operator sees
    members         the pods, and the world in force. The one table that is changed in place: an event changes one pod
                    of thousands. It has its own verbs (members.py)
    previous        what is known of the end of the world that trained last
    phase           Forming | Planned | Running | Interrupted | Over. What belongs to a phase alone ends with it
    report          what the status says
    numbers         what never goes back

Deciders read it and return a Decision, which the resolver carries out (resolver.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken_core.coordinator.events import Action, Close, Send
from unbroken_core.coordinator.memory.choosing import Recall
from unbroken_core.coordinator.memory.rings import CopyRings
from unbroken_core.coordinator.memory.table import Checkpoints
from unbroken_core.coordinator.state.health_table import HealthTable
from unbroken_core.coordinator.state.members import ActiveWorld, Members
from unbroken_core.coordinator.state.pace_table import PaceTable
from unbroken_core.coordinator.state.pair_table import PairTable
from unbroken_core.coordinator.state.phases import AnyPhase, Forming
from unbroken_core.coordinator.state.places import Member
from unbroken_core.coordinator.state.pod_clock import PodClock
from unbroken_core.protocol.messages import GonePod, PodObservation, Policy, RendezvousMessage, Repair
from unbroken_core.protocol.settings import HealthMode, JobSettings, Timeouts
from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.budgets import Budgets
from unbroken_core.recovery.history import History
from unbroken_core.recovery.progress import Progress
from unbroken_core.vocabulary.reasons import Reason

MAX_ALONE = 3
"""So many plans may end by faults of one pod alone, without progress, before others take its ranks."""


class StatusText(NamedTuple):
    """What the status says of a job. Many an event makes one: a tuple is made fastest."""

    reason: Reason
    message: str
    until_s: float | None = None
    """When the wait ends that the message speaks of; None where that is not known."""


@dataclass(frozen=True)
class Numbers:
    """What never goes back, whatever is forgotten."""

    term: int
    highest_iteration: int = -1
    """Highest iteration that any agent knows of."""
    question: int = 0
    """Of the last question and the last Halt in this term."""
    halt: int = 0


@dataclass(frozen=True)
class Cluster:
    """What the operator sees of the job."""

    pods: Mapping[str, PodObservation] = field(default_factory=dict)
    """By uid."""
    is_accounted: bool = False
    """Whether pods that are not in it, or are no more, are known to have ended."""
    num_running: int | None = None
    """Pods that run; None while the operator has said nothing."""


@dataclass
class Script:
    """What the workers' script asks for."""

    policy: Policy | None = None
    source: str = ""
    """Worker that asked first; "" before any has spoken."""
    iteration: int = -1
    """Highest iteration of those who ask for it."""
    keys: dict[Worker, tuple[str, ...]] = field(default_factory=dict)
    """What the key functions of code have said in each worker, those included that were lost since the last plan."""

    @property
    def names_domains(self) -> bool:
        """Whether the script, not the operator, says where pods are."""
        return self.policy is not None and bool(self.policy.layers)


@dataclass(frozen=True)
class PreviousWorld:
    """What is known of the end of the world of the iteration in force, or of the last one before this coordinator."""

    is_over: bool = False
    """Whether it has stopped, or stops in time by itself: another one may begin."""
    is_newest: bool = True
    """Whether no later world than that of the iteration in force can be: what its pods say is to the point."""
    has_unknown: bool = False
    """Whether it may have pods that this coordinator has never heard."""
    is_lone: bool = False
    """Whether all of it is in one pod, which leaves within timeouts.heartbeat."""
    lone_until_s: float | None = None
    """When it has left at the latest, as far as that follows from the end of its connection."""
    lost: dict[str, str] = field(default_factory=dict)
    """Names of those of its pods that were given up, by uid; added to in place, since thousands may be lost at once."""
    heard_at_s: float = 0.0
    """When the last of these and of the unknown may have been heard."""
    told_at_s: float = 0.0
    """When the last of those that were lost and came back was told to leave."""

    def limit_s(self, timeouts: Timeouts) -> float:
        """Return how long after its last word a pod has left by itself."""
        return timeouts.heartbeat_s if self.is_lone else timeouts.isolation_limit_s


class Inherited(NamedTuple):
    """A recovery that another coordinator led, which it may not have lived to count."""

    term: int
    """That coordinator's."""
    repair: Repair
    planned_s: float
    """When its plan was in force, as far as the pods say."""
    iteration: int
    """That of the plan."""
    has_run: bool = False
    """Whether all ranks were seen in it."""


class Growth(NamedTuple):
    """The plans with more ranks than the one before since the job has last got on."""

    size_before: int
    pods: frozenset[str]
    """Uids of those that came in."""


class JobState:
    """State of one job; see above."""

    def __init__(self, settings: JobSettings, numbers: Numbers, now_s: float) -> None:
        self.settings = settings
        self.rules = Rules.of(settings)
        self.script = Script()
        self.numbers = numbers
        self.cluster = Cluster()
        self.pod_clock = PodClock()
        self.members = Members(self.rules, ActiveWorld(now_s))
        self.previous = PreviousWorld(is_over=True)
        self.phase: AnyPhase = Forming(now_s, self.pod_clock.read(now_s))
        self.report = StatusText(Reason.WAITING_FOR_PODS, "waits for the first pod")
        self.health = HealthTable()
        """What the pods' watches have found."""
        self.pairs = PairTable()
        """Which pods test with which others."""
        self.paces = PaceTable()
        """How busy the workers are."""
        self.budgets = Budgets(settings.rungs)
        self.history = History()
        self.progress = Progress()
        self.repair: Repair | None = None
        """What plans say of the recovery that they end."""
        self.inherited: Inherited | None = None
        """Until it is known whether it was counted."""
        self.counted: tuple[int, int] | None = None
        """The newest recovery of an earlier coordinator that was, as the operator says; None: not known."""
        self.gone_before: tuple[tuple[GonePod, float], ...] = ()
        """Pods of the world before this coordinator that have gone, as the operator says, and when."""
        self.refused: dict[tuple[str, str], str] = {}
        """Why a pod cannot be a member, by uid and name; replaced when it changes."""
        self.gone: dict[str, None] = {}
        """Names of pods that the operator has named, and does not name any more; the newest last."""
        self.named: frozenset[str] = frozenset()
        """Names of the pods that it names now."""
        self.newest_ordinal = -1
        """The highest one of theirs."""
        self.welcomed: set[str] = set()
        """Pods that have this coordinator's term."""
        self.growth: Growth | None = None
        self.set_aside: dict[str, str] = {}
        """Pods that alone have failed again and again, by uid, and what they have said: the last choice for ranks."""
        self.checkpoints = Checkpoints()
        """Checkpoints in memory, as agents tell them."""
        self.returned_s = -math.inf
        """When a pod joined that had been in the job before: the first of those that came together."""
        self.recall = Recall()
        self.copying = CopyRings()
        """Who keeps whose copies of them."""
        self.actions: list[Action] = []
        """Of the step that is under way, in order."""

    @property
    def world(self) -> ActiveWorld:
        """The plan in force."""
        return self.members.world

    @property
    def version(self) -> tuple[object, ...]:
        """Another one whenever something has changed that a status shows, but for progress."""
        members, cluster = self.members, self.cluster
        return (
            members.num_changes,
            self.history.num_changes,
            members.world.iteration,
            self.phase.kind,
            self.report,
            cluster.is_accounted,
            cluster.pods,
            self.refused,
            self.checkpoints.loads.num_known,
            self.health.num_changes,
        )

    def worn_spares(self) -> dict[str, set[int]]:
        """Return the places of spares that failed before, and, in jobs that act on it, of which something was found."""
        if self.rules.has_code:
            return {}
        members, table = self.members, self.health
        worn = [uid for uid in table.worn if table.is_worn(uid)] if self.settings.health is HealthMode.ACT else []
        spares = (
            uid for uid in (*worn, *table.failed, *self.set_aside) if uid in members.ready and uid not in members.active
        )
        return {uid: set(members.by_uid[uid].places) for uid in spares}

    def failing_alone(self) -> frozenset[str]:
        """Return the pods that alone ended the last plans without progress, where others may do better instead.

        One pod, also the only one, or some of those that came in when the job grew. Where the script itself fails,
        moving its ranks only costs a plan more: the limit of recoveries without progress counts on.
        """
        limit = self.settings.no_progress_limit
        failed = self.history.who_failed(MAX_ALONE if limit is None else min(MAX_ALONE, limit))
        members = self.members
        if not failed or self.rules.has_code or any(uid not in members.active or uid in members.out for uid in failed):
            return frozenset()
        is_of_growth = self.growth is not None and failed <= self.growth.pods
        return failed if len(failed) == 1 or (is_of_growth and len(members.active) > len(failed)) else frozenset()

    def send(self, member: Member, message: RendezvousMessage) -> None:
        """Send a message to a member; one that is away catches up when it comes back."""
        if member.session is not None:
            self.actions.append(Send(member.session, message))

    def broadcast(self, message: RendezvousMessage) -> None:
        """Send one message to all connected members."""
        for member in self.members.by_uid.values():
            self.send(member, message)

    def close(self, session: str) -> None:
        """Close a connection."""
        self.actions.append(Close(session))

    def startup_due_s(self, began: float) -> float:
        """Return when timeouts.startup is over for what began at this reading of the pod clock; inf while it stands."""
        return self.pod_clock.due_s(began, self.settings.timeouts.startup_s)
