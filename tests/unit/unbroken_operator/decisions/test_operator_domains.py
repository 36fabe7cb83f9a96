"""Which labels say in which domain a pod is, and the presets of platforms."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, a_node, running_world

from unbroken_operator.api.models import PRESETS, TopologyPreset
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec, admit

RACK = "example.com/rack"
TOPOLOGY = Path(__file__).parents[4] / "docs" / "topology.md"


def world_of(source: str | None, labels: dict[str, str], annotations: dict[str, str] | None = None) -> World:
    """Return a running job whose first pod bears these, on a node in rack r1."""
    layer: dict[str, Any] = {"name": "rack", "label": RACK}
    layer |= {} if source is None else {"source": source}
    world = running_world(topology={"layers": [layer]})
    world.pods["digits-0"]["metadata"]["labels"] |= labels
    world.pods["digits-0"]["metadata"].setdefault("annotations", {}).update(annotations or {})
    world.settle()
    return world


def told(world: World) -> tuple[str, str, str]:
    """Return status, reason and message of TopologyKnown."""
    (found,) = [item for item in world.job["status"]["conditions"] if item["type"] == "TopologyKnown"]
    return found["status"], found["reason"], found["message"]


def domains_sent(world: World) -> list[tuple[str, ...]]:
    """Return the domains of the pods as the rendezvous was told them last."""
    observation = world.pushed[-1][2]
    return [pod.domains for pod in sorted(observation.pods.values(), key=lambda pod: pod.pod)]


@pytest.mark.parametrize(
    ("source", "labels", "annotations", "domain"),
    [
        (None, {}, {}, "r1"),
        ("Auto", {RACK: "r7"}, {}, "r7"),
        (None, {RACK: "r7"}, {}, "r7"),
        (None, {}, {RACK: "r8"}, "r8"),
        (None, {RACK: "r7"}, {RACK: "r8"}, "r7"),
        ("Node", {RACK: "r7"}, {RACK: "r8"}, "r1"),
        ("Pod", {RACK: "r7"}, {}, "r7"),
        ("Pod", {}, {RACK: "r8"}, "r8"),
        ("Pod", {}, {}, ""),
    ],
)
def test_the_pods_label_comes_before_its_annotation_and_that_before_the_nodes_label(
    source: str | None, labels: dict[str, str], annotations: dict[str, str], domain: str
) -> None:
    world = world_of(source, labels, annotations)
    others = "" if source == "Pod" else "r1"
    assert domains_sent(world) == [(domain,), (others,), (others,)]


def test_a_pod_that_contradicts_its_node_wins_and_a_condition_says_so() -> None:
    status, reason, message = told(world_of(None, {RACK: "r7"}))
    assert (status, reason) == ("False", "TopologyLabelsContradict")
    assert f"{RACK}=r7 on pod digits-0, but r1 on its node a: the pod's counts" in message


def test_a_layer_of_pods_names_the_pods_that_lack_its_label() -> None:
    status, reason, message = told(world_of("Pod", {RACK: "r7"}))
    assert (status, reason) == ("False", "TopologyLabelMissing")
    assert f"label {RACK} on pod digits-1, pod digits-2" in message


@pytest.mark.parametrize("value", ["", "x" * 64, "x" * 1_000_000, "a\x1b[2J", "a b", "../..", "ä", "-"])
def test_an_annotation_that_is_no_label_value_says_nothing(value: str) -> None:
    assert domains_sent(world_of(None, {}, {RACK: value}))[0] == ("r1",)


def test_a_pod_of_another_rack_on_a_node_of_this_one_is_told_where_it_contradicts_the_tree() -> None:
    layers = [{"name": "rack", "label": RACK}, {"name": "nvlink", "label": "example.com/nvlink"}]
    world = running_world(topology={"layers": layers})
    world.pods["digits-0"]["metadata"]["labels"][RACK] = "r7"
    world.settle()
    assert "example.com/nvlink=n1: must be in one rack" in told(world)[2]
    assert "pod digits-0" in told(world)[2]


@pytest.mark.parametrize("preset", TopologyPreset)
def test_a_preset_is_a_list_of_layers_with_labels_of_nodes(preset: TopologyPreset) -> None:
    verdict = admit(a_job(topology={"preset": preset.value}))
    assert isinstance(verdict, ValidSpec)
    assert [(layer.name, layer.label) for layer in verdict.settings.layers] == [
        (layer.name, layer.label) for layer in PRESETS[preset]
    ]
    first = PRESETS[preset][0]
    node = a_node("a")
    node["metadata"]["labels"] = {layer.label: f"{layer.name}-1" for layer in PRESETS[preset]}
    world = World(a_job(topology={"preset": preset.value}), nodes=[node])
    world.settle()
    affinity = world.pods["digits-0"]["spec"]["affinity"]["podAffinity"]
    terms = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["podAffinityTerm"]["topologyKey"] == first.label


@pytest.mark.parametrize("preset", TopologyPreset)
def test_the_docs_say_who_sets_the_labels_of_a_preset(preset: TopologyPreset) -> None:
    (row,) = (line for line in TOPOLOGY.read_text().splitlines() if line.startswith(f"| `{preset.value}` |"))
    assert "](https://" in row
    for layer in PRESETS[preset]:
        assert f"`{layer.name}`" in row
    assert f"`{PRESETS[preset][0].label}`" in row, "the first whole, the others from where they differ"


def test_a_preset_beside_layers_is_refused() -> None:
    verdict = admit(a_job(topology={"preset": "GKE", "layers": [{"name": "rack", "label": RACK}]}))
    assert isinstance(verdict, InvalidSpec)
    assert verdict.message.startswith("spec.topology.preset: GKE is a list of layers, and spec.topology.layers is one")


def test_the_scheduler_is_not_given_labels_that_only_pods_have() -> None:
    layers = [{"name": "rack", "label": RACK, "source": "Pod"}]
    world = World(a_job(topology={"layers": layers}))
    world.settle()
    assert "podAffinity" not in world.pods["digits-0"]["spec"].get("affinity", {})
