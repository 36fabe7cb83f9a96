"""What is known of one job, wherever it was read. These dataclasses are also the shape of `-o json`."""

from dataclasses import dataclass, field
from datetime import datetime

from unbroken_core.protocol.messages import OtherFault


@dataclass(frozen=True)
class FaultSummary:
    """One interruption and what repaired it."""

    id: str
    """What `unbroken why` takes: its number, or term.number where several coordinators have counted."""
    cause: str
    detail: str
    """What was seen; empty when nobody remembers."""
    rank: int | None
    """Active rank of the culprit; None for a fault outside of the workers."""
    pod: str
    node: str
    domain: str
    rung: str
    """Highest rung that was needed so far; empty before the first."""
    replaced_by: tuple[str, ...]
    iteration: int
    """Iteration that the recovery led to."""
    started_at: str
    ended_at: str
    """Wall-clock times, RFC 3339; the end is empty while it lasts, and for good when the job failed instead."""
    seconds: dict[str, float]
    """Seconds of each phase of the recovery."""
    stack: tuple[str, ...] = ()
    """The culprit's frames, innermost last; empty without any, and from the job's status, which keeps none."""
    num_faults: int = 1
    """All that this recovery was for, with those that only waited in a hang."""
    others: tuple[OtherFault, ...] = ()
    """Those besides the culprit's, at most a few."""
    others_noted: str = ""
    """What the Event of a recovery says of them, of a job that was read from a cluster: its status has none."""
    taken_by: str = ""
    """Pod that has the culprit's rank now; empty when it is the same one, or not known."""

    @property
    def is_recovered(self) -> bool:
        """Whether all active workers ran again."""
        return bool(self.ended_at)


@dataclass(frozen=True)
class ConditionRecord:
    """One statement of the operator about the job."""

    type: str
    status: str
    reason: str
    message: str
    since: str


@dataclass(frozen=True)
class EventRecord:
    """One Event of the job."""

    time: str
    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class JobRecord:
    """One job at one moment."""

    namespace: str
    """Empty for a job that was asked at its rendezvous."""
    name: str
    state: str
    """Invalid, Suspended, Forming, Running, Recovering, Unknown, Complete, Failed; empty: no operator has written."""
    is_training: bool | None
    """None: nobody knows; message says why, and what was known last."""
    reason: str
    message: str
    """Why it is so: one word, and one sentence."""
    iteration: int
    active_ranks: int | None
    spare_ranks: int | None
    lost_ranks: int | None
    """None: nobody knows."""
    restarts: int
    ettr: float | None
    container: str
    """Name of the trainer's container, for kubectl logs."""
    conditions: tuple[ConditionRecord, ...] = ()
    """Those of the operator; from a rendezvous NodesHealthy and Straggling, in the operator's words."""
    faults: tuple[FaultSummary, ...] = ()
    """Oldest first, at most 20."""
    notes: tuple[EventRecord, ...] = field(default=())
    """Events, oldest first. The API server forgets them, after an hour where nothing else was set."""
    stale: str = ""
    """Why nobody keeps all this up to date; empty when somebody does, or it cannot be known."""
    unwatched: str = ""
    """When the status was written last, where it names no Lease: nobody can tell whether an operator is there."""
    deleting: str = ""
    """Since when it is being deleted, and what holds it; empty when nobody has deleted it."""
    time: dict[str, float] | None = None
    """Seconds since the job first ran, by word of Spent and `open`; None where nobody has told."""
    time_at: str = ""
    """When that was reported, RFC 3339; empty: just now."""
    ratios: dict[str, float] | None = None
    """ettr, ettr_capacity and goodput_allocated."""
    memory: str = ""
    """What its checkpoints in memory are worth; empty of a job without, or where nobody has told."""
    forgotten: str = ""
    """Why faults before those of `faults` are not known; empty where they are, or there were none."""

    @property
    def title(self) -> str:
        """Name and namespace, for a person."""
        return f"{self.name} in namespace {self.namespace}" if self.namespace else self.name

    def condition(self, kind: str) -> ConditionRecord | None:
        """Return the condition of a type."""
        return next((item for item in self.conditions if item.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Return whether a condition is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"


def moment(text: str) -> datetime | None:
    """Return an RFC 3339 time, or None where there is none."""
    try:
        # Python 3.10 reads no Z.
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
