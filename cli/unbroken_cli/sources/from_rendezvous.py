"""Pure: a job from what its rendezvous says."""

from unbroken_cli.job import ConditionRecord, FaultSummary, JobRecord
from unbroken_core.protocol.messages import HealthStatus, JobStatus, Recovery
from unbroken_core.recovery.account import ratios, terms
from unbroken_core.recovery.health_words import nodes_healthy, straggling
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.reasons import JobPhase

_STATES = {
    JobPhase.FORMING: "Forming",
    JobPhase.RUNNING: "Running",
    JobPhase.INTERRUPTED: "Recovering",
    JobPhase.PLANNED: "Recovering",
    JobPhase.ENDING: "Running",
    JobPhase.COMPLETE: "Complete",
    JobPhase.FAILED: "Failed",
}


def job_from_status(status: JobStatus) -> JobRecord:
    """Return what the rendezvous says, without what only Kubernetes knows."""
    is_first_start = status.phase is JobPhase.PLANNED and not status.recoveries
    return JobRecord(
        namespace="",
        name=status.job,
        state="Forming" if is_first_start else _STATES[status.phase],
        is_training=status.phase is JobPhase.RUNNING,
        reason=status.reason.value,
        message=status.message,
        iteration=status.iteration,
        active_ranks=status.world_size,
        spare_ranks=status.spare_ranks,
        lost_ranks=status.lost_ranks,
        restarts=sum(status.restarts_by_rung.values()),
        ettr=status.ettr,
        time=None if status.time is None else terms(status.time),
        ratios=None if status.time is None else ratios(status.time),
        container="",
        conditions=_conditions(status.health),
        faults=tuple(map(_fault, status.recoveries)),
        memory="" if status.memory is None else memory_text(status.memory, status.max_step),
        forgotten=_forgotten(status),
    )


def _conditions(health: HealthStatus | None) -> tuple[ConditionRecord, ...]:
    """Return what an operator would say of the watches of the pods; since when is not known here."""
    words = {True: "True", False: "False", None: "Unknown"}
    said = {"NodesHealthy": nodes_healthy(health), "Straggling": straggling(health)}
    return tuple(
        ConditionRecord(kind, words[one.is_true], one.reason.value, one.message, "") for kind, one in said.items()
    )


def _forgotten(status: JobStatus) -> str:
    """Return why there were faults of which nobody tells; "" when there were none before those that are told."""
    first = status.recoveries[0].iteration_before if status.recoveries else status.iteration
    if status.term == 1 or first <= 0:
        return ""
    return f"the rendezvous was started again, in iteration {first}, and does not know what was before"


def memory_text(memory: MemoryStatus, max_step: int) -> str:
    """Return what checkpoints in memory are worth, and what was restored last."""
    text = "no step is on all ranks yet"
    if memory.complete_step >= 0:
        text = f"step {memory.complete_step} on all ranks{_ago(memory.complete_step, max_step)}"
    text += _protection(memory) + _disk(memory, max_step)
    redone = memory.redone_text
    restored = {
        "memory": f"; restored step {memory.restored_step} from memory, {redone}",
        "disk": f"; restored step {memory.restored_step} from disk, {redone}",
        "nothing": f"; nothing was restored, {redone}" if memory.steps_redone else "",
    }
    last = restored.get(memory.source, "")
    # Before the next load it is why nothing newer can be restored, and no part of what the disk says.
    return text + last + (f"{':' if last else ';'} {memory.reason}" if memory.reason else "")


def _protection(memory: MemoryStatus) -> str:
    """Return what outlives the loss of a pod; "" for a job without copies."""
    if not memory.across:
        return ""
    is_as_asked = memory.across.startswith("across ")
    if memory.protected_step < 0:
        return f"; no step is protected{' yet, wanted ' if is_as_asked else ': '}{memory.across}"
    return f"; protected to step {memory.protected_step}{' ' if is_as_asked else ', '}{memory.across}"


def _disk(memory: MemoryStatus, max_step: int) -> str:
    """Return what is on the disk; "" for a job that writes nothing there in the background."""
    if not memory.disk_every:
        return ""
    text = "; no step is on the disk"
    if memory.disk_step >= 0:
        text = f"; step {memory.disk_step} on the disk{_ago(memory.disk_step, max_step)}"
    return text + (f", {memory.disk_problem}" if memory.disk_problem else "")


def _ago(step: int, max_step: int) -> str:
    """Return how long ago a step was; "" where that is not known."""
    behind = max_step - step
    return f" ({behind} step{'s' * (behind != 1)} ago)" if behind >= 0 else ""


def _fault(recovery: Recovery) -> FaultSummary:
    return FaultSummary(
        id=str(recovery.number),
        cause=recovery.cause.value,
        detail=recovery.detail,
        rank=recovery.rank,
        pod=recovery.pod,
        node=recovery.node,
        domain=recovery.domain,
        rung="" if recovery.rung is None else recovery.rung.value,
        replaced_by=recovery.replaced_by,
        iteration=recovery.iteration_after,
        started_at=recovery.started_at,
        ended_at=recovery.ended_at,
        seconds=dict(recovery.phase_s),
        stack=recovery.stack,
        num_faults=recovery.num_faults,
        others=recovery.others,
        taken_by=recovery.taken_by,
    )
