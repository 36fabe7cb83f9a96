"""NVSentinel's DrainRequests on real API servers: served with the rights that the chart gives, and with no others.

The modern control plane of the tests has no evictions.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters import kubeconfig_of
from tests.integration.chart.test_chart import CHART, REGISTRY, helm_or_skip, run, service_account_kubeconfig
from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound, KubeUnavailable
from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.drains.requests import GROUP_VERSION, PLURAL

from .operator_bench import CRDS, Bench, bench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = "drained"
PLACES = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "CustomResourceDefinition": CRDS,
}
TRAINS = {"unbroken.dev/job": "digits", "unbroken.dev/component": "trainer", "unbroken.dev/role": "active"}


async def install(made: Bench, helm: str) -> str:
    """Create what the chart has for drains, but for the Deployment; return the service account."""
    words = [f"registry={REGISTRY}", "drains.enabled=true", f"drains.namespace={made.namespace}"]
    options = ["--namespace", made.namespace, "--show-only", "templates/drains.yaml"]
    sets = [word for option in words for word in ("--set", option)]
    done = await asyncio.to_thread(run, helm, "template", made.namespace, str(CHART), *options, *sets)
    assert done.returncode == 0, done.stderr
    account = ""
    for item in yaml.safe_load_all(done.stdout):
        if item and item["kind"] in PLACES:
            with contextlib.suppress(KubeConflict):
                await made.kube.create(PLACES[item["kind"]].format(made.namespace), item)
            account = item["metadata"]["name"] if item["kind"] == "ServiceAccount" else account

    async def is_served() -> bool:
        try:
            await made.kube.list(requests_of(made))
        except (KubeNotFound, KubeUnavailable):
            return False
        return True

    await eventually(is_served, "the kind DrainRequest")
    return account


def requests_of(made: Bench) -> str:
    return collection_path(PLURAL, made.namespace, GROUP_VERSION)


@contextlib.contextmanager
def drains(made: Bench, kubeconfig: Path, *arguments: str) -> Iterator[Path]:
    """Run the program; yield its log."""
    log = made.output / "drains.log"
    command = [sys.executable, "-m", "unbroken_operator.drains", "--namespace", made.namespace]
    command += ["--every-seconds", "0.3", "--kubeconfig", str(kubeconfig), *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ})
        try:
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            assert process.wait(30) == 0, log.read_text()


async def add_pod(made: Bench, name: str, node: str, labels: dict[str, str]) -> None:
    container = {"name": "c", "image": "x"}
    metadata = {"name": name, "labels": labels}
    spec = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 1}
    await made.kube.create(made.path("pods"), {"metadata": metadata, "spec": spec})
    await made.run_pod(name, "10.0.0.1")


async def ask(made: Bench, name: str, spec: dict[str, Any]) -> None:
    item = {"apiVersion": GROUP_VERSION, "kind": "DrainRequest", "metadata": {"name": name}, "spec": spec}
    await made.kube.create(requests_of(made), item)


async def said(made: Bench, name: str) -> tuple[str, str, str]:
    """Return status, reason and message of DrainComplete."""
    item = await made.kube.get(f"{requests_of(made)}/{name}")
    for condition in (item.get("status") or {}).get("conditions") or ():
        if condition["type"] == "DrainComplete":
            return condition["status"], condition["reason"], condition["message"]
    return "", "", ""


async def is_ending(made: Bench, name: str) -> bool:
    """Return whether a pod is told to end, or gone."""
    try:
        return "deletionTimestamp" in (await made.kube.get(made.path("pods", name)))["metadata"]
    except KubeNotFound:
        return True


async def bury(made: Bench, name: str) -> None:
    """Stand in for the kubelet of a pod that was told to end."""

    async def look() -> bool:
        return await is_ending(made, name)

    await eventually(look, f"the end of {name}", describe=made.operator_log)
    with contextlib.suppress(KubeNotFound):
        pod = await made.kube.get(made.path("pods", name))
        await made.kube.delete(made.path("pods", name), pod["metadata"]["uid"], is_forced=True)


@contextlib.asynccontextmanager
async def served(kubeconfig: Path, tmp_path: Path, *arguments: str) -> AsyncIterator[Bench]:
    helm = helm_or_skip()
    async with bench(kubeconfig, tmp_path) as made:
        account = await install(made, helm)
        limited = tmp_path / "drains.kubeconfig"
        if kubeconfig == kubeconfig_of("full"):
            await service_account_kubeconfig(made.kube, kubeconfig, made.namespace, account, limited)
        else:
            limited = kubeconfig  # The modern control plane has no accounts.
        with drains(made, limited, *arguments) as log:
            yield made
            assert "forbidden" not in await asyncio.to_thread(log.read_text)


async def wait_said(made: Bench, name: str, reason: str) -> str:
    """Return the message once the request says this."""
    seen: list[tuple[str, str, str]] = []

    async def look() -> bool:
        seen[:] = [await said(made, name)]
        return seen[0][1] == reason

    await eventually(look, reason, describe=lambda: f"{seen}; {made.operator_log()}")
    assert seen[0][0] == str(reason == "Drained")
    return seen[0][2]


def test_others_are_evicted_at_once_and_ranks_are_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(kubeconfig_of("full"), tmp_path) as made:
            await add_pod(made, "digits-0", NODE, TRAINS)
            await add_pod(made, "web", NODE, {})
            await add_pod(made, "moved", "elsewhere", {})
            await add_pod(made, "not-listed", NODE, {})
            pods = ["digits-0", "web", "moved", "never-was"]
            await ask(
                made, "one", {"nodeName": NODE, "podsToDrain": {made.namespace: pods}, "checkName": "GpuMemWatch"}
            )
            await bury(made, "web")
            await wait_said(made, "one", "RanksMove")
            leaving = (await made.kube.get(made.path("pods", "digits-0")))["metadata"]
            assert leaving["annotations"]["unbroken.dev/leaving"] == f"node {NODE} is drained"
            assert "deletionTimestamp" not in leaving
            await made.kube.merge(
                made.path("pods", "digits-0"), {"metadata": {"labels": {"unbroken.dev/role": "spare"}}}
            )
            await bury(made, "digits-0")
            assert await wait_said(made, "one", "Drained") == f"4 pods drained from {NODE}"
            for name in ("moved", "not-listed"):
                assert not await is_ending(made, name)
            # It is over: what comes later under a name of it is another one's.
            await add_pod(made, "web", NODE, {})
            await ask(made, "two", {"nodeName": "nobody"})
            await wait_said(made, "two", "Drained")
            assert not await is_ending(made, "web")

    asyncio.run(scenario())


def test_a_pod_whose_ranks_do_not_leave_is_evicted_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(kubeconfig_of("full"), tmp_path, "--patience-seconds", "0") as made:
            await add_pod(made, "digits-0", NODE, TRAINS)
            await ask(made, "one", {"nodeName": NODE, "podsToDrain": {made.namespace: ["digits-0"]}})
            await bury(made, "digits-0")
            await wait_said(made, "one", "Drained")

    asyncio.run(scenario())


def test_what_no_pod_is_called_and_what_a_budget_forbids_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(kubeconfig_of("full"), tmp_path) as made:
            await add_pod(made, "web", NODE, {"app": "web"})
            version = "policy/v1"
            try:
                await made.kube.get("/apis/policy/v1")
            except (KubeNotFound, KubeUnavailable):
                version = "policy/v1beta1"
            budget = {
                "metadata": {"name": "all"},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
            }
            path = collection_path("poddisruptionbudgets", made.namespace, version)
            await made.kube.create(path, budget)
            await ask(made, "evil", {"nodeName": NODE, "podsToDrain": {made.namespace: ["../secrets/x"]}})
            await ask(made, "one", {"nodeName": NODE, "podsToDrain": {made.namespace: ["web"]}})
            assert "must be names of pods" in await wait_said(made, "evil", "Invalid")
            message = await wait_said(made, "one", "EvictionRefused")
            assert message.startswith(f"no eviction of {made.namespace}/web: ")
            found = await made.kube.get(f"{path}/all")
            await made.kube.delete(f"{path}/all", found["metadata"]["uid"])
            await bury(made, "web")
            await wait_said(made, "one", "Drained")

    asyncio.run(scenario())


def test_where_there_are_no_evictions_ranks_are_asked_and_the_request_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(kubeconfig_of("modern"), tmp_path) as made:
            await add_pod(made, "digits-0", NODE, TRAINS)
            await ask(made, "one", {"nodeName": NODE, "podsToDrain": {made.namespace: ["digits-0"]}})
            await wait_said(made, "one", "RanksMove")
            pod = made.path("pods", "digits-0")
            assert (await made.kube.get(pod))["metadata"]["annotations"]["unbroken.dev/leaving"]
            await made.kube.merge(pod, {"metadata": {"labels": {"unbroken.dev/role": "spare"}}})
            assert "has no evictions" in await wait_said(made, "one", "EvictionRefused")
            await made.kube.delete(pod, (await made.kube.get(pod))["metadata"]["uid"], is_forced=True)
            await wait_said(made, "one", "Drained")

    asyncio.run(scenario())
