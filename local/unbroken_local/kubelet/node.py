"""One fake node: its Node object, its Lease, its pods, its log server; and what happens when it fails."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient, pause_s, retry
from unbroken_local.kube.events import micro_timestamp, timestamp
from unbroken_local.kubelet.context import NodeContext
from unbroken_local.kubelet.pod import PodRunner
from unbroken_local.kubelet.server import LogServer

log = logging.getLogger(__name__)

LEASE_NAMESPACE = "kube-node-lease"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
HEARTBEAT_S = 240.0
"""Between two writes of an unchanged status."""
TAINT_PREFIX = "node.kubernetes.io/"


@dataclass(frozen=True)
class NodeSpec:
    """One node as the user described it; quantities as text."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Json, ...] = ()


class FakeNode:
    """A node and its pods, by uid."""

    def __init__(self, spec: NodeSpec, context: NodeContext, port: int, lease_s: float) -> None:
        self.spec = spec
        self.is_down = False
        self.is_silent = False
        """Whether it says nothing about itself, though its pods run on."""
        self.is_registered = asyncio.Event()
        self.pods: dict[str, PodRunner] = {}
        self._context = context
        self._client: KubeClient = context.client
        self._port = port
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = LogServer(context.address, port, self)
        self._report = asyncio.Event()
        self._path = f"/api/v1/nodes/{spec.name}"

    async def run(self) -> None:
        """Register, serve logs, renew the lease and the status until cancelled; then kill all pods."""
        try:
            async with self._server, asyncio.TaskGroup() as group:
                group.create_task(self._register())
                group.create_task(self._keep_lease())
                group.create_task(self._keep_status())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def observe_pod(self, old: Json | None, new: Json | None) -> None:
        """A pod of this node appeared, changed or went."""
        pod = new or old
        if pod is None:
            return
        uid = pod["metadata"]["uid"]
        runner = self.pods.get(uid)
        if new is None:
            if runner is not None:
                runner.vanish()
        elif runner is not None:
            runner.update(new)
        else:
            self.pods[uid] = runner = PodRunner(new, self._context)
            if self.is_down:
                runner.crash()
            elif self.is_silent:
                runner.fall_silent()
            task = runner.start(self._forget)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def observe_node(self, node: Json | None) -> None:
        """The Node object changed: take back what is said of a node that lives."""
        if self.is_down or self.is_silent or not self.is_registered.is_set():
            return
        conditions = (node or {}).get("status", {}).get("conditions") or []
        if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
            self._report.set()

    def fail(self) -> None:
        """Kill every process at once and fall silent."""
        log.warning("node fails: node=%s pods=%d", self.spec.name, len(self.pods))
        self.is_down = True
        for runner in self.pods.values():
            runner.crash()

    def fall_silent(self) -> None:
        """Renew neither lease nor status, of node and pods, as a kubelet that hangs; its processes run on."""
        log.warning("node falls silent: node=%s pods=%d", self.spec.name, len(self.pods))
        self.is_silent = True
        for runner in self.pods.values():
            runner.fall_silent()

    def recover(self) -> None:
        """Come back with the pods that the API server still has here."""
        log.info("node recovers: node=%s", self.spec.name)
        self.is_down = self.is_silent = False
        self._report.set()
        for runner in self.pods.values():
            runner.recover()

    def find_pod(self, namespace: str, name: str) -> PodRunner | None:
        """Return the newest pod of a name."""
        found = [r for r in self.pods.values() if r.spec.namespace == namespace and r.spec.name == name]
        return found[-1] if found else None

    async def deregister(self) -> None:
        """Delete the Node and its Lease, best effort."""
        for path in (self._path, f"{LEASES}/{self.spec.name}"):
            try:
                await self._client.delete(path)
            except ApiError as error:
                log.info("not deleted: path=%s error=%s", path, error)

    def _forget(self, runner: PodRunner) -> None:
        self.pods.pop(runner.spec.uid, None)

    async def _register(self) -> None:
        failures = 0
        while True:
            try:
                await self._write_node()
                await self._write_status()
                self.is_registered.set()
                return
            except ApiError as error:
                failures += 1
                log.warning("node not registered: node=%s error=%s", self.spec.name, error)
                await asyncio.sleep(pause_s(failures))

    async def _write_node(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.spec.labels,
        }
        metadata = {"name": self.spec.name, "labels": labels}
        try:
            body = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": metadata,
                "spec": {"taints": list(self.spec.taints)},
            }
            await self._client.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.status != 409:
                raise
            old = await self._client.get(self._path)
            kept = [t for t in old.get("spec", {}).get("taints") or [] if t["key"].startswith(TAINT_PREFIX)]
            change = {"metadata": {"labels": labels}, "spec": {"taints": [*self.spec.taints, *kept]}}
            await self._client.merge_patch(self._path, change)

    async def _write_status(self) -> None:
        await self._client.merge_patch(f"{self._path}/status", {"status": self._status()})

    def _status(self) -> Json:
        now = timestamp()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "the local kubelet is posting ready status",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        resources = dict(self.spec.allocatable)
        return {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [ready],
            "addresses": [
                {"type": "InternalIP", "address": self._context.address},
                {"type": "Hostname", "address": self.spec.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "nodeInfo": _node_info(self.spec.name),
        }

    async def _keep_status(self) -> None:
        await self.is_registered.wait()
        while True:
            try:
                await asyncio.wait_for(self._report.wait(), HEARTBEAT_S)
            except TimeoutError:
                pass
            self._report.clear()
            if self.is_down or self.is_silent:
                continue
            try:
                await self._write_status()
            except ApiError as error:
                log.warning("node status not written: node=%s error=%s", self.spec.name, error)
                if error.status == 404:
                    await self._register()
                else:
                    self._report.set()
                await asyncio.sleep(1.0)

    async def _keep_lease(self) -> None:
        await self.is_registered.wait()
        while True:
            if not (self.is_down or self.is_silent):
                try:
                    await self._renew()
                except ApiError as error:
                    log.warning("lease not renewed: node=%s error=%s", self.spec.name, error)
            await asyncio.sleep(self._lease_s)

    async def _renew(self) -> None:
        lease = {"holderIdentity": self.spec.name, "leaseDurationSeconds": 40, "renewTime": micro_timestamp()}
        try:
            await self._client.merge_patch(f"{LEASES}/{self.spec.name}", {"spec": lease})
        except ApiError as error:
            if error.status != 404:
                raise
            metadata = {"name": self.spec.name, "namespace": LEASE_NAMESPACE}
            await self._client.create(
                LEASES, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": lease}
            )


def _node_info(name: str) -> Json:
    empty = ("bootID", "machineID", "systemUUID", "kernelVersion", "kubeProxyVersion")
    return dict.fromkeys(empty, "") | {
        "osImage": f"local processes ({name})",
        "containerRuntimeVersion": "local://1",
        "kubeletVersion": "v1.34.0-unbroken",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }


async def ensure_lease_namespace(client: KubeClient) -> None:
    """Create the namespace of the node leases where it is missing. Raises ApiError."""

    async def create() -> Json:
        try:
            return await client.create(
                "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASE_NAMESPACE}}
            )
        except ApiError as error:
            if error.status == 409:
                return {}
            raise

    await retry("create the lease namespace", create)
