"""Where spare pods are asked to stand, and what is said when they do not (spares.spread)."""

from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import LAYERS, JsonObject, World, a_job, a_node

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout


def rack(name: str, num_nodes: int) -> list[JsonObject]:
    """Return the nodes of a rack, two to an NVLink domain: r1-0 and r1-1 in n1-0, r1-2 and r1-3 in n1-1."""
    return [a_node(f"{name}-{index}", rack=name, nvlink=f"n{name[1:]}-{index // 2}") for index in range(num_nodes)]


class Cluster(World):
    """Nodes that take one pod each; the scheduler goes by the operator's preferences, then by the nodes' order."""

    def schedule(self) -> None:
        """Give each pending pod that a node has room for a node, and run it."""
        for name in sorted(self.pods, key=lambda name: self.pods[name]["metadata"]["uid"]):
            pod = self.pods[name]
            free = [node for node in self.nodes if node not in self.used]
            if pod["status"]["phase"] != "Pending" or pod["metadata"]["labels"][layout.COMPONENT_LABEL] != "trainer":
                continue
            if free:
                pod["spec"]["nodeName"] = max(free, key=lambda node: self.weight(pod, node))
                pod["status"] = {"phase": "Running", "podIP": "127.0.0.9", "conditions": []}
            else:
                refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/0 nodes"}
                pod["status"] = {"phase": "Pending", "conditions": [refusal]}

    @property
    def used(self) -> set[str]:
        """Nodes with a pod."""
        return {pod["spec"]["nodeName"] for pod in self.pods.values() if "nodeName" in pod["spec"] and is_up(pod)}

    def weight(self, pod: JsonObject, node: str) -> int:
        """Return how well a node suits a pod, as the scheduler adds it up."""
        labels = self.nodes[node]["metadata"]["labels"]
        return sum(
            term["weight"]
            for term in node_preferences(pod)
            if all(labels.get(item["key"]) in item["values"] for item in term["preference"]["matchExpressions"])
        )

    def start(self) -> None:
        """Bring the job up until nothing is left to do."""
        for _ in range(3):
            self.settle()
            self.schedule()
        self.run_rendezvous()
        self.train()

    def run_rendezvous(self) -> None:
        (name,) = self.names(layout.RENDEZVOUS)
        self.pods[name]["status"] = {"phase": "Running", "podIP": "127.0.0.8", "conditions": []}

    def train(self, active: list[str] | None = None) -> None:
        """Let the rendezvous say who is active; by default who was made for it."""
        up = [name for name in self.names() if self.pods[name]["status"]["phase"] in ("Running", "Pending")]
        made = {name: self.pods[name]["metadata"]["labels"][layout.ROLE_LABEL] for name in up}
        chosen = [name for name in up if made[name] == "active"] if active is None else active
        self.rendezvous_says(JobPhase.RUNNING, chosen, [name for name in up if name not in chosen])
        self.settle()

    def node_of(self, name: str) -> str:
        return str(self.pods[name]["spec"]["nodeName"])

    @property
    def spread(self) -> str:
        """The message of the condition, "" when it is True."""
        (found,) = (item for item in self.job["status"]["conditions"] if item["type"] == "SparesSpread")
        assert found["reason"] == ("SparesSpread" if found["status"] == "True" else "SparesNotSpread")
        return "" if found["status"] == "True" else str(found["message"])


def is_up(pod: JsonObject) -> bool:
    """Return whether a pod runs."""
    return bool(pod["status"]["phase"] == "Running")


