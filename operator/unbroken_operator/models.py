"""The spec of a ResilientTrainingJob: the source of the CRD's schema, of its reference and of the operator's checks.

A field is here only when it works. Docstrings of fields are what `kubectl explain` shows.
"""

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from unbroken_core.reasons import Rung
from unbroken_core.settings import MAX_PODS, MAX_RANKS_PER_POD

LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DAY_S = 86_400
NO_PATTERN: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


def rule(expression: str, message: str, field_path: str = "") -> dict[str, str]:
    """Return one CEL rule of the schema; `field_path` names the field to blame."""
    return {"rule": expression, "message": message} | ({"fieldPath": field_path} if field_path else {})


def rules(*items: dict[str, str]) -> dict[str, Any]:
    """Return the schema extension that holds CEL rules."""
    return {"x-kubernetes-validations": list(items)}


class Model(BaseModel):
    """Strict: no unknown fields, no conversions, camelCase outside."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class Spread(str, Enum):
    """Where spare pods should stand."""

    DOMAINS = "Domains"
    ANYWHERE = "Anywhere"


class CleanPodPolicy(str, Enum):
    """Which training pods are deleted when the job is over."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class Reaction(str, Enum):
    """What a sign that a node is about to go means for its pods."""

    MOVE = "Move"
    IGNORE = "Ignore"


class ConditionSign(str, Enum):
    """Value of a node's condition that is a sign."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class UpdatePolicy(str, Enum):
    """What a change of the template does to pods that run."""

    ON_DELETE = "OnDelete"
    ROLLING = "Rolling"


class SidecarMode(str, Enum):
    """How the agent runs in a training pod."""

    AUTO = "Auto"
    NATIVE = "Native"
    CONTAINER = "Container"


class PullPolicy(str, Enum):
    """When the kubelet pulls an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class TolerationOperator(str, Enum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(str, Enum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


Image = Annotated[str, Field(min_length=1, max_length=512)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY, min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE, max_length=63)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Quantity = Annotated[
    str | int,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 64, "pattern": r"^[0-9.]+[A-Za-z0-9]*$"}),
]
Quantities = Annotated[dict[Annotated[str, Field(max_length=317)], Quantity], Field(max_length=32)]
Seconds = Annotated[int, Field(ge=1, le=30 * DAY_S)]
MAX_INT32 = 2_147_483_647


class Resources(Model):
    """Compute resources of a container, as in a pod."""

    requests: Quantities | None = None
    """Least amounts that the container needs, by resource name."""
    limits: Quantities | None = None
    """Most that the container may use, by resource name."""


class Toleration(Model):
    """Lets the pod run on nodes with a taint, as in a pod."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Key of the taint; empty with operator Exists means every taint."""
    operator: TolerationOperator | None = None
    """Exists or Equal (the default)."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint, with operator Equal."""
    effect: TaintEffect | None = None
    """Effect of the taint; empty means all."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long the pod stays after a NoExecute taint appears; empty means for ever."""


class Spares(Model):
    """Pods that run, have imported everything and wait to take over."""

    count: Annotated[int, Field(ge=0, le=MAX_PODS)] = 0
    """Spare pods to keep beside the active ones. A promoted or lost spare is replaced."""
    spread: Spread = Spread.DOMAINS
    """Domains asks the scheduler for a spare in each domain of every topology layer in which active pods stand, the
    neediest first, and the condition SparesSpread says whether each has one. Spares are then made once the active pods
    have nodes. Anywhere asks for nothing."""


class TopologyLayer(Model):
    """One kind of failure domain, such as racks or NVLink domains."""

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
    """Name of the layer in messages and annotations."""
    label: LabelKey
    """Node label whose value names the domain that the node belongs to."""
    min_ranks: Annotated[int, Field(ge=1)] = 1
    """A domain with fewer healthy ranks than this gives up all of them."""
    max_ranks: Annotated[int, Field(ge=1)] | None = None
    """Most active ranks in one domain; empty means no limit."""
    replace_from: bool = True
    """Whether a spare may be sought in the whole domain of this layer around the lost ranks. The search widens from
    the innermost layer outwards, and stays inside of the first layer that does not allow it."""
    close_gaps: bool = False
    """Without a spare, the highest ranks of the domain take the places of the lost ones, and nobody else moves.
    It needs the same of all layers inside of this one."""


