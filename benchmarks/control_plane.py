"""What the operator costs and how soon it acts, on a real API server whose kubeconfig is given.

    python benchmarks/control_plane.py --kubeconfig PATH

Pods are objects only: this process says that they run, as their kubelets would, and answers for all rendezvous. The
API server's own rate is measured in the same run, with the same client, and the operator is compared with that.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from unbroken_core.protocol.messages import PROTOCOL, JobStatus, Observation, PodStatus, Recovery
from unbroken_core.protocol.wire import decode, encode
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase
from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound, KubeRefused, KubeUnavailable
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout
from unbroken_operator.api.schema import custom_resource_definition, without_cel
from unbroken_operator.decisions.admission import InvalidSpec, admit
from unbroken_operator.decisions.objects.training_pods import training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions

LIMIT_S = 900.0
NUM_PARALLEL = 32
RENDEZVOUS = "127.77.77.77"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
Json = dict[str, Any]
CONTAINER: Json = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    seen: str
    bar: str
    is_good: bool


class Objects:
    """What a watch shows of one kind of object in the namespace; a store of an informer."""

    def __init__(self) -> None:
        self.items: dict[str, Json] = {}
        self.changed = asyncio.Event()

    def read(self, item: Json) -> Json:
        """Keep all of an object."""
        return item

    def mark(self) -> int:
        """Return what a list is to be compared with: nothing is kept across lists here."""
        return 0

    def replace(self, items: list[Json], version: str, mark: int, namespace: str | None) -> None:
        """Hold exactly these."""
        del version, mark, namespace
        self.items = {item["metadata"]["name"]: item for item in items}
        self.changed.set()

    def upsert(self, item: Json) -> None:
        """Hold this one."""
        self.items[item["metadata"]["name"]] = item
        self.changed.set()

    def remove(self, item: Json) -> None:
        """Forget this one."""
        self.items.pop(item["metadata"]["name"], None)
        self.changed.set()

    async def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until it is so. Raises TimeoutError that says what was waited for."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError as error:
            raise TimeoutError(f"want {what} within {LIMIT_S:g} s, got {len(self.items)} objects") from error


class Pods(Objects):
    """The pods of the namespace."""

    def of(self, job: str, component: str = layout.TRAINER) -> list[Json]:
        """Return a job's pods of one component."""
        wanted = {layout.JOB_LABEL: job, layout.COMPONENT_LABEL: component}
        return [
            item for item in self.items.values() if wanted.items() <= (item["metadata"].get("labels") or {}).items()
        ]

    def marks(self) -> dict[str, Json]:
        """Return what an operator could have changed of each pod."""
        return {
            name: {key: item["metadata"].get(key) for key in ("uid", "labels", "annotations", "deletionTimestamp")}
            for name, item in self.items.items()
        }


class Jobs(Objects):
    """The jobs of the namespace."""

    def num_restarted(self, times: int) -> int:
        """Return how many jobs report that many restarts."""
        told = [((job.get("status") or {}).get("restarts") or {}).get("total", 0) for job in self.items.values()]
        return sum(total >= times for total in told)


