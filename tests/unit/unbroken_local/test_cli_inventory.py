"""The nodes file."""

from pathlib import Path
from typing import Any

import pytest

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.inventory import parse_inventory, read_inventory
from unbroken_local.kube.quantity import parse_quantity
from unbroken_local.kubelet.images import ImageRule
from unbroken_local.kubelet.node import NodeSpec

EXAMPLE = Path(__file__).parents[3] / "examples" / "nodes-10.yaml"


def test_a_node_has_what_the_file_says_and_defaults_for_cpu_memory_and_pods() -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    allocatable = {"nvidia.com/gpu": 8, "cpu": "500m"}
    data = {"name": "n1", "labels": {"rack": "a", "slot": 7}, "allocatable": allocatable, "taints": [taint]}
    assert parse_inventory([data]).nodes == (
        NodeSpec(
            name="n1",
            labels={"rack": "a", "slot": "7"},
            allocatable={"cpu": "500m", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"},
            taints=(taint,),
        ),
    )


def test_a_mapping_may_bring_images() -> None:
    image = {"pattern": "team/x:*", "env": {"A": 1}, "path": ["/p"], "folders": {"/app": "/src"}, "entrypoint": ["sh"]}
    data = {"nodes": [{"name": "n1"}], "images": [image]}
    assert parse_inventory(data).images == (
        ImageRule("team/x:*", env={"A": "1"}, path=("/p",), folders={"/app": "/src"}, entrypoint=("sh",)),
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "nodes: want a list, got nothing"),
        ("text", "nodes: want a list, got str 'text'"),
        ([], "nodes: want 1 to 200 nodes, got 0"),
        (["n1"], "nodes[0]: want a mapping, got str 'n1'"),
        ([{}], "nodes[0].name: want a DNS name"),
        ([{"name": "Node_1"}], "got 'Node_1'"),
        ([{"name": "a"}, {"name": "a"}], "nodes[1].name: want a name of its own, got 'a' again"),
        ([{"name": "a", "gpus": 8}], "nodes[0].gpus: unknown field; want only allocatable, labels, name, taints"),
        ([{"name": "a", "labels": ["x"]}], "nodes[0].labels: want a mapping, got list ['x']"),
        ([{"name": "a", "labels": {"x": True}}], "nodes[0].labels.x: want a label value"),
        ([{"name": "a", "labels": {"x": "a b"}}], "got 'a b'"),
        ([{"name": "a", "labels": {"/x": "y"}}], "nodes[0].labels: want label names"),
        ([{"name": "a", "allocatable": {"cpu": "many"}}], "nodes[0].allocatable.cpu: want a quantity"),
        ([{"name": "a", "allocatable": {"cpu": -1}}], "got -1"),
        ([{"name": "a", "allocatable": {"cpu": True}}], "got True"),
        ([{"name": "a", "taints": [{"key": "k"}]}], "nodes[0].taints[0].effect: want one of NoSchedule"),
        ([{"name": "a", "taints": [{"effect": "NoExecute"}]}], "nodes[0].taints[0].key: want a name"),
        ({"nodes": [{"name": "a"}], "image": []}, "file.image: unknown field; want only images, nodes"),
        ({"nodes": [{"name": "a"}], "images": [{}]}, "images[0].pattern: want a pattern"),
    ],
)
def test_a_bad_file_is_refused_with_what_where_seen_and_wanted(data: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_inventory(data)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_or_is_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: want a readable file, got No such file"):
        read_inventory(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("- {name: a")
    with pytest.raises(InputError, match=r"broken\.yaml: want YAML, got"):
        read_inventory(broken)


def test_the_example_has_two_racks_four_nvlink_domains_and_two_cpu_nodes() -> None:
    nodes = read_inventory(EXAMPLE).nodes
    domains: dict[str, list[str]] = {}
    for node in nodes:
        for layer in ("unbroken.dev/rack", "unbroken.dev/nvlink-domain"):
            if layer in node.labels:
                domains.setdefault(node.labels[layer], []).append(node.name)
    assert len(nodes) == 10
    assert {name: len(members) for name, members in domains.items()} == {
        "rack-a": 5, "rack-b": 5, "nvl-a1": 2, "nvl-a2": 2, "nvl-b1": 2, "nvl-b2": 2,
    }  # fmt: skip
    has_gpus = [int(node.allocatable.get("nvidia.com/gpu", "0")) > 0 for node in nodes]
    assert has_gpus == [True] * 8 + [False] * 2


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), (8, 8), ("500m", 0.5), ("2Gi", 2**31), ("1e3", 1000), ("1.5k", 1500), (".5", 0.5)]
)
def test_quantities_are_exact(text: object, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KiB", "1e3k", "--1", None, True, "nan"])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(InputError, match="want a number"):
        parse_quantity(text)