class Topology(Model):
    """Where ranks stand to each other. The order of the ranks follows the order of the domains."""

    layers: Annotated[
        tuple[TopologyLayer, ...],
        Field(
            strict=False,
            max_length=8,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items_rules": rules(
                    rule("!has(self.maxRanks) || self.maxRanks >= self.minRanks", "maxRanks must be at least minRanks")
                ),
            },
        ),
    ] = ()
    """Layers from the outermost to the innermost; a pod is always a domain of its own below them. A node without the
    label counts as a domain without a name."""


class World(Model):
    """Limits on the number of active ranks."""

    divisible_by: Annotated[int, Field(ge=1)] = 1
    """The number of active ranks is a multiple of this (tensor parallel size x pipeline size, for example)."""
    max_ranks: Annotated[int, Field(ge=1)] | None = None
    """Most active ranks; healthy ranks above it are spares. Empty means no limit."""
    min_ranks_per_pod: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_POD)] | None = None
    """A pod with fewer healthy workers steps aside as a whole. Empty means ranksPerPod: pods are never split."""


class RestartRung(Model):
    """One step of the recovery ladder, and how often it may be used."""

    name: Rung
    """in-process restarts the training function in the same processes (the script must use
    unbroken.inprocess.Wrapper); process starts lost worker processes again; pod promotes a spare pod; world goes on
    with fewer ranks; job starts all pods again."""
    limit: Annotated[int, Field(ge=0)] | None = None
    """Most uses within the window; empty means no limit."""
    window_seconds: Annotated[int, Field(ge=1, le=30 * DAY_S)] = 3600
    """Length of the window in seconds."""


ALL_RUNGS = tuple(RestartRung(name=word) for word in Rung)


