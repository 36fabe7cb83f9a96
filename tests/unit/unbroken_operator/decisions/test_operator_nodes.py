"""Nodes that are about to go, and nodes on which pods failed before."""

import dataclasses
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, a_node, a_recovery

from unbroken_core.protocol.messages import PodStatus
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase
from unbroken_operator.api import layout
from unbroken_operator.api.recovery_models import NodeSignals
from unbroken_operator.decisions.actions import DeletePod, PatchPod
from unbroken_operator.decisions.lifecycle import SILENT_S
from unbroken_operator.decisions.node_signals import sign_of
from unbroken_operator.decisions.objects.affinity import AvoidedNodes, away_from
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import node_view
from unbroken_operator.decisions.suspects import score_now


def bound(world: World, name: str, node: str) -> None:
    """Let a pod run on a node."""
    pod = world.pods[name]
    pod["spec"]["nodeName"] = node
    ready = {"type": "Ready", "status": "True"}
    pod["status"] = {"phase": "Running", "podIP": "127.0.0.9", "conditions": [ready]}


def running_world(**spec: Any) -> World:
    """Return a world with a job that trains: digits-0 on node a, digits-1 on b are active, digits-2 on c is spare."""
    world = World(a_job(**spec), nodes=[a_node(name) for name in "abcd"])
    world.settle()
    for number, node in enumerate("abc"[: len(world.names())]):
        bound(world, f"digits-{number}", node)
    bound(world, "digits-rendezvous-0", "d")
    say(world, ["digits-0", "digits-1"], ["digits-2"] if len(world.names()) > 2 else [])
    world.settle()
    return world


def say(world: World, active: list[str], spare: list[str], **fields: Any) -> None:
    """Let the rendezvous say that the job trains."""
    world.rendezvous_says(JobPhase.RUNNING, active, spare, **fields)


def cordon(world: World, name: str) -> None:
    """Cordon a node."""
    world.nodes[name]["spec"] = {"unschedulable": True}


def test_ranks_leave_a_cordoned_node_before_its_pod_goes() -> None:
    world = running_world()
    cordon(world, "a")
    world.settle()
    assert world.pods["digits-0"]["metadata"]["annotations"][layout.LEAVING_ANNOTATION] == "node a is cordoned"
    assert world.told_to_leave() == ["digits-0"]
    assert world.created[-1] == "digits-3", "its replacement is made meanwhile"
    assert world.deleted == []
    assert world.condition("PodsReady") == ("False", "NodesLeaving")
    bound(world, "digits-3", "d")
    say(world, ["digits-2", "digits-1"], ["digits-3"], iteration=1)
    world.settle()
    assert world.deleted == [DeletePod("digits-0", world.uid_of("digits-0"), "node a is cordoned")]
    world.remove_pod("digits-0")
    world.settle()
    assert world.condition("PodsReady") == ("True", "PodsReady")
    assert world.names() == ["digits-1", "digits-2", "digits-3"]
    (event,) = [item for item in world.events.values() if item["reason"] == "NodesLeaving"]
    assert "digits-0 (node a is cordoned)" in event["message"]


