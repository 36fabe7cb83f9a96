"""A rendezvous is given up only when the next one can lead; at no time do two."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_node, running_world

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, DeletePod, LetLead
from unbroken_operator.decisions.plan import plan

OLD, NEW = "digits-rendezvous-0", "digits-rendezvous-1"


def changed_world() -> World:
    """Return a job that trains, whose spec has changed so that it needs another rendezvous."""
    made = running_world()
    made.job["spec"]["restart"] = {"maxFaultsPerRank": 7}
    made.job["metadata"]["generation"] = 2
    made.settle()
    return made


def unschedulable(world: World, name: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available."}
    world.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}
    world.settle()


def is_deleting(world: World, name: str) -> bool:
    return "deletionTimestamp" in world.pods[name]["metadata"]


def test_the_next_rendezvous_is_made_beside_the_one_that_serves_and_out_of_the_service() -> None:
    world = changed_world()
    assert not is_deleting(world, OLD)
    pod = world.pods[NEW]
    assert pod["metadata"]["labels"][layout.COMPONENT_LABEL] == layout.STANDBY
    assert pod["spec"]["containers"][0]["command"][-1] == "unbroken.rendezvous.standby"
    assert "UNBROKEN_EARLIER" not in {item["name"] for item in pod["spec"]["containers"][0]["env"]}
    assert world.service is not None
    assert world.service.spec["selector"][layout.COMPONENT_LABEL] == layout.RENDEZVOUS


def test_while_the_next_one_cannot_run_nothing_changes_and_a_condition_says_so() -> None:
    world = changed_world()
    unschedulable(world, NEW)
    for _ in range(3):
        world.settle()
    assert (is_deleting(world, OLD), world.led, world.deleted) == (False, [], [])
    assert world.condition("UpToDate") == ("False", "RendezvousOutdated")
    (message,) = [item["message"] for item in world.job["status"]["conditions"] if item["type"] == "UpToDate"]
    assert f"rendezvous pod {OLD}" in message
    assert f"successor {NEW} cannot run: 0/3 nodes are available" in message
    assert world.job["status"]["state"] == "Running"


def test_the_one_before_goes_first_and_the_next_one_leads_when_it_has_gone() -> None:
    world = changed_world()
    world.run_pods()
    world.settle()
    assert is_deleting(world, OLD)
    assert world.led == []
    world.remove_pod(OLD)
    world.settle()
    assert [(action.name, action.earlier.term, action.earlier.iteration) for action in world.led] == [(NEW, 1, 0)]
    assert layout.STANDBY_ANNOTATION not in world.pods[NEW]["metadata"]["annotations"]
    assert world.names(layout.RENDEZVOUS) == [NEW]
    assert world.condition("UpToDate") == ("True", "TemplateCurrent")


def test_one_that_does_not_go_is_waited_for_as_long_as_a_kubelet_may_take() -> None:
    world = changed_world()
    world.run_pods()
    world.settle()
    uid = world.uid_of(OLD)

    def led_after(seconds: float) -> list[LetLead]:
        world.memory = replace(world.memory, deleting_for_s={uid: seconds})
        return [action for action in plan(world.snapshot()).actions if isinstance(action, LetLead)]

    assert led_after(9.0) == []
    assert plan(world.snapshot()).check_after_s is not None
    assert [action.name for action in led_after(10.0)] == [NEW]


def test_a_spec_that_is_mended_remakes_the_one_that_stands_by_and_one_that_is_taken_back_deletes_it() -> None:
    world = changed_world()
    unschedulable(world, NEW)
    world.job["spec"]["restart"] = {"maxFaultsPerRank": 8}
    world.settle()
    assert NEW not in world.pods
    unschedulable(world, "digits-rendezvous-2")
    world.job["spec"]["restart"] = {}
    world.settle()
    assert [name for name in world.pods if "rendezvous" in name] == [OLD]
    assert (is_deleting(world, OLD), world.led) == (False, [])


def do_some(world: World, num: int | None) -> int:
    """Do all actions of a plan, or as many as an operator lives for; return how many were done."""
    for number, action in enumerate(world.actions()):
        if number == num:
            return number
        world.apply(action)
        leaders = [name for name in world.names(layout.RENDEZVOUS) if not is_deleting(world, name)]
        assert len(leaders) <= 1, action
    return len(world.actions())


@pytest.mark.parametrize("num_done", range(12))
def test_an_operator_that_stops_after_any_action_is_followed_by_one_that_ends_in_the_same_state(num_done: int) -> None:
    world = running_world()
    world.job["spec"]["restart"] = {"maxFaultsPerRank": 7}
    left: int | None = num_done
    for _round in range(12):
        done = do_some(world, left)
        left = None if left is None or done >= left else left - done
        world.run_pods()
        for name in [name for name in world.pods if "rendezvous" in name and is_deleting(world, name)]:
            world.remove_pod(name)
    (name,) = world.names(layout.RENDEZVOUS)
    # The number of a pod that was never made is not used again.
    assert name in (NEW, "digits-rendezvous-2")
    assert [action.name for action in world.led] == [name]


def test_a_rendezvous_that_is_gone_before_its_successor_is_ready_is_followed_by_it() -> None:
    world = changed_world()
    world.remove_pod(OLD)
    world.is_reachable = False
    world.settle()
    assert [name for name in world.pods if "rendezvous" in name] == [NEW]
    world.run_pods()
    world.settle()
    assert [action.name for action in world.led] == [NEW]


def test_a_cordoned_node_is_left_by_a_hand_over_and_an_uncordoned_one_is_not() -> None:
    world = running_world()
    world.nodes["b"] = a_node("b", rack="r1", nvlink="n1")
    node = world.nodes["a"]
    node["spec"] = {"unschedulable": True}
    world.settle()
    assert (NEW in world.pods, is_deleting(world, OLD)) == (True, False)
    node["spec"] = {}
    world.settle()
    assert (NEW in world.pods, is_deleting(world, OLD)) == (False, False)
    node["spec"] = {"unschedulable": True}
    world.settle()
    world.run_pods("b")
    world.settle()
    world.remove_pod(OLD)
    world.settle()
    assert [action.name for action in world.led] == ["digits-rendezvous-2"]


def test_an_image_that_may_know_no_standby_is_replaced_as_before() -> None:
    world = running_world(rendezvous={"image": "sidecar:0"})
    world.job["spec"]["restart"] = {"maxFaultsPerRank": 7}
    actions = world.actions()
    assert [action.name for action in actions if isinstance(action, DeletePod)] == [OLD]
    (made,) = [action.manifest for action in actions if isinstance(action, CreatePod)]
    assert made["metadata"]["labels"][layout.COMPONENT_LABEL] == layout.RENDEZVOUS


def test_a_job_that_is_suspended_or_over_keeps_no_rendezvous_that_stands_by() -> None:
    for change in ("suspend", "end"):
        world = changed_world()
        world.run_pods()
        if change == "suspend":
            world.job["spec"]["suspend"] = True
        else:
            world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
            world.memory = replace(world.memory, finished_for_s=1000.0)
        world.settle()
        assert is_deleting(world, NEW)
        assert world.led == []
