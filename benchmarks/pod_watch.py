"""Compare kopf's event handlers with the operator's own list and watch, for the pods of all jobs.

    python benchmarks/pod_watch.py [--pods 2048]

A server in this process stands in for the API server, so that only the client is measured. It lists the pods, sends one
change of each, breaks the watch, deletes a pod meanwhile, and then answers that the resource version is too old (410).
"""

import argparse
import asyncio
import json
import logging
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import kopf
from aiohttp import web

from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.stores import PodStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import InvalidSpec, admit
from unbroken_operator.decisions.objects.training_pods import training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions

LIMIT_S = 60.0
STALE_S = 10.0
"""How long is waited for the news that a pod has gone."""
Json = dict[str, Any]


def pods(num: int) -> list[Json]:
    """Return running pods as the operator makes them, of jobs of 4."""
    container: Json = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}
    made = []
    for number in range(num):
        metadata = {"name": f"job-{number // 4}", "namespace": "bench", "uid": f"job-{number // 4}"}
        verdict = admit(
            {"metadata": metadata, "spec": {"replicas": 4, "template": {"spec": {"containers": [container]}}}}
        )
        if isinstance(verdict, InvalidSpec):
            raise ValueError(verdict.message)
        pod = training_pod(verdict.spec, verdict.settings, number % 4, Role.ACTIVE, OperatorOptions("sidecar"))
        pod["metadata"] |= {"uid": f"pod-{number}", "resourceVersion": "1"}
        pod["spec"]["nodeName"] = f"node-{number}"
        ready = {"type": "Ready", "status": "True"}
        pod["status"] = {"phase": "Pending", "podIP": "127.0.0.1", "conditions": [ready]}
        made.append(pod)
    return made


class Server:
    """Lists and watches pods; every other collection is empty."""

    def __init__(self, items: list[Json]) -> None:
        self.items = {item["metadata"]["name"] + item["metadata"]["uid"]: item for item in items}
        self.version = 1
        self.step = asyncio.Event()
        """Set when the changes are to be sent, and when the watch is to break."""
        self.is_gone = False

    async def api(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        path = request.path
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            return web.json_response({"groups": []})
        if path == "/api/v1":
            kinds = [("pods", "Pod", True), ("namespaces", "Namespace", False)]
            return web.json_response({"resources": [_kind(*kind) for kind in kinds]})
        if "watch" in request.query:
            return await self._watch(request)
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "PodList", "items": list(self.items.values()), "metadata": metadata})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(kind: str, item: Json) -> None:
            await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

        if self.is_gone and int(request.query["resourceVersion"]) < self.version:
            await send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        if self.is_gone:
            await asyncio.Event().wait()
        await self.step.wait()
        self.step.clear()
        for item in self.items.values():
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            item["status"]["phase"] = "Running"
            await send("MODIFIED", item)
        await self.step.wait()
        self.step.clear()
        # The connection breaks, and a pod goes while nobody watches.
        self.items.pop(next(iter(self.items)))
        self.version += 1
        self.is_gone = True
        return response


def _kind(plural: str, kind: str, is_namespaced: bool) -> Json:
    verbs = ["get", "list", "watch", "patch"]
    return {"name": plural, "singularName": plural[:-1], "kind": kind, "namespaced": is_namespaced, "verbs": verbs}


class Client:
    """Counts what arrives in a store of the operator."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.store = PodStore(lambda _: None)

    def count(self, phase: str) -> int:
        """Return how many pods are known in this phase."""
        keys = {("bench", f"job-{number // 4}") for number in range(self.num)}
        return sum(pod.phase == phase for key in keys for pod in self.store.of_job(key))

    async def run(self) -> None:
        """Say when all are listed, when all have changed, and whether the deletion was noticed."""
        for what, phase, num, limit_s in (
            ("listed", "Pending", self.num, LIMIT_S),
            ("changed", "Running", self.num, LIMIT_S),
            ("deleted", "Running", self.num - 1, STALE_S),
        ):
            started_s = time.monotonic()
            while self.count(phase) != num and time.monotonic() - started_s < limit_s:
                await asyncio.sleep(0.1)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            is_done = self.count(phase) == num
            found = {"what": what, "is_done": is_done, "cpu_s": usage.ru_utime + usage.ru_stime}
            print(json.dumps(found | {"mib": usage.ru_maxrss / 1024}), flush=True)


async def own(kubeconfig: str, client: Client) -> None:
    """Follow the pods as the operator does."""
    kube = await Kube.connect(kubeconfig)
    informer = Informer(kube, collection_path("pods", "bench"), client.store, layout.JOB_LABEL)
    running = asyncio.create_task(informer.run())
    await client.run()
    running.cancel()
    await kube.close()


async def with_kopf(server: str, client: Client) -> None:
    """Follow the pods with an event handler of kopf, with the least that kopf can be told to do for each event."""
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=server)

    @kopf.on.event("v1", "pods", registry=registry)
    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        item = dict(event["object"])
        (client.store.remove if event["type"] == "DELETED" else client.store.upsert)(item)

    stop = threading.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=registry, settings=settings, namespaces=["bench"], standalone=True, stop_flag=stop, identity=None
        )
    )
    await client.run()
    stop.set()
    await running


def watch(way: str, server: str, num: int) -> None:
    """Be the client, in a process of its own."""
    logging.disable(logging.ERROR)
    client = Client(num)
    if way == "kopf":
        asyncio.run(with_kopf(server, client))
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        clusters = [{"name": "bench", "cluster": {"server": server}}]
        contexts = [{"name": "bench", "context": {"cluster": "bench", "user": "any"}}]
        users: list[Json] = [{"name": "any", "user": {}}]
        config = {"clusters": clusters, "contexts": contexts, "users": users, "current-context": "bench"}
        file.write(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
        file.flush()
        asyncio.run(own(file.name, client))


async def measure(way: str, num: int) -> dict[str, Json]:
    """Return what the client says of each step, with the seconds that it took."""
    server = Server(pods(num))
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.api)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    command = (sys.executable, __file__, "--watch", way, "--server", url, "--pods", str(num))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    found: dict[str, Json] = {}
    started_s = time.monotonic()
    while process.stdout is not None and (line := await process.stdout.readline()):
        step = json.loads(line)
        found[step["what"]] = step | {"took_s": time.monotonic() - started_s}
        server.step.set()
        started_s = time.monotonic()
    await process.wait()
    await runner.cleanup()
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--watch", choices=("own", "kopf"), help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch(arguments.watch, arguments.server, arguments.pods)
        return 0
    found = {way: asyncio.run(measure(way, arguments.pods)) for way in ("own", "kopf")}
    rows: list[tuple[str, Callable[[dict[str, Json]], str]]] = [
        ("list: CPU since the start of the process", lambda seen: f"{seen['listed']['cpu_s']:.2f} s"),
        ("one change of each: CPU", lambda seen: f"{seen['changed']['cpu_s'] - seen['listed']['cpu_s']:.2f} s"),
        ("one change of each: until known", lambda seen: f"{seen['changed']['took_s']:.1f} s"),
        ("memory (peak RSS)", lambda seen: f"{seen['changed']['mib']:.0f} MiB"),
        (
            "deletion while the watch was broken",
            lambda seen: (
                f"known after {seen['deleted']['took_s']:.1f} s"
                if seen["deleted"]["is_done"]
                else f"not known after {STALE_S:.0f} s"
            ),
        ),
    ]
    print(f"| {arguments.pods} pods | own list and watch | kopf.on.event |\n|---|---|---|")
    for what, show in rows:
        print(f"| {what} | {show(found['own'])} | {show(found['kopf'])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
