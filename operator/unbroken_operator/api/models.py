"""The spec of a ResilientTrainingJob: the source of the CRD's schema, of its reference and of the operator's checks.

A field is here only when it works. Docstrings of fields are what `kubectl explain` shows.
"""

from enum import Enum
from typing import Annotated

from pydantic import ConfigDict, Field

from unbroken_core.protocol.settings import (
    COPIES_RULES,
    LAYER_FITS_JOB,
    LAYER_FITS_PODS,
    LAYER_LIMITS,
    MAX_PODS,
    MAX_RANKS_PER_POD,
    PREFLIGHT_RULES,
    RESTART_RULES,
    SIZE_RULES,
    STRAGGLER_RULES,
    TIMEOUT_RULES,
)
from unbroken_core.vocabulary.checkpoints import MAX_COPIES
from unbroken_operator.api.health_models import HealthSpec
from unbroken_operator.api.memory_rules import MEMORY_RULES, SIZE_CEL, SIZE_MESSAGE, cel_of
from unbroken_operator.api.model_base import DNS_LABEL, MAX_INT32, LabelKey, Model, cel_rules, rule, rules
from unbroken_operator.api.pod_models import Logs, Rendezvous, Sidecar, Template
from unbroken_operator.api.quantities import SIZE_PATTERN
from unbroken_operator.api.recovery_models import NodeSignals, Restart, Timeouts


class Spread(str, Enum):
    """Where spare pods should stand."""

    DOMAINS = "Domains"
    ANYWHERE = "Anywhere"


class CleanPodPolicy(str, Enum):
    """Which training pods are deleted when the job is over."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class UpdatePolicy(str, Enum):
    """What a change of the template does to pods that run."""

    ON_DELETE = "OnDelete"
    ROLLING = "Rolling"


class Spares(Model):
    """Pods that run, have imported everything and wait to take over."""

    count: Annotated[int, Field(ge=0, le=MAX_PODS)] = 0
    """Spare pods to keep beside the active ones. A promoted or lost spare is replaced."""
    spread: Spread = Spread.DOMAINS
    """Domains asks the scheduler for a spare in each domain of every topology layer in which active pods stand, the
    neediest first, and the condition SparesSpread says whether each has one. Spares are then made once the active pods
    have nodes. Anywhere asks for nothing."""


class LabelSource(str, Enum):
    """Whose labels say in which domain of a layer a pod is."""

    AUTO = "Auto"
    POD = "Pod"
    NODE = "Node"


class TopologyPreset(str, Enum):
    """Layers by the labels that a platform sets on its nodes."""

    KUBERNETES = "Kubernetes"
    NVLINK = "NVLink"
    GKE = "GKE"
    EKS = "EKS"
    COREWEAVE = "CoreWeave"


class TopologyLayer(Model):
    """One kind of failure domain, such as racks or NVLink domains."""

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
    """Name of the layer in messages and annotations."""
    label: LabelKey
    """Label whose value names the domain that the pod, or its node, belongs to."""
    source: LabelSource = LabelSource.AUTO
    """Whose label: Pod is the pod's label, else its annotation of that name. Node is its node's label. Auto is the
    pod's if it has one, else the node's."""
    min_ranks: Annotated[int, Field(ge=1)] = 1
    """A domain with fewer healthy ranks than this gives up all of them."""
    max_ranks: Annotated[int, Field(ge=1)] | None = None
    """Most active ranks in one domain; empty means no limit."""
    replace_from: bool = True
    """Whether a spare from anywhere in the lost ranks' domain of this layer may take them. The search widens from the
    innermost layer outwards, and stops below the first layer that does not allow it."""
    close_gaps: bool = False
    """Without a spare, the highest ranks of the domain take the places of the lost ones, and nobody else moves. All
    layers inside this one must allow it, too."""


PRESETS: dict[TopologyPreset, tuple[TopologyLayer, ...]] = {
    preset: tuple(TopologyLayer(name=name, label=label) for name, label in layers)
    for preset, layers in (
        # kubernetes.io/docs/reference/labels-annotations-taints
        (TopologyPreset.KUBERNETES, (("zone", "topology.kubernetes.io/zone"),)),
        # NVIDIA's GPU feature discovery: cluster and clique of an NVLink fabric that spans nodes
        (TopologyPreset.NVLINK, (("nvlink", "nvidia.com/gpu.clique"),)),
        # Google's compact placement: a block has subblocks, a subblock has hosts
        (
            TopologyPreset.GKE,
            (("block", "cloud.google.com/gce-topology-block"), ("subblock", "cloud.google.com/gce-topology-subblock")),
        ),
        # docs.aws.amazon.com/eks/latest/userguide/ml-workload-topology.html
        (
            TopologyPreset.EKS,
            tuple((f"network-{depth}", f"topology.k8s.aws/network-node-layer-{depth}") for depth in (1, 2, 3)),
        ),
        # docs.coreweave.com/products/networking/hpc-interconnect/infiniband-roce-labels
        (
            TopologyPreset.COREWEAVE,
            (("fabric", "backend.coreweave.cloud/fabric"), ("leafgroup", "backend.coreweave.cloud/leafgroup")),
        ),
    )
}


class Topology(Model):
    """How close ranks are to each other. Their order follows the order of the domains."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.preset) || !has(self.layers) || size(self.layers) == 0",
                "preset and layers exclude each other: a preset is a list of layers",
                ".preset",
            )
        )
    )

    preset: TopologyPreset | None = None
    """Layers of a platform, instead of a list: Kubernetes (zone), NVLink (NVIDIA's gpu.clique), GKE (block, subblock),
    EKS (three network layers), CoreWeave (fabric, leafgroup)."""
    layers: Annotated[
        tuple[TopologyLayer, ...],
        Field(
            strict=False,
            max_length=8,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items_rules": rules(rule(LAYER_LIMITS.cel, LAYER_LIMITS.cel_message)),
            },
        ),
    ] = ()
    """Layers from the outermost to the innermost; a pod is always a domain of its own below them. A node without the
    label counts as a domain without a name."""

    @property
    def all_layers(self) -> tuple[TopologyLayer, ...]:
        """The layers, or those of the preset."""
        return self.layers if self.preset is None else PRESETS[self.preset]