def test_nothing_leaves_while_no_spare_elsewhere_is_ready() -> None:
    world = running_world(spares={"count": 0})
    cordon(world, "a")
    world.settle()
    assert world.created[-1] == "digits-2", "one pod more, to move to"
    assert world.told_to_leave() == []
    bound(world, "digits-2", "a")
    say(world, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert world.told_to_leave() == [], "the spare is on the same node"
    world.pods["digits-2"]["spec"]["nodeName"] = "c"
    world.report = dataclasses.replace(world.report or pytest.fail("no report"), pods=starting(world, "digits-2"))
    world.settle()
    assert world.told_to_leave() == [], "the spare still imports"
    say(world, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert world.told_to_leave() == ["digits-0"]
    assert world.deleted == []


def starting(world: World, name: str) -> tuple[PodStatus, ...]:
    """Return the members, one of which is still starting."""
    assert world.report is not None
    return tuple(
        dataclasses.replace(pod, workers=(WorkerPhase.STARTING,) * 2) if pod.pod == name else pod
        for pod in world.report.pods
    )


def test_no_more_pods_leave_at_once_than_spares_are_ready_and_no_more_are_made() -> None:
    world = running_world()
    for name in "abc":
        cordon(world, name)
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2", "digits-3"]
    bound(world, "digits-3", "d")
    say(world, ["digits-0", "digits-1"], ["digits-2", "digits-3"])
    world.settle()
    assert world.told_to_leave() == ["digits-0", "digits-2"], "nor may ranks move to the other cordoned node"
    assert [action.name for action in world.deleted] == ["digits-2"]


def test_a_mark_outlives_the_operator_and_the_sign() -> None:
    world = running_world()
    cordon(world, "a")
    for action in world.actions():
        if isinstance(action, PatchPod):
            world.apply(action)
    world.memory = dataclasses.replace(world.memory, sent=None, sent_to="")
    world.nodes["a"]["spec"] = {}
    world.settle()
    assert world.told_to_leave() == ["digits-0"]


def test_a_node_that_is_uncordoned_in_time_keeps_its_pods_and_the_extra_pod_goes() -> None:
    world = running_world(spares={"count": 0})
    cordon(world, "a")
    world.settle()
    world.nodes["a"]["spec"] = {}
    world.settle()
    assert [action.name for action in world.deleted] == ["digits-2"]
    assert world.condition("PodsReady") == ("True", "PodsReady")


def test_a_spare_on_a_cordoned_node_goes_when_another_one_is_ready() -> None:
    world = running_world()
    cordon(world, "c")
    world.settle()
    assert world.deleted == []
    bound(world, "digits-3", "d")
    say(world, ["digits-0", "digits-1"], ["digits-2", "digits-3"])
    world.settle()
    assert [action.name for action in world.deleted] == ["digits-2"]


def test_what_is_ignored_moves_nothing() -> None:
    world = running_world(nodeSignals={"cordon": "Ignore"})
    cordon(world, "a")
    assert world.actions() == ()


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        ({"taints": [{"key": "example.com/bad"}]}, "has taint example.com/bad:NoSchedule"),
        ({"taints": [{"key": "example.com/bad", "effect": "NoExecute"}]}, ""),
        ({"conditions": [{"type": "GpuFailing"}]}, "has condition GpuFailing=True"),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, "has condition Ready=True"),
        ({"conditions": [{"type": "GpuFailing", "status": "Unknown"}]}, ""),
        ({"presets": ["NVSentinel"]}, "has condition GpuNvlinkWatch=True"),
        ({"presets": ["NodeProblemDetector"]}, ""),
        ({"presets": ["NodeProblemDetector", "NVSentinel"], "conditions": []}, "has condition GpuNvlinkWatch=True"),
        ({}, ""),
    ],
)
def test_taints_and_conditions_are_signs_where_they_are_named(signals: dict[str, Any], words: str) -> None:
    item = a_node("a")
    item["spec"] = {"taints": [{"key": "example.com/bad", "effect": "NoSchedule"}]}
    for kind, status in {"GpuFailing": "True", "GpuNvlinkWatch": "True", "KernelDeadlock": "Unknown"}.items():
        item["status"]["conditions"].append({"type": kind, "status": status})
    wanted = NodeSignals.model_validate(signals, strict=False)
    assert sign_of(node_view(item), wanted) == words


def devices(*healths: str) -> list[dict[str, Any]]:
    """Return what a kubelet says of a container with these GPUs."""
    found = [{"resourceID": f"GPU-{number}", "health": health} for number, health in enumerate(healths)]
    return [{"name": "trainer", "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": found}]}]


@pytest.mark.parametrize(
    ("healths", "signals", "words"),
    [
        (("Healthy", "Unhealthy"), {}, "device GPU-1 (nvidia.com/gpu) of container trainer is Unhealthy"),
        (("Healthy", "Unhealthy"), {"devices": "Ignore"}, ""),
        (("Healthy", "Unknown"), {}, ""),
        ((), {}, ""),
        (("x" * 10**6, "Unhealthy"), {}, "device GPU-1 (nvidia.com/gpu) of container trainer is Unhealthy"),
    ],
)
def test_ranks_leave_a_pod_whose_kubelet_calls_a_device_unhealthy(
    healths: tuple[str, ...], signals: dict[str, str], words: str
) -> None:
    world = running_world(nodeSignals=signals)
    world.pods["digits-0"]["status"]["containerStatuses"] = devices(*healths)
    world.settle()
    assert world.told_to_leave() == (["digits-0"] if words else [])
    if words:
        assert world.pods["digits-0"]["metadata"]["annotations"][layout.LEAVING_ANNOTATION] == words
        assert world.deleted == []


def test_no_ranks_leave_where_the_devices_of_all_pods_are_called_unhealthy() -> None:
    world = running_world()
    for pod in world.pods.values():
        pod["status"]["containerStatuses"] = devices("Unhealthy")
    world.settle()
    assert world.told_to_leave() == []
    assert world.deleted == []


