"""Resources, priority, pull secrets and places of our own containers and pods."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.api import layout
from unbroken_operator.config import parse

DEFAULTS = {"requests": {"cpu": "50m"}}


def pods_of(options: dict[str, Any] | None = None, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specs of a training pod and of the rendezvous pod of a new job."""
    world = World(a_job(**spec))
    world.options = type(world.options)("sidecar:1", **(options or {}))
    world.settle()
    return world.pods["digits-0"]["spec"], world.pods["digits-rendezvous-0"]["spec"]


def resources_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the resources of our own containers by name."""
    items = [*pod.get("initContainers", ()), *pod["containers"]]
    return {item["name"]: item.get("resources") for item in items if item["name"] != CONTAINER["name"]}


def template(pod: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    """Return a pod template with more in it."""
    return {"spec": {"containers": [{**CONTAINER, **container}], **(pod or {})}}


def test_resources_are_the_jobs_else_the_operators_else_none() -> None:
    options = {"sidecar_resources": DEFAULTS, "rendezvous_resources": {"limits": {"memory": "1Gi"}}}
    trainer, rendezvous = pods_of(options)
    assert set(map(str, resources_of(trainer).values())) == {str(DEFAULTS)}
    assert resources_of(rendezvous) == {"rendezvous": {"limits": {"memory": "1Gi"}}}
    own = {"resources": {"limits": {"cpu": "2"}}}
    trainer, rendezvous = pods_of(options, sidecar=own, rendezvous=own)
    assert set(map(str, resources_of(trainer).values())) == {str(own["resources"])}
    assert resources_of(rendezvous) == {"rendezvous": own["resources"]}
    trainer, rendezvous = pods_of()
    assert set(resources_of(trainer).values()) == set(resources_of(rendezvous).values()) == {None}


@pytest.mark.parametrize(
    ("resources", "is_guaranteed"),
    [
        ({"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}}, True),
        ({"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}}, True),
        ({"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "4"}}, False),
        ({"limits": {"memory": "64Gi"}}, False),
        ({}, False),
    ],
)
def test_a_guaranteed_pod_stays_guaranteed(resources: dict[str, Any], is_guaranteed: bool) -> None:
    trainer, _ = pods_of({"sidecar_resources": DEFAULTS}, template=template(resources=resources))
    for found in resources_of(trainer).values():
        assert (
            found.get("limits") == found["requests"] and set(found["requests"]) == {"cpu", "memory"}
        ) is is_guaranteed


@pytest.mark.parametrize(
    ("defaults", "resources", "expected"),
    [
        pytest.param(DEFAULTS, {"limits": {"memory": "64Gi"}}, {**DEFAULTS, "limits": {"memory": "256Mi"}}, id="one"),
        pytest.param(
            {"requests": {"cpu": "0.5", "memory": "64Mi"}},
            {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "4"}},
            {"requests": {"cpu": "0.5", "memory": "64Mi"}, "limits": {"cpu": "0.5", "memory": "256Mi"}},
            id="never below the request",
        ),
        pytest.param(
            {"limits": {"cpu": "2"}},
            {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "4"}},
            {"limits": {"cpu": "2", "memory": "256Mi"}},
            id="the operator's own limit stays",
        ),
        pytest.param(DEFAULTS, {"limits": {"nvidia.com/gpu": "8"}}, DEFAULTS, id="none"),
    ],
)
def test_where_all_containers_have_a_limit_so_has_the_agent(
    defaults: dict[str, Any], resources: dict[str, Any], expected: dict[str, Any]
) -> None:
    trainer, _ = pods_of({"sidecar_resources": defaults}, template=template(resources=resources))
    assert list(resources_of(trainer).values()) == [expected, expected]


def test_a_container_without_a_limit_keeps_the_agent_without_one() -> None:
    other = {"name": "other", "image": "other:1"}
    limited = {**CONTAINER, "resources": {"limits": {"cpu": "8", "memory": "64Gi"}}}
    trainer, _ = pods_of({"sidecar_resources": DEFAULTS}, template={"spec": {"containers": [limited, other]}})
    assert resources_of(trainer)["unbroken-agent"] == DEFAULTS


def test_the_rendezvous_gets_pull_secrets_account_and_priority_of_the_template_or_its_own() -> None:
    pod = {"imagePullSecrets": [{"name": "pull"}], "serviceAccountName": "team", "priorityClassName": "high"}
    _, rendezvous = pods_of(template=template(pod))
    assert {key: rendezvous[key] for key in pod} == pod
    assert rendezvous["automountServiceAccountToken"] is False
    own = {"imagePullSecrets": ["other"], "serviceAccountName": "mine", "priorityClassName": "low"}
    _, rendezvous = pods_of(template=template(pod), rendezvous=own)
    assert rendezvous["imagePullSecrets"] == [{"name": "other"}]
    assert (rendezvous["serviceAccountName"], rendezvous["priorityClassName"]) == ("mine", "low")


def test_the_rendezvous_prefers_a_node_without_the_jobs_pods_and_without_gpus() -> None:
    _, rendezvous = pods_of()
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    (apart,) = rendezvous["affinity"]["podAntiAffinity"][key]
    selector = {layout.JOB_LABEL: "digits", layout.COMPONENT_LABEL: layout.TRAINER}
    assert apart["podAffinityTerm"]["labelSelector"] == {"matchLabels": selector}
    (elsewhere,) = rendezvous["affinity"]["nodeAffinity"][key]
    assert {item["operator"] for item in elsewhere["preference"]["matchExpressions"]} == {"DoesNotExist"}


@pytest.mark.parametrize("text", ["x", "[]", '{"request": {}}', '{"limits": 1}'])
def test_resources_on_the_command_line_are_checked(text: str, tmp_path: Path) -> None:
    (tmp_path / "config").touch()
    options = ["--all-namespaces", "--kubeconfig", str(tmp_path / "config")]
    with pytest.raises(InputError, match=r"^--sidecar-resources: "):
        parse([*options, "--sidecar-resources", text])
    assert parse([*options, "--sidecar-resources", '{"limits": {"cpu": "1"}}']).sidecar_resources == {
        "limits": {"cpu": "1"}
    }


def waiting_world() -> World:
    """Return a world with a job whose rendezvous waits for a node that does not exist."""
    world = World(a_job(rendezvous={"nodeSelector": {"pool": "typo"}}))
    world.settle()
    world.pods["digits-rendezvous-0"]["status"] = {"phase": "Pending"}
    return world


@pytest.mark.parametrize(
    "change",
    [
        {"rendezvous": {"nodeSelector": {"pool": "cpu"}}},
        {"rendezvous": {"image": "sidecar:2"}},
        {"sidecar": {"image": "sidecar:2"}},
        {"template": template({"imagePullSecrets": [{"name": "pull"}]})},
    ],
)
def test_a_rendezvous_that_has_not_started_is_made_anew_from_a_corrected_spec(change: dict[str, Any]) -> None:
    world = waiting_world()
    world.job["spec"] |= change
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert world.names(layout.RENDEZVOUS) == ["digits-rendezvous-1"]


def test_a_rendezvous_that_waits_or_works_is_not_made_anew_for_nothing() -> None:
    world = waiting_world()
    world.job["spec"] |= {"replicas": 2, "template": template(image="torch:3")}
    world.settle()
    assert world.names(layout.RENDEZVOUS) == ["digits-rendezvous-0"], "its own part of the spec is the same"
    world.pods["digits-rendezvous-0"]["status"] = {"phase": "Running", "podIP": "10.0.0.9"}
    world.job["spec"]["rendezvous"] = {"nodeSelector": {"pool": "cpu"}}
    world.settle()
    assert world.names(layout.RENDEZVOUS) == ["digits-rendezvous-0"], "it works: it stays where it is"