class WorldSpec(Model):
    """Limits on the number of active ranks."""

    divisible_by: Annotated[int, Field(ge=1)] = 1
    """The number of active ranks is a multiple of this (tensor parallel size x pipeline size, for example)."""
    max_ranks: Annotated[int, Field(ge=1)] | None = None
    """Most active ranks; healthy ranks above it are spares. Empty means no limit."""
    min_ranks_per_pod: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_POD)] | None = None
    """A pod with fewer healthy workers steps aside as a whole. Empty means ranksPerPod: pods are never split."""


MAX_KEPT = 1000
SizeLimit = Annotated[
    str | int,
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 16, "pattern": SIZE_PATTERN}),
]


class MemoryDisk(Model):
    """A folder for checkpoints, where the script names none itself (Checkpointer(disk=))."""

    directory: Annotated[str, Field(pattern="^/", max_length=4096)]
    """Absolute path in the trainer container, on a volume of the template that all pods share. Give each job a folder
    of its own: it goes on from the newest checkpoint there when no memory has a newer one."""
    every: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Steps between two checkpoints that are written there in the background; empty means that the script writes
    them."""
    keep: Annotated[int, Field(ge=1, le=MAX_KEPT)] = 3
    """How many of the checkpoints that were written in the background stay, the newest ones."""


class Memory(Model):
    """Checkpoints in the memory of the pods (unbroken.memory)."""

    model_config = ConfigDict(json_schema_extra=rules(rule(SIZE_CEL, SIZE_MESSAGE, ".sizeLimit")))

    size_limit: SizeLimit
    """Memory for the checkpoints of each pod, on a volume of their own: 2 x ranksPerPod x (a rank's part of the state +
    100 KB) + 1 MiB. The agent's request and limit of memory grow by it, the trainer's do not."""
    every: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Steps between two checkpoints, where the script names no number itself; empty means each step that it saves."""
    replicas: Annotated[int, Field(ge=0, le=MAX_COPIES)] = 0
    """Number of other pods to which each pod's checkpoints are copied, so that they outlive its host. The copies take
    memory of sizeLimit, too: make it 1 + replicas times as large."""
    across: Annotated[str, Field(max_length=63)] | None = None
    """Layer of topology.layers, or host: no domain of it holds two copies of one checkpoint. Empty means the outermost
    layer. Where that has too few domains, the next layer within it is taken, and the status says so."""
    disk: MemoryDisk | None = None
    """Where checkpoints are written on a disk as well; empty means where the script says."""


