"""Which pod goes to which node."""

from typing import Any

import pytest

from unbroken_local.scheduler.decide import decide, natural
from unbroken_local.scheduler.world import Snapshot

Json = dict[str, Any]
TAINTED = "(0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}.)"


def node(name: str, labels: dict[str, str] | None = None, **changes: Any) -> Json:
    allocatable = {"cpu": "8", "memory": "16Gi", "pods": "10", "nvidia.com/gpu": "8"} | changes.pop("allocatable", {})
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    return {"metadata": metadata, "spec": changes, "status": {"allocatable": allocatable}}


def pod(name: str, *, gpus: int = 0, labels: dict[str, str] | None = None, on: str = "", **spec: Any) -> Json:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    containers = [{"name": "c", "image": "i", "resources": {"limits": limits}}]
    body: Json = {"containers": containers, **({"nodeName": on} if on else {}), **spec}
    namespace = body.pop("namespace", "default")
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": labels or {}},
        "spec": body,
        "status": {"phase": "Pending"},
    }


def placed(nodes: list[Json], pods: list[Json], **more: Any) -> dict[str, str]:
    """Return pod -> node, or pod -> the reason in brackets."""
    decision = decide(Snapshot(tuple(nodes), tuple(pods), **more))
    bound = {binding.pod["metadata"]["name"]: binding.node for binding in decision.bindings}
    return bound | {refusal.pod["metadata"]["name"]: f"({refusal.message})" for refusal in decision.refusals}


RACKS = [node(f"n{i}", {"rack": "a" if i < 2 else "b"}) for i in range(4)]


def near(key: str, app: str, kind: str = "podAffinity", **term: Any) -> Json:
    selector = {"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": key, **term}
    return {"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [selector]}}}


def test_pods_spread_over_empty_nodes_in_natural_order() -> None:
    nodes = [node(name) for name in ("n10", "n2", "n1")]
    assert placed(nodes, [pod(f"p{i}", gpus=2) for i in range(4)]) == {"p0": "n1", "p1": "n2", "p2": "n10", "p3": "n1"}


def test_extended_resources_are_counted_and_the_refusal_says_what_is_short() -> None:
    nodes = [node("n1"), node("n2", allocatable={"nvidia.com/gpu": "0"})]
    pods = [pod("a", gpus=6), pod("b", gpus=2), pod("c", gpus=1)]
    assert placed(nodes, pods) == {
        "a": "n1",
        "b": "n1",
        "c": "(0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)",
    }


def test_finished_pods_free_their_resources_and_assumed_ones_hold_theirs() -> None:
    done = pod("done", gpus=8, on="n1") | {"status": {"phase": "Succeeded"}}
    assert placed([node("n1")], [done, pod("a", gpus=8)]) == {"a": "n1"}
    assumed = {"uid-old": "n1"}
    refused = placed([node("n1")], [pod("old", gpus=8), pod("a", gpus=1)], assumed=assumed)
    assert refused == {"a": "(0/1 nodes are available: 1 Insufficient nvidia.com/gpu.)"}


def test_cpu_memory_and_the_number_of_pods_are_limits_too() -> None:
    def asking(name: str, **requests: str) -> Json:
        return pod(name, containers=[{"name": "c", "image": "i", "resources": {"requests": requests}}])

    nodes = [node("n1", allocatable={"pods": "1"})]
    assert placed(nodes, [asking("a", cpu="8001m")]) == {"a": "(0/1 nodes are available: 1 Insufficient cpu.)"}
    assert placed(nodes, [asking("a", memory="17Gi", cpu="9")]) == {
        "a": "(0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory.)"
    }
    assert placed(nodes, [pod("old", on="n1"), pod("a")]) == {"a": "(0/1 nodes are available: 1 Too many pods.)"}


def test_init_containers_count_at_their_peak_and_sidecars_all_the_time() -> None:
    def gpus(number: int, **more: str) -> Json:
        return {"name": f"c{number}", "resources": {"limits": {"nvidia.com/gpu": str(number)}}, **more}

    inits = [gpus(3, restartPolicy="Always"), gpus(5)]
    fits = pod("fits", containers=[gpus(5)], initContainers=inits)
    assert placed([node("n1")], [fits]) == {"fits": "n1"}
    too_big = pod("big", containers=[gpus(1)], initContainers=[*inits, gpus(6)])
    assert placed([node("n1")], [too_big]) == {"big": "(0/1 nodes are available: 1 Insufficient nvidia.com/gpu.)"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"nodeSelector": {"rack": "b"}}, "n2", id="node selector"),
        pytest.param({"nodeSelector": {"rack": "c"}}, "4 node(s) didn't match Pod's node affinity/selector", id="none"),
    ],
)
def test_node_selector(spec: Json, expected: str) -> None:
    assert expected in placed(RACKS, [pod("p", **spec)])["p"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ({"key": "rack", "operator": "In", "values": ["b", "x"]}, "n2"),
        ({"key": "rack", "operator": "NotIn", "values": ["a"]}, "lone"),
        ({"key": "rack", "operator": "Exists"}, "n0"),
        ({"key": "rack", "operator": "DoesNotExist"}, "lone"),
        ({"key": "size", "operator": "Gt", "values": ["3"]}, "lone"),
        ({"key": "size", "operator": "Lt", "values": ["3"]}, "(0/5"),
    ],
)
def test_required_node_affinity_knows_every_operator(expression: Json, expected: str) -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    nodes = [*RACKS, node("lone", {"size": "4"})]
    assert placed(nodes, [pod("p", affinity=affinity)])["p"].startswith(expected)