class AllRendezvous:
    """Answers for the rendezvous of every job: all train, and one may have had a fault."""

    def __init__(self) -> None:
        self._changed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By the job's token; set, and replaced, at a change. One for all would wake every job at each other's."""
        self._revision = 1
        self._told: dict[str, Observation] = {}
        """By the job's token."""
        self._num_told: Counter[str] = Counter()
        self._recoveries: tuple[Recovery, ...] = ()

    def recover(self) -> None:
        """Let an in-process fault have been recovered, in every job."""
        self._revision += 1
        number = len(self._recoveries) + 1
        fault = Recovery(
            number=number,
            cause=Cause.EXCEPTION,
            rung=Rung.IN_PROCESS,
            rank=0,
            pod="pod",
            node="",
            domain="",
            detail="ValueError: boom",
            iteration_before=number - 1,
            iteration_after=number,
            replaced_by=(),
            phase_s={"stop": 0.01},
            started_at="2026-01-01T00:00:00Z",
            ended_at="2026-01-01T00:00:01Z",
        )
        self._recoveries = (*self._recoveries, fault)
        for token in tuple(self._changed):
            self._tell(token)

    def _tell(self, token: str) -> None:
        self._changed.pop(token, asyncio.Event()).set()

    def _members(self, token: str) -> tuple[PodStatus, ...]:
        """Return every pod that runs as one that trains."""
        told = self._told.get(token, Observation({})).pods
        running = [(uid, pod) for uid, pod in told.items() if pod.gone is None and not pod.is_waiting]
        return tuple(
            PodStatus(pod.pod, uid, pod.node, Role.ACTIVE, (rank,), (), (WorkerPhase.RUNNING,), is_connected=True)
            for rank, (uid, pod) in enumerate(running)
        )

    def _status(self, token: str) -> JobStatus:
        num = len(self._recoveries)
        return JobStatus(
            protocol=PROTOCOL,
            job="any",
            term=1,
            revision=self._revision + self._num_told[token],
            phase=JobPhase.RUNNING,
            reason=Reason.TRAINING,
            message="4 ranks train",
            iteration=num,
            world_size=4,
            spare_ranks=0,
            lost_ranks=0,
            pods=self._members(token),
            restarts_by_rung={"in-process": num} if num else {},
            restarts_by_cause={"exception": num} if num else {},
            recoveries=self._recoveries,
            max_step=-1,
            ettr=0.9,
        )

    async def _get(self, request: web.Request) -> web.Response:
        after, wait_s = int(request.query.get("after", -1)), float(request.query.get("timeout", 0))
        token = request.headers["Authorization"]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._revision + self._num_told[token] <= after:
                    await self._changed[token].wait()
        return web.Response(text=encode(self._status(token)))

    async def _put(self, request: web.Request) -> web.Response:
        token, told = request.headers["Authorization"], decode(await request.read(), Observation)
        self._told[token] = told
        self._num_told[token] += 1
        self._tell(token)
        return web.Response(status=204)

    @contextlib.asynccontextmanager
    async def serving(self, address: str = RENDEZVOUS) -> AsyncIterator[None]:
        """Serve while the context lasts."""
        application = web.Application(client_max_size=64 * 2**20)
        application.add_routes([web.get("/v1/status", self._get), web.put("/v1/observation", self._put)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, address, layout.API_PORT, backlog=4096).start()
            yield
        finally:
            await runner.cleanup()


class Operator:
    """The operator's process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self._port = port

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))

    @property
    def peak_mib(self) -> float:
        """Most memory that it had (RSS)."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    async def calls(self) -> Counter[str]:
        """Return the calls to the API server so far, by verb."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
            text = await answer.text()
        found: Counter[str] = Counter()
        for verb, number in re.findall(r'api_calls_total\{.*?verb="(\w+)"\} ([0-9.e+]+)', text):
            found[verb] += int(float(number))
        return found

    async def stop(self) -> None:
        """Tell it to end and wait for that."""
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await self._process.wait()


@contextlib.asynccontextmanager
async def operator(kubeconfig: Path, namespace: str) -> AsyncIterator[Operator]:
    """Run the operator for one namespace."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "unbroken_operator", "--namespace", namespace, "--kubeconfig", str(kubeconfig)),
        # This process answers for all rendezvous at one address, for which no certificate of a job is made.
        *("--metrics-listen", f"127.0.0.1:{port}", "--log-level", "warning", "--no-encryption"),
    )
    running = Operator(process, port)
    try:
        yield running
    finally:
        if process.returncode is None:
            await running.stop()