_PRESET_NAMES = {preset.value: [layer.name for layer in layers] for preset, layers in PRESETS.items()}
ACROSS_PRESET = rule(
    "!has(self.memory) || !has(self.memory.across) || self.memory.across in ['', 'host'] || "
    "!has(self.topology) || !has(self.topology.preset) || "
    f"self.memory.across in {_PRESET_NAMES}[self.topology.preset]",
    f"memory.across must be host or the name of a layer of the preset: {_PRESET_NAMES}",
    ".memory.across",
)
"""COPIES_RULES knows the layers that a spec names; these are the API's own."""


class Spec(Model):
    """What the job is to be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *cel_rules(SIZE_RULES),
            *cel_rules((LAYER_FITS_PODS, LAYER_FITS_JOB), ".topology.layers"),
            *cel_rules(RESTART_RULES),
            *cel_rules(COPIES_RULES),
            *cel_rules(STRAGGLER_RULES),
            *cel_rules(PREFLIGHT_RULES),
            ACROSS_PRESET,
            *(rule(cel_of(row), row.message, row.field_path) for row in MEMORY_RULES),
            rule(
                "(has(self.topology) ? self.topology.layers : []) == "
                "(has(oldSelf.topology) ? oldSelf.topology.layers : [])",
                "topology cannot change after the job was created",
            ),
            rule(
                "(has(self.topology) && has(self.topology.preset) ? self.topology.preset : '') == "
                "(has(oldSelf.topology) && has(oldSelf.topology.preset) ? oldSelf.topology.preset : '')",
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
    """Workers in each pod, normally one per GPU. Cannot be changed."""
    topology: Topology = Topology()
    world: WorldSpec = WorldSpec()
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
        Field(json_schema_extra=rules(*cel_rules(TIMEOUT_RULES))),
    ] = Timeouts()
    node_signals: NodeSignals = NodeSignals()
    sidecar: Sidecar = Sidecar()
    rendezvous: Rendezvous = Rendezvous()
    logs: Logs | None = None
    memory: Memory | None = None
    """Where checkpoints in memory are kept; empty means that there are none."""
    health: HealthSpec = HealthSpec()
    update_policy: UpdatePolicy = UpdatePolicy.ON_DELETE
    """What happens to running pods when template, sidecar, logs or memory change. OnDelete: they stay until they are
    deleted or lost. Rolling: as many new pods as spares.count, at least one, are made beside them. When one is ready,
    ranks move to it in a planned recovery, and the old pod is deleted; and so on. Nothing moves before a new pod is
    ready. The condition UpToDate says which pods are old."""
    suspend: bool = False
    """True: the job's pods are ended with their grace period, and it gets no others. False: it starts, or resumes
    where its script left off, with all counters and budgets as they were. Queues such as Kueue set it."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """A job that is not complete this long after status.startTime fails, and its pods are ended. A suspension restarts
    the count. Empty means no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """The job and everything it owns are deleted this long after status.completionTime. Empty means that it stays."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which training pods are deleted when the job is over. Running: those that have not ended a minute later. All: the
    others as well, with their logs. None: only those that never started."""
    failed_pods_history_limit: Annotated[int, Field(ge=0, le=100)] = 5
    """How many failed pods stay for their logs while the job runs, newest first. Controllers that watch a job's pods,
    such as AppWrapper's, may take a failed pod for a failed job: 0 keeps none."""
    template: Template