def test_node_affinity_terms_are_alternatives_and_fields_name_nodes() -> None:
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n3"]}]}, {}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
    }
    assert placed(RACKS, [pod("p", affinity=affinity)]) == {"p": "n3"}


def test_preferred_node_affinity_outweighs_emptiness_and_yields_to_need() -> None:
    preference = {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["b"]}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 5, "preference": preference}]}
    pods = [pod(f"p{i}", gpus=8, affinity={"nodeAffinity": preferred}) for i in range(3)]
    assert placed(RACKS, pods) == {"p0": "n2", "p1": "n3", "p2": "n0"}


def test_pods_that_want_each_other_start_anywhere_and_gather_in_one_domain() -> None:
    pods = [pod(f"p{i}", gpus=4, labels={"app": "x"}, **near("rack", "x")) for i in range(5)]
    result = placed(RACKS, pods)
    assert {result[f"p{i}"] for i in range(4)} == {"n0", "n1"}
    assert result["p4"] == (
        "(0/4 nodes are available: 2 Insufficient nvidia.com/gpu, 2 node(s) didn't match pod affinity rules.)"
    )


def test_pods_that_refuse_each_other_take_one_domain_each() -> None:
    refusing = near("rack", "x", "podAntiAffinity")
    pods = [pod(f"p{i}", labels={"app": "x"}, **refusing) for i in range(3)]
    assert placed(RACKS, pods) == {
        "p0": "n0",
        "p1": "n2",
        "p2": "(0/4 nodes are available: 4 node(s) didn't match pod anti-affinity rules.)",
    }


def test_a_placed_pod_that_refuses_others_is_respected_by_those_that_do_not_ask() -> None:
    old = pod("old", on="n0", **near("rack", "x", "podAntiAffinity"))
    assert placed(RACKS, [old, pod("p", labels={"app": "x"})]) == {"p": "n2"}


def test_affinity_looks_into_its_own_namespace_unless_told_otherwise() -> None:
    other = pod("old", labels={"app": "x"}, on="n3", namespace="other")
    assert "didn't match pod affinity" in placed(RACKS, [other, pod("p", **near("rack", "x"))])["p"]
    named = pod("p", **near("kubernetes.io/hostname", "x", namespaces=["other"]))
    assert placed(RACKS, [other, named]) == {"p": "n3"}
    selected = pod("p", **near("kubernetes.io/hostname", "x", namespaceSelector={"matchLabels": {"team": "t"}}))
    assert placed(RACKS, [other, selected], namespace_labels={"other": {"team": "t"}}) == {"p": "n3"}