class Bench:
    """One namespace of the API server."""

    def __init__(self, kube: Kube, namespace: str, kubeconfig: Path, pods: Pods) -> None:
        self.kube = kube
        self.namespace = namespace
        self.kubeconfig = kubeconfig
        self.pods = pods
        self.rendezvous = AllRendezvous()

    def path(self, resource: str, name: str = "") -> str:
        """Return the path of a resource, or of one object, in the namespace."""
        version = layout.API_VERSION if resource == layout.PLURAL else "v1"
        path = collection_path(resource, self.namespace, version)
        return f"{path}/{name}" if name else path

    async def each(self, items: Iterable[Any], do: Callable[[Any], Any]) -> None:
        """Do something with each item, some at a time."""
        gate = asyncio.Semaphore(NUM_PARALLEL)

        async def one(item: Any) -> None:
            async with gate:
                await do(item)

        await asyncio.gather(*(one(item) for item in items))

    async def apply(self, name: str, replicas: int) -> None:
        """Create a job."""
        item = {"apiVersion": layout.API_VERSION, "kind": layout.KIND, "metadata": {"name": name}}
        await self.kube.create(self.path(layout.PLURAL), {**item, "spec": job_spec(replicas)})

    async def run_pods(self) -> None:
        """Stand in for all kubelets: let every pod run."""
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": RENDEZVOUS, "conditions": [ready]}
        waiting = [
            name for name, item in self.pods.items.items() if item["status"].get("phase", "Pending") == "Pending"
        ]
        await self.each(waiting, lambda name: self.kube.merge(self.path("pods", f"{name}/status"), {"status": status}))

    async def wait_state(self, state: str, num: int) -> None:
        """Wait until so many jobs are in a state."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                jobs, _ = await self.kube.list(self.path(layout.PLURAL))
                if sum((job.get("status") or {}).get("state") == state for job in jobs) >= num:
                    return
                await asyncio.sleep(1.0)

    async def wait_for_account(self) -> None:
        """Wait until the namespace can have pods: its service account is made a moment after it."""
        item = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "first"},
            "spec": {"containers": [{"name": "first", "image": "none"}]},
        }
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.kube.create(self.path("pods"), item)
                except (KubeRefused, KubeUnavailable):
                    await asyncio.sleep(0.1)
                else:
                    return

    async def clear(self) -> None:
        """Delete everything in the namespace."""
        for resource in (layout.PLURAL, "pods", "services", "secrets"):
            items, _ = await self.kube.list(self.path(resource))

            async def remove(item: Json, resource: str = resource) -> None:
                with contextlib.suppress(KubeNotFound, KubeConflict):
                    path = self.path(resource, item["metadata"]["name"])
                    await self.kube.delete(path, item["metadata"]["uid"], is_forced=True)

            await self.each(items, remove)


async def own_rate(bench: Bench, pods: list[Json]) -> float:
    """Return how many of these pods a second the API server creates for this client."""
    started_s = time.monotonic()
    await bench.each(pods, lambda item: bench.kube.create(bench.path("pods"), item))
    rate = len(pods) / (time.monotonic() - started_s)
    await bench.clear()
    return rate


def bare_pods(num: int) -> list[Json]:
    """Return pods with what a pod must have."""
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"bare-{index}"}, "spec": {"containers": [CONTAINER]}}
        for index in range(num)
    ]


def training_pods(bench: Bench, num: int) -> list[Json]:
    """Return pods as the operator makes them."""
    metadata = {"name": "large", "namespace": bench.namespace, "uid": str(uuid.uuid4())}
    verdict = admit({"metadata": metadata, "spec": job_spec(num)})
    if isinstance(verdict, InvalidSpec):
        raise ValueError(verdict.message)
    options = OperatorOptions("sidecar")
    pods = [training_pod(verdict.spec, verdict.settings, index, Role.ACTIVE, options) for index in range(num)]
    for pod in pods:
        # No such job exists: the garbage collector would take them.
        del pod["metadata"]["ownerReferences"]
    return pods


async def one_large_job(bench: Bench, num: int, rate: float) -> Row:
    """Measure from apply until all pods exist."""
    async with operator(bench.kubeconfig, bench.namespace) as running:
        await bench.apply("warm", 1)
        await bench.pods.wait("a first pod", lambda: len(bench.pods.of("warm")) == 1)
        started_s = time.monotonic()
        await bench.apply("large", num)
        await bench.pods.wait(f"{num} pods", lambda: len(bench.pods.of("large")) == num)
        took_s = time.monotonic() - started_s
        peak_mib = running.peak_mib
    await bench.clear()
    bar = rate / 1.3
    seen = f"{num / took_s:.0f} pods/s ({took_s:.1f} s), operator {peak_mib:.0f} MiB"
    return Row(f"one job of {num} pods: apply to all created", seen, f">= {bar:.0f} pods/s", num / took_s >= bar)


async def many_jobs(bench: Bench, running: Operator, num: int, rate: float) -> Row:
    """Measure from the first apply until all jobs have their pods."""
    started_s = time.monotonic()
    await bench.each(range(num), lambda index: bench.apply(f"job-{index}", 4))
    await bench.pods.wait(f"{5 * num} pods", lambda: len(bench.pods.items) == 5 * num)
    took_s = time.monotonic() - started_s
    # The API server creates a job, a Secret, a Service and five pods, and stores a status, for each of them.
    floor_s = 9 * num / rate
    seen = f"{took_s:.1f} s, operator {running.peak_mib:.0f} MiB"
    is_good = took_s <= floor_s + 30 and running.peak_mib <= 400
    return Row(f"{num} jobs of 4 pods: all have their pods", seen, f"<= {floor_s + 30:.0f} s, 400 MiB", is_good)


async def idle(bench: Bench, running: Operator, seconds: float) -> Row:
    """Measure what the operator does while nothing happens."""
    before, cpu_s = await running.calls(), running.cpu_s
    await asyncio.sleep(seconds)
    share = 100 * (running.cpu_s - cpu_s) / seconds
    calls = await running.calls() - before
    writes = sum(calls[verb] for verb in ("POST", "PATCH", "DELETE"))
    what = f"idle for {seconds:.0f} s with {len(bench.pods.items)} pods"
    return Row(what, f"{share:.1f} % of a core, {writes} writes", "<= 5 %, 0 writes", share <= 5 and writes == 0)


async def settled(running: Operator) -> Counter[str]:
    """Return the calls so far, once there are no more."""
    seen = await running.calls()
    async with asyncio.timeout(LIMIT_S):
        while True:
            await asyncio.sleep(3.0)
            now = await running.calls()
            if now == seen:
                return now
            seen = now


async def one_fault(bench: Bench, running: Operator, num_jobs: int) -> Row:
    """Count the calls for an in-process fault in every job."""
    before = await settled(running)
    bench.rendezvous.recover()
    calls = await settled(running) - before
    each = sum(calls[verb] for verb in ("GET", "POST", "PATCH", "DELETE")) / num_jobs
    return Row("API calls for a recovered in-process fault", f"{each:.2f}", "<= 2", each <= 2)


async def lost_pod(bench: Bench, running: Operator) -> Row:
    """Measure from the failure of a pod until its replacement exists."""
    del running
    took_s = []
    for number in range(5):
        job = f"job-{number}"
        before = {item["metadata"]["name"] for item in bench.pods.of(job)}
        started_s = time.monotonic()
        await bench.kube.merge(bench.path("pods", f"{min(before)}/status"), {"status": {"phase": "Failed"}})
        await bench.pods.wait("a replacement", partial(_has_new_pod, bench.pods, job, frozenset(before)))
        took_s.append(time.monotonic() - started_s)
    worst_s = max(took_s)
    return Row("pod lost to replacement created, worst of 5", f"{worst_s:.2f} s", "<= 1 s", worst_s <= 1)


def job_spec(replicas: int) -> Json:
    """Return the spec of a job whose pods nobody places: the scheduler would say again and again that no node is."""
    return {"replicas": replicas, "template": {"spec": {"containers": [CONTAINER], "schedulerName": "nobody"}}}


def _has_new_pod(pods: Pods, job: str, known: frozenset[str]) -> bool:
    return any(item["metadata"]["name"] not in known for item in pods.of(job))


async def restart(bench: Bench, num_jobs: int) -> Row:
    """Measure from the start of another operator until it has told every rendezvous what it sees."""
    await bench.run_pods()
    before, marks = time.monotonic(), bench.pods.marks()
    jobs = Jobs()
    # Lists of all jobs again and again would be most of what the machine has to do.
    watching = asyncio.create_task(Informer(bench.kube, bench.path(layout.PLURAL), jobs).run())
    try:
        async with operator(bench.kubeconfig, bench.namespace):
            # The status of every job shows a fault as soon as the operator has caught up.
            bench.rendezvous.recover()
            await jobs.wait("two restarts of every job", lambda: jobs.num_restarted(2) >= num_jobs)
            took_s = time.monotonic() - before
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    after = bench.pods.marks()
    touched = sum(marks.get(name) != after.get(name) for name in {*marks, *after})
    seen = f"{took_s:.1f} s, {touched} pods touched"
    return Row(f"operator restarted with {num_jobs} jobs: caught up", seen, "<= 15 s, 0", took_s <= 15 and touched == 0)


async def measure(arguments: argparse.Namespace) -> list[Row]:
    """Return the table."""
    kube = await Kube.connect(str(arguments.kubeconfig))
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    pods = Pods()
    bench = Bench(kube, namespace, arguments.kubeconfig, pods)
    try:
        await install_crd(kube)
        await kube.create(
            collection_path("namespaces"), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )
        watching = asyncio.create_task(Informer(kube, bench.path("pods"), pods).run())
        try:
            return await rows(bench, arguments)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await bench.clear()
            item = await kube.get(f"{collection_path('namespaces')}/{namespace}")
            await kube.delete(f"{collection_path('namespaces')}/{namespace}", item["metadata"]["uid"])
    finally:
        await kube.close()


async def rows(bench: Bench, arguments: argparse.Namespace) -> list[Row]:
    """Measure one after the other."""
    await bench.wait_for_account()
    bare_rate = await own_rate(bench, bare_pods(arguments.pods))
    rate = await own_rate(bench, training_pods(bench, arguments.pods))
    found = [
        Row("the API server's own rate, bare pods", f"{bare_rate:.0f} pods/s", "", is_good=True),
        Row("the API server's own rate, these pods", f"{rate:.0f} pods/s", "", is_good=True),
    ]
    found.append(await one_large_job(bench, arguments.pods, rate))
    async with bench.rendezvous.serving():
        async with operator(bench.kubeconfig, bench.namespace) as running:
            found.append(await many_jobs(bench, running, arguments.jobs, rate))
            await bench.run_pods()
            await bench.wait_state("Running", arguments.jobs)
            await settled(running)
            found.append(await idle(bench, running, arguments.idle_seconds))
            found.append(await one_fault(bench, running, arguments.jobs))
            found.append(await lost_pod(bench, running))
            await settled(running)
        found.append(await restart(bench, arguments.jobs))
    return found


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
    async with asyncio.timeout(60):
        while True:
            found = await kube.get(f"{CRDS}/{layout.CRD_NAME}")
            conditions = (found.get("status") or {}).get("conditions") or ()
            if any(item["type"] == "Established" and item["status"] == "True" for item in conditions):
                return
            await asyncio.sleep(0.1)


def main() -> int:
    """Print the table; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="of an API server for tests")
    parser.add_argument("--pods", type=int, default=2048, help="pods of the one large job (default: 2048)")
    parser.add_argument("--jobs", type=int, default=500, help="jobs of 4 pods (default: 500)")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="how long to watch it idle (default: 60)")
    arguments = parser.parse_args()
    table = asyncio.run(measure(arguments))
    print("| what | seen | bar | |\n|---|---|---|---|")
    for row in table:
        print(f"| {row.what} | {row.seen} | {row.bar} | {'ok' if row.is_good else 'MISSED'} |")
    return 0 if all(row.is_good for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
