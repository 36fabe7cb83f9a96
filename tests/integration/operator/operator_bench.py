"""A real API server, the operator as a process, and a rendezvous of the test's own that speaks the contract."""

import asyncio
import base64
import contextlib
import datetime
import itertools
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.ports import free_port
from tests.waiting import eventually

from unbroken_core.conventions.tls import server_context
from unbroken_core.protocol.messages import JobStatus, Observation
from unbroken_core.protocol.wire import decode, encode
from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound, KubeUnavailable
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout
from unbroken_operator.api.schema import custom_resource_definition, without_cel
from unbroken_operator.decisions.objects.credentials import Certificates, certificates_of, identity_of

JsonObject = dict[str, Any]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_addresses = itertools.count(2)


class Bench:
    """One namespace of one API server."""

    def __init__(self, kube: Kube, kubeconfig: Path, namespace: str, output: Path) -> None:
        self.kube = kube
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.output = output

    def path(self, resource: str, name: str = "") -> str:
        """Return the path of a resource in the namespace."""
        version = layout.API_VERSION if resource == layout.PLURAL else "v1"
        path = collection_path(resource, self.namespace, version)
        return f"{path}/{name}" if name else path

    async def apply(self, name: str, **spec: Any) -> JsonObject:
        """Create a job."""
        container = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}
        job = {
            "apiVersion": layout.API_VERSION,
            "kind": layout.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"template": {"spec": {"containers": [container]}}, **spec},
        }
        return await self.kube.create(self.path(layout.PLURAL), job)

    async def job(self, name: str) -> JsonObject:
        """Return a job."""
        return await self.kube.get(self.path(layout.PLURAL, name))

    async def condition(self, name: str, kind: str) -> JsonObject:
        """Return a condition of a job, {} while there is none."""
        conditions = ((await self.job(name)).get("status") or {}).get("conditions") or ()
        return next((item for item in conditions if item["type"] == kind), {})

    async def pods(self, component: str = layout.TRAINER) -> list[JsonObject]:
        """Return the pods of a component that are not being deleted."""
        items, _ = await self.kube.list(self.path("pods"), f"{layout.COMPONENT_LABEL}={component}")
        return sorted(
            (item for item in items if "deletionTimestamp" not in item["metadata"]),
            key=lambda item: str(item["metadata"]["name"]),
        )

    async def pod_names(self, component: str = layout.TRAINER) -> list[str]:
        """Return the names of these pods."""
        return [item["metadata"]["name"] for item in await self.pods(component)]

    async def wait_for_pods(self, *names: str) -> None:
        """Wait until exactly these training pods are there."""
        seen: list[str] = []

        async def look() -> bool:
            seen[:] = await self.pod_names()
            return seen == sorted(names)

        await eventually(look, f"training pods {names}", describe=lambda: f"{seen}; {self.operator_log()}")

    def operator_log(self) -> str:
        """Return the end of what the operators said, to be read when a test fails."""
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.output.glob("*.log")))

    async def run_pod(self, name: str, address: str, node: str = "") -> None:
        """Stand in for a kubelet: let a pod run, as soon as it is there."""

        async def look() -> JsonObject | None:
            try:
                return await self.kube.get(self.path("pods", name))
            except KubeNotFound:
                return None

        pod = await eventually(look, f"pod {name}")
        if node and not pod["spec"].get("nodeName"):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            await self.kube.create(self.path("pods", f"{name}/binding"), binding)
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": address, "conditions": [ready]}
        await self.kube.merge(self.path("pods", f"{name}/status"), {"status": status})

    async def end_pod(self, name: str, phase: str) -> None:
        """Stand in for a kubelet: let a pod end."""
        await self.kube.merge(self.path("pods", f"{name}/status"), {"status": {"phase": phase}})

    async def events(self, reason: str) -> list[JsonObject]:
        """Return the operator's Events of a reason."""
        items, _ = await self.kube.list(self.path("events"))
        return [item for item in items if item["reason"] == reason and item["involvedObject"]["kind"] == layout.KIND]

    async def secret(self, job: str) -> JsonObject:
        """Return the job's Secret once there is one."""

        async def look() -> JsonObject | None:
            try:
                return await self.kube.get(self.path("secrets", layout.rendezvous_name(job)))
            except KubeNotFound:
                return None

        return await eventually(look, "the Secret")

    async def rendezvous(self, job: str) -> "Rendezvous":
        """Return what can stand in for the job's rendezvous."""
        secret = await self.secret(job)
        certificates = certificates_of(secret)
        identity = identity_of(secret)
        assert certificates is not None
        assert identity is not None
        operators = identity.operator_token(secret["metadata"]["ownerReferences"][0]["uid"])
        return Rendezvous(operators, certificates, base64.b64decode(secret["data"]["token"]).decode())


@contextlib.asynccontextmanager
async def ready_node(kube: Kube, name: str, labels: dict[str, str]) -> AsyncIterator[None]:
    """A node that says again and again that it is ready, as its kubelet would: else it soon counts as lost."""
    path = f"{collection_path('nodes')}/{name}"
    metadata = {"name": name, "labels": labels}
    # No scheduler puts other tests' pods there.
    taint = {"key": "example.com/of-one-test", "effect": "NoSchedule"}
    manifest = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}}
    created = await kube.create(collection_path("nodes"), manifest)

    async def say_ready() -> None:
        heartbeat = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}
        # As a kubelet does: conditions of others stay.
        await kube.merge_lists(f"{path}/status", {"status": {"conditions": [ready]}})

    async def go_on() -> None:
        while True:
            # How often a kubelet speaks: nothing waits for it.
            await asyncio.sleep(1.0)
            await say_ready()

    await say_ready()
    kubelet = asyncio.create_task(go_on())
    try:
        yield
    finally:
        kubelet.cancel()
        await asyncio.gather(kubelet, return_exceptions=True)
        await kube.delete(path, created["metadata"]["uid"])


