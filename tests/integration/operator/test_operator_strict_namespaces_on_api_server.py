"""Namespaces with a ResourceQuota, a LimitRange and the Pod Security standard `restricted`: the examples run there."""

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters import kubeconfig_of
from tests.waiting import eventually

from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator
from .pod_security import violations
from .test_operator_on_api_server import report

ROOT = Path(__file__).parents[3]
DEFAULTS = yaml.safe_load((ROOT / "charts" / "unbroken" / "values.yaml").read_text())["defaults"]
LIMITED = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
JsonObject = dict[str, Any]


def example() -> JsonObject:
    """Return the job of examples/digits.yaml."""
    job: JsonObject = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    return job


def chart_arguments(made: Bench) -> tuple[str, ...]:
    """Return the operator's arguments with the defaults of the chart."""
    sidecar, rendezvous = json.dumps(DEFAULTS["sidecarResources"]), json.dumps(DEFAULTS["rendezvousResources"])
    return ("--namespace", made.namespace, "--sidecar-resources", sidecar, "--rendezvous-resources", rendezvous)


async def make_strict(made: Bench) -> None:
    """Make the quota and the range, and wait until the quota is in force."""
    hard = {"requests.cpu": "40", "requests.memory": "64Gi", "limits.cpu": "40", "limits.memory": "64Gi", "pods": "20"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": {"hard": hard}}
    least = {"type": "Container", "min": {"cpu": "50m", "memory": "64Mi"}}
    limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "all"}, "spec": {"limits": [least]}}
    await made.kube.create(made.path("limitranges"), limits)
    await made.kube.create(made.path("resourcequotas"), quota)

    async def look() -> bool:
        found = await made.kube.get(made.path("resourcequotas", "all"))
        return bool((found.get("status") or {}).get("hard"))

    await eventually(look, "a quota in force")


async def all_pods(made: Bench, job: str) -> list[JsonObject]:
    """Return all pods of a job."""
    return (await made.kube.list(made.path("pods"), f"{layout.JOB_LABEL}={job}"))[0]


async def check_accepted(made: Bench) -> None:
    await made.kube.create(made.path(layout.PLURAL), example())
    await made.apply("limited", template={"spec": {"containers": [container(LIMITED)]}})
    # Spares come when these have nodes.
    await made.wait_for_pods(*(f"digits-{number}" for number in range(4)), "limited-0")
    await made.secret("limited")

    async def has_all() -> bool:
        return [len(await all_pods(made, job)) for job in ("digits", "limited")] == [5, 2]

    await eventually(has_all, "a rendezvous for each")
    found = await all_pods(made, "digits")
    trainers = [pod for pod in found if pod["metadata"]["labels"][layout.COMPONENT_LABEL] == layout.TRAINER]
    assert {pod["status"].get("qosClass") for pod in trainers} == {"Guaranteed"}
    assert [said for pod in found for said in violations(pod)] == []
    assert (await made.condition("digits", "PodsReady"))["reason"] != "WriteRefused"


async def check_ipv6(made: Bench) -> None:
    """The operator follows a rendezvous whose pod has an IPv6 address, and nothing else."""
    rendezvous = await made.rendezvous("limited")
    async with rendezvous.serving("::1") as address:
        await made.run_pod("limited-rendezvous-0", address)
        await made.run_pod("limited-0", address)
        pods = [await made.kube.get(made.path("pods", "limited-0"))]
        await rendezvous.say(dataclasses.replace(report(pods, 1), job="limited"))

        async def is_followed() -> bool:
            return bool(rendezvous.observations) and (await made.condition("limited", "Running"))["status"] == "True"

        await eventually(is_followed, "a job that runs")


async def check_refused(made: Bench) -> None:
    """What has no limits is refused here: so the quota is in force, and the operator says what it wants."""
    await made.apply("loose", template={"spec": {"containers": [container({})]}})

    async def look() -> JsonObject | None:
        found = await made.condition("loose", "PodsReady")
        return found if found.get("reason") == "WriteRefused" else None

    message = (await eventually(look, "a refusal"))["message"]
    assert "failed quota: all: must specify" in message
    assert "limits.cpu" in message
    # However often it is tried again: the pod that comes at last is the first.
    quota = await made.kube.get(made.path("resourcequotas", "all"))
    await made.kube.delete(made.path("resourcequotas", "all"), quota["metadata"]["uid"])
    await made.wait_for_pods(*(f"digits-{number}" for number in range(4)), "limited-0", "loose-0")


def container(resources: JsonObject) -> JsonObject:
    """Return a container with these resources."""
    return {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"], "resources": resources}


# Only this profile has the admission plug-ins of both, and QoS classes.
@pytest.mark.cluster
def test_the_example_runs_under_a_quota_a_limit_range_and_the_restricted_standard(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig_of("full"), tmp_path) as made:
            await make_strict(made)
            with operator(made, *chart_arguments(made)):
                await check_accepted(made)
                await check_ipv6(made)
                await check_refused(made)

    asyncio.run(scenario())


def sound_pod() -> JsonObject:
    """Return a pod of the example as a user would write it, without ours."""
    template = example()["spec"]["template"]
    return {"metadata": {"annotations": {}}, "spec": copy.deepcopy(template["spec"])}


def own(pod: JsonObject) -> JsonObject:
    """Return the security context of the container."""
    context: JsonObject = pod["spec"]["containers"][0]["securityContext"]
    return context


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda pod: None, [], id="as it is"),
        pytest.param(lambda pod: pod["spec"].update(hostNetwork=True), ["spec.hostNetwork"], id="host network"),
        pytest.param(
            lambda pod: pod["spec"]["volumes"].append({"name": "h", "hostPath": {"path": "/tmp"}}),
            ["volume h"],
            id="host path",
        ),
        pytest.param(
            lambda pod: pod["spec"].update(securityContext={}),
            ["trainer.runAsNonRoot", "trainer.seccompProfile"],
            id="nothing for the pod",
        ),
        pytest.param(
            lambda pod: pod["spec"]["containers"][0].pop("securityContext"),
            ["trainer.allowPrivilegeEscalation", "trainer.capabilities.drop"],
            id="nothing for the container",
        ),
        pytest.param(lambda pod: own(pod).update(runAsUser=0), ["trainer.runAsUser"], id="root"),
        pytest.param(lambda pod: own(pod).update(privileged=True), ["trainer.privileged"], id="privileged"),
        pytest.param(
            lambda pod: own(pod)["capabilities"].update(add=["SYS_PTRACE"]), ["trainer.capabilities.add"], id="added"
        ),
        pytest.param(
            lambda pod: pod["spec"]["containers"][0].update(ports=[{"containerPort": 1, "hostPort": 1}]),
            ["trainer.hostPort"],
            id="host port",
        ),
    ],
)
def test_what_the_restricted_standard_refuses_is_found(
    change: Callable[[JsonObject], object], expected: list[str]
) -> None:
    pod = sound_pod()
    change(pod)
    assert violations(pod) == expected
