"""Deletion: grace, finalizers, preconditions, owners."""

import pytest
from tests.waiting import wait_until

from .kube_target import Document, Target, config_map, needs, pod


def maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def owned(name: str, owner: Document, **reference: object) -> Document:
    body = config_map(name)
    metadata = owner["metadata"]
    body["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"], **reference}
    ]
    return body


def until_the_collector_knows(target: Target, namespace: str, owner: Document) -> None:
    """Wait until the garbage collector has seen all that was made here so far: it learns of it in that order."""
    target.post(maps(namespace), owned("probe", owner, uid="00000000-0000-0000-0000-000000000000")).ok(201)
    wait_until(lambda: target.get(f"{maps(namespace)}/probe").code == 404, "who names a uid that is not there goes")


def test_deletion_of_a_plain_object_answers_with_a_success(target: Target, namespace: str) -> None:
    made = target.post(maps(namespace), config_map("a")).ok(201)
    done = target.delete(f"{maps(namespace)}/a").ok()
    assert (done["kind"], done["status"]) == ("Status", "Success")
    assert done["details"] == {"name": "a", "kind": "configmaps", "uid": made["metadata"]["uid"]}
    assert target.get(f"{maps(namespace)}/a").code == 404


def test_finalizer_holds_an_object_until_it_goes(target: Target, namespace: str) -> None:
    body = config_map("a")
    body["metadata"]["finalizers"] = ["contract.test/hold"]
    target.post(maps(namespace), body).ok(201)
    waiting = target.delete(f"{maps(namespace)}/a").body
    assert waiting["metadata"]["deletionTimestamp"].endswith("Z")
    again = target.get(f"{maps(namespace)}/a").ok()
    assert again["metadata"]["finalizers"] == ["contract.test/hold"]
    added = {"metadata": {"finalizers": ["contract.test/hold", "contract.test/late"]}}
    assert target.merge(f"{maps(namespace)}/a", added).status == (422, "Invalid")
    target.merge(f"{maps(namespace)}/a", {"metadata": {"finalizers": None}}).ok()
    assert target.get(f"{maps(namespace)}/a").code == 404


@pytest.mark.parametrize("condition", [{"uid": "00000000-0000-0000-0000-000000000000"}, {"resourceVersion": "1"}])
def test_deletion_whose_precondition_fails_is_a_conflict(target: Target, namespace: str, condition: Document) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": condition}
    assert target.delete(f"{maps(namespace)}/a", options).status == (409, "Conflict")
    assert target.get(f"{maps(namespace)}/a").code == 200


@needs("core-strategies")
def test_pod_on_a_node_is_given_its_grace(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("p", nodeName=f"{namespace}-node", terminationGracePeriodSeconds=40)).ok(201)
    waiting = target.delete(f"{path}/p").ok()
    assert waiting["kind"] == "Pod"
    assert waiting["metadata"]["deletionGracePeriodSeconds"] == 40
    assert target.get(f"{path}/p").ok()["metadata"]["deletionTimestamp"]
    shorter = target.delete(f"{path}/p", {"gracePeriodSeconds": 5}).ok()
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    target.delete(f"{path}/p", gracePeriodSeconds=0).ok()
    assert target.get(f"{path}/p").code == 404


@needs("core-strategies")
def test_pod_without_a_node_goes_at_once(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("p")).ok(201)
    assert target.delete(f"{path}/p").ok()["kind"] == "Pod"
    assert target.get(f"{path}/p").code == 404


@needs("core-strategies")
def test_finished_pod_goes_at_once(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("p", nodeName=f"{namespace}-node")).ok(201)
    target.merge(f"{path}/p/status", {"status": {"phase": "Succeeded"}}).ok()
    target.delete(f"{path}/p").ok()
    assert target.get(f"{path}/p").code == 404


