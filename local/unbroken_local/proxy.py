"""The service proxy: every Service has a loopback address here, and connections to it go to a ready pod.

A Service's address is its cluster IP when that is a loopback address; else one of the cluster's own block, given when
the Service, or its name in a pod's environment, is first seen. Like a real cluster, which only rewrites addresses, the
proxy refuses connections while no pod is ready, or nobody listens in it. No other address than loopback is ever bound
or connected to.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Mapping

from unbroken_local.kube import Json
from unbroken_local.kube.informer import Informer, Key

log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 10
CONNECT_LIMIT_S = 5.0
PROBE_PAUSE_S = 0.05
"""Between two attempts to find somebody who listens."""
Endpoint = tuple[str, int]


class ServiceDirectory:
    """Which local address stands for which Service."""

    def __init__(self, services: Mapping[Key, Json], take_address: Callable[[], str]) -> None:
        self._services = services
        self._take_address = take_address
        self._own: dict[Key, str] = {}

    def address_of(self, namespace: str, name: str) -> str:
        """Return the address of a Service, known or not yet; the same one ever after."""
        key = (namespace, name)
        if key not in self._own:
            cluster_ip = str((self._services.get(key) or {"spec": {}})["spec"].get("clusterIP") or "")
            self._own[key] = cluster_ip if cluster_ip.startswith("127.") else self._take_address()
        return self._own[key]

    def replace_address(self, key: Key) -> str:
        """Give a Service another address: the one that it had is taken on this machine."""
        self._own[key] = self._take_address()
        return self._own[key]

    def address_by_cluster_ip(self) -> Mapping[str, str]:
        """Return the local address of each cluster IP."""
        return {
            str(service["spec"]["clusterIP"]): self.address_of(*key)
            for key, service in self._services.items()
            if str(service["spec"].get("clusterIP") or "None") != "None" and service["spec"].get("selector")
        }

    def of_namespace(self, namespace: str) -> tuple[tuple[Json, str], ...]:
        """Return the Services of a namespace that pods get variables for, each with its address."""
        return tuple(
            (service, self.address_of(*key))
            for key, service in sorted(self._services.items())
            if key[0] == namespace and service["spec"].get("selector") and service["spec"].get("clusterIP") != "None"
        )


def ready_endpoints(service: Json, port: Json, pods: Iterable[Json]) -> list[Endpoint]:
    """Return address and port of each ready pod behind one port of a Service, in a fixed order."""
    selector = service["spec"].get("selector") or {}
    namespace = service["metadata"].get("namespace", "default")
    is_any = bool(service["spec"].get("publishNotReadyAddresses"))
    found = []
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if pod["metadata"].get("namespace", "default") != namespace or any(
            labels.get(k) != v for k, v in selector.items()
        ):
            continue
        address = (pod.get("status") or {}).get("podIP") or ""
        number = target_port(port, pod)
        if address.startswith("127.") and number and (is_any or _is_ready(pod)):
            found.append((address, number))
    return sorted(found)


def _is_ready(pod: Json) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def target_port(port: Json, pod: Json) -> int:
    """Return the number of a Service port's target in a pod; 0 when the pod has no port of that name."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int) or str(target).isdigit():
        return int(target)
    for container in [*(pod["spec"].get("containers") or []), *(pod["spec"].get("initContainers") or [])]:
        for candidate in container.get("ports") or []:
            if candidate.get("name") == target:
                return int(candidate["containerPort"])
    return 0


