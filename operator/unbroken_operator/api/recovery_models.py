"""Models of how a job recovers: rungs, time boxes, and signs that a node is about to go."""

from enum import Enum
from typing import Annotated

from pydantic import Field

from unbroken_core.vocabulary.reasons import Cause, Rung
from unbroken_operator.api.model_base import DAY_S, LABEL_KEY, LabelKey, Model, Seconds, TaintEffect


class Reaction(str, Enum):
    """What a sign that a node is about to go means for its pods."""

    MOVE = "Move"
    IGNORE = "Ignore"


class ConditionSign(str, Enum):
    """Value of a node's condition that is a sign."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class RestartRung(Model):
    """One step of the recovery ladder, and how often it may be used."""

    name: Rung
    """in-process restarts the training function in the same processes (the script must use unbroken.inprocess.Wrapper);
    process respawns lost worker processes; pod promotes a spare pod; world continues with fewer ranks; job restarts
    every process."""
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
    """Steps that may be taken, cheapest first. List all but in-process to run a script that was written for torchrun as
    it is."""
    max_faults_per_rank: Annotated[int, Field(ge=1)] | None = None
    """A place with this many faults is not used again; empty means no limit."""
    fatal_exit_codes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=255)], ...],
        Field(strict=False, max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Exit codes of a worker's process with which the script says that no restart would help: the job fails at once,
    whatever rungs are left. Choose codes that nothing else uses: after a fault of one worker the others may end with 1,
    from errors of their collectives."""
    uncounted_causes: Annotated[
        tuple[Cause, ...],
        Field(strict=False, max_length=len(Cause), json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Causes of faults whose recoveries count in no limit of rungs, such as pod-leaving and node-lost on machines that
    are taken away now and then: that is not the job's fault."""
    grow_back_seconds: Seconds | None = None
    """A job that runs with fewer ranks than it wants takes in pods that have been ready for the missing ranks this
    long, after a step that all ranks have finished and saved (call.on_move). It counts in no limit. A script that
    reports no steps is left alone. Empty means that the pods wait for the next recovery."""
    no_progress_limit: Annotated[int, Field(ge=1)] = 10
    """This many faults of the script in a row are recovered without progress between them (no new step, or, if the
    script reports no steps, no run of a minute). One more fails the job."""


class Timeouts(Model):
    """Time boxes, in seconds. Nothing waits for ever."""

    soft_seconds: Seconds = 60
    """A worker without progress for this long is interrupted, and the iteration restarts."""
    hard_seconds: Seconds = 90
    """A worker that does not leave the training function by then is ended. More than softSeconds."""
    heartbeat_seconds: Seconds = 30
    """A pod that is silent for this long is lost."""
    barrier_seconds: Seconds = 120
    """All workers must be ready for the next iteration within this. More than hardSeconds."""
    completion_seconds: Seconds = 120
    """After the first worker has completed, the others have this long to complete, too."""
    termination_grace_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """Time between SIGTERM and SIGKILL for a worker process."""
    startup_seconds: Seconds = 600
    """A started worker has this long to become ready (imports, CUDA context, first compilation)."""
    reconnect_seconds: Seconds = 5
    """A pod whose connection broke has this long to come back before it is lost."""
    last_call_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """A job that could start with the ready pods waits this long for more of them."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 30
    """Ranks that have to move while all is well (a pod is deleted, a node drained, the template changed) do so after a
    step that all ranks have finished and saved, if that comes within this time; 0 interrupts at once. The
    terminationGracePeriodSeconds of a deleted pod must be longer by the time that it takes to end its workers."""
    isolation_seconds: Seconds | None = None
    """When the rendezvous hears no active pod, it gives their ranks to others after this time: a pod that hears no
    rendezvous has left its iteration by then. Empty means 120, or twice heartbeatSeconds + terminationGraceSeconds
    where that is more. With more, training survives a longer absence of the rendezvous' node, and a lost rack is
    replaced later."""


class NodeTaint(Model):
    """A taint that says that a node is about to go."""

    key: LabelKey
    """Key of the taint."""
    effect: TaintEffect | None = None
    """Effect of the taint; empty means any."""


class NodeCondition(Model):
    """A condition that says that a node is about to go."""

    type: Annotated[str, Field(pattern=LABEL_KEY, min_length=1, max_length=317)]
    """Type of the condition, such as one of node-problem-detector's."""
    status: ConditionSign = ConditionSign.TRUE
    """Value that is the sign."""


class SignalPreset(str, Enum):
    """Whose conditions of nodes are signs."""

    NVSENTINEL = "NVSentinel"
    NODE_PROBLEM_DETECTOR = "NodeProblemDetector"


class NodeSignals(Model):
    """Signs that a node is about to go. Its pods leave it in time: when a spare pod on another node is ready, ranks
    move there, and then the old pod is deleted. One more pod is made for this, or as many as spares.count."""

    cordon: Reaction = Reaction.MOVE
    """Whether a cordoned node (spec.unschedulable) is about to go."""
    devices: Reaction = Reaction.MOVE
    """Whether pods leave when their kubelet calls one of their devices Unhealthy (allocatedResourcesStatus in a pod's
    status, where the cluster has the feature ResourceHealthStatus), or when a device of a ResourceClaim that was made
    for the pod has a taint NoSchedule or NoExecute in its ResourceSlice that the claim does not tolerate."""
    taints: Annotated[tuple[NodeTaint, ...], Field(strict=False, max_length=16)] = ()
    """Taints of nodes that are about to go."""
    conditions: Annotated[tuple[NodeCondition, ...], Field(strict=False, max_length=16)] = ()
    """Conditions of nodes that are about to go. NotReady need not be listed."""
    presets: Annotated[
        tuple[SignalPreset, ...],
        Field(strict=False, max_length=len(SignalPreset), json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Conditions of broken nodes, by who sets them: NVSentinel (its fatal ones: GPU memory, NVLink, NVSwitch, PCI
    Express, XIDs and others) or NodeProblemDetector (kernel, file systems and hardware)."""

    @property
    def all_conditions(self) -> tuple[NodeCondition, ...]:
        """Those of the presets, and those that are named."""
        named = (kind for preset in self.presets for kind in PRESET_CONDITIONS[preset])
        return (*(NodeCondition(type=kind) for kind in named), *self.conditions)


PRESET_CONDITIONS = {
    SignalPreset.NVSENTINEL: (
        "CSPMaintenance",
        "GpuDriverWatch",
        "GpuInforomWatch",
        "GpuMcuWatch",
        "GpuMemWatch",
        "GpuNvlinkWatch",
        "GpuNvswitchFatalWatch",
        "GpuPcieWatch",
        "GpuPmuWatch",
        "GpuSmWatch",
        "SysLogsGPUFallenOff",
        "SysLogsSXIDError",
        "SysLogsXIDError",
    ),
    SignalPreset.NODE_PROBLEM_DETECTOR: (
        "CperHardwareErrorFatal",
        "KernelDeadlock",
        "ReadonlyFilesystem",
        "XfsShutdown",
    ),
}
"""Types of conditions that are True where something is broken; NVSentinel sets them to True for fatal events only.

Not among them: heat and power, which make a node slow; that a monitor cannot look, which says nothing about the node;
and that its kubelet or container runtime restarts often, which does not touch who runs. From NVSentinel's page
INTEGRATIONS.md, and node-problem-detector's config/kernel-monitor.json and readonly-monitor.json."""
