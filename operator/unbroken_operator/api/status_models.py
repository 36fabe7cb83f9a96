"""The status of a ResilientTrainingJob: what the operator writes, and the source of the schema of status."""

from enum import Enum
from typing import Annotated

from pydantic import Field

from unbroken_operator.api.model_base import Model

Text = Annotated[str, Field(max_length=253)]
Sentence = Annotated[str, Field(max_length=2048)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Counts = Annotated[dict[Text, Count], Field(max_length=64)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]

MAX_HISTORY = 20
MAX_SUSPECTS = 20


class JobStateWord(str, Enum):
    """The job in one word."""

    INVALID = "Invalid"
    SUSPENDED = "Suspended"
    FORMING = "Forming"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    UNKNOWN = "Unknown"
    COMPLETE = "Complete"
    FAILED = "Failed"
    DELETING = "Deleting"


class ConditionStatus(str, Enum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(str, Enum):
    """What the operator says about a job."""

    ADMITTED = "Admitted"
    SUSPENDED = "Suspended"
    PODS_READY = "PodsReady"
    TOPOLOGY_KNOWN = "TopologyKnown"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    DEGRADED = "Degraded"
    SPARES_EXHAUSTED = "SparesExhausted"
    SPARES_SPREAD = "SparesSpread"
    UP_TO_DATE = "UpToDate"
    NODES_HEALTHY = "NodesHealthy"
    STRAGGLING = "Straggling"
    RESTART_STORM = "RestartStorm"
    NO_PROGRESS = "NoProgress"
    THROTTLED = "Throttled"
    COMPLETE = "Complete"
    FAILED = "Failed"


class JobCondition(Model):
    """One statement about the job."""

    type: ConditionType
    """Admitted: the spec is sound. Suspended: the job has no pods, or is ending those that it has, because its spec
    says so. PodsReady: all wanted pods run. TopologyKnown: every pod's node has every layer's label, and no domain lies
    in two domains of an outer layer. Running: the training function runs on all active ranks. Recovering: an
    interruption is being repaired. Degraded: the job runs with fewer ranks than it wants. SparesExhausted: spares are
    wanted and none is ready. SparesSpread: every domain of every layer in which active pods stand has a spare pod.
    UpToDate: all pods were made from the current template; shown from its first change on. NodesHealthy: the watches
    of the pods found no broken device, link or storage; shown from their first word on. Straggling: ranks hold all
    others up, since they are busy longer in each step; shown once workers have measured it. RestartStorm: more
    than 5 recoveries ended within 15 minutes; shown from the first time on. NoProgress: the job is to train, and has
    reached nothing new for 30 minutes; shown from the first time on. Throttled: the job asks for more than its share of
    the operator, and the rest is held back; shown from the first time on. Complete and Failed: the job is over."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=64)]
    """One word for programs."""
    message: Sentence
    """One sentence for people."""
    observed_generation: Count
    """metadata.generation of the spec that this is about."""
    last_transition_time: Time
    """When status changed last."""


class Ranks(Model):
    """Workers by what they do."""

    active: Count
    """Workers in the training function's world."""
    spare: Count
    """Workers that wait to take over."""
    lost: Count
    """Active ranks that the job wants and does not have."""


class Restarts(Model):
    """Recoveries so far."""

    total: Count
    """All recoveries."""
    by_rung: Counts
    """Recoveries by the highest rung that they needed."""
    by_cause: Counts
    """Recoveries by their cause."""


class LastInterruption(Model):
    """A fault that interrupted the job."""

    time: Time
    """When it was reported."""
    cause: Text
    """Why: one of the causes in the reference."""
    rank: Count | None = None
    """Active rank of the culprit; empty for a fault outside the workers."""
    pod: Text = ""
    """Pod of the culprit."""
    node: Text = ""
    """Node of that pod."""
    domain: Text = ""
    """Innermost domain of that pod."""
    detail: Sentence = ""
    """What was seen: the exception, exit code, signal, or what hung."""


class RecoveryRecord(Model):
    """How one interruption was repaired."""

    term: Count
    """Term of the coordinator: its fencing number, which only ever rises."""
    number: Count
    """Number of the recovery in that term, from 1."""
    cause: Text
    """Why the job was interrupted."""
    rung: Text = ""
    """Highest rung that was needed so far; empty before the first."""
    rank: Count | None = None
    """Active rank of the culprit."""
    pod: Text = ""
    """Pod of the culprit."""
    node: Text = ""
    """Node of that pod."""
    replaced_by: Annotated[tuple[Text, ...], Field(strict=False, max_length=64)] = ()
    """Spare pods that were promoted."""
    iteration: Count = 0
    """Iteration that the recovery led to."""
    started_at: Time
    """When the interruption was reported."""
    ended_at: Time | None = None
    """When all active workers ran again; empty while it lasts, and for good when the job failed instead."""
    seconds: Annotated[dict[Text, float], Field(max_length=16)]
    """Seconds of each phase: detect, stop, plan, enter, first-progress."""


class SuspectNode(Model):
    """A node on which pods of the job failed in ways for which the node may be to blame."""

    name: Text
    """Name of the node."""
    faults: Count
    """Number of faults."""
    score: Annotated[float, Field(ge=0)]
    """Their weight at scoreTime: 1 for a lost node or pod or a failed health check, less where the script may be to
    blame. It halves every half hour. From 0.25 on new pods avoid the node; from 1.5 on none goes there, unless there is
    no other: then the score is lowered."""
    score_time: Time
    """When the score was that."""


class RendezvousStatus(Model):
    """The coordinator that this status comes from."""

    pod_uid: Text
    """Uid of its pod."""
    term: Count
    """Its term."""
    earlier: Restarts
    """Recoveries of earlier coordinators, which are part of restarts."""


class TimeRecord(Model):
    """Where the time went since the job first ran; docs/cost.md explains the terms."""

    term: Count
    """Term of the coordinator that reported it."""
    reported_at: Time
    """When it was reported."""
    progress_seconds: Seconds = 0.0
    """Up to steps that the job reached for the first time."""
    checkpoint_seconds: Seconds = 0.0
    """While training stood still for checkpoints, as far as workers told."""
    redo_seconds: Seconds = 0.0
    """Steps that were there before, and what followed the last step before a fault."""
    detect_seconds: Seconds = 0.0
    """From faults until the coordinator knew of them."""
    restart_seconds: Seconds = 0.0
    """Until all workers trained again."""
    waiting_seconds: Seconds = 0.0
    """While too few pods were there."""
    suspended_seconds: Seconds = 0.0
    """While the job was suspended."""
    open_seconds: Seconds = 0.0
    """Since the last step: the next one, or a fault, says what it was."""
    progress_rank_seconds: Seconds = 0.0
    """Progress times active ranks."""
    held_rank_seconds: Seconds = 0.0
    """Time times the ranks of all pods that were there, spares and waiting included."""
    wanted_rank_seconds: Seconds = 0.0
    """Time times the ranks that the job wants active."""
    ettr_capacity: Annotated[float, Field(ge=0)] = 0.0
    """Progress times active ranks / time times wanted ranks."""
    goodput_allocated: Annotated[float, Field(ge=0)] = 0.0
    """Progress times active ranks / time times ranks held."""


class Accepted(Model):
    """What cannot change after the job was admitted."""

    ranks_per_pod: Count
    """ranksPerPod."""
    layers: Annotated[tuple[Annotated[str, Field(max_length=381)], ...], Field(strict=False, max_length=8)]
    """Name and label of each topology layer: 63 characters, an equals sign and 317 at most."""
    is_in_process: bool
    """Whether in-process is among the rungs."""


class Status(Model):
    """What the job is."""

    state: JobStateWord | None = None
    observed_generation: Count | None = None
    """metadata.generation of the spec that the operator acted on."""
    conditions: Annotated[
        tuple[JobCondition, ...],
        Field(
            strict=False,
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    """Statements about the job; see type."""
    start_time: Time | None = None
    """When the job was first seen unsuspended, or was resumed; empty while it is suspended."""
    completion_time: Time | None = None
    """When it was seen that the job is over."""
    iteration: int | None = None
    """Number of the training function's current run; +1 at every restart, -1 before the first."""
    ranks: Ranks | None = None
    replicas: Count | None = None
    """Active pods, for the scale subresource."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the active pods, for the scale subresource."""
    restarts: Restarts | None = None
    last_interruption: LastInterruption | None = None
    last_recovery: RecoveryRecord | None = None
    history: Annotated[tuple[RecoveryRecord, ...], Field(strict=False, max_length=MAX_HISTORY)] = ()
    """The last recoveries, newest last."""
    suspect_nodes: Annotated[
        tuple[SuspectNode, ...],
        Field(
            strict=False,
            max_length=MAX_SUSPECTS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Nodes that new pods avoid, or avoided until recently."""
    ettr: float | None = None
    """Seconds in which the job made first-time progress / seconds since it first ran."""
    time: TimeRecord | None = None
    """Where the time went."""
    next_pod_ordinal: Count | None = None
    """Number of the next training pod."""
    next_rendezvous_ordinal: Count | None = None
    """Number of the next rendezvous pod."""
    rendezvous: RendezvousStatus | None = None
    lease: Annotated[str, Field(max_length=512)] | None = None
    """The Lease, NAMESPACE/NAME, of the operator that writes this status: while nobody renews it, nobody writes."""
    ended_term: Count | None = None
    """Highest term of the coordinators that ended with a suspension: what they still report is ignored."""
    accepted: Accepted | None = None