def test_what_a_kubelet_says_of_devices_is_bounded() -> None:
    world = running_world()
    said = devices("Unhealthy")
    said[0]["name"] = "\x1b[2J\u202e" + "c" * 10**6
    said[0]["allocatedResourcesStatus"][0]["name"] = "\x9b31m<script>" + "n" * 10**6
    said[0]["allocatedResourcesStatus"][0]["resources"][0]["resourceID"] = "\n\x00\x1b]0;owned\x07" + "i" * 10**6
    world.pods["digits-0"]["status"]["containerStatuses"] = said
    world.settle()
    mark = world.pods["digits-0"]["metadata"]["annotations"][layout.LEAVING_ANNOTATION]
    assert len(mark) <= 400
    assert mark.isprintable()
    assert "owned" in mark


@pytest.mark.parametrize("presets", [["NPD"], ["NVSentinel"] * 2, ["NVSentinel"] * 3, "NVSentinel"])
def test_presets_that_cannot_be_are_refused(presets: Any) -> None:
    world = World(a_job(nodeSignals={"presets": presets}), nodes=[a_node("a")])
    world.settle()
    assert world.names() == []
    assert "nodeSignals.presets" in next(
        item["message"] for item in world.job["status"]["conditions"] if item["type"] == "Admitted"
    )


def test_ranks_leave_a_node_of_a_preset_and_none_leave_where_all_nodes_have_its_sign() -> None:
    """A new release of a monitor may call a whole fleet broken."""
    broken = {"type": "GpuMemWatch", "status": "True"}
    world = running_world(nodeSignals={"presets": ["NVSentinel"]})
    world.nodes["a"]["status"]["conditions"].append(broken)
    world.settle()
    assert world.told_to_leave() == ["digits-0"]
    world = running_world(nodeSignals={"presets": ["NVSentinel"]})
    for node in world.nodes.values():
        node["status"]["conditions"].append(broken)
    world.settle()
    assert world.told_to_leave() == []
    assert world.deleted == []
    assert len(world.names()) <= 4, "no more than the spares that are wanted are made anew"


def suspects(world: World) -> dict[str, tuple[int, float]]:
    """Return faults and stored score by node."""
    return {item["name"]: (item["faults"], item["score"]) for item in world.job["status"].get("suspectNodes") or ()}


def fail_on(world: World, node: str, *causes: Cause) -> None:
    """Let faults on a node have been recovered."""
    known = world.report.recoveries if world.report is not None else ()
    fresh = tuple(
        a_recovery(len(known) + number, cause=cause, node=node) for number, cause in enumerate(causes, start=1)
    )
    say(world, ["digits-0", "digits-1"], ["digits-2"], recoveries=(*known, *fresh))
    world.settle()


def test_faults_that_a_node_may_be_to_blame_for_are_remembered_once_each() -> None:
    world = running_world()
    fail_on(world, "a", Cause.NODE_LOST, Cause.EXCEPTION, Cause.PROCESS_SIGNAL)
    assert suspects(world) == {"a": (2, 1.5)}
    say(
        world,
        ["digits-0", "digits-1"],
        ["digits-2"],
        recoveries=(world.report or pytest.fail("no report")).recoveries,
        max_step=1,
    )
    world.settle()
    assert suspects(world) == {"a": (2, 1.5)}
    assert world.actions() == ()


def test_half_of_a_nodes_score_is_gone_after_half_an_hour_without_a_write() -> None:
    world = running_world()
    fail_on(world, "a", Cause.NODE_LOST)
    world.now = "2026-01-01T00:30:00Z"
    assert world.actions() == ()
    (item,) = world.job["status"]["suspectNodes"]
    assert score_now(item, world.now) == pytest.approx(0.5)
    fail_on(world, "a", Cause.NODE_LOST)
    assert suspects(world) == {"a": (2, 1.5)}
    world.now = "2026-01-02T00:00:00Z"
    fail_on(world, "b", Cause.UNHEALTHY)
    assert suspects(world) == {"b": (1, 1.0)}


def test_a_report_that_names_a_node_without_a_pod_of_the_job_counts_for_nothing() -> None:
    world = running_world()
    strangers = [a_node("e"), a_node("victim")]
    world.nodes |= {item["metadata"]["name"]: item for item in strangers}
    fail_on(world, "victim", Cause.NODE_LOST, Cause.NODE_LOST)
    assert suspects(world) == {}
    world.end_pod("digits-1", "Failed")
    world.settle()
    world.remove_pod("digits-1")
    known = (world.report or pytest.fail("no report")).recoveries
    lost = a_recovery(len(known) + 1, cause=Cause.NODE_LOST, node="b")
    say(world, ["digits-0"], ["digits-2"], recoveries=(*known, lost))
    world.settle()
    assert suspects(world) == {"b": (1, 1.0)}, "its pod is gone, but was seen there"


