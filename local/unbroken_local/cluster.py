"""Kubelets, proxy and, where the control plane has none, scheduler and node lifecycle, around one API server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from unbroken_local.addresses import AddressBlock
from unbroken_local.inventory import Inventory
from unbroken_local.kube import Json
from unbroken_local.kube.client import KubeClient, retry
from unbroken_local.kube.events import EventRecorder
from unbroken_local.kube.informer import Informer
from unbroken_local.kube.kubeconfig import Access
from unbroken_local.kubelet.context import NodeContext
from unbroken_local.kubelet.folders import Folders
from unbroken_local.kubelet.images import default_rules
from unbroken_local.kubelet.kubelet import Kubelets
from unbroken_local.kubelet.node import LEASES, TAINT_PREFIX, FakeNode, ensure_lease_namespace
from unbroken_local.kubelet.restart import BackOff
from unbroken_local.lifecycle import LifecycleSettings, NodeLifecycle, is_ready
from unbroken_local.processes.host import ProcessHost
from unbroken_local.proxy import ServiceDirectory, ServiceProxy
from unbroken_local.scheduler.shell import Scheduler

log = logging.getLogger(__name__)

LEASES_PER_GRACE = 4.0


@dataclass(frozen=True)
class ClusterSettings:
    """What may be chosen; times in seconds."""

    has_control_loops: bool = True
    """Whether scheduler and node lifecycle are ours."""
    back_off: BackOff = field(default_factory=BackOff)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)


class LocalCluster:
    """What runs around an API server; made by `open_cluster`."""

    def __init__(self, kubelets: Kubelets, node_objects: Informer) -> None:
        self._kubelets = kubelets
        self._node_objects = node_objects

    @property
    def nodes(self) -> dict[str, FakeNode]:
        """The fake nodes by name: fail and recover them here."""
        return self._kubelets.nodes

    async def wait_ready(self) -> None:
        """Wait until the API server shows every node as ready and without a taint that says otherwise."""
        while not all(_is_usable(self._node_objects.objects.get(("", name))) for name in self.nodes):
            await asyncio.sleep(0.05)

    async def deregister(self) -> None:
        """Delete the Node objects from an API server that lives on."""
        await asyncio.gather(*(node.deregister() for node in self.nodes.values()))


@asynccontextmanager
async def open_cluster(
    access: Access, inventory: Inventory, folders: Folders, host: ProcessHost, settings: ClusterSettings
) -> AsyncIterator[LocalCluster]:
    """Run the cluster's parts while the context is open. The processes of pods live as long as `host`.

    Raises InputError, AddressError, ApiError.
    """
    block = AddressBlock()
    connector = aiohttp.TCPConnector(force_close=True, limit=64)
    try:
        async with (
            KubeClient(access) as client,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await retry("reach the API server", lambda: client.get("/api/v1"), tries=8)
            await ensure_lease_namespace(client)
            async with asyncio.TaskGroup() as group:
                tasks = _start(group, _Parts(client, host, session, folders, block, inventory, settings))
                try:
                    yield LocalCluster(tasks.kubelets, tasks.node_objects)
                finally:
                    for task in tasks.tasks:
                        task.cancel()
    finally:
        block.close()


@dataclass(frozen=True)
class _Parts:
    client: KubeClient
    host: ProcessHost
    session: aiohttp.ClientSession
    folders: Folders
    block: AddressBlock
    inventory: Inventory
    settings: ClusterSettings


@dataclass(frozen=True)
class _Started:
    kubelets: Kubelets
    node_objects: Informer
    tasks: list[asyncio.Task[None]]


def _start(group: asyncio.TaskGroup, parts: _Parts) -> _Started:
    client, settings = parts.client, parts.settings
    pods, nodes, services = (Informer(client, f"/api/v1/{plural}") for plural in ("pods", "nodes", "services"))
    directory = ServiceDirectory(services.objects, parts.block.next_service)
    events = EventRecorder(client, "kubelet")
    proxy = ServiceProxy(services, pods, directory)
    lease_s = settings.lifecycle.grace_s / LEASES_PER_GRACE
    fakes = [
        FakeNode(
            spec,
            NodeContext(
                name=spec.name,
                address=parts.block.node(index),
                client=client,
                host=parts.host,
                folders=parts.folders,
                images=(*parts.inventory.images, *default_rules()),
                back_off=settings.back_off,
                services=directory,
                events=events,
                session=parts.session,
                take_pod_ip=parts.block.next_pod,
            ),
            parts.block.port,
            lease_s,
        )
        for index, spec in enumerate(parts.inventory.nodes)
    ]
    kubelets = Kubelets(fakes, pods, nodes)
    work = [events.run(), services.run(), nodes.run(), proxy.run(), kubelets.run(), _run_pods(services, pods)]
    if settings.has_control_loops:
        scheduler_events = EventRecorder(client, "default-scheduler")
        leases, namespaces = Informer(client, LEASES), Informer(client, "/api/v1/namespaces")
        work += [
            scheduler_events.run(),
            namespaces.run(),
            Scheduler(client, pods, nodes, scheduler_events, namespaces).run(),
            leases.run(),
            NodeLifecycle(client, pods, nodes, leases, settings.lifecycle).run(),
        ]
    return _Started(kubelets, nodes, [group.create_task(item) for item in work])


async def _run_pods(services: Informer, pods: Informer) -> None:
    """Watch pods once the Services are known: a pod that starts gets their variables."""
    await services.synced.wait()
    await pods.run()


def _is_usable(node: Json | None) -> bool:
    taints = ((node or {}).get("spec") or {}).get("taints") or []
    return node is not None and is_ready(node) and not any(taint["key"].startswith(TAINT_PREFIX) for taint in taints)
