"""Which pods on nodes that are not ready count as lost: an agent's connection is a better witness than a kubelet."""

import dataclasses
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_node, running_world

from unbroken_core.vocabulary.reasons import JobPhase, WorkerPhase
from unbroken_operator.decisions.actions import CreatePod, DeletePod
from unbroken_operator.decisions.plan import plan


def with_node_out_of_reach(**fields: Any) -> World:
    """Return a job that trains, with digits-0 alone on node b, which the API server does not reach any more."""
    world = running_world(**fields)
    world.nodes["b"] = a_node("b", is_ready=False)
    world.pods["digits-0"]["spec"]["nodeName"] = "b"
    return world


def of_member(world: World, name: str, **changes: Any) -> None:
    """Change what the report says of one pod."""
    report = world.report or pytest.fail("no report")
    pods = tuple(dataclasses.replace(pod, **changes) if pod.pod == name else pod for pod in report.pods)
    world.report = dataclasses.replace(report, pods=pods)


def made_and_deleted(world: World) -> list[str]:
    """Return the training pods that the operator would make or delete now."""
    actions = world.actions()
    made = [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreatePod)]
    deleted = [action.name for action in actions if isinstance(action, DeletePod)]
    return [name for name in made + deleted if "rendezvous" not in name]


def test_a_pod_whose_connection_broke_is_the_rendezvous_to_judge_while_its_ranks_run() -> None:
    world = with_node_out_of_reach()
    of_member(world, "digits-0", is_connected=False)
    assert made_and_deleted(world) == [], "it may come back within timeouts.reconnect"
    world.report = dataclasses.replace(world.report or pytest.fail("no report"), phase=JobPhase.INTERRUPTED)
    assert made_and_deleted(world) == ["digits-3", "digits-0"]


def test_a_spare_whose_connection_broke_on_a_dead_node_is_replaced_at_once() -> None:
    world = running_world()
    world.nodes["b"] = a_node("b", is_ready=False)
    world.pods["digits-2"]["spec"]["nodeName"] = "b"
    of_member(world, "digits-2", is_connected=False)
    assert made_and_deleted(world) == ["digits-3", "digits-2"]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_node_that_is_said_to_be_off_has_lost_its_pods_whatever_the_rendezvous_said_last(is_deleted: bool) -> None:
    world = with_node_out_of_reach()
    of_member(world, "digits-0", is_connected=False)
    if is_deleted:
        del world.nodes["b"]
    else:
        world.nodes["b"]["spec"] = {
            "taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute", "value": "nodeshutdown"}]
        }
    assert made_and_deleted(world) == ["digits-3", "digits-0"]


def test_a_pod_that_trained_when_the_rendezvous_was_last_heard_is_kept_until_it_has_left_by_itself() -> None:
    world = with_node_out_of_reach()
    world.is_reachable, world.unreachable_because = False, "its node is off"
    world.unheard_for_s = 30.0
    assert made_and_deleted(world) == []
    decision = plan(world.snapshot())
    assert decision.check_after_s is not None
    assert decision.check_after_s <= 90.0
    world.unheard_for_s = 119.0
    assert made_and_deleted(world) == []
    world.unheard_for_s = 120.0
    assert made_and_deleted(world) == ["digits-3", "digits-0"]


def test_a_pod_that_was_not_connected_when_the_rendezvous_was_last_heard_is_not_waited_for() -> None:
    world = with_node_out_of_reach()
    of_member(world, "digits-0", is_connected=False)
    world.is_reachable, world.unreachable_because, world.unheard_for_s = False, "its node is off", 30.0
    assert made_and_deleted(world) == ["digits-3", "digits-0"]


def test_the_time_of_isolation_is_that_of_the_spec() -> None:
    world = with_node_out_of_reach(timeouts={"isolationSeconds": 300})
    world.is_reachable, world.unreachable_because, world.unheard_for_s = False, "its node is off", 299.0
    assert made_and_deleted(world) == []
    world.unheard_for_s = 300.0
    assert made_and_deleted(world) == ["digits-3", "digits-0"]


def test_a_pod_made_after_the_end_does_not_pass_for_one_of_the_world_that_has_ended() -> None:
    """Else those that ended well would count as present, and the job would wait for ranks that nobody can have."""
    world = running_world()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0}}}
    world.end_pod("digits-1", "Succeeded")
    world.pods["digits-1"]["status"]["containerStatuses"] = [ended]
    world.rendezvous_says(JobPhase.FORMING, ["digits-0"], [], term=2)
    of_member(world, "digits-0", workers=(WorkerPhase.COMPLETED,) * 2)
    assert made_and_deleted(world) == [], "digits-0 has yet to say how its processes ended"
    of_member(world, "digits-0", workers=(WorkerPhase.READY,) * 2)
    assert made_and_deleted(world) == ["digits-3"], "digits-0 is a new pod: the job forms again"
