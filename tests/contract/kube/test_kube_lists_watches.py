"""Lists and watches: selectors, pages, events, bookmarks, and what is too old."""

import itertools
from collections.abc import Iterator

import pytest

from .kube_target import Document, Target, config_map, needs, pod


def maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def labelled(target: Target, namespace: str) -> str:
    """A path with config maps that carry labels."""
    for name, labels in (("a", {"app": "x", "tier": "1"}), ("b", {"app": "y"}), ("c", {"tier": "2"}), ("d", {})):
        body = config_map(name)
        body["metadata"]["labels"] = labels
        target.post(maps(namespace), body).ok(201)
    return maps(namespace)


def names(document: Document) -> list[str]:
    found = [entry["metadata"]["name"] for entry in document["items"]]
    return [name for name in found if name != "kube-root-ca.crt"]


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("app=x", "a"),
        ("app==x,tier=1", "a"),
        ("app!=x", "bcd"),
        ("app in (x, y)", "ab"),
        ("app notin (x)", "bcd"),
        ("app", "ab"),
        ("!app", "cd"),
        ("tier in (1,2),!app", "c"),
        ("tier>1", "c"),
        ("app=", ""),
    ],
)
def test_label_selectors_choose(target: Target, labelled: str, selector: str, wanted: str) -> None:
    assert names(target.get(labelled, labelSelector=selector).ok()) == list(wanted)


def test_broken_selectors_are_refused(target: Target, labelled: str) -> None:
    for query in ({"labelSelector": "a in (b"}, {"labelSelector": "=="}, {"fieldSelector": "spec.unicorn=1"}):
        assert target.get(labelled, **query).status == (400, "BadRequest")


def test_field_selectors_choose(target: Target, labelled: str, namespace: str) -> None:
    assert names(target.get(labelled, fieldSelector="metadata.name=b").ok()) == ["b"]
    assert "b" not in names(target.get(labelled, fieldSelector="metadata.name!=b").ok())
    everywhere = target.get("/api/v1/configmaps", fieldSelector=f"metadata.namespace={namespace}").ok()
    assert names(everywhere) == ["a", "b", "c", "d"]


