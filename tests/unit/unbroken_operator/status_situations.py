"""Situations of a job as the operator sees them; docs/operations/situations.md shows what people read in each."""

from collections.abc import Callable
from typing import Any

from unbroken_core.reasons import Cause, JobPhase, Reason, Rung

from .operator_world import World, a_job, a_node, a_recovery, running_world

ACTIVE, SPARE = ["digits-0", "digits-1"], ["digits-2"]
Situation = Callable[[], World]


def formed(**spec: Any) -> World:
    """Return a job whose pods are made and run."""
    world = World(a_job(**spec))
    world.settle()
    world.run_pods()
    world.settle()
    return world


def pending(component_text: str, *, waiting: str = "", **fields: Any) -> World:
    """Return a job whose training pods do not start, for this reason of the cluster."""
    world = World(a_job())
    world.settle()
    world.run_pods()
    world.settle()
    for name in world.names():
        status: dict[str, Any] = {"phase": "Pending"}
        if waiting:
            state = {"waiting": {"reason": waiting, "message": component_text}}
            status["containerStatuses"] = [{"name": "trainer", "state": state}]
        else:
            status["conditions"] = [{"type": "PodScheduled", "status": "False", "message": component_text}]
        world.pods[name]["status"] = status
    world.rendezvous_says(JobPhase.FORMING, [], [], message="waits for the first pod", **fields)
    return world


def refused() -> World:
    """The quota of the namespace is used up."""
    world = formed()
    for name in world.names():
        world.remove_pod(name)
    world.rendezvous_says(JobPhase.FORMING, [], [], message="waits for the first pod")
    world.refuse("digits-0", 'pods "digits-0" is forbidden: exceeded quota: gpus')
    return world


def gated() -> World:
    """A queue holds the pods back."""
    world = formed()
    for name in world.names():
        world.pods[name]["spec"]["schedulingGates"] = [{"name": "example.com/queue"}]
        world.pods[name]["status"] = {"phase": "Pending"}
    world.rendezvous_says(JobPhase.FORMING, [], [], message="waits for the first pod")
    return world


def silent(because: str = "connection refused", **status: Any) -> World:
    """The rendezvous of a job that trained does not answer."""
    world = running_world()
    world.is_reachable, world.unreachable_because, world.unheard_for_s = False, because, 60.0
    world.heard_at = "2026-01-01T00:00:00Z"
    if status:
        (name,) = world.names("rendezvous")
        world.pods[name]["status"] = status
    return world


def phase(kind: JobPhase, reason: Reason, message: str, **fields: Any) -> World:
    """A job of which the rendezvous says this."""
    world = running_world()
    world.rendezvous_says(kind, ACTIVE, SPARE, reason=reason, message=message, **fields)
    return world


def recovering(cause: Cause, rung: Rung | None, detail: str, message: str) -> World:
    """A recovery is under way."""
    fault = a_recovery(cause=cause, rung=rung, detail=detail, ended_at="", started_at="2026-01-01T00:00:00Z")
    return phase(JobPhase.INTERRUPTED, Reason.RECOVERING, message, recoveries=(fault,))


def recovered(cause: Cause, rung: Rung, detail: str) -> World:
    """It trains again after a fault."""
    fault = a_recovery(cause=cause, rung=rung, detail=detail)
    return phase(JobPhase.RUNNING, Reason.TRAINING, "iteration 1 runs with 4 ranks", recoveries=(fault,), iteration=1)


def edited(**spec: Any) -> World:
    """Somebody edits the spec of a job that trains."""
    world = running_world()
    world.job["spec"].update(spec)
    world.job["metadata"]["generation"] = 2
    return world


def failed(reason: Reason, message: str, **fields: Any) -> World:
    """The job has failed."""
    return phase(JobPhase.FAILED, reason, message, **fields)


def relabelled() -> World:
    """No node has the labels of the layers."""
    layers = [{"name": "rack", "label": "example.com/rack"}]
    world = World(a_job(topology={"layers": layers}), [a_node("a")])
    world.settle()
    world.run_pods()
    world.settle()
    world.rendezvous_says(JobPhase.RUNNING, ACTIVE, SPARE)
    return world


def node_lost() -> World:
    """The node of all pods is NotReady."""
    world = running_world()
    world.nodes["a"] = a_node("a", is_ready=False, rack="r1", nvlink="n1")
    return world


def restored(**fields: Any) -> World:
    """A new rendezvous answers that does not know the ranks yet."""
    world = running_world()
    world.rendezvous_says(JobPhase.FORMING, [], [], term=2, message="0 of 2 pods are ready, 0 have joined", **fields)
    return world


def _settled(world: World) -> World:
    world.settle()
    return world


def _forming(message: str) -> World:
    world = formed()
    world.rendezvous_says(JobPhase.FORMING, [], [], message=message, reason=Reason.WAITING_FOR_WORKERS, lost_ranks=4)
    return world


def _numbers(**fields: Any) -> World:
    return phase(JobPhase.RUNNING, Reason.TRAINING, "it trains", **fields)