def test_a_pod_that_no_kubelet_took_up_is_no_proof_that_the_job_was_there() -> None:
    world = running_world()
    world.pods["digits-2"]["spec"]["nodeName"] = "victim"
    world.pods["digits-2"]["status"] = {"phase": "Pending"}
    world.nodes["victim"] = a_node("victim")
    fail_on(world, "victim", Cause.NODE_LOST)
    assert suspects(world) == {}


def affinity_of(world: World, name: str) -> Any:
    """Return the node affinity of a pod."""
    return world.pods[name]["spec"]["affinity"].get("nodeAffinity", {})


NOT_ON_A = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a"]}


def test_a_replacement_avoids_the_node_that_just_failed_and_is_kept_from_a_repeat_offender() -> None:
    world = running_world()
    fail_on(world, "a", Cause.NODE_LOST)
    world.end_pod("digits-2", "Failed")
    world.settle()
    preferred = affinity_of(world, "digits-3")["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {"weight": 100, "preference": {"matchExpressions": [NOT_ON_A]}} in preferred
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity_of(world, "digits-3")
    fail_on(world, "a", Cause.HARD_TIMEOUT)
    world.end_pod("digits-3", "Failed")
    world.settle()
    required = affinity_of(world, "digits-4")["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required == {"nodeSelectorTerms": [{"matchExpressions": [NOT_ON_A]}]}


def test_an_offender_is_taken_when_there_is_no_other_node() -> None:
    world = running_world()
    fail_on(world, "a", Cause.NODE_LOST, Cause.NODE_LOST)
    world.end_pod("digits-2", "Failed")
    world.settle()
    condition = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
    world.pods["digits-3"]["status"] = {"phase": "Pending", "conditions": [condition]}
    world.settle()
    assert suspects(world) == {"a": (2, 1.0)}
    assert "digits-3" not in world.pods
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity_of(world, "digits-4")
    for name in "bcd":
        del world.nodes[name]
    fail_on(world, "a", Cause.NODE_LOST)
    world.end_pod("digits-4", "Failed")
    world.settle()
    assert suspects(world) == {"a": (3, 2.0)}
    assert layout.AVOIDS_ANNOTATION not in world.pods["digits-5"]["metadata"].get("annotations", {})


def test_each_of_the_users_own_terms_is_narrowed() -> None:
    users = {"key": "gpu", "operator": "Exists"}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {"nodeAffinity": {key: {"nodeSelectorTerms": [{"matchExpressions": [users]}, {"matchFields": []}]}}}
    narrowed = away_from(affinity, AvoidedNodes(forbidden=("a",)))
    assert narrowed["nodeAffinity"][key]["nodeSelectorTerms"] == [
        {"matchExpressions": [users, NOT_ON_A]},
        {"matchFields": [], "matchExpressions": [NOT_ON_A]},
    ]
    assert affinity["nodeAffinity"][key]["nodeSelectorTerms"][0] == {"matchExpressions": [users]}


def _followed_while_nodes_are_silent() -> World:
    """Another operator takes over while no kubelet tells of a pod that trains, nor of the rendezvous."""
    world = running_world()
    world.report, world.report_from, world.is_reachable = None, "", False
    for name in "bd":
        world.nodes[name] = a_node(name, is_ready=False)
    return world


def test_a_new_operator_asks_the_rendezvous_before_it_takes_what_runs_on_a_silent_node_for_lost() -> None:
    world = _followed_while_nodes_are_silent()
    pods = list(world.pods)
    world.settle()
    assert (world.deleted, list(world.pods)) == ([], pods)
    assert plan(world.snapshot()).check_after_s == SILENT_S
    say(world, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert (world.deleted, list(world.pods)) == ([], pods), "the agent there is connected"


@pytest.mark.parametrize("why", ["silent", "refused", "gone", "out of service"])
def test_a_new_operator_asks_no_longer_than_an_answer_can_take_and_not_when_a_node_is_said_to_be_off(why: str) -> None:
    world = _followed_while_nodes_are_silent()
    if why == "silent":
        world.unheard_for_s = SILENT_S
    elif why == "refused":
        world.unreachable_because = "connection refused"
    elif why == "gone":
        del world.nodes["b"]
    else:
        taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
        world.nodes["b"]["spec"] = {"taints": [taint]}
    world.settle()
    assert "digits-1" in [pod.name for pod in world.deleted]
