"""What no node has, in words."""

from fractions import Fraction
from typing import Any

import pytest

from unbroken_operator.api.quantities import quantity
from unbroken_operator.decisions.reporting.unschedulable import missing_on_nodes
from unbroken_operator.decisions.snapshot import NodeView

NODES = {
    "a": NodeView("a", {"pool": "cpu"}, True, {"cpu": "7500m", "memory": "16Gi"}),
    "b": NodeView("b", {"pool": "small"}, True, {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "4"}),
    "c": NodeView("c", {}, False),
}


def wants(**spec: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", "resources": spec.pop("resources", {})}, {"name": "other"}], **spec}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        pytest.param(wants(), "not ready: c", id="nothing asked for"),
        pytest.param(
            wants(nodeSelector={"pool": "gpu"}),
            "no node has the label pool=gpu (seen cpu, small); not ready: c",
            id="another value",
        ),
        pytest.param(
            wants(nodeSelector={"zone": "x"}), "no node has the label zone=x (seen none); not ready: c", id="no label"
        ),
        pytest.param(wants(nodeSelector={"pool": "cpu"}), "not ready: c", id="a label that a node bears"),
        pytest.param(
            wants(resources={"limits": {"nvidia.com/gpu": 8}}),
            "each pod needs 8 nvidia.com/gpu, the largest node has 4; not ready: c",
            id="too many devices",
        ),
        pytest.param(
            wants(resources={"limits": {"example.com/nic": "1"}}),
            "each pod needs 1 example.com/nic, the largest node has none; not ready: c",
            id="a device that no node has",
        ),
        pytest.param(
            wants(resources={"limits": {"cpu": "64"}, "requests": {"cpu": "7.5", "memory": "16Gi"}}),
            "not ready: c",
            id="requests come before limits",
        ),
    ],
)
def test_each_wish_that_no_node_meets_is_named_with_what_there_is(spec: dict[str, Any], text: str) -> None:
    assert missing_on_nodes(spec, NODES) == text


def test_a_cluster_without_nodes_says_so() -> None:
    assert missing_on_nodes(wants(), {}) == "the cluster has no nodes"


def test_nothing_is_said_where_every_wish_is_met() -> None:
    assert missing_on_nodes(wants(), {"a": NODES["a"]}) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), (8, 8), ("500m", Fraction(1, 2)), ("2Gi", 2**31), ("1.5k", 1500), ("x", None), ("1Xi", None)],
)
def test_quantities_are_exact(text: object, value: object) -> None:
    assert quantity(text) == value


NONSENSE = [
    "abc",
    7,
    True,
    None,
    [],
    {},
    ["a"],
    [None],
    {"a": {"b": 1}},
    {"": ""},
    "9" * 5000,
    "1" * 400 + ".5",
    10**400,
]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: str(value)[:12])
def test_whatever_a_template_says_the_job_has_a_status(value: object) -> None:
    """Each of them got past the API server, and kept the operator from writing this job's status at all."""
    assert missing_on_nodes(wants(nodeSelector=value), NODES).endswith("not ready: c")
    for resources in (value, {"limits": value}, {"requests": {"memory": value}}, {"limits": {"cpu": value}}):
        assert missing_on_nodes(wants(resources=resources), NODES).endswith("not ready: c")
    assert missing_on_nodes({"containers": value}, NODES, value).endswith("not ready: c")


@pytest.mark.parametrize(
    "text", ["9" * 5000, "1" * 400 + ".5", 10**400, None, [], {}, "1" * 65], ids=lambda text: str(text)[:12]
)
def test_what_is_too_long_for_a_quantity_is_none(text: object) -> None:
    assert quantity(text) is None
    assert quantity("9" * 60 + "Ei") is not None
    assert quantity(10**5000) is None
