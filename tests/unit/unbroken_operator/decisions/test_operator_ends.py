"""What the operator vouches for: pods whose processes have ended, and those that are no more."""

from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import JsonObject, World, a_node, running_world

from unbroken_core.protocol.messages import Observation
from unbroken_operator.adapters.stores import PodStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import PushObservation
from unbroken_operator.decisions.snapshot import OUT_OF_SERVICE, pod_view

RUNNING: JsonObject = {"name": "trainer", "state": {"running": {}}}
ENDED: JsonObject = {"name": "trainer", "state": {"terminated": {"exitCode": 137}}}


def a_pod(uid: str, phase: str, *containers: JsonObject, is_deleting: bool = True, node: str = "a") -> JsonObject:
    """Return a training pod of a job."""
    metadata: JsonObject = {
        "name": uid,
        "uid": uid,
        "namespace": "ml",
        "resourceVersion": "5",
        "labels": {layout.JOB_LABEL: "digits", layout.COMPONENT_LABEL: layout.TRAINER},
        "ownerReferences": [{"controller": True, "uid": "uid-of-digits"}],
    }
    if is_deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status = {"phase": phase, "containerStatuses": list(containers)}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": status}


@pytest.mark.parametrize(
    ("pod", "has_ended"),
    [
        pytest.param(a_pod("p", "Running", RUNNING), False, id="is being deleted and runs"),
        pytest.param(a_pod("p", "Running", ENDED), True, id="is being deleted and its kubelet says that it has ended"),
        pytest.param(
            a_pod("p", "Running", ENDED, is_deleting=False), False, id="a container ended and may start again"
        ),
        pytest.param(a_pod("p", "Failed", ENDED, is_deleting=False), True, id="failed"),
        pytest.param(a_pod("p", "Failed", RUNNING), False, id="called failed by others than its kubelet"),
        pytest.param(a_pod("p", "Failed"), False, id="nobody says anything of its containers"),
        pytest.param(a_pod("p", "Pending", node=""), True, id="never had a node"),
    ],
)
def test_a_pod_has_ended_only_when_its_kubelet_says_so(pod: JsonObject, has_ended: bool) -> None:
    assert pod_view(pod).has_ended is has_ended


def test_pods_that_were_seen_to_end_are_counted_once_and_others_are_not() -> None:
    store = PodStore(lambda _key: None)
    for uid, container in (("seen", ENDED), ("forced", RUNNING), ("told at the end", RUNNING)):
        store.upsert(a_pod(uid, "Running", container))
    store.forget(("ml", "digits"), "seen", "seen")
    store.remove(a_pod("seen", "Running", ENDED))
    store.remove(a_pod("forced", "Running", RUNNING))
    store.remove(a_pod("told at the end", "Running", ENDED))
    key = ("ml", "digits")
    assert (store.num_ended(key, "uid-of-digits"), store.num_ended(key, "another")) == (2, 0)


def test_a_pod_of_another_namespace_that_bears_the_jobs_uid_is_none_of_its_pods() -> None:
    store = PodStore(lambda _key: None)
    for name, container in (("a", ENDED), ("b", RUNNING)):
        stranger = a_pod(name, "Running", container)
        stranger["metadata"]["namespace"] = "evil"
        store.upsert(stranger)
        assert store.hosts(("evil", "digits"), "uid-of-digits")
        store.remove(stranger)
    assert store.num_ended(("evil", "digits"), "uid-of-digits") == 1
    assert store.num_ended(("ml", "digits"), "uid-of-digits") == 0
    assert not store.hosts(("ml", "digits"), "uid-of-digits")


def pushed(world: World) -> Observation:
    """Return what the rendezvous is told now."""
    (push,) = [action for action in world.actions() if isinstance(action, PushObservation)]
    return push.observation


@pytest.mark.parametrize(
    ("node", "is_ended"),
    [
        pytest.param(a_node("a", is_ready=False), False, id="a node that is not ready may train on"),
        pytest.param(None, True, id="a node that was deleted"),
        pytest.param(
            {**a_node("a", is_ready=False), "spec": {"taints": [{"key": OUT_OF_SERVICE}]}}, True, id="tainted"
        ),
    ],
)
def test_what_runs_on_a_node_has_ended_when_somebody_vouches_that_it_is_off(node: Any, is_ended: bool) -> None:
    world = running_world()
    world.nodes["b"] = a_node("b")
    del world.nodes["a"]
    if node is not None:
        world.nodes["a"] = node
    world.pods["digits-0"]["metadata"]["labels"]["changed"] = "so that there is something to tell"
    world.memory = type(world.memory)()
    assert pushed(world).pods[world.uid_of("digits-0")].is_ended is is_ended


def test_the_operator_vouches_for_all_pods_until_one_is_gone_whose_end_it_has_not_seen() -> None:
    world = running_world()
    world.memory = type(world.memory)()
    assert pushed(world).is_accounted
    world.remove_pod("digits-0")
    assert not pushed(world).is_accounted
