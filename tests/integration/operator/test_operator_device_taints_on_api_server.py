"""A device of a pod is tainted in its ResourceSlice: the pod's ranks are led away, on a real API server.

The control planes of the tests serve no resource.k8s.io. A CRD of the same group and kinds, with the same field
selector, stands in for it on the modern one; who writes claims and slices there, the test does.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.clusters import kubeconfig_of
from tests.integration.operator.test_operator_on_api_server import report
from tests.waiting import eventually

from unbroken_core.vocabulary.reasons import WorkerPhase
from unbroken_operator.adapters.device_taints.looking import GROUP_VERSION
from unbroken_operator.adapters.errors import KubeError, KubeNotFound
from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.api import layout

from .operator_bench import CRDS, Bench, bench, operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GROUP, VERSION = GROUP_VERSION.split("/")
SLICES = collection_path("resourceslices", None, GROUP_VERSION)
DRIVER = "gpu.example.com"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def a_kind(kind: str, scope: str, *selectable: str) -> dict[str, Any]:
    """Return a CRD that keeps whatever is written."""
    plural = f"{kind.lower()}s"
    spec = {**ANYTHING, "properties": {name: {"type": "string"} for name in selectable}}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {**ANYTHING, "properties": {"spec": spec}}},
        **({"selectableFields": [{"jsonPath": f".spec.{name}"} for name in selectable]} if selectable else {}),
    }
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, stands in for the real kind in a test"},
        },
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [version]},
    }


@contextlib.asynccontextmanager
async def serving_devices(made: Bench) -> AsyncIterator[None]:
    """Serve resource.k8s.io/v1 while the context lasts."""
    kinds = [a_kind("ResourceSlice", "Cluster", "nodeName"), a_kind("ResourceClaim", "Namespaced")]
    created = [await made.kube.create(CRDS, kind) for kind in kinds]
    try:
        for path in (SLICES, collection_path("resourceclaims", made.namespace, GROUP_VERSION)):

            async def is_served(path: str = path) -> bool:
                with contextlib.suppress(KubeError):
                    return bool(await made.kube.peek(path))
                return False

            await eventually(is_served, f"an API server that serves {path}")
        yield
    finally:
        for item in created:
            with contextlib.suppress(KubeNotFound):
                await made.kube.delete(f"{CRDS}/{item['metadata']['name']}", item["metadata"]["uid"])


async def allocate(made: Bench, pod: dict[str, Any], node: str, *tolerations: dict[str, str]) -> None:
    """Stand in for scheduler and driver: the pod has a claim of its own, for the device gpu-NAME of its node."""
    metadata = pod["metadata"]
    name = f"{metadata['name']}-gpu-x"
    result = {"request": "gpu", "driver": DRIVER, "pool": node, "device": f"gpu-{metadata['name']}"}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    claim = {
        "apiVersion": GROUP_VERSION,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "status": {"allocation": {"devices": {"results": [{**result, "tolerations": list(tolerations)}]}}},
    }
    await made.kube.create(collection_path("resourceclaims", made.namespace, GROUP_VERSION), claim)
    status = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": name}]}
    await made.kube.merge(made.path("pods", f"{metadata['name']}/status"), {"status": status})


async def publish(made: Bench, node: str, *tainted: str) -> None:
    """Stand in for the driver: each device of the node's pods is tainted."""
    taint = {"key": "example.com/broken", "value": "xid", "effect": "NoSchedule"}
    devices = [{"name": f"gpu-{pod}", "taints": [taint]} for pod in tainted]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    metadata = {"name": f"{node}-slice"}
    await made.kube.create(
        SLICES, {"apiVersion": GROUP_VERSION, "kind": "ResourceSlice", "metadata": metadata, "spec": spec}
    )


def test_ranks_leave_a_pod_whose_device_is_tainted_unless_its_claim_tolerates_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig_of("modern"), tmp_path) as made, serving_devices(made):
            template = {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "torch:2",
                            "command": ["python3", "train.py"],
                            "resources": {"claims": [{"name": "gpu"}]},
                        }
                    ],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpus"}],
                }
            }
            await made.apply("digits", replicas=2, spares={"count": 1}, template=template)
            names = ("digits-0", "digits-1", "digits-2")
            nodes = {name: f"{made.namespace}-{name}" for name in names}
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    await made.wait_for_pods(*names)
                    await made.run_pod("digits-rendezvous-0", address)
                    for name, node in nodes.items():
                        # The first two devices are tainted, and the claim of the second tolerates it.
                        await publish(made, node, *([name] if name != "digits-2" else []))
                        tolerated = [{"operator": "Exists"}] if name == "digits-1" else []
                        await allocate(made, await made.kube.get(made.path("pods", name)), node, *tolerated)
                        await made.run_pod(name, "10.0.0.1", node)
                    said = report(await made.pods(), 1)
                    spare = dataclasses.replace(said.pods[-1], workers=(WorkerPhase.READY,))
                    await rendezvous.say(dataclasses.replace(said, pods=(*said.pods[:-1], spare)))

                    async def leaving() -> dict[str, str]:
                        marks = {
                            pod["metadata"]["name"]: pod["metadata"]["annotations"].get(layout.LEAVING_ANNOTATION)
                            for pod in await made.pods()
                        }
                        return {name: str(mark) for name, mark in marks.items() if mark}

                    told = await eventually(leaving, "a pod that is to leave", 90.0, describe=made.operator_log)
                    words = f"device gpu-digits-0 of pool {nodes['digits-0']} ({DRIVER})"
                    assert told == {"digits-0": f"{words} has taint example.com/broken=xid:NoSchedule"}
                    await made.wait_for_pods(*names, "digits-3")

                    async def is_told() -> bool:
                        seen = rendezvous.observations[-1:]
                        return [[pod.pod for pod in item.pods.values() if pod.gone] for item in seen] == [["digits-0"]]

                    await eventually(is_told, "an Observation with the pod that leaves", describe=made.operator_log)
                    assert list(await leaving()) == ["digits-0"]
                assert "not read" not in made.operator_log()

    asyncio.run(scenario())
