"""A template that changes while its pods run, or before they do."""

import json
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.objects.training_pods import template_digest


def trains(**spec: Any) -> World:
    """Return a world with a job that trains: digits-0 and digits-1 are active, digits-2 is a spare, if any."""
    world = World(a_job(**spec))
    world.settle()
    world.run_pods()
    names = world.names()
    world.rendezvous_says(JobPhase.RUNNING, names[:2], names[2:])
    world.settle()
    return world


def change(world: World, image: str = "torch:3") -> None:
    """Let the user change the template."""
    world.job["spec"]["template"]["spec"]["containers"][0]["image"] = image
    world.job["metadata"]["generation"] += 1
    world.settle()


def images(world: World) -> dict[str, str]:
    """Return the trainer's image of each pod that is not being deleted."""
    return {
        name: world.pods[name]["spec"]["containers"][0]["image"]
        for name in world.names()
        if "deletionTimestamp" not in world.pods[name]["metadata"]
    }


def reap(world: World) -> None:
    """Let every pod that is being deleted be gone."""
    for name in world.names():
        if "deletionTimestamp" in world.pods[name]["metadata"]:
            world.remove_pod(name)
    world.settle()


def test_pods_that_run_stay_as_they_are_and_the_condition_names_them() -> None:
    world = trains()
    change(world)
    assert images(world) == {"digits-0": "torch:2", "digits-1": "torch:2", "digits-2": "torch:2"}
    assert world.deleted == []
    assert world.condition("UpToDate") == ("False", "TemplateOutdated")
    assert world.condition("PodsReady") == ("True", "PodsReady")
    (told,) = (item for item in world.job["status"]["conditions"] if item["type"] == "UpToDate")
    assert "3 of 3 training pods were made from an earlier template (digits-0, digits-1, digits-2)" in told["message"]
    assert "spec.updatePolicy" in told["message"]
    world.remove_pod("digits-2")
    world.settle()
    assert images(world)["digits-3"] == "torch:3", "the next one is new"
    world.run_pods()
    change(world, "torch:2")
    (told,) = (item for item in world.job["status"]["conditions"] if item["type"] == "UpToDate")
    was = "1 of 3 training pods was made from an earlier template (digits-3)"
    assert told["message"] == f"{was}; delete it, or set spec.updatePolicy to Rolling", "taken back"


def test_nobody_is_told_to_delete_pods_whose_successors_do_not_come_up() -> None:
    """Before, the advice went on when the API server refused the new pods, and named the active ones."""
    world = trains()
    change(world)
    world.remove_pod("digits-2")
    world.refuse("digits-3", "POST /api/v1/namespaces/ml/pods: 422 Pod is invalid")
    world.settle()
    (told,) = (item for item in world.job["status"]["conditions"] if item["type"] == "UpToDate")
    assert told["message"] == (
        "2 of 2 training pods were made from an earlier template (digits-0, digits-1); "
        "delete none of them before PodsReady is True: the pods that take their place must come up"
    )


def test_a_job_whose_template_never_changed_says_nothing_of_it() -> None:
    world = trains()
    assert not [item for item in world.job["status"]["conditions"] if item["type"] == "UpToDate"]


def test_ranks_move_to_new_pods_step_by_step_until_all_are_new() -> None:
    """With one spare: never fewer than two pods train, and never more than one pod too many is there."""
    world = trains(updatePolicy="Rolling")
    change(world)
    assert images(world) == {"digits-0": "torch:2", "digits-1": "torch:2", "digits-2": "torch:2", "digits-3": "torch:3"}
    assert world.told_to_leave() == [], "the new one is not ready"
    world.run_pods()
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2", "digits-3"])
    world.settle()
    assert world.told_to_leave() == ["digits-0", "digits-2"], (
        "one pod with ranks, and the spare that is not to get them"
    )
    world.rendezvous_says(JobPhase.RUNNING, ["digits-3", "digits-1"], ["digits-2"], iteration=1)
    world.settle()
    reap(world)
    world.run_pods()
    active, rounds = ["digits-3", "digits-1"], 0
    while "torch:2" in images(world).values():
        rounds += 1
        assert rounds < 5
        spares = [name for name in images(world) if name not in active]
        world.rendezvous_says(JobPhase.RUNNING, active, spares, iteration=1 + rounds)
        world.settle()
        assert len(images(world)) <= 4
        leaving = world.told_to_leave()
        if "digits-1" in leaving and "digits-1" in active:
            new = [name for name in spares if name not in leaving and images(world)[name] == "torch:3"]
            active = ["digits-3", new[0]]
        reap(world)
        world.run_pods()
    assert len(images(world)) == 3
    assert "digits-3" in images(world), "what is new is left alone"
    world.rendezvous_says(JobPhase.RUNNING, active, [name for name in images(world) if name not in active], iteration=9)
    world.settle()
    assert world.condition("UpToDate") == ("True", "TemplateCurrent")
    assert world.condition("PodsReady") == ("True", "PodsReady")
    assert world.actions() == ()


def test_nothing_moves_while_new_pods_fail_and_the_reason_is_shown() -> None:
    world = trains(updatePolicy="Rolling", spares={"count": 0})
    change(world)
    assert list(images(world)) == ["digits-0", "digits-1", "digits-2"]
    world.pods["digits-2"]["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}],
    }
    world.settle()
    assert world.condition("PodsReady") == ("False", "ImagePullFailed")
    assert world.deleted == []
    change(world, "torch:4")
    assert images(world) == {"digits-0": "torch:2", "digits-1": "torch:2", "digits-3": "torch:4"}


@pytest.mark.parametrize("policy", ["OnDelete", "Rolling"])
def test_pods_that_have_not_started_are_made_anew_at_once(policy: str) -> None:
    """A wrong image, a request that no node has: whoever corrects the template needs to delete nothing."""
    world = World(a_job(updatePolicy=policy))
    world.settle()
    change(world)
    assert set(images(world).values()) == {"torch:3"}
    assert len(images(world)) == 3
    assert world.condition("UpToDate") == ("True", "TemplateCurrent")


def test_what_operator_and_rendezvous_decide_makes_no_pod_old() -> None:
    def digest(**spec: Any) -> str:
        return template_digest(Spec.model_validate_json(json_of(a_job(**spec)["spec"])))

    same = digest()
    assert digest(replicas=4, timeouts={"softSeconds": 10}, updatePolicy="Rolling", suspend=True) == same
    assert digest(sidecar={"mode": "Auto"}) == same, "a default that is written out"
    assert digest(sidecar={"image": "sidecar:2"}) != same
    assert digest(logs={"directory": "/logs"}) != same
    world = trains(updatePolicy="Rolling")
    for pod in world.pods.values():
        pod["metadata"].get("annotations", {}).pop(layout.TEMPLATE_ANNOTATION, None)
    change(world)
    assert world.deleted == [], "pods of an earlier release do not say what they were made from"
    assert len(images(world)) == 3


def json_of(spec: dict[str, Any]) -> str:
    """Return the spec as JSON."""
    return json.dumps(spec)
