"""What hostile jobs cost honest ones, on a real API server whose kubeconfig is given.

    python benchmarks/fairness.py --kubeconfig PATH [--hostile 50] [--honest 200] [--lost 20] [--without-bars]

Pods are objects only: this process says that they run, and answers for the rendezvous of honest jobs. Those of hostile
jobs are served by another process, and answer in every way that harms: at once, with megabytes, with garbage, with
events without end, slowly. Of two kinds more, the pods of one are deleted as soon as they are made, and the specs of
the other changed without end. The operator is the real one, with a lease. With --without-bars only that no lease is
lost, and no honest pod missing, counts.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import socket
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from control_plane import Bench, Operator, Pods, Row, install_crd, job_spec
from systems.fairness_rendezvous import KINDS, address_of
from unbroken_operator.adapters.errors import KubeConflict, KubeError, KubeNotFound
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.lease import API_VERSION as LEASES
from unbroken_operator.api import layout

LEASE_S = 8
REPLICAS = 2
KUBELET_S = 0.05
"""Between two looks of the process that stands in for all kubelets."""
BAR_S = 1.0
NETWORK = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
"""Others on this machine may measure at the same time."""
HONEST = f"{NETWORK}.200"
BASE = "/api/v1/namespaces"
CIRCLES, EDITS = len(KINDS), len(KINDS) + 1
"""Kinds of hostile jobs beside those whose rendezvous is hostile."""
EDIT_S = 0.05
Json = dict[str, Any]


@dataclass
class Seen:
    """What was seen of the lease."""

    transitions: int = 0
    longest_s: float = 0.0
    """Longest time without a renewal, as far as looks every half second show it."""


class Kubelets:
    """Say that pods run, at the address of their job's rendezvous; delete those of jobs that go in circles."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known: set[str] = set()
        self._hostile = itertools.count()
        self._kinds: dict[str, int] = {}
        self.num_deleted = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            fresh = [item for item in self._bench.pods.items.values() if item["metadata"]["uid"] not in self._known]
            self._known |= {item["metadata"]["uid"] for item in fresh}
            await self._bench.each(fresh, self._take)
            await asyncio.sleep(KUBELET_S)

    def kind(self, job: str) -> int | None:
        """Return how a job harms: None for not at all, CIRCLES, EDITS, or how its rendezvous answers."""
        if not job.startswith("hostile-"):
            return None
        return int(job.rpartition("-")[2]) % (len(KINDS) + 2)

    async def _take(self, item: Json) -> None:
        name, labels = item["metadata"]["name"], item["metadata"].get("labels") or {}
        kind = self.kind(labels.get(layout.JOB_LABEL, ""))
        with contextlib.suppress(KubeNotFound, KubeConflict):
            if kind == CIRCLES:
                self.num_deleted += 1
                await self._bench.kube.delete(self._bench.path("pods", name), item["metadata"]["uid"], is_forced=True)
                return
            address = HONEST if kind in (None, EDITS) else address_of(NETWORK, kind)
            ready = {"type": "Ready", "status": "True"}
            status = {"phase": "Running", "podIP": address, "conditions": [ready]}
            await self._bench.kube.merge(self._bench.path("pods", f"{name}/status"), {"status": status})


async def edit(bench: Bench, kubelets: Kubelets, jobs: list[str]) -> None:
    """Change what the pods and the rendezvous of some jobs are made from, again and again, until cancelled."""
    edited = [job for job in jobs if kubelets.kind(job) == EDITS]
    for number in itertools.count():
        environment = [{"name": "N", "value": str(number)}]
        spec = {"replicas": REPLICAS + number % 3, "timeouts": {"heartbeatSeconds": 20 + number % 7}}
        for job in edited:
            with contextlib.suppress(KubeError):
                path = bench.path(layout.PLURAL, job)
                container = {**job_spec(REPLICAS)["template"]["spec"]["containers"][0], "env": environment}
                template = {"spec": {"containers": [container]}}
                await bench.kube.merge(path, {"spec": {**spec, "template": template}})
        await asyncio.sleep(EDIT_S)


@contextlib.asynccontextmanager
async def operator(bench: Bench) -> AsyncIterator[tuple[Operator, int]]:
    """Run the operator for the namespace, with a lease there; also yields the port of its metrics."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "unbroken_operator", "--namespace", bench.namespace),
        *("--kubeconfig", str(bench.kubeconfig), "--metrics-listen", f"127.0.0.1:{port}", "--log-level", "error"),
        *("--no-encryption", "--lease", f"{bench.namespace}/operator", "--lease-seconds", str(LEASE_S)),
    )
    running = Operator(process, port)
    try:
        yield running, port
        if process.returncode is not None:
            raise RuntimeError(f"the operator ended by itself with status {process.returncode}")
    finally:
        if process.returncode is None:
            await running.stop()


@contextlib.asynccontextmanager
async def hostile_rendezvous() -> AsyncIterator[None]:
    """Run the process with the hostile ones."""
    program = Path(__file__).parent / "systems" / "fairness_rendezvous.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), NETWORK, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the hostile rendezvous do not listen; is another benchmark running?")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def watch_lease(bench: Bench, seen: Seen) -> None:
    """Look at the lease until cancelled."""
    path = f"{collection_path('leases', bench.namespace, LEASES)}/operator"
    renewed, since_s = "", time.monotonic()
    while True:
        with contextlib.suppress(KubeNotFound):
            spec = (await bench.kube.get(path))["spec"]
            seen.transitions = max(seen.transitions, spec.get("leaseTransitions") or 0)
            if spec["renewTime"] != renewed:
                renewed, since_s = spec["renewTime"], time.monotonic()
            seen.longest_s = max(seen.longest_s, time.monotonic() - since_s)
        await asyncio.sleep(0.5)


async def replacements(bench: Bench, num_honest: int, num_lost: int) -> list[float]:
    """Lose a pod of one honest job after the other; return the seconds until each is replaced."""
    took_s = []
    for number in range(num_lost):
        job = f"honest-{number % num_honest}"
        before = frozenset(item["metadata"]["name"] for item in bench.pods.of(job))
        started_s = time.monotonic()
        await bench.kube.merge(bench.path("pods", f"{max(before)}/status"), {"status": {"phase": "Failed"}})
        await bench.pods.wait(f"a new pod of {job}", partial(_has_new_pod, bench.pods, job, before))
        took_s.append(time.monotonic() - started_s)
    return took_s


def _has_new_pod(pods: Pods, job: str, known: frozenset[str]) -> bool:
    return any(item["metadata"]["name"] not in known for item in pods.of(job))


async def refusals(port: int) -> dict[str, int]:
    """Return what the operator counts as refused or held back."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'unbroken_operator_refusals_total\{what="([a-z-]+)"\} ([0-9.e+]+)', text)
    return {what: int(float(number)) for what, number in found}