def _refused_report() -> World:
    world = silent("its report has 5000 pods")
    world.is_report_refused = True
    return world


def _late() -> World:
    world = edited(activeDeadlineSeconds=60)
    world.now = "2026-01-01T01:00:00Z"
    return world


PROGRESS = "exception: ValueError: bad batch"
SITUATIONS: dict[str, Situation] = {
    "No operator has looked at it": lambda: World(a_job()),
    "First start: pods are being made": lambda: _settled(World(a_job())),
    "Pods run, workers load": lambda: _forming("1 of 2 pods are ready, 3 have joined; not ready: digits-1"),
    "No node has room": lambda: pending("0/4 nodes are available: 4 Insufficient nvidia.com/gpu"),
    "A PersistentVolumeClaim is missing": lambda: pending('persistentvolumeclaim "data" not found'),
    "The image cannot be pulled": lambda: pending("no such image", waiting="ImagePullBackOff"),
    "A Secret of the container is missing": lambda: pending(
        'secret "wandb" not found', waiting="CreateContainerConfigError"
    ),
    "The quota is used up": refused,
    "A queue holds the pods back": gated,
    "The spec contradicts itself": lambda: World(a_job(minReplicas=9)),
    "It trains": running_world,
    "The rendezvous does not answer": silent,
    "The rendezvous has no node": lambda: silent(
        "",
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}],
    ),
    "The rendezvous sends nonsense": _refused_report,
    "A new rendezvous takes over": restored,
    "An exception is recovered in process": lambda: recovering(
        Cause.EXCEPTION, Rung.IN_PROCESS, "ValueError: boom", "iteration 0: exception of digits-1; waits for digits-0"
    ),
    "A process is started again": lambda: recovering(
        Cause.PROCESS_EXIT, Rung.PROCESS, "exited with code 1", "waits at most 600 s for new processes in digits-1"
    ),
    "A spare takes over a lost pod": lambda: recovering(
        Cause.POD_LOST, Rung.POD, "its connection broke", "iteration 0: pod-lost of digits-1"
    ),
    "Too few pods are left": lambda: phase(
        JobPhase.INTERRUPTED,
        Reason.BELOW_MINIMUM,
        "waits for pods: 1 of 2 are there (0 starting), at least 2 wanted",
    ),
    "Pods that were lost may train on": lambda: phase(
        JobPhase.INTERRUPTED, Reason.WAITING_FOR_ISOLATION, "digits-1 is not heard and may train on, at 00:02:00Z"
    ),
    "It trained again after an exception": lambda: recovered(Cause.EXCEPTION, Rung.IN_PROCESS, "ValueError: boom"),
    "It trained again after a kill": lambda: recovered(Cause.PROCESS_SIGNAL, Rung.POD, "was killed by signal 9"),
    "It trained again after a hang": lambda: recovered(
        Cause.HARD_TIMEOUT, Rung.PROCESS, "no progress for 90 s; its process was ended"
    ),
    "It trained again after a planned deletion": lambda: recovered(Cause.POD_LEAVING, Rung.POD, "deleted"),
    "It trained again after a node was lost": lambda: recovered(Cause.NODE_LOST, Rung.POD, "node a is NotReady"),
    "It trains with fewer ranks": lambda: _numbers(world_size=3, lost_ranks=1, spare_ranks=0),
    "Ranks are missing and spares are ready": lambda: _numbers(world_size=2, lost_ranks=2, spare_ranks=2),
    "A node of its pods is NotReady": node_lost,
    "Nodes lack the labels of the layers": relabelled,
    "It is suspended": lambda: edited(suspend=True),
    "Its running spec was edited wrongly": lambda: edited(minReplicas=9),
    "Its template was changed": lambda: edited(
        template={"spec": {"containers": [{"name": "trainer", "image": "torch:3", "command": ["python3", "t.py"]}]}}
    ),
    "The training has returned, processes end": lambda: phase(
        JobPhase.ENDING,
        Reason.ENDING,
        "all 4 ranks have returned; waits for their processes",
    ),
    "It is complete": lambda: phase(JobPhase.COMPLETE, Reason.COMPLETED, "all 4 ranks completed"),
    "It failed: no progress": lambda: failed(
        Reason.NO_PROGRESS, f"the same fault came 11 times in a row: {PROGRESS}", recoveries=(a_recovery(ended_at=""),)
    ),
    "It failed: a code that no restart helps": lambda: failed(
        Reason.FATAL_EXIT, "rank 3 in digits-1 exited with code 3"
    ),
    "It failed: its budget is used up": lambda: failed(Reason.BUDGET_EXHAUSTED, "no rung of the ladder is left"),
    "It failed before it was ready": lambda: failed(
        Reason.FAILED_BEFORE_READY, "digits-0 worker 0 ended 2 times: exited with code 1: NameError", iteration=-1
    ),
    "It failed after the training": lambda: failed(
        Reason.FAILED_AFTER_TRAINING, "rank 3 in digits-1 exited with code 3"
    ),
    "Its time was over": _late,
}
