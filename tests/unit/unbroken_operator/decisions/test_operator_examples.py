"""The examples of jobs in queues: sound jobs, whose numbers are those that the queue is told."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.unbroken_operator.operator_world import World

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import ValidSpec, admit

EXAMPLES = Path(__file__).parents[4] / "examples"
KNOWN = (layout.KIND, "PersistentVolumeClaim", "ClusterRole", "ClusterRoleBinding")
"""These are there where the operator is."""
FOREIGN = {"PodGroup": "podgroups.scheduling.x-k8s.io", "AppWrapper": "appwrappers.workload.codeflare.dev"}
GROUP_LABEL = "scheduling.x-k8s.io/pod-group"


def objects(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of an example by kind."""
    return {item["kind"]: item for item in yaml.safe_load_all((EXAMPLES / name).read_text())}


def world_of(job: dict[str, Any]) -> World:
    """Return a world in which the operator has made the objects of the job."""
    metadata = {"namespace": "ml", "uid": "uid-of-digits", "generation": 1, "resourceVersion": "1", **job["metadata"]}
    world = World({**job, "metadata": metadata})
    assert isinstance(admit(world.job), ValidSpec)
    world.settle()
    return world


@pytest.mark.parametrize("name", ["digits.yaml", "digits-coscheduling.yaml"])
def test_the_job_of_an_example_is_admitted(name: str) -> None:
    assert world_of(objects(name)[layout.KIND]).condition("Admitted")[0] == "True"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("digits*.yaml")))
def test_an_example_creates_nothing_where_a_kind_of_others_is_missing(name: str) -> None:
    """kubectl creates what it knows and fails at the rest: a job without its group would be left."""
    wanted = [FOREIGN[kind] for kind in objects(name) if kind not in KNOWN]
    header = (EXAMPLES / name).read_text()
    checks = "".join(f"kubectl get crd {crd} && " for crd in wanted)
    assert f"#   {checks}kubectl apply -f examples/{name}\n" in header


def test_kueue_is_told_of_as_many_pods_as_the_job_makes() -> None:
    (component,) = objects("digits-kueue.yaml")["AppWrapper"]["spec"]["components"]
    (pod_set,) = component["podSets"]
    job = component["template"]
    found: Any = {"template": job}
    for part in pod_set["path"].split("."):
        found = found[part]
    assert found == job["spec"]["template"]
    world = world_of(job)
    assert len(world.names()) == pod_set["replicas"]
    world.run_pods()
    world.end_pod("digits-1", "Failed")
    world.settle()
    assert "digits-1" in [action.name for action in world.deleted], "a failed pod would count against the job"


def members(world: World) -> list[str]:
    """Return the training pods of the group."""
    return [name for name in world.names() if GROUP_LABEL in world.pods[name]["metadata"]["labels"]]


def test_the_pods_of_a_gang_bear_its_name_and_the_job_can_train_with_its_number() -> None:
    example = objects("digits-coscheduling.yaml")
    group, job = example["PodGroup"], example[layout.KIND]
    world = world_of(job)
    assert group["spec"]["minMember"] == job["spec"].get("minReplicas", job["spec"]["replicas"])
    active = [f"digits-{number}" for number in range(4)]
    assert world.names() == active, "spares take no node that the group may need"
    for name in active:
        pod = world.pods[name]
        assert pod["metadata"]["labels"][GROUP_LABEL] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == job["spec"]["template"]["spec"]["schedulerName"]
    world.run_pods()
    world.settle()
    world.run_pods()
    spares = ["digits-4", "digits-5"]
    assert members(world) == active, "a spare waits for nobody"
    world.rendezvous_says(JobPhase.RUNNING, active, spares)
    world.settle()
    assert members(world) == active
    world.end_pod("digits-1", "Failed")
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-2", "digits-3", "digits-4"], ["digits-5"])
    world.settle()
    assert {name for name in members(world) if name != "digits-1"} == {"digits-0", "digits-2", "digits-3", "digits-4"}
    assert "digits-6" in world.names(), "its replacement is a spare, and held back by no group"
    rendezvous = world.pods["digits-rendezvous-0"]
    num_left, num_free = job["spec"]["replicas"] - 2, 1
    assert num_left + num_free >= group["spec"]["minMember"], "two nodes lost, one free: its pod must not wait"
    assert GROUP_LABEL not in rendezvous["metadata"]["labels"], "it must run before, and goes by itself"