def test_deletecollection_takes_what_is_selected(target: Target, namespace: str) -> None:
    for name, app in (("a", "x"), ("b", "x"), ("c", "y")):
        body = config_map(name)
        body["metadata"]["labels"] = {"app": app}
        target.post(maps(namespace), body).ok(201)
    target.delete(maps(namespace), labelSelector="app=x").ok()
    left = [entry["metadata"]["name"] for entry in target.get(maps(namespace)).ok()["items"]]
    assert [name for name in left if len(name) == 1] == ["c"]


def test_dependents_go_with_their_owner(target: Target, namespace: str) -> None:
    owner = target.post(maps(namespace), config_map("owner")).ok(201)
    middle = target.post(maps(namespace), owned("middle", owner)).ok(201)
    target.post(maps(namespace), owned("leaf", middle)).ok(201)
    target.delete(f"{maps(namespace)}/owner").ok()
    wait_until(lambda: target.get(f"{maps(namespace)}/leaf").code == 404, "the whole chain goes")
    assert target.get(f"{maps(namespace)}/middle").code == 404


def test_owner_of_another_uid_does_not_count(target: Target, namespace: str) -> None:
    owner = target.post(maps(namespace), config_map("owner")).ok(201)
    target.post(maps(namespace), owned("false", owner, uid="00000000-0000-0000-0000-000000000000")).ok(201)
    target.post(maps(namespace), owned("true", owner)).ok(201)
    wait_until(lambda: target.get(f"{maps(namespace)}/false").code == 404, "who names a uid that is not there goes")
    assert target.get(f"{maps(namespace)}/true").code == 200


def test_foreground_deletion_waits_for_blocking_dependents(target: Target, namespace: str) -> None:
    owner = target.post(maps(namespace), config_map("owner")).ok(201)
    body = owned("held", owner, blockOwnerDeletion=True)
    body["metadata"]["finalizers"] = ["contract.test/hold"]
    target.post(maps(namespace), body).ok(201)
    until_the_collector_knows(target, namespace, owner)
    waiting = target.delete(f"{maps(namespace)}/owner", {"propagationPolicy": "Foreground"}).body
    assert waiting["metadata"]["finalizers"] == ["foregroundDeletion"]
    held = f"{maps(namespace)}/held"
    wait_until(lambda: "deletionTimestamp" in target.get(held).ok()["metadata"], "the dependent is deleted first")
    assert target.get(f"{maps(namespace)}/owner").code == 200
    target.merge(held, {"metadata": {"finalizers": None}}).ok()
    wait_until(lambda: target.get(f"{maps(namespace)}/owner").code == 404, "the owner follows")


def test_orphans_stay_without_their_owner(target: Target, namespace: str) -> None:
    owner = target.post(maps(namespace), config_map("owner")).ok(201)
    target.post(maps(namespace), owned("child", owner)).ok(201)
    until_the_collector_knows(target, namespace, owner)
    target.delete(f"{maps(namespace)}/owner", {"propagationPolicy": "Orphan"})
    wait_until(lambda: target.get(f"{maps(namespace)}/owner").code == 404, "the owner goes")
    assert not target.get(f"{maps(namespace)}/child").ok()["metadata"].get("ownerReferences")


def test_dependent_with_a_second_owner_stays(target: Target, namespace: str) -> None:
    one = target.post(maps(namespace), config_map("one")).ok(201)
    two = target.post(maps(namespace), config_map("two")).ok(201)
    body = owned("child", one)
    body["metadata"]["ownerReferences"] += owned("child", two)["metadata"]["ownerReferences"]
    target.post(maps(namespace), body).ok(201)
    target.delete(f"{maps(namespace)}/one").ok()
    path = f"{maps(namespace)}/child"
    wait_until(lambda: len(target.get(path).ok()["metadata"]["ownerReferences"]) == 1, "the dead reference goes")
    assert target.get(path).ok()["metadata"]["ownerReferences"][0]["name"] == "two"


def test_unknown_propagation_policy_is_refused(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    assert target.delete(f"{maps(namespace)}/a", {"propagationPolicy": "Sideways"}).code in (400, 422)
