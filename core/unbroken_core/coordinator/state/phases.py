"""The phases of a job, each with what belongs to it alone: it goes when the job leaves the phase.

    Forming ──> Planned ──> Running ──> Ending ──> Over
       ^          │   ^        │
       │          v   └──┐     v
       └────── Interrupted <───┘

Values are replaced, never changed, but for what is said to be added to in place.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Union

from unbroken_core.protocol.messages import Activity, Halt, Question
from unbroken_core.ranks.worlds import Shortage, Worker
from unbroken_core.recovery.history import FaultRecord
from unbroken_core.vocabulary.reasons import JobPhase, Rung, Word


@dataclass(frozen=True)
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
    """Of the ranking that was looked at."""
    shortage: Shortage


@dataclass(frozen=True)
class Consulting:
    """Who is asked for the ranks of the next plan, where the script has code for it."""

    question: Consultation | None = None
    objection: Objection | None = None
    num_silent: int = 0
    """Workers in a row that did not answer in time."""
    silent_began: float | None = None
    """Reading of the pod clock when the last of them was given a new process."""

    def shortage(self, version: int) -> Shortage | None:
        """Return why the script makes no world of this ranking; None where it was not asked about it, or makes one."""
        return None if self.objection is None or self.objection.version != version else self.objection.shortage


@dataclass(frozen=True)
class Hold:
    """The next plan waits for the end of the previous world: what was found, as long as nothing changes."""

    facts: tuple[object, ...]
    report: object
    """What the status says of it, as long as it says nothing else."""
    until_s: float


@dataclass(frozen=True)
class KeepersWait:
    """The next plan waits for keepers without which a checkpoint in memory is lost."""

    since_s: float
    until_s: float
    """As it was found last; one that begins soon after it goes on with it."""


@dataclass(frozen=True)
class Adoption:
    """A job that runs already is being taken over from its agents."""

    since_s: float
    newest: tuple[int, int] = (-1, -1)
    """Iteration and term of the newest plan at the last look at all pods."""
    num_joins: int = 0
    """Pods that came with a plan since that look."""
    num_awaited: int = 0
    """So many are to come before the next look: one at each of thousands would cost the square of their number."""
    num_members: int = 0


@dataclass(frozen=True)
class Outage:
    """The coordinator lost sight of a running job."""

    at_s: float
    why: str
    iteration: int
    world_size: int


@dataclass(frozen=True)
class Forming:
    """No plan is in force: pods are waited for, or a job that runs is taken over."""

    kind: ClassVar[JobPhase] = JobPhase.FORMING
    since_s: float
    began: float
    """Reading of the pod clock then."""
    outage: Outage | None = None
    """Set where the job ran before, until it is taken over again or formed anew."""
    last_call_s: float | None = None
    """Since when enough pods are ready."""
    pairs_until_s: float | None = None
    """Until when pods may test with each other before the first plan; None: they may not yet, or need not."""
    adoption: Adoption | None = None
    consulting: Consulting = Consulting()
    hold: Hold | None = None
    keepers: KeepersWait | None = None


@dataclass(frozen=True)
class Planned:
    """A plan was sent: workers enter the training function."""

    kind: ClassVar[JobPhase] = JobPhase.PLANNED


class Awaited(Word):
    """What every worker is to do about the newest Halt."""

    ANSWER = "answer"
    STAND = "stand"
    SAVE = "save"


@dataclass(frozen=True)
class PlannedMove:
    """Ranks that are to move as planned, until all workers stand after the same step."""

    until_s: float
    """When the iteration is interrupted wherever they are."""
    faults: Mapping[str, FaultRecord] = field(default_factory=dict)
    """By uid of the pods that are to give their ranks away."""
    order: Halt | None = None
    """The one in force; None before the first."""
    wants: Awaited = Awaited.ANSWER
    is_ending: bool = False
    """Whether a worker has completed: the others shall do so, too, rather than stop."""
    pending: dict[str, None] = field(default_factory=dict)
    """Pods for which that is not known yet. Each order has a list of its own, from which pods are struck off."""


@dataclass(frozen=True)
class Running:
    """All active workers are in the training function."""

    kind: ClassVar[JobPhase] = JobPhase.RUNNING
    since_s: float
    move: PlannedMove | None = None
    can_grow_since_s: float | None = None
    """Since when pods are ready for ranks that are missing; None while there are none."""
    may_grow_again_s: float = -math.inf
    """When it may be tried again to find a common step to grow after; inf: not in this iteration."""
    stayed_s: Mapping[str, float] = field(default_factory=dict)
    """When ranks stayed although their pod is suspect, as no common step was found; by its uid."""
    is_held: bool = False
    """Whether workers wait after a step, as an earlier coordinator has ordered, and have no order since."""
    released_s: float = -math.inf
    """When ranks that may have stood after a step were last told to go on; -inf: never."""


@dataclass(frozen=True)
class Inquiry:
    """Who hangs: agents answer the order to leave with what their workers did. Nobody waits for this but the name."""

    until_s: float
    """When the first name is given at the latest, with the answers that are there."""
    pending: dict[str, None]
    """Pods that have not answered for all of their ranks; struck off in place."""
    answers: dict[int, Activity] = field(default_factory=dict)
    """By rank; added to in place."""
    returned: frozenset[int] = frozenset()
    """Ranks that had returned from the training function when it began."""
    free_s: float = math.inf
    """How long ago ranks that may have stood after a step were told to go on, when it began."""
    num_judged: int = -1
    """Answers that were there when a name was given last; -1: before the first."""
    is_final: bool = False
    """Whether that name counts as a fault of its worker: all had answered, or had left."""


@dataclass(frozen=True)
class Interrupted:
    """The iteration is over: survivors leave it, and the ladder says how to go on."""

    kind: ClassVar[JobPhase] = JobPhase.INTERRUPTED
    at_s: float
    began: float
    """Reading of the job's pod clock then."""
    charged: frozenset[Rung] = frozenset()
    """Rungs that this interruption has paid for."""
    respawned: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks at which a process was started again, by uid of the pods with ranks in the iteration. It is added to
    in place: the job rung names all places of thousands of pods."""
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
    holds_respawns: bool | None = None
    """Whether new processes wait until spares have taken over; None before the first was asked for."""
    job_rung_began: float | None = None
    """Reading of the pod clock when every process was ordered to start again; None while none was."""
    has_replaced_culprit: bool = False
    """Whether the culprit's process was looked at, after the survivors had left."""
    inquiry: Inquiry | None = None
    """Set where a worker made no progress."""
    consulting: Consulting = Consulting()
    hold: Hold | None = None
    keepers: KeepersWait | None = None


@dataclass(frozen=True)
class Ending:
    """The training function has returned on all ranks, and what follows it in the script runs."""

    kind: ClassVar[JobPhase] = JobPhase.ENDING
    since_s: float
    failure: str = ""
    """How the first process ended that did not end well."""


@dataclass(frozen=True)
class Over:
    """The job has ended."""

    kind: JobPhase
    """COMPLETE or FAILED."""


AnyPhase = Union[Forming, Planned, Running, Interrupted, Ending, Over]
OVER = (JobPhase.COMPLETE, JobPhase.FAILED)