@pytest.mark.parametrize(("kind", "expected"), [("podAffinity", "n3"), ("podAntiAffinity", "n0")])
def test_preferred_pod_affinity_attracts_or_repels(kind: str, expected: str) -> None:
    term = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {kind: {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": term}]}}
    assert placed(RACKS, [pod("old", labels={"app": "x"}, on="n3"), pod("p", affinity=affinity)]) == {"p": expected}


@pytest.mark.parametrize(
    ("tolerations", "expected"),
    [
        pytest.param([], TAINTED, id="none"),
        pytest.param([{"key": "gpu", "value": "yes"}], "n1", id="equal"),
        pytest.param([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}], "n1", id="exists"),
        pytest.param([{"operator": "Exists"}], "n1", id="everything"),
        pytest.param([{"key": "gpu", "value": "no"}], TAINTED, id="other value"),
        pytest.param([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], TAINTED, id="other effect"),
    ],
)
def test_taints_keep_pods_away_that_do_not_tolerate_them(tolerations: list[Json], expected: str) -> None:
    nodes = [node("n1", taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])]
    assert placed(nodes, [pod("p", tolerations=tolerations)]) == {"p": expected}


def test_a_soft_taint_makes_a_node_the_last_choice() -> None:
    nodes = [node("n1", taints=[{"key": "old", "effect": "PreferNoSchedule"}]), node("n2")]
    assert placed(nodes, [pod(f"p{i}", gpus=8) for i in range(2)]) == {"p0": "n2", "p1": "n1"}


def test_a_cordoned_node_takes_no_pods() -> None:
    nodes = [node("n1", unschedulable=True), node("n2", taints=[{"key": "t", "effect": "NoExecute"}])]
    assert placed(nodes, [pod("p")]) == {
        "p": "(0/2 nodes are available: 1 node(s) had untolerated taint {t: }, 1 node(s) were unschedulable.)"
    }


def test_host_ports_are_exclusive() -> None:
    containers = [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}]}]
    result = placed([node("n1")], [pod("old", containers=containers, on="n1"), pod("p", containers=containers)])
    assert result == {"p": "(0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.)"}


def test_priority_comes_before_age_and_age_before_name() -> None:
    pods = [pod("c", gpus=8), pod("b", gpus=8), pod("a", gpus=8, priority=10)]
    pods[0]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    pods[1]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:01Z"
    assert placed([node("n1"), node("n2")], pods) == {
        "a": "n1",
        "c": "n2",
        "b": "(0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)",
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"schedulerName": "other"}, id="another scheduler's"),
        pytest.param({"schedulingGates": [{"name": "g"}]}, id="gated"),
        pytest.param({"nodeName": "n0"}, id="bound"),
    ],
)
def test_pods_that_are_not_ours_are_left_alone(change: Json) -> None:
    assert placed(RACKS, [pod("p", **change)]) == {}


def test_pods_that_are_being_deleted_are_left_alone_and_no_nodes_is_said() -> None:
    leaving = pod("p")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert placed(RACKS, [leaving]) == {}
    assert placed([], [pod("p")]) == {"p": "(no nodes available to schedule pods)"}


def test_a_decision_does_not_depend_on_the_order_of_pods_and_nodes() -> None:
    pods = [pod(f"p{i}", gpus=3, labels={"app": "x"}, **near("rack", "x")) for i in range(6)]
    assert placed(RACKS, pods) == placed(RACKS[::-1], pods[::-1])


def test_natural_order_counts() -> None:
    assert sorted(["n10", "n9", "a", "n9b"], key=natural) == ["a", "n9", "n9b", "n10"]
