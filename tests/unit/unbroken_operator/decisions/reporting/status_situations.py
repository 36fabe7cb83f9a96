"""Situations of a job as the operator sees them; docs/operations/situations.md shows what people read in each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job, a_node, a_recovery, running_world

from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung

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


def full(*, refusal: str = "") -> World:
    """A new job in a cluster without room, where its rendezvous has no node either."""
    world = World(a_job())
    world.settle()
    if refusal:
        for name in world.names():
            world.remove_pod(name)
        world.refuse("digits-0", refusal)
    text = "0/10 nodes are available: 10 node(s) were unschedulable."
    for pod in world.pods.values():
        lacks_node = {"type": "PodScheduled", "status": "False", "message": text}
        pod["status"] = {"phase": "Pending", "conditions": [lacks_node]}
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


def returned(*, is_cordoned: bool = False) -> World:
    """The operator was away while the job lost its rendezvous."""
    world = running_world()
    if is_cordoned:
        world.nodes["a"]["spec"] = {"unschedulable": True}
    world.report, world.report_from, world.is_reachable = None, "", False
    world.remove_pod("digits-rendezvous-0")
    world.settle()
    lacks_node = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    for pod in world.pods.values():
        if is_cordoned and pod["status"]["phase"] == "Pending":
            pod["status"] = {"phase": "Pending", "conditions": [lacks_node]}
    return world


def phase(kind: JobPhase, reason: Reason, message: str, **fields: Any) -> World:
    """A job of which the rendezvous says this."""
    world = running_world()
    world.rendezvous_says(kind, ACTIVE, SPARE, reason=reason, message=message, **fields)
    return world


def recovering(cause: Cause, rung: Rung | None, detail: str, message: str, rank: int = 3) -> World:
    """A recovery is under way."""
    fault = a_recovery(cause=cause, rung=rung, detail=detail, rank=rank, ended_at="", started_at="2026-01-01T00:00:00Z")
    return phase(JobPhase.INTERRUPTED, Reason.RECOVERING, message, recoveries=(fault,))


def recovered(cause: Cause, rung: Rung, detail: str, **fields: Any) -> World:
    """It trains again after a fault."""
    fault = a_recovery(cause=cause, rung=rung, detail=detail, **fields)
    return phase(JobPhase.RUNNING, Reason.TRAINING, "iteration 1 runs with 4 ranks", recoveries=(fault,), iteration=1)


def edited(**spec: Any) -> World:
    """Somebody edits the spec of a job that trains."""
    world = running_world()
    world.job["spec"].update(spec)
    world.job["metadata"]["generation"] = 2
    return world


def edited_and_refused(*, is_training: bool = True) -> World:
    """Somebody changed the template of a job that trains, and deleted pods that the API server does not make anew."""
    world = hung_and_edited()
    world.report = None if world.report is None else replace(world.report, recoveries=())
    world.remove_pod("digits-2")
    world.refuse("digits-3", NO_QUANTITY)
    message = "iteration 0 runs with 4 ranks"
    if is_training:
        world.rendezvous_says(JobPhase.RUNNING, ACTIVE, [], message=message)
        return world
    world.remove_pod("digits-1")
    message = "waits for pods: 1 of 2 are there (0 starting), at least 2 wanted"
    world.rendezvous_says(JobPhase.INTERRUPTED, ACTIVE[:1], [], reason=Reason.BELOW_MINIMUM, message=message)
    return world


def failed(reason: Reason, message: str, **fields: Any) -> World:
    """The job has failed."""
    return phase(JobPhase.FAILED, reason, message, **{"world_size": 0, "spare_ranks": 0, **fields})


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


def orphaned() -> World:
    """A job was deleted with --cascade=orphan, and applied again under its name."""
    world = running_world()
    for pod in world.pods.values():
        pod["metadata"]["ownerReferences"] = []
    world.job = a_job()
    world.job["metadata"]["uid"] = "uid-of-the-next"
    world.report, world.is_reachable = None, False
    return world


def deleted(*finalizers: str) -> World:
    """Somebody has deleted the job while it trained."""
    world = running_world()
    world.job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:04:50Z", "finalizers": list(finalizers)}
    return world


def quarantined() -> World:
    """The operator itself keeps pods off the node that they would need."""
    world = pending("0/1 nodes are available: 1 node(s) had untolerated taint {unbroken.dev/quarantine: }")
    world.nodes["a"]["spec"] = {"taints": [{"key": "unbroken.dev/quarantine", "effect": "NoSchedule"}]}
    return world


def drained(*, has_room: bool) -> World:
    """Somebody drains the node of all pods, and a PodDisruptionBudget refuses to evict them."""
    world = running_world()
    world.nodes["a"]["spec"] = {"unschedulable": True}
    world.nodes["b"] = a_node("b", rack="r1", nvlink="n2")
    world.settle()
    if not has_room:
        for name in ("digits-3", "digits-rendezvous-1"):
            text = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) were unschedulable"
            lacks_node = {"type": "PodScheduled", "status": "False", "message": text}
            world.pods[name]["status"] = {"phase": "Pending", "conditions": [lacks_node]}
    return world


def unlucky_replacement() -> World:
    """A pod is lost, and the image of the one in its place cannot be pulled any more."""
    world = formed()
    waiting = {"reason": "ErrImagePull", "message": "toomanyrequests"}
    world.pods["digits-2"]["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}],
    }
    world.rendezvous_says(
        JobPhase.RUNNING, ACTIVE[:1], [], message="iteration 1 runs with 2 ranks, 2 fewer than wanted", lost_ranks=2
    )
    return world


def storm() -> World:
    """Faults come faster than anybody reads of them, now here and now there."""
    nodes = ["a", "b", "c"]
    faults = [
        a_recovery(
            number,
            cause=Cause.PROCESS_SIGNAL,
            rung=Rung.PROCESS,
            detail="killed by signal 9 (SIGKILL)",
            rank=number % 4,
            node=nodes[number % 3],
            started_at=f"2026-01-01T00:03:{10 * number - 10:02d}Z",
            ended_at=f"2026-01-01T00:03:{10 * number - 9:02d}Z",
            iteration_after=number,
        )
        for number in range(1, 7)
    ]
    message = "iteration 6 runs with 4 ranks"
    return phase(
        JobPhase.RUNNING,
        Reason.TRAINING,
        message,
        recoveries=tuple(faults),
        restarts_by_rung={"process": 6},
        restarts_by_cause={"process-signal": 6},
        iteration=6,
    )


def grown() -> World:
    """Pods came back, and the job took them in by itself."""
    growth = a_recovery(
        cause=Cause.CAPACITY_RETURNED,
        rung=Rung.WORLD,
        rank=None,
        pod="",
        node="",
        domain="",
        detail="pods are ready for 2 of the ranks that are missing",
        world_size_before=2,
    )
    return phase(JobPhase.RUNNING, Reason.TRAINING, "iteration 1 runs with 4 ranks", recoveries=(growth,), iteration=1)


def _settled(world: World) -> World:
    world.settle()
    return world


def _forming(message: str) -> World:
    world = formed()
    world.rendezvous_says(JobPhase.FORMING, [], [], message=message, reason=Reason.WAITING_FOR_WORKERS, lost_ranks=4)
    return world


def _numbers(**fields: Any) -> World:
    return phase(JobPhase.RUNNING, Reason.TRAINING, **{"message": "it trains", **fields})


def _refused_report() -> World:
    world = silent("its report has 5000 pods")
    world.is_report_refused = True
    return world


def _late() -> World:
    world = edited(activeDeadlineSeconds=60)
    world.now = "2026-01-01T01:00:00Z"
    return world


PROGRESS = "exception: ValueError: bad batch"
NO_QUANTITY = (
    'POST /api/v1/namespaces/ml/pods: 400 Pod in version "v1" cannot be handled as a Pod: quantities must match the '
    "regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)
HANG = "rank 2 hung for 60 s in its own code (train.py:41 load_batch) while ranks 0, 1, 3 waited in all_reduce"
NOBODY = "rank not known: ranks 0-3 waited in all_reduce"


def starting(active: list[str], **fields: Any) -> World:
    """The other pods run, and their workers load what they need."""
    world = running_world()
    world.rendezvous_says(JobPhase.RUNNING, active, [], message="iteration 1 runs", **fields)
    return world


def hung_and_edited() -> World:
    """A job that hung got a new template, and nobody has replaced its pods yet."""
    world = recovered(Cause.SOFT_TIMEOUT, Rung.IN_PROCESS, HANG, rank=2)
    world.job["spec"]["template"]["spec"]["containers"][0]["image"] = "trainer:2"
    world.job["metadata"]["generation"] = 2
    return world


SITUATIONS: dict[str, Situation] = {
    "No operator has looked at it": lambda: World(a_job()),
    "First start: pods are being made": lambda: _settled(World(a_job())),
    "Pods run, workers load": lambda: _forming("1 of 2 pods are ready, 3 have joined; not ready: digits-1"),
    "No node has room": lambda: pending("0/4 nodes are available: 4 Insufficient nvidia.com/gpu"),
    "No node has room, not even for the rendezvous": full,
    "No node has room for the rendezvous, and the pods are refused": lambda: full(refusal=NO_QUANTITY),
    "A PersistentVolumeClaim is missing": lambda: pending('persistentvolumeclaim "data" not found'),
    "The image cannot be pulled": lambda: pending("no such image", waiting="ImagePullBackOff"),
    "A Secret of the container is missing": lambda: pending(
        'secret "wandb" not found', waiting="CreateContainerConfigError"
    ),
    "The quota is used up": refused,
    "A queue holds the pods back": gated,
    "The node is in quarantine": quarantined,
    "The spec contradicts itself": lambda: World(a_job(minReplicas=9)),
    "The job before it was deleted with --cascade=orphan": orphaned,
    "It trains": running_world,
    "The operator is away": running_world,
    "The operator was uninstalled": running_world,
    "The operator was started without --lease": running_world,
    "It was deleted while it trained": lambda: deleted("foregroundDeletion"),
    "It was deleted, and a finalizer holds it": lambda: deleted("example.com/backup"),
    "The rendezvous does not answer": silent,
    "The rendezvous has no node": lambda: silent(
        "",
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}],
    ),
    "The operator came back, and the rendezvous had gone": returned,
    "The operator came back, the rendezvous had gone, and no node has room": lambda: returned(is_cordoned=True),
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
    "A hang is being repaired": lambda: recovering(
        Cause.SOFT_TIMEOUT, Rung.IN_PROCESS, HANG, f"iteration 0: {HANG}; waits for digits-1 to leave", rank=2
    ),
    "Too few pods are left": lambda: phase(
        JobPhase.INTERRUPTED,
        Reason.BELOW_MINIMUM,
        "waits for pods: 1 of 2 are there (0 starting), at least 2 wanted",
    ),
    "Pods that were lost may train on": lambda: phase(
        JobPhase.INTERRUPTED, Reason.WAITING_FOR_ISOLATION, "digits-1 is not heard and may train on, at 00:02:00Z"
    ),
    "It trains, and its spares start": lambda: starting(ACTIVE),
    "It trains with fewer ranks, and new pods start": lambda: starting(ACTIVE[:1], lost_ranks=2),
    "It trained again after an exception": lambda: recovered(Cause.EXCEPTION, Rung.IN_PROCESS, "ValueError: boom"),
    "It trained again after a kill": lambda: recovered(Cause.PROCESS_SIGNAL, Rung.POD, "was killed by signal 9"),
    "It trained again after a hang": lambda: recovered(
        Cause.HARD_TIMEOUT, Rung.PROCESS, "no progress for 90 s; its process was ended"
    ),
    "It trained again after a hang that nobody can be blamed for": lambda: recovered(
        Cause.SOFT_TIMEOUT, Rung.IN_PROCESS, NOBODY, rank=None, pod="", node="", domain=""
    ),
    "It trained again after a hang, and has a new template": hung_and_edited,
    "It trained again after a planned deletion": lambda: recovered(Cause.POD_LEAVING, Rung.POD, "deleted"),
    "It trained again after a node was lost": lambda: recovered(Cause.NODE_LOST, Rung.POD, "node a is NotReady"),
    "Faults come again and again": storm,
    "A node is drained, and a spare elsewhere starts": lambda: drained(has_room=True),
    "A node is drained, and no other node has room": lambda: drained(has_room=False),
    "It trains with fewer ranks, and the new pod cannot start": unlucky_replacement,
    "Ranks that were missing are about to join": lambda: _numbers(
        message="iteration 1 runs with 2 ranks, 2 fewer than wanted; more join after step 120",
        world_size=2,
        lost_ranks=2,
        spare_ranks=2,
    ),
    "Ranks that were missing have joined": grown,
    "It trains with fewer ranks": lambda: _numbers(world_size=3, lost_ranks=1, spare_ranks=0),
    "Ranks are missing and spares are ready": lambda: _numbers(world_size=2, lost_ranks=2, spare_ranks=2),
    "Nothing new is reached": lambda: _numbers(max_step=120, still_for_s=1900.0),
    "A node of its pods is NotReady": node_lost,
    "Nodes lack the labels of the layers": relabelled,
    "It is suspended": lambda: edited(suspend=True),
    "Its running spec was edited wrongly": lambda: edited(minReplicas=9),
    "Its template was changed": lambda: edited(
        template={"spec": {"containers": [{"name": "trainer", "image": "torch:3", "command": ["python3", "t.py"]}]}}
    ),
    "Its template was changed, and no pod can be made of it": edited_and_refused,
    "Its template was changed, no pod can be made of it, and an active pod was deleted": lambda: edited_and_refused(
        is_training=False
    ),
    "Its template got a quantity that is none": lambda: edited(
        template={"spec": {"containers": [{**CONTAINER, "resources": {"limits": {"cpu": "abc"}}}]}}
    ),
    "The training has returned, processes end": lambda: phase(
        JobPhase.ENDING,
        Reason.ENDING,
        "all 4 ranks have returned; waits for their processes",
    ),
    "It is complete": lambda: phase(JobPhase.COMPLETE, Reason.COMPLETED, "all 4 ranks completed"),
    "It failed: no progress": lambda: failed(
        Reason.NO_PROGRESS,
        f"the same fault came in 11 recoveries in a row: {PROGRESS}",
        recoveries=(a_recovery(ended_at=""),),
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