@contextlib.asynccontextmanager
async def bench(kubeconfig: Path, output: Path) -> AsyncIterator[Bench]:
    """A fresh namespace with the CRD installed; removed at the end."""
    kube = await Kube.connect(str(kubeconfig))
    name = f"operator-{uuid.uuid4().hex[:8]}"
    try:
        await install_crd(kube)
        await kube.create(
            collection_path("namespaces"), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
        made = Bench(kube, kubeconfig, name, output)
        try:
            yield made
        finally:
            await _clean(made)
    finally:
        await kube.close()


async def _clean(made: Bench) -> None:
    for resource in (layout.PLURAL, "pods", "services", "secrets", "events"):
        for item in (await made.kube.list(made.path(resource)))[0]:
            with contextlib.suppress(KubeNotFound, KubeConflict):
                path = made.path(resource, item["metadata"]["name"])
                await made.kube.delete(path, item["metadata"]["uid"], is_forced=True)
    with contextlib.suppress(KubeNotFound, KubeConflict):
        namespace = await made.kube.get(f"{collection_path('namespaces')}/{made.namespace}")
        await made.kube.delete(f"{collection_path('namespaces')}/{made.namespace}", namespace["metadata"]["uid"])


async def install_crd(kube: Kube) -> None:
    """Install the CRD, without CEL rules where the server does not know them."""
    version = await kube.get("/version")
    crd = custom_resource_definition()
    if int("".join(filter(str.isdigit, version["minor"]))) < 25:
        crd = without_cel(crd)
    try:
        await kube.create(CRDS, crd)
    except KubeConflict:
        await kube.merge(f"{CRDS}/{layout.CRD_NAME}", crd)

    async def look() -> bool:
        # The CRD's own status says so a moment before it is true.
        try:
            await kube.list(collection_path(layout.PLURAL, "default", layout.API_VERSION))
        except (KubeNotFound, KubeUnavailable):
            return False
        return True

    await eventually(look, "an API server that serves jobs")


class OperatorProcess:
    """The operator, as it runs in a cluster."""

    def __init__(self, process: subprocess.Popen[bytes], metrics_port: int, log: Path) -> None:
        self.process = process
        self.metrics_port = metrics_port
        self.log = log


@contextlib.contextmanager
def operator(made: Bench, *arguments: str, kubeconfig: Path | None = None, wanted_status: int | None = None) -> Any:
    """Run the operator for the bench's namespace; at the end it must leave on SIGTERM with status 0.

    With a wanted status, the operator is to have ended with it by itself.
    """
    port = free_port()
    log = made.output / f"operator-{port}.log"
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "unbroken_operator",
                *(arguments or ("--namespace", made.namespace)),
                "--kubeconfig",
                str(kubeconfig or made.kubeconfig),
                "--metrics-listen",
                f"127.0.0.1:{port}",
                "--log-format",
                "json",
            ],
            stdout=output,
            stderr=output,
            env=environment,
        )
        try:
            yield OperatorProcess(process, port, log)
            assert process.poll() == wanted_status, f"the operator ended by itself:\n{log.read_text()[-4000:]}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        assert status == (wanted_status or 0), log.read_text()[-4000:]


class Rendezvous:
    """Speaks the operator's part of the rendezvous API."""

    def __init__(self, token: str, certificates: Certificates, readers_token: str = "") -> None:
        self._token = token
        self._readers_token = readers_token
        """That of the commands: it reads the status, and no more."""
        self._certificates = certificates
        self._status: JobStatus | None = None
        self._changed = asyncio.Condition()
        self.observations: list[Observation] = []
        self.num_refused = 0

    async def say(self, status: JobStatus) -> None:
        """Report this from now on."""
        async with self._changed:
            self._status = status
            self._changed.notify_all()

    def _is_known(self, request: web.Request) -> bool:
        is_known = request.headers.get("Authorization") == f"Bearer {self._token}"
        self.num_refused += not is_known
        return is_known

    async def _get_status(self, request: web.Request) -> web.Response:
        is_reader = request.headers.get("Authorization") == f"Bearer {self._readers_token}" and self._readers_token
        if not is_reader and not self._is_known(request):
            return web.Response(status=401)
        seen = (int(request.query.get("term", -1)), int(request.query.get("after", -1)))
        wait_s = min(float(request.query.get("timeout", 0)), 60.0)

        def is_newer() -> bool:
            return self._status is not None and (self._status.term, self._status.revision) > seen

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_newer), max(wait_s, 0.001))
            return web.Response(status=503) if self._status is None else web.Response(text=encode(self._status))

    async def _put_observation(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return web.Response(status=401)
        self.observations.append(decode(await request.read(), Observation))
        return web.Response(status=204)

    def _context(self) -> ssl.SSLContext:
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            certificate.write_text(self._certificates.certificate)
            key.write_text(self._certificates.key)
            return server_context(certificate, key)

    @contextlib.asynccontextmanager
    async def serving(self, address: str = "") -> AsyncIterator[str]:
        """Serve; yields the address, one of 127.0.0.0/8 of its own unless another is given."""
        application = web.Application()
        application.add_routes(
            [web.get("/v1/status", self._get_status), web.put("/v1/observation", self._put_observation)]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        address = address or f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.{next(_addresses)}"
        try:
            await web.TCPSite(runner, address, layout.API_PORT, ssl_context=self._context()).start()
            yield address
        finally:
            await runner.cleanup()