class ServiceProxy:
    """Listens for every Service with a selector."""

    def __init__(self, services: Informer, pods: Informer, directory: ServiceDirectory) -> None:
        self._services = services
        self._pods = pods
        self._directory = directory
        self._dirty = asyncio.Event()
        self._listeners: dict[tuple[Key, int], _Listener] = {}
        services.listen(lambda *_: self._dirty.set())
        pods.listen(self._on_pod)

    def _on_pod(self, old: Json | None, new: Json | None) -> None:
        if _endpoint_facts(old) != _endpoint_facts(new):
            self._dirty.set()

    async def run(self) -> None:
        """Keep listeners and endpoints up to date until cancelled."""
        try:
            while True:
                await self._dirty.wait()
                self._dirty.clear()
                await self._reconcile()
        finally:
            for listener in self._listeners.values():
                listener.close()

    async def _reconcile(self) -> None:
        wanted: dict[tuple[Key, int], list[Endpoint]] = {}
        for key, service in self._services.objects.items():
            for port in service["spec"].get("ports") or []:
                if service["spec"].get("selector") and (port.get("protocol") or "TCP") == "TCP":
                    wanted[(key, int(port["port"]))] = ready_endpoints(service, port, self._pods.objects.values())
        for place in [place for place in self._listeners if not wanted.get(place)]:
            self._listeners.pop(place).close()
        for place, endpoints in wanted.items():
            if not endpoints:
                continue
            if place not in self._listeners:
                listener = self._open(place)
                if listener is None:
                    continue
                self._listeners[place] = listener
            self._listeners[place].endpoints = endpoints

    def _open(self, place: tuple[Key, int]) -> "_Listener | None":
        key, port = place
        address = self._directory.address_of(*key)
        is_first = all(other != key for other, _ in self._listeners)
        for _ in range(10):
            try:
                return _Listener(address, port)
            except OSError as error:
                log.warning("address taken: service=%s/%s address=%s:%d error=%s", *key, address, port, error)
                if not is_first:
                    break
                address = self._directory.replace_address(key)
        return None


def _endpoint_facts(pod: Json | None) -> object:
    if pod is None:
        return None
    metadata = pod["metadata"]
    return (
        metadata["uid"],
        metadata.get("labels"),
        bool(metadata.get("deletionTimestamp")),
        (pod.get("status") or {}).get("podIP"),
        _is_ready(pod),
    )


class _Listener:
    """One port of one Service."""

    def __init__(self, address: str, port: int) -> None:
        """Take the address. Raises OSError when it is taken already."""
        self.endpoints: list[Endpoint] = []
        self._address = (address, port)
        self._socket = _bound(self._address)
        self._turn = itertools.count()
        self._is_deserted = asyncio.Event()
        """Set by a connection that reached nobody."""
        self._connections: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"service {address}:{port}")

    def close(self) -> None:
        """Accept no more connections; those that are open live on."""
        self._task.cancel()

    async def _run(self) -> None:
        """Listen while somebody listens behind; the address is kept, and refuses, meanwhile."""
        try:
            while True:
                await self._wait_for_somebody()
                self._is_deserted.clear()
                server = await asyncio.start_server(
                    self._serve, sock=self._socket, limit=BUFFER_BYTES, backlog=512, start_serving=False
                )
                try:
                    # Within: a task that is cancelled in here already has it in the event loop.
                    await server.start_serving()
                    await self._is_deserted.wait()
                finally:
                    server.close()
                self._socket = _bound(self._address)
        finally:
            self._socket.close()

    async def _wait_for_somebody(self) -> None:
        while (found := await self._connect()) is None:
            await asyncio.sleep(PROBE_PAUSE_S)
        found[1].close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            target = await self._connect()
            if target is None:
                self._is_deserted.set()
                writer.transport.abort()
                return
            target_reader, target_writer = target
            await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))
        except asyncio.CancelledError:
            writer.transport.abort()  # The cluster ends.
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        endpoints = list(self.endpoints)
        first = next(self._turn)
        for offset in range(len(endpoints)):
            host, port = endpoints[(first + offset) % len(endpoints)]
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(host, port, limit=BUFFER_BYTES), CONNECT_LIMIT_S)
        return None


def _bound(address: Endpoint) -> socket.socket:
    """Return a socket that has the address and does not listen: connections to it are refused."""
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setblocking(False)
        taken.bind(address)
    except OSError:
        taken.close()
        raise
    return taken


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends; a broken side breaks the other one."""
    try:
        while data := await source.read(BUFFER_BYTES):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.transport.abort()
