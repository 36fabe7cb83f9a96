"""What people do to a job's objects by hand, on real API servers."""

import asyncio
from pathlib import Path
from typing import Any

from tests.waiting import eventually

from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator


async def _edit(made: Bench, resource: str, name: str, patch: dict[str, Any]) -> None:
    await made.kube.merge(made.path(resource, name), patch)


async def _told(made: Bench, reason: str, *words: str) -> None:
    async def look() -> bool:
        return any(all(word in item["message"] for word in words) for item in await made.events(reason))

    await eventually(look, f"an Event {reason} with {words}")


async def _service_is_mended(made: Bench) -> None:
    path = made.path("services", "digits-rendezvous")
    before = await made.kube.get(path)
    ports = [{"name": "web", "port": 80, "protocol": "TCP"}]
    spec = {"selector": {"app": "mine"}, "ports": ports, "publishNotReadyAddresses": False}
    metadata = {"labels": {layout.JOB_LABEL: None}, "ownerReferences": None}
    await _edit(made, "services", "digits-rendezvous", {"metadata": metadata, "spec": spec})

    async def is_mended() -> bool:
        found = await made.kube.get(path)
        keys = ("uid", "labels", "ownerReferences")
        is_same = all(found["metadata"].get(key) == before["metadata"][key] for key in keys)
        return is_same and found["spec"] == before["spec"]

    await eventually(is_mended, "the Service is as it was")
    await _told(made, "ChangedByHand", "Service digits-rendezvous", "spec.selector", "metadata.labels")


async def _pod_gets_its_owner_back(made: Bench) -> None:
    path = made.path("pods", "digits-0")
    before = (await made.kube.get(path))["metadata"]
    patch = {"ownerReferences": None, "labels": {layout.COMPONENT_LABEL: "mine"}}
    await _edit(made, "pods", "digits-0", {"metadata": patch})

    async def is_mended() -> bool:
        found = (await made.kube.get(path))["metadata"]
        return all(found.get(key) == before[key] for key in ("uid", "labels", "ownerReferences"))

    await eventually(is_mended, "the pod is as it was")
    await _told(made, "ChangedByHand", "Pod digits-0")


async def _pod_without_label_is_replaced(made: Bench) -> None:
    await _edit(made, "pods", "digits-1", {"metadata": {"labels": {layout.JOB_LABEL: None}}})
    await made.wait_for_pods("digits-0", "digits-1", "digits-2")
    await _told(made, "PodReleased", "digits-1")
    assert (await made.kube.get(made.path("pods", "digits-1")))["metadata"].get("deletionTimestamp") is None


def test_what_people_change_by_hand_is_set_back_or_told(kubeconfig: Path, tmp_path: Path) -> None:
    """Service, owners and components are set back; a pod without the job's label is replaced, and left in peace."""

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2)
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1")
                await _service_is_mended(made)
                await _pod_gets_its_owner_back(made)
                await _pod_without_label_is_replaced(made)
            # A Secret is read when an operator starts, among other times.
            await _edit(made, "secrets", "digits-rendezvous", {"data": {layout.JOB_KEY_KEY: None}})
            with operator(made):
                await _told(made, "SecretDamaged", layout.JOB_KEY_KEY)

    asyncio.run(scenario())
