"""What somebody else changed of a job's objects: set back or told, once, and never fought over."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, running_world

from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import PatchPod, Revert
from unbroken_operator.decisions.drift import NUM_FREE_STAMPS
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import SecretView, service_view


def the_service(world: World) -> dict[str, Any]:
    """Return the Service as it is stored."""
    assert world.service_object is not None
    return world.service_object


def selector_narrowed(service: dict[str, Any]) -> None:
    service["spec"]["selector"]["version"] = "2"


def selector_removed(service: dict[str, Any]) -> None:
    del service["spec"]["selector"]


def port_moved(service: dict[str, Any]) -> None:
    service["spec"]["ports"][0]["port"] = 80


def only_ready_ones(service: dict[str, Any]) -> None:
    service["spec"]["publishNotReadyAddresses"] = False


def sent_elsewhere(service: dict[str, Any]) -> None:
    service["spec"] |= {"type": "ExternalName", "externalName": "example.com", "selector": {}}


def label_removed(service: dict[str, Any]) -> None:
    del service["metadata"]["labels"][layout.JOB_LABEL]


def owner_removed(service: dict[str, Any]) -> None:
    del service["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (selector_narrowed, "spec.selector"),
        (selector_removed, "spec.selector"),
        (port_moved, "spec.ports"),
        (only_ready_ones, "spec.publishNotReadyAddresses"),
        (sent_elsewhere, "spec.type"),
        (label_removed, "metadata.labels"),
        (owner_removed, "metadata.ownerReferences"),
    ],
)
def test_a_service_that_somebody_changed_leads_to_the_rendezvous_again(
    change: Callable[[dict[str, Any]], None], field: str
) -> None:
    world, untouched = running_world(), running_world()
    change(the_service(world))
    world.settle()
    assert the_service(world)["spec"].pop("type", "ClusterIP") == "ClusterIP"
    assert the_service(world) == the_service(untouched)
    (message,) = world.messages("ChangedByHand")
    assert field in message


def test_what_somebody_adds_to_a_service_stays() -> None:
    world = running_world()
    service = the_service(world)
    service["spec"]["ports"].append({"name": "extra", "port": 9999, "targetPort": 9999, "protocol": "TCP"})
    service["spec"] |= {"type": "NodePort", "clusterIP": "10.0.0.7"}
    service["metadata"]["labels"]["team"] = "vision"
    assert world.actions() == ()


def test_the_event_names_who_wrote_the_service_last() -> None:
    world = running_world()
    port_moved(the_service(world))
    the_service(world)["metadata"]["managedFields"] = [
        {"manager": "operator", "time": "2026-01-01T00:00:00Z"},
        {"manager": "kubectl-edit", "time": "2026-01-01T00:00:09Z"},
        {"manager": "controller", "time": "2026-01-01T00:00:10Z", "subresource": "status"},
    ]
    world.settle()
    (message,) = world.messages("ChangedByHand")
    assert "last written by kubectl-edit" in message


def test_what_is_changed_again_and_again_is_set_back_ever_more_seldom_and_told_twice_only() -> None:
    """No hot loop between two controllers that want different things."""
    world = running_world()
    times: list[float] = []
    num, at, now_s, key = 0, 0.0, 0.0, ""
    while now_s < 700.0:
        port_moved(the_service(world))
        known = {key: (num, now_s - at)} if num else {}
        world.memory = dataclasses.replace(world.memory, reverts=known)
        decision = plan(world.snapshot())
        for action in decision.actions:
            world.apply(action)
            if isinstance(action, Revert):
                num, at, key = num + 1, now_s, action.key
                times.append(now_s)
        if not decision.actions:
            assert decision.check_after_s is not None
            now_s += decision.check_after_s
    assert times == [0.0, 2.0, 10.0, 42.0, 170.0, 470.0]
    told = world.messages("ChangedByHand")
    assert ["again and again" in message for message in told] == [False, True]


def test_a_label_that_flips_with_recoveries_is_no_fight_but_one_that_flips_more_is() -> None:
    world = running_world()
    world.pods["digits-0"]["metadata"]["labels"][layout.ROLE_LABEL] = "spare"
    (patch,) = (action for action in world.actions() if isinstance(action, PatchPod))
    world.memory = dataclasses.replace(world.memory, reverts={patch.key: (NUM_FREE_STAMPS, 0.0)})
    assert patch in world.actions()
    world.memory = dataclasses.replace(world.memory, reverts={patch.key: (NUM_FREE_STAMPS + 2, 3.0)})
    decision = plan(world.snapshot())
    assert not [action for action in decision.actions if isinstance(action, PatchPod)]
    assert decision.check_after_s == 5.0


@pytest.mark.parametrize("name", ["digits-1", "digits-rendezvous-0"])
def test_a_pod_without_owner_or_component_stays_a_pod_of_the_job_and_gets_them_back(name: str) -> None:
    """The component is what the Service selects by; without an owner the pod would outlive the job."""
    world = running_world()
    before = world.pods[name]
    world.pods[name] = {**before, "metadata": {**before["metadata"], "labels": dict(before["metadata"]["labels"])}}
    del world.pods[name]["metadata"]["ownerReferences"]
    del world.pods[name]["metadata"]["labels"][layout.COMPONENT_LABEL]
    created = len(world.created)
    world.settle()
    assert world.pods[name] == before
    assert (len(world.created), world.deleted) == (created, [])
    (message,) = world.messages("ChangedByHand")
    assert f"Pod {name}: metadata.ownerReferences, metadata.labels" in message


def test_a_pod_that_another_job_of_that_name_left_behind_is_not_adopted() -> None:
    world = running_world()
    del world.pods["digits-1"]["metadata"]["ownerReferences"]
    world.job["metadata"]["uid"] = "another"
    assert not [action for action in world.actions() if isinstance(action, Revert)]


def test_a_pod_that_lost_the_label_of_its_job_is_told_of_once_and_replaced() -> None:
    world = running_world()
    world.released.append(world.pods.pop("digits-1"))
    world.settle()
    assert world.created[-1] == "digits-3"
    (message,) = world.messages("PodReleased")
    assert "digits-1" in message
    assert "on node a until it is deleted" in message


def test_a_pod_that_a_finalizer_holds_is_told_of_and_neither_freed_nor_waited_for() -> None:
    world = running_world()
    pod = world.pods["digits-1"]
    pod["metadata"] |= {"deletionTimestamp": world.now, "finalizers": ["example.com/audit"]}
    pod["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 143}}}],
    }
    world.settle()
    assert pod["metadata"]["finalizers"] == ["example.com/audit"]
    assert world.created[-1] == "digits-3"
    (message,) = world.messages("HeldByFinalizer")
    assert "example.com/audit" in message
    world.job["spec"]["suspend"] = True
    world.settle()
    for name in [name for name in world.pods if name != "digits-1"]:
        world.remove_pod(name)
    world.settle()
    assert world.condition("Suspended") == ("True", "Suspended")
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.condition("Suspended") == ("False", "Resumed")


def test_a_secret_without_its_owner_is_used_and_told_of() -> None:
    world = running_world()
    world.secret = SecretView("digits-rendezvous", "s", "uid-of-digits", is_orphan=True)
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")
    (message,) = world.messages("ChangedByHand")
    assert "it would stay when the job is deleted" in message


def test_a_secret_that_lost_what_pods_read_is_shown_until_it_is_whole() -> None:
    world = running_world()
    world.secret = SecretView("digits-rendezvous", "s", "uid-of-digits", lacks=("token",))
    world.settle()
    assert world.condition("PodsReady") == ("False", "SecretDamaged")
    assert len(world.messages("SecretDamaged")) == 1
    world.secret = SecretView("digits-rendezvous", "s", "uid-of-digits")
    world.settle()
    assert world.condition("PodsReady") == ("True", "PodsReady")


def test_a_service_of_the_first_release_without_the_note_whose_it_is_belongs_to_nobody() -> None:
    item = {"metadata": {"name": "digits-rendezvous", "uid": "s"}}
    assert (service_view(item).owner_uid, service_view(item).is_orphan) == ("", True)