def node_preferences(pod: JsonObject) -> list[JsonObject]:
    """Return the terms of a pod's preferred node affinity."""
    affinity = pod["spec"].get("affinity") or {}
    terms: list[JsonObject] = (affinity.get("nodeAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution", []
    )
    return terms


def cluster(nodes: list[JsonObject], replicas: int, spares: int, **spec: Any) -> Cluster:
    """Return a cluster on which the job trains."""
    fields = {"replicas": replicas, "spares": {"count": spares}, "topology": {"layers": LAYERS}, **spec}
    made = Cluster(a_job(**fields), nodes)
    made.start()
    return made


def interleaved(*racks: list[JsonObject]) -> list[JsonObject]:
    """Return the nodes so that the scheduler fills the racks in turn."""
    return [node for row in zip(*racks, strict=True) for node in row]


def test_spares_are_made_once_the_active_pods_have_nodes() -> None:
    world = Cluster(a_job(topology={"layers": LAYERS}), rack("r1", 4))
    world.settle()
    assert world.names() == ["digits-0", "digits-1"]
    world.schedule()
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.job["status"]["nextPodOrdinal"] == 3


def test_each_domain_with_active_pods_gets_a_spare() -> None:
    world = cluster(interleaved(rack("r1", 3), rack("r2", 3), rack("r3", 3)), 3, 3)
    assert [world.node_of(f"digits-{number}") for number in range(6)] == [
        "r1-0",
        "r2-0",
        "r3-0",
        "r1-1",
        "r2-1",
        "r3-1",
    ]
    assert world.spread == ""


def test_an_unserved_rack_comes_before_an_unserved_domain_of_a_served_one() -> None:
    nodes = [*rack("r1", 6), *rack("r2", 2)]
    order = [nodes[index] for index in (0, 2, 4, 6, 1, 3, 5, 7)]
    world = cluster(order, 4, 2)
    assert {world.node_of("digits-4"), world.node_of("digits-5")} == {"r1-1", "r2-1"}
    assert world.spread == (
        "nvlink: no spare pod in n1-1, n1-2. Raise spares.count from 2 to 4: one for each domain with active pods"
    )


def test_no_room_is_said_and_taken_back_when_a_spare_could_be_placed() -> None:
    racks = [*rack("r1", 2), *rack("r2", 2), *rack("r3", 2)]
    # Both racks are full of active pods.
    world = cluster(racks, 4, 2)
    assert {world.node_of("digits-4"), world.node_of("digits-5")} == {"r3-0", "r3-1"}
    assert world.spread == (
        "rack: no spare pod in r1, r2; "
        "nvlink: no spare pod in n1-0, n2-0. Free or add a node there, then delete a spare pod elsewhere: the next "
        "one is made there"
    )
    (event,) = [item for item in world.events.values() if item["reason"] == "SparesNotSpread"]
    assert event["type"] == "Normal"
    # The administrator adds a node to each rack and deletes the spares.
    world.nodes |= {"r1-2": a_node("r1-2", rack="r1", nvlink="n1-0"), "r2-2": a_node("r2-2", rack="r2", nvlink="n2-0")}
    for name in ("digits-4", "digits-5"):
        world.remove_pod(name)
    world.settle()
    assert world.spread != "", "nothing is judged while spares are missing"
    world.schedule()
    world.train(["digits-0", "digits-1", "digits-2", "digits-3"])
    assert {world.node_of("digits-6"), world.node_of("digits-7")} == {"r1-2", "r2-2"}
    assert world.spread == ""
    assert len([item for item in world.events.values() if item["reason"] == "SparesNotSpread"]) == 1


def test_spares_that_no_node_takes_are_told_as_missing_where_active_pods_are() -> None:
    world = cluster(rack("r1", 2), 2, 1)
    assert world.spread.startswith("rack: no spare pod in r1; nvlink: no spare pod in n1-0. Free or add a node there")
    assert world.condition("PodsReady") == ("False", "PodsUnschedulable")


@pytest.mark.parametrize("is_reported", [pytest.param(True, id="reported"), pytest.param(False, id="not reported yet")])
def test_the_spare_that_follows_a_promoted_one_goes_where_that_one_was(is_reported: bool) -> None:
    world = cluster(interleaved(rack("r1", 4), rack("r2", 4)), 2, 2)
    assert [world.node_of(f"digits-{number}") for number in range(4)] == ["r1-0", "r2-0", "r1-1", "r2-1"]
    world.end_pod("digits-1", "Failed")
    if is_reported:
        world.train(["digits-0", "digits-3"])
    world.settle()
    assert world.created[-1] == "digits-4"
    best = max(node_preferences(world.pods["digits-4"]), key=lambda term: int(term["weight"]))
    assert [item["values"] for item in best["preference"]["matchExpressions"]] == [["r2"], ["n2-0"]]


def test_a_pod_that_no_spare_may_replace_is_missed_where_it_was() -> None:
    layers = [{**LAYERS[0], "replaceFrom": False}, LAYERS[1]]
    nodes = [a_node(f"r1-{index}", rack="r1", nvlink="n1") for index in range(4)]
    nodes += [a_node(f"r2-{index}", rack="r2", nvlink="n2") for index in range(2)]
    world = cluster([nodes[0], nodes[4], *nodes[1:4], nodes[5]], 2, 1, topology={"layers": layers})
    assert [world.node_of(f"digits-{number}") for number in range(3)] == ["r1-0", "r2-0", "r1-1"]
    world.end_pod("digits-1", "Failed")
    world.settle()
    best = max(node_preferences(world.pods["digits-3"]), key=lambda term: int(term["weight"]))
    assert [item["values"] for item in best["preference"]["matchExpressions"]] == [["r2"], ["n2"]]


def test_nothing_is_judged_while_a_promoted_spare_is_replaced() -> None:
    world = cluster(interleaved(rack("r1", 4), rack("r2", 4)), 2, 2)
    world.end_pod("digits-1", "Failed")
    world.train(["digits-0", "digits-3"])
    assert world.spread == ""
    world.schedule()
    world.train(["digits-0", "digits-3"])
    assert world.nodes[world.node_of("digits-4")]["metadata"]["labels"]["example.com/rack"] == "r2"
    assert world.spread == ""
    assert not [item for item in world.events.values() if item["reason"] == "SparesNotSpread"]


def test_the_nearest_spare_serves_where_a_domain_has_no_label() -> None:
    nodes = [a_node("a", rack="r1"), a_node("b"), a_node("c", rack="r1"), a_node("d", rack="r1")]
    world = cluster(nodes, 2, 1)
    assert node_preferences(world.pods["digits-2"]) == [
        {
            "weight": 100,
            "preference": {"matchExpressions": [{"key": "example.com/rack", "operator": "In", "values": ["r1"]}]},
        }
    ]
    assert world.spread == ""


def test_a_layer_of_single_nodes_is_not_judged() -> None:
    layers = [*LAYERS, {"name": "host", "label": layout.HOSTNAME_LABEL}]
    nodes = rack("r1", 4)
    for node in nodes:
        node["metadata"]["labels"][layout.HOSTNAME_LABEL] = node["metadata"]["name"]
    world = cluster(nodes, 3, 1, topology={"layers": layers})
    assert world.spread == (
        "nvlink: no spare pod in n1-0. Raise spares.count from 1 to 2: one for each domain with active pods"
    )


def test_spares_that_may_stand_anywhere_wait_for_nobody_and_take_the_condition_back() -> None:
    spares = {"count": 1, "spread": "Anywhere"}
    world = Cluster(a_job(topology={"layers": LAYERS}, spares=spares), rack("r1", 4))
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.pods["digits-2"]["spec"]["affinity"] == {}
    world.start()
    assert not [item for item in world.job["status"]["conditions"] if item["type"] == "SparesSpread"]

    full = cluster(rack("r1", 2), 2, 1)
    assert full.spread != ""
    full.job["spec"]["spares"] = spares
    full.settle()
    assert full.spread == ""


def test_a_spare_is_told_a_few_domains_however_many_there_are() -> None:
    nodes = [a_node(f"n{number}", rack=f"r{number}", nvlink=f"n{number}") for number in range(60)]
    world = cluster(nodes, 30, 5)
    assert {world.node_of(f"digits-{number}") for number in range(30, 35)} < {f"n{number}" for number in range(30, 60)}
    assert "Raise spares.count from 5 to 30" in world.spread
    assert "r25, r26, r27, r28 and" not in world.spread, "five names at most"
    assert [len(node_preferences(world.pods[f"digits-{number}"])) for number in range(30, 35)] == [16] * 5