def _replaced(what: str, took_s: list[float]) -> Row:
    seen = f"{max(took_s):.2f} s worst of {len(took_s)}, {statistics.median(took_s):.2f} s median"
    return Row(f"pod lost to replacement created, {what}", seen, f"<= {BAR_S:g} s", max(took_s) <= BAR_S)


async def compare(bench: Bench, arguments: argparse.Namespace) -> tuple[list[Row], Seen]:
    """Measure honest jobs alone, then beside hostile ones."""
    seen = Seen()
    num_honest, num_hostile = arguments.honest, arguments.hostile
    num_lost = arguments.lost
    async with bench.rendezvous.serving(HONEST), hostile_rendezvous(), operator(bench) as (running, port):
        kubelets = Kubelets(bench)
        tasks = [asyncio.create_task(kubelets.run()), asyncio.create_task(watch_lease(bench, seen))]
        try:
            await bench.each(range(num_honest), lambda index: bench.apply(f"honest-{index}", REPLICAS))
            await bench.wait_state("Running", num_honest)
            table = [_replaced(f"{num_honest} honest jobs", await replacements(bench, num_honest, num_lost))]
            await bench.each(range(num_hostile), lambda index: bench.apply(f"hostile-{index}", REPLICAS))
            names = [f"hostile-{index}" for index in range(num_hostile)]
            tasks.append(asyncio.create_task(edit(bench, kubelets, names)))
            await asyncio.sleep(arguments.seconds / 2)
            before, cpu_s, began_s = await running.calls(), running.cpu_s, time.monotonic()
            took_s = await replacements(bench, num_honest, num_lost)
            await asyncio.sleep(max(0.0, arguments.seconds / 2 - (time.monotonic() - began_s)))
            passed_s = time.monotonic() - began_s
            calls, share = await running.calls() - before, (running.cpu_s - cpu_s) / passed_s
            table.append(_replaced(f"beside {num_hostile} hostile ones", took_s))
            silence = f"{seen.longest_s:.1f} s"
            table.append(
                Row("longest time without a renewal of the lease", silence, f"< {LEASE_S} s", is_lease_kept(seen))
            )
            writes = sum(calls[verb] for verb in ("POST", "PATCH", "DELETE")) / passed_s
            table.append(
                Row("the operator meanwhile", f"{share:.0%} of a core, {writes:.0f} writes/s", "", is_good=True)
            )
            table.append(Row("its most memory", f"{running.peak_mib:.0f} MiB", "<= 400 MiB", running.peak_mib <= 400))
            counts = ", ".join(f"{what} {number}" for what, number in (await refusals(port)).items() if number)
            table.append(Row("refused or held back", counts, "", is_good=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return table, seen


def is_lease_kept(seen: Seen) -> bool:
    """Whether nobody else led, and nobody else could have."""
    return seen.transitions == 0 and seen.longest_s < LEASE_S


async def measure(arguments: argparse.Namespace) -> tuple[list[Row], Seen]:
    """Return the table, and what was seen of the lease."""
    kube = await Kube.connect(str(arguments.kubeconfig))
    namespace, pods = f"fair-{uuid.uuid4().hex[:8]}", Pods()
    bench = Bench(kube, namespace, arguments.kubeconfig, pods)
    try:
        await install_crd(kube)
        await kube.create(BASE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        await bench.wait_for_account()
        await bench.clear()
        watching = asyncio.create_task(Informer(kube, bench.path("pods"), pods).run())
        try:
            return await compare(bench, arguments)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await bench.clear()
            item = await kube.get(f"{BASE}/{namespace}")
            await kube.delete(f"{BASE}/{namespace}", item["metadata"]["uid"])
    finally:
        await kube.close()


def main() -> int:
    """Print the table; return 1 when a bar is missed, or without bars when the lease was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="of an API server for tests")
    parser.add_argument("--honest", type=int, default=200, help="honest jobs of 2 pods (default: 200)")
    parser.add_argument("--hostile", type=int, default=50, help="hostile jobs of all kinds in turn (default: 50)")
    parser.add_argument("--lost", type=int, default=20, help="pods that are lost, each time (default: 20)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long they meet (default: 40)")
    parser.add_argument("--without-bars", action="store_true", help="on a busy machine: do not judge times")
    arguments = parser.parse_args()
    table, seen = asyncio.run(measure(arguments))
    print("| what | seen | bar | |\n|---|---|---|---|")
    for row in table:
        print(f"| {row.what} | {row.seen} | {row.bar} | {'ok' if row.is_good else 'MISSED'} |")
    if arguments.without_bars:
        return 0 if seen.transitions == 0 else 1
    return 0 if all(row.is_good for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