@needs("core-strategies")
def test_pods_are_selected_by_node_and_phase(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    target.post(path, pod("free")).ok(201)
    node = f"{namespace}-node"
    target.post(path, pod("placed", nodeName=node)).ok(201)
    assert names(target.get(path, fieldSelector=f"spec.nodeName={node}").ok()) == ["placed"]
    assert names(target.get(path, fieldSelector="spec.nodeName=").ok()) == ["free"]
    assert names(target.get(path, fieldSelector="status.phase=Pending").ok()) == ["free", "placed"]
    assert names(target.get(path, fieldSelector="status.phase!=Pending").ok()) == []
    target.delete(f"{path}/placed", gracePeriodSeconds=0)


@needs("core-strategies")
def test_events_are_selected_by_their_object(target: Target, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/events"
    for name in ("p", "q"):
        about = {"kind": "Pod", "name": name, "namespace": namespace, "uid": f"uid-{name}"}
        target.post(path, {"metadata": {"name": f"e-{name}"}, "reason": "R", "involvedObject": about}).ok(201)
    chosen = target.get(
        path, fieldSelector=f"involvedObject.name=p,involvedObject.kind=Pod,involvedObject.namespace={namespace}"
    )
    assert names(chosen.ok()) == ["e-p"]


def test_pages_together_are_the_list_as_it_was(target: Target, labelled: str) -> None:
    first = target.get(labelled, limit=2, fieldSelector="metadata.name!=kube-root-ca.crt").ok()
    assert names(first) == ["a", "b"]
    target.delete(f"{labelled}/c")
    target.post(labelled, config_map("e")).ok(201)
    token = first["metadata"]["continue"]
    second = target.get(labelled, limit=9, **{"continue": token}, fieldSelector="metadata.name!=kube-root-ca.crt").ok()
    assert names(second) == ["c", "d"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert not second["metadata"].get("continue")


def test_broken_continue_token_is_refused(target: Target, labelled: str) -> None:
    assert target.get(labelled, limit=2, **{"continue": "!!"}).status == (400, "BadRequest")


def test_list_at_an_exact_revision_shows_the_past(target: Target, labelled: str) -> None:
    revision = target.get(labelled).ok()["metadata"]["resourceVersion"]
    target.delete(f"{labelled}/a")
    past = target.get(labelled, resourceVersion=revision, resourceVersionMatch="Exact").ok()
    assert names(past) == ["a", "b", "c", "d"]
    assert past["metadata"]["resourceVersion"] == revision


def test_resource_version_match_needs_a_revision(target: Target, labelled: str) -> None:
    assert target.get(labelled, resourceVersionMatch="Exact").code in (400, 422)


def take(events: Iterator[Document], count: int) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"]["name"]) for event in itertools.islice(events, count)]


def test_watch_shows_what_is_there_then_what_changes(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    events = target.watch(maps(namespace), fieldSelector="metadata.name!=kube-root-ca.crt")
    assert take(events, 1) == [("ADDED", "a")]
    target.merge(f"{maps(namespace)}/a", {"data": {"x": "1"}}).ok()
    target.post(maps(namespace), config_map("b")).ok(201)
    target.delete(f"{maps(namespace)}/a")
    assert take(events, 3) == [("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_watch_from_a_list_misses_nothing(target: Target, namespace: str) -> None:
    revision = target.get(maps(namespace)).ok()["metadata"]["resourceVersion"]
    for number in range(20):
        target.post(maps(namespace), config_map(f"m{number}")).ok(201)
    events = target.watch(maps(namespace), resourceVersion=revision, fieldSelector="metadata.name!=kube-root-ca.crt")
    assert take(events, 20) == [("ADDED", f"m{number}") for number in range(20)]


def test_watched_revisions_rise_and_deletion_has_its_own(target: Target, namespace: str) -> None:
    revision = target.get(maps(namespace)).ok()["metadata"]["resourceVersion"]
    target.post(maps(namespace), config_map("a")).ok(201)
    last = target.merge(f"{maps(namespace)}/a", {"data": {"x": "1"}}).ok()["metadata"]["resourceVersion"]
    target.delete(f"{maps(namespace)}/a")
    events = target.watch(maps(namespace), resourceVersion=revision, fieldSelector="metadata.name=a")
    found = [event["object"]["metadata"]["resourceVersion"] for event in itertools.islice(events, 3)]
    assert sorted(found, key=int) == found
    assert int(found[2]) > int(last)


def test_object_that_leaves_the_selection_looks_deleted(target: Target, namespace: str) -> None:
    revision = target.get(maps(namespace)).ok()["metadata"]["resourceVersion"]
    target.post(maps(namespace), config_map("a")).ok(201)
    for labels in ({"app": "x"}, {"app": "x", "more": "1"}, {"app": None}):
        target.merge(f"{maps(namespace)}/a", {"metadata": {"labels": labels}}).ok()
    events = target.watch(maps(namespace), resourceVersion=revision, labelSelector="app=x")
    assert take(events, 3) == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


def test_watch_ends_when_its_time_is_over(target: Target, namespace: str) -> None:
    assert list(target.watch(maps(namespace), timeoutSeconds=1, fieldSelector="metadata.name=none")) == []


@needs("initial-events")
def test_bookmark_tells_a_quiet_watch_how_far_it_is(target: Target, namespace: str) -> None:
    events = target.watch(
        maps(namespace),
        allowWatchBookmarks="true",
        sendInitialEvents="true",
        resourceVersionMatch="NotOlderThan",
        fieldSelector="metadata.name!=kube-root-ca.crt",
    )
    found = next(events)
    assert found["type"] == "BOOKMARK"
    assert found["object"]["kind"] == "ConfigMap"
    assert found["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true"
    assert int(found["object"]["metadata"]["resourceVersion"]) > 0


@needs("short-history")
def test_revision_before_the_history_is_gone(target: Target, namespace: str) -> None:
    target.post(maps(namespace), config_map("a")).ok(201)
    old = target.get(maps(namespace), limit=1).ok()["metadata"]
    target.post(maps(namespace), config_map("b")).ok(201)
    page = target.get(maps(namespace), limit=1).ok()["metadata"]
    for number in range(220):
        target.merge(f"{maps(namespace)}/a", {"data": {"x": str(number)}})
    event = next(target.watch(maps(namespace), resourceVersion=old["resourceVersion"]))
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert event["object"]["message"].startswith("too old resource version: ")
    gone = target.get(maps(namespace), limit=1, **{"continue": page["continue"]})
    assert gone.status == (410, "Expired")
    exact = target.get(maps(namespace), resourceVersion=old["resourceVersion"], resourceVersionMatch="Exact")
    assert exact.status == (410, "Expired")


def test_revision_of_the_future_is_refused(target: Target, namespace: str) -> None:
    future = int(target.get(maps(namespace)).ok()["metadata"]["resourceVersion"]) + 10**6  # Others write meanwhile.
    refused = target.get(maps(namespace), resourceVersion=future)
    assert refused.code == 504
    assert refused.body["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


def test_partial_metadata_leaves_the_rest_away(target: Target, labelled: str) -> None:
    accept = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
    found = target.call("GET", labelled, headers={"Accept": accept}, fieldSelector="metadata.name=a").ok()
    assert found["kind"] == "PartialObjectMetadataList"
    assert found["items"][0]["metadata"]["labels"] == {"app": "x", "tier": "1"}
    assert "data" not in found["items"][0]
