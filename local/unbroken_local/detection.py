"""Does a control plane bring its own scheduler? A pod that no node takes tells: a scheduler says so in its status."""

import asyncio
import time
import uuid

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient

NAMESPACE = "default"
LIMIT_S = 10.0
"""A scheduler judges at once; one on a busy machine, later. Two of them would give the same resources away."""
ACCOUNT_LIMIT_S = 30.0
"""A control plane that has just started refuses pods until their service account is there."""


async def has_scheduler(client: KubeClient) -> bool:
    """Return whether some scheduler judges pods. Takes up to 10 s, longer while pods are refused. Raises ApiError."""
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    name = f"unbroken-scheduler-probe-{uuid.uuid4().hex[:8]}"
    await _create(client, pods, name)
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            pod = await client.get(f"{pods}/{name}")
            conditions = (pod.get("status") or {}).get("conditions") or []
            if any(condition["type"] == "PodScheduled" for condition in conditions):
                return True
            await asyncio.sleep(0.1)
        return False
    finally:
        await client.delete(f"{pods}/{name}", {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})


async def _create(client: KubeClient, pods: str, name: str) -> None:
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": False,
            "nodeSelector": {"unbroken.dev/probe": "no-node-has-this"},
            "containers": [{"name": "none", "image": "none"}],
        },
    }
    deadline = time.monotonic() + ACCOUNT_LIMIT_S
    while True:
        try:
            await client.create(pods, pod)
            return
        except ApiError as error:
            if time.monotonic() > deadline or not (error.is_passing or error.status == 403):
                raise
        await asyncio.sleep(0.2)