class Restart(Model):
    """What may be done about a fault."""

    rungs: Annotated[
        tuple[RestartRung, ...],
        Field(
            strict=False,
            min_length=1,
            max_length=len(Rung),
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ALL_RUNGS
    """Steps that may be taken, cheapest first. List all but in-process to run a script that was written for torchrun
    as it is."""
    max_faults_per_rank: Annotated[int, Field(ge=1)] | None = None
    """A place that faulted so often is not used again; empty means no limit."""
    fatal_exit_codes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=255)], ...],
        Field(strict=False, max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Exit codes of a worker's process with which the script says that no restart would help: the job fails at once,
    whatever rungs are left. Choose codes that nothing else ends with: after a fault of one worker the others may end
    with 1, by errors of their collectives."""
    no_progress_limit: Annotated[int, Field(ge=1)] = 10
    """So many faults of the script in a row are recovered while the job gets nowhere between them (no new step, or,
    where the script reports no steps, no run of a minute); one more fails the job."""


class Timeouts(Model):
    """Time boxes, in seconds. Nothing waits for ever."""

    soft_seconds: Seconds = 60
    """A worker without progress for so long is interrupted, and the iteration restarts."""
    hard_seconds: Seconds = 90
    """A worker that does not leave the training function by then is ended. More than softSeconds."""
    heartbeat_seconds: Seconds = 30
    """A pod that is silent for so long is lost."""
    barrier_seconds: Seconds = 120
    """All workers must be ready for the next iteration within this. More than hardSeconds."""
    completion_seconds: Seconds = 120
    """After the first worker completed, the others have so long to complete, too."""
    termination_grace_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Time between SIGTERM and SIGKILL for a worker process."""
    startup_seconds: Seconds = 600
    """A started worker has so long to become ready (imports, CUDA context, first compilation)."""
    reconnect_seconds: Seconds = 5
    """A pod whose connection broke has so long to come back before it is lost."""
    last_call_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """A job that could start with the pods that are ready waits so long for more of them."""
    isolation_seconds: Seconds | None = None
    """When no active pod is heard any more, others get the ranks after so long, since pods that hear no rendezvous have
    left their iteration by then; empty means 120, or twice heartbeatSeconds + terminationGraceSeconds where that is
    more. With more, training survives a longer absence of the rendezvous' node, and a lost rack is replaced later."""


class NodeTaint(Model):
    """A taint that tells that a node is about to go."""

    key: LabelKey
    """Key of the taint."""
    effect: TaintEffect | None = None
    """Effect of the taint; empty means any."""


class NodeCondition(Model):
    """A condition of a node that tells that it is about to go."""

    type: Annotated[str, Field(pattern=LABEL_KEY, min_length=1, max_length=317)]
    """Type of the condition, such as one of node-problem-detector's."""
    status: ConditionSign = ConditionSign.TRUE
    """Value that is the sign."""


class NodeSignals(Model):
    """Signs that a node is about to go. Its pods leave it in time: when a spare pod on another node is ready, ranks
    move there, and then the pod is deleted. One pod more is made for this, or as many as spares.count."""

    cordon: Reaction = Reaction.MOVE
    """Whether a cordoned node (spec.unschedulable) is one."""
    taints: Annotated[tuple[NodeTaint, ...], Field(strict=False, max_length=16)] = ()
    """Taints that are."""
    conditions: Annotated[tuple[NodeCondition, ...], Field(strict=False, max_length=16)] = ()
    """Conditions that are. That a node is not ready needs no mention."""


class Sidecar(Model):
    """The agent beside the trainer in every training pod."""

    image: Image | None = None
    """Image with the agent and the library; empty means the operator's default."""
    mode: SidecarMode = SidecarMode.AUTO
    """Native runs the agent as an init container with restartPolicy Always (Kubernetes 1.29 and newer), Container as a
    plain container; Auto chooses by the version of the cluster."""
    image_pull_policy: PullPolicy | None = None
    """When to pull the image; empty means Kubernetes' default."""
    resources: Resources | None = None
    """Compute resources of the agent."""


class Rendezvous(Model):
    """The pod that coordinates the job. It needs little CPU and no GPU."""

    image: Image | None = None
    """Image with the rendezvous; empty means the sidecar's."""
    resources: Resources | None = None
    """Compute resources of the rendezvous."""
    node_selector: Labels | None = None
    """Labels of the nodes where it may run, such as those of a pool of CPU nodes."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False, max_length=32)] | None = None
    """Taints of nodes where it may run nevertheless."""


class Logs(Model):
    """Where the output of the workers goes besides the pod's log."""

    directory: Annotated[str, Field(pattern="^/", max_length=4096)]
    """Absolute path in the trainer container; each worker writes <pod>/rank-<local>/<incarnation>.log below it. Mount a
    volume there in the template."""


class TemplateMetadata(Model):
    """Metadata of the training pods."""

    labels: Labels | None = None
    """Labels; those under unbroken.dev/ are the operator's."""
    annotations: Annotated[dict[LabelKey, Annotated[str, Field(max_length=262_144)]], Field(max_length=64)] | None = (
        None
    )
    """Annotations; those under unbroken.dev/ are the operator's."""


class Container(Model):
    """A container, with every field that a pod's container has."""

    model_config = ConfigDict(extra="allow", json_schema_extra=NO_PATTERN)

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
    """Name of the container."""
    image: Image
    """Image of the container; the first container's needs Python 3.10 or newer and torch."""
    command: (
        Annotated[tuple[Annotated[str, Field(max_length=131_072)], ...], Field(strict=False, max_length=1024)] | None
    ) = None
    """Command of the container. The first container must name one: the operator puts the launcher before it."""


class PodRestartPolicy(str, Enum):
    """What the kubelet does when a container ends."""

    NEVER = "Never"


class TemplateSpec(Model):
    """Spec of the training pods, with every field that a pod has. The first container is the trainer."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=NO_PATTERN
        | rules(
            rule(
                "has(self.containers[0].command) && self.containers[0].command.size() > 0",
                "containers[0].command: want the command that starts the training, got none "
                "(an image's own entrypoint cannot be put under the launcher)",
            )
        ),
    )

    containers: Annotated[tuple[Container, ...], Field(strict=False, min_length=1, max_length=16)]
    """Containers of a training pod; the first one runs the training."""
    restart_policy: PodRestartPolicy | None = None
    """Never, or empty: the operator replaces pods, the kubelet does not."""


class Template(Model):
    """Training pods, active and spare alike. A change applies to pods that are created after it; updatePolicy says what
    becomes of those that run, and those that have not started are made anew."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the training pods."""
    spec: TemplateSpec
    """Spec of the training pods."""


class Spec(Model):
    """What the job is to be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.minReplicas) || self.minReplicas <= self.replicas",
                "minReplicas must be at most replicas",
                ".minReplicas",
            ),
            rule(
                "!has(self.world) || !has(self.world.minRanksPerPod) || self.world.minRanksPerPod <= self.ranksPerPod",
                "world.minRanksPerPod must be at most ranksPerPod",
                ".world.minRanksPerPod",
            ),
            rule(
                "!has(self.world) || self.world.divisibleBy <= self.replicas * self.ranksPerPod",
                "world.divisibleBy must be at most replicas x ranksPerPod",
                ".world.divisibleBy",
            ),
            rule(
                "!has(self.world) || !has(self.world.maxRanks) || self.world.maxRanks >= self.world.divisibleBy",
                "world.maxRanks must be at least world.divisibleBy",
                ".world.maxRanks",
            ),
            rule(
                "!has(self.topology) || self.topology.layers.all(layer, !has(layer.maxRanks) || "
                "layer.maxRanks >= self.ranksPerPod || (has(self.world) && has(self.world.minRanksPerPod) && "
                "self.world.minRanksPerPod < self.ranksPerPod))",
                "topology.layers[].maxRanks must be at least ranksPerPod, because pods are kept whole unless "
                "world.minRanksPerPod allows otherwise",
                ".topology.layers",
            ),
            rule(
                "!has(self.topology) || self.topology.layers.all(layer, layer.minRanks <= "
                "(self.replicas + (has(self.spares) ? self.spares.count : 0)) * self.ranksPerPod)",
                "topology.layers[].minRanks must be at most (replicas + spares.count) x ranksPerPod",
                ".topology.layers",
            ),
            rule(
                "(has(self.topology) ? self.topology.layers : []) == "
                "(has(oldSelf.topology) ? oldSelf.topology.layers : [])",
                "topology cannot change after the job was created",
            ),
        )
    )

    replicas: Annotated[int, Field(ge=1, le=MAX_PODS)] = 1
    """Active pods."""
    min_replicas: Annotated[int, Field(ge=1, le=MAX_PODS)] | None = None
    """Fewest active pods to train with when no spare is left; empty means replicas: the job never shrinks."""
    spares: Spares = Spares()
    ranks_per_pod: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_RANKS_PER_POD,
            json_schema_extra=rules(rule("self == oldSelf", "ranksPerPod cannot change after the job was created")),
        ),
    ] = 1
    """Workers in each pod, normally one a GPU. Cannot be changed."""
    topology: Topology = Topology()
    world: World = World()
    restart: Annotated[
        Restart,
        Field(
            json_schema_extra=rules(
                rule(
                    "self.rungs.exists(r, r.name == 'in-process') == oldSelf.rungs.exists(r, r.name == 'in-process')",
                    "restart.rungs cannot gain or lose in-process after the job was created",
                )
            )
        ),
    ] = Restart()
    timeouts: Annotated[
        Timeouts,
        Field(
            json_schema_extra=rules(
                rule(
                    "self.softSeconds < self.hardSeconds",
                    "softSeconds must be less than hardSeconds",
                    ".softSeconds",
                ),
                rule(
                    "self.hardSeconds < self.barrierSeconds",
                    "hardSeconds must be less than barrierSeconds",
                    ".hardSeconds",
                ),
            )
        ),
    ] = Timeouts()
    node_signals: NodeSignals = NodeSignals()
    sidecar: Sidecar = Sidecar()
    rendezvous: Rendezvous = Rendezvous()
    logs: Logs | None = None
    update_policy: UpdatePolicy = UpdatePolicy.ON_DELETE
    """What becomes of pods that run when template, sidecar or logs change. OnDelete: they stay until they are deleted
    or lost. Rolling: as many new pods as spares.count, at least one, are made beside them; when one is ready ranks move
    to it, in a planned recovery, and the old pod is deleted; and so on. Without a new pod that is ready nothing moves.
    The condition UpToDate says which pods are old."""
    suspend: bool = False
    """True keeps the job without pods, or ends those that it has with their grace period; false starts it, or starts it
    again where its script left off, with all counters and budgets as they were. Queues such as Kueue set it."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """A job that is not complete so long after status.startTime fails, and its pods are ended. A suspension ends the
    count; it begins again when the job does. Empty means no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """The job is deleted, with all that belongs to it, so long after status.completionTime. Empty means that it
    stays."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which training pods are deleted when the job is over: Running, those that have not ended a minute later; All, the
    others as well, with their logs; None, none but those that never started."""
    template: Template
