"""When a silent node becomes unreachable, and when its pods are evicted."""

from typing import Any

import pytest

from unbroken_local.lifecycle import Evict, LifecycleSettings, MarkReachable, MarkUnreachable, NodeView, decide

SETTINGS = LifecycleSettings(grace_s=8.0, eviction_s=2.0)
UNREACHABLE = "node.kubernetes.io/unreachable"


def view(**changes: Any) -> NodeView:
    values: dict[str, Any] = {
        "name": "n",
        "silent_s": 0.0,
        "is_ready": True,
        "has_taints": False,
        "unreachable_s": None,
        "pods": (),
    }
    return NodeView(**values | changes)


def pod(*tolerations: dict[str, Any], phase: str = "Running", leaving: bool = False) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "d", "uid": "u", **({"deletionTimestamp": "t"} if leaving else {})}
    return {"metadata": metadata, "spec": {"tolerations": list(tolerations)}, "status": {"phase": phase}}


def tolerating(seconds: int | None) -> dict[str, Any]:
    limit = {} if seconds is None else {"tolerationSeconds": seconds}
    return {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", **limit}


def test_a_node_that_renews_its_lease_is_left_alone() -> None:
    assert decide((view(silent_s=7.9),), SETTINGS) == []


@pytest.mark.parametrize("state", [{"is_ready": True}, {"is_ready": False, "has_taints": False}])
def test_a_silent_node_is_marked_until_all_of_it_is_written(state: dict[str, Any]) -> None:
    assert decide((view(silent_s=8.0, **state),), SETTINGS) == [MarkUnreachable("n")]


def test_a_node_that_is_back_loses_its_taints_once_it_is_ready() -> None:
    assert decide((view(is_ready=False, has_taints=True),), SETTINGS) == []
    assert decide((view(is_ready=True, has_taints=True),), SETTINGS) == [MarkReachable("n")]


@pytest.mark.parametrize(
    ("candidate", "after_s", "is_evicted"),
    [
        pytest.param(pod(), 0.0, True, id="no toleration: at once"),
        pytest.param(pod(tolerating(300)), 1.9, False, id="the default toleration: not yet"),
        pytest.param(pod(tolerating(300)), 2.0, True, id="the default toleration: after the local default"),
        pytest.param(pod(tolerating(5)), 4.9, False, id="an own toleration: not before its time"),
        pytest.param(pod(tolerating(5)), 5.0, True, id="an own toleration: at its time"),
        pytest.param(pod(tolerating(300), tolerating(5)), 2.0, True, id="the shortest counts"),
        pytest.param(pod(tolerating(None)), 1e6, False, id="for ever: never"),
        pytest.param(pod({"operator": "Exists"}), 1e6, False, id="everything for ever: never"),
        pytest.param(pod(leaving=True), 10.0, False, id="leaving already"),
        pytest.param(pod(phase="Succeeded"), 10.0, False, id="finished"),
    ],
)
def test_pods_are_evicted_when_their_toleration_ends(
    candidate: dict[str, Any], after_s: float, is_evicted: bool
) -> None:
    node = view(silent_s=20.0, is_ready=False, has_taints=True, unreachable_s=after_s, pods=(candidate,))
    assert decide((node,), SETTINGS) == ([Evict(candidate)] if is_evicted else [])
