"""What a DrainRequest wants, what is due for its pods, and what its condition says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.drains.requests import (
    MAX_PODS,
    DrainReason,
    DrainRequest,
    FoundPod,
    PodName,
    condition,
    decide,
    is_complete,
    read_pod,
    read_request,
    whose_turn,
    with_condition,
)

PATIENCE_S = 600.0
A, B = PodName("ml", "a-0"), PodName("web", "b")
REQUEST = DrainRequest("/x", "gpu-1", (A, B), 0.0)
PLAIN = FoundPod("u", "gpu-1", is_ending=False, is_over=False, has_ranks=False, is_leaving=False)
TRAINS = replace(PLAIN, has_ranks=True)


def test_ranks_are_asked_to_leave_once_and_others_are_evicted_at_once() -> None:
    due = decide(REQUEST, {A: TRAINS, B: PLAIN}, PATIENCE_S)
    assert (due.ask, due.evict, due.moving, due.left) == ((A,), (B,), (A,), (A, B))
    again = decide(REQUEST, {A: replace(TRAINS, is_leaving=True), B: replace(PLAIN, is_ending=True)}, PATIENCE_S)
    assert (again.ask, again.evict, again.moving, again.left) == ((), (), (A,), (A, B))


def test_a_pod_that_ranks_have_left_is_evicted_and_so_is_one_that_they_do_not_leave_in_time() -> None:
    assert decide(REQUEST, {A: replace(PLAIN, is_leaving=True)}, PATIENCE_S).evict == (A,)
    late = replace(REQUEST, known_s=PATIENCE_S)
    due = decide(late, {A: replace(TRAINS, is_leaving=True)}, PATIENCE_S)
    assert (due.evict, due.moving) == ((A,), ())


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(replace(PLAIN, node="gpu-2"), id="elsewhere"),
        pytest.param(replace(PLAIN, node=""), id="waits for a node"),
        pytest.param(replace(PLAIN, is_over=True), id="over"),
        pytest.param(None, id="gone"),
    ],
)
def test_a_pod_that_is_not_on_the_node_any_more_is_left_alone(pod: FoundPod | None) -> None:
    found = {} if pod is None else {A: pod}
    due = decide(REQUEST, found, PATIENCE_S)
    assert (due.ask, due.evict, due.left) == ((), (), ())
    assert condition(REQUEST, due, {}, PATIENCE_S) == (True, DrainReason.DRAINED, "2 pods drained from gpu-1")


def test_a_pod_that_ends_is_not_gone() -> None:
    due = decide(REQUEST, {A: replace(PLAIN, is_ending=True)}, PATIENCE_S)
    assert condition(REQUEST, due, {}, PATIENCE_S) == (False, DrainReason.PODS_END, "ml/a-0 not gone yet")


def test_the_condition_names_whom_it_waits_for_and_why() -> None:
    due = decide(REQUEST, {A: TRAINS, B: PLAIN}, PATIENCE_S)
    assert condition(REQUEST, due, {}, PATIENCE_S) == (
        False,
        DrainReason.RANKS_MOVE,
        "ranks are to leave ml/a-0; they have 600 s in all before these are evicted",
    )
    is_done, reason, message = condition(REQUEST, due, {B: "429 budget" + "x" * 9999, A: "?"}, PATIENCE_S)
    assert (is_done, reason) == (False, DrainReason.EVICTION_REFUSED)
    assert message.startswith("no eviction of web/b and 1 more: 429 budget")
    assert len(message) < 400


def test_messages_of_many_pods_are_short() -> None:
    names = tuple(PodName("ml", f"{'p' * 200}-{number}") for number in range(MAX_PODS))
    due = decide(replace(REQUEST, pods=names), dict.fromkeys(names, TRAINS), PATIENCE_S)
    _, _, message = condition(REQUEST, due, {}, PATIENCE_S)
    assert len(message) < 1200
    assert "995 more" in message


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "spec.nodeName: must be the name of a node, is ''"),
        ({"nodeName": 7}, "spec.nodeName: .* is 7"),
        ({"nodeName": "a/../../secrets"}, "spec.nodeName"),
        ({"nodeName": "n" * 1000}, "spec.nodeName.*\\.\\.\\.$"),
        ({"nodeName": "n", "podsToDrain": ["a"]}, "podsToDrain: must map namespaces"),
        ({"nodeName": "n", "podsToDrain": {"a/b": []}}, "keys must be namespaces"),
        ({"nodeName": "n", "podsToDrain": {"ml": "pod"}}, "podsToDrain.ml: must be a list"),
        ({"nodeName": "n", "podsToDrain": {"ml": ["../nodes/x"]}}, "podsToDrain.ml: must be names"),
        ({"nodeName": "n", "podsToDrain": {"ml": [None]}}, "podsToDrain.ml: must be names"),
        ({"nodeName": "n", "podsToDrain": {"ml": ["p"] * (MAX_PODS + 1)}}, "at most 1000 pods"),
    ],
)
def test_what_no_pod_is_called_is_refused_with_its_place(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_request("/x", spec, 0.0)


def test_a_request_is_read_with_each_pod_once_and_one_without_pods_is_complete() -> None:
    spec = {
        "nodeName": "gpu-1",
        "podsToDrain": {"ml": ["a-0", "a-0"], "web": ["b"], "none": None},
        "checkName": "GpuMemWatch",
    }
    assert read_request("/x", spec, 0.0) == REQUEST
    empty = read_request("/x", {"nodeName": "gpu-1", "podsToDrain": None}, 0.0)
    assert condition(empty, decide(empty, {}, PATIENCE_S), {}, PATIENCE_S)[0]


def test_a_training_pod_with_ranks_is_known_by_its_labels() -> None:
    labels = {"unbroken.dev/job": "j", "unbroken.dev/component": "trainer", "unbroken.dev/role": "active"}
    item: dict[str, Any] = {"metadata": {"uid": "u", "labels": labels}, "spec": {"nodeName": "gpu-1"}}
    assert read_pod(item) == TRAINS
    for key, value in (("role", "spare"), ("component", "rendezvous")):
        other = {"metadata": {"uid": "u", "labels": {**labels, f"unbroken.dev/{key}": value}}, "spec": item["spec"]}
        assert read_pod(other) == PLAIN
    bare = read_pod({"metadata": {"uid": "u", "annotations": {"unbroken.dev/leaving": "wanted"}}})
    assert (bare.node, bare.is_leaving) == ("", True)


def test_a_condition_is_written_when_it_changes_and_those_of_others_stay() -> None:
    other = {"type": "DrainDeferred", "status": "True"}
    first = with_condition({"conditions": [other]}, (False, DrainReason.RANKS_MOVE, "m"), "t1")
    assert first is not None
    assert first[0] == other
    assert with_condition({"conditions": first}, (False, DrainReason.RANKS_MOVE, "m"), "t2") is None
    second = with_condition({"conditions": first}, (False, DrainReason.PODS_END, "n"), "t2")
    assert second is not None
    assert (second[1]["reason"], second[1]["lastTransitionTime"]) == ("PodsEnd", "t1")
    third = with_condition({"conditions": second}, (True, DrainReason.DRAINED, "n"), "t3")
    assert third is not None
    assert (third[1]["status"], third[1]["lastTransitionTime"]) == ("True", "t3")
    assert is_complete({"conditions": third})
    assert not is_complete({"conditions": second})
    assert not is_complete({"conditions": ["garbage", {"type": "DrainComplete"}]})
    for garbage in (7, "text", {"type": "DrainComplete", "status": "True"}, [None]):
        assert not is_complete({"conditions": garbage})
        assert with_condition({"conditions": garbage}, (True, DrainReason.DRAINED, ""), "t") is not None
    assert with_condition({"conditions": ["garbage"]}, (True, DrainReason.DRAINED, ""), "t") is not None


def test_too_many_requests_take_turns() -> None:
    assert whose_turn([], 7, 2) == []
    assert whose_turn([1, 2], 0, 5) == [1, 2]
    assert [whose_turn([1, 2, 3], first, 2) for first in (0, 2, 4)] == [[1, 2], [3, 1], [2, 3]]
