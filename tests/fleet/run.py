"""Run three jobs on a local cluster, break them one after the other, and let a Prometheus watch."""

import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.dashboards.scraping import discover, prometheus, scrape_configs
from tests.e2e.e2e_bench import Bench, CommandError, Json, job, make_bench

WORKLOAD = Path(__file__).with_name("workload.py")
DISCOVERY_PAUSE_S = 1.0
SCRAPE_S = 5.0
BETWEEN_FAULTS_S = (45.0, 120.0)
"""Of one job."""
TIMEOUTS = {"softSeconds": 6, "hardSeconds": 12, "barrierSeconds": 60, "startupSeconds": 300}


@dataclass(frozen=True)
class Trained:
    """One job of the fleet; `faults` say how often each way to fail is drawn."""

    namespace: str
    name: str
    replicas: int
    ranks_per_pod: int
    spares: int
    faults: tuple[str, ...]

    def document(self, flags: Path) -> Json:
        """Return the job as it is applied."""
        document = job(
            self.name,
            [sys.executable, str(WORKLOAD)],
            replicas=self.replicas,
            ranksPerPod=self.ranks_per_pod,
            spares={"count": self.spares},
            timeouts=TIMEOUTS,
            topology={"layers": [{"name": "rack", "label": "unbroken.dev/rack"}]},
        )
        environment = [{"name": "FLAGS", "value": str(flags)}]
        container = document["spec"]["template"]["spec"]["containers"][0]
        container |= {"env": environment, "resources": {"limits": {"nvidia.com/gpu": self.ranks_per_pod}}}
        return document


FLEET = (
    Trained("research", "llama", 3, 2, 1, ("raise", "kill", "pod", "hang", "raise", "link", "kill")),
    Trained("research", "vision", 2, 1, 1, ("raise", "pod", "raise")),
    Trained("platform", "ranker", 2, 1, 0, ("raise", "exit")),
)


@dataclass(frozen=True)
class Watched:
    """A fleet that ran, and the Prometheus that watched it."""

    url: str
    started_s: float
    """Unix time of the first scrape."""
    ended_s: float


@asynccontextmanager
async def watched_fleet(helm: str, keep: Path, seconds: float, seed: int) -> AsyncIterator[Watched]:
    """Break the fleet for so long, then yield its Prometheus, which keeps its data below `keep`."""
    # Unix sockets of the pods lie below it, and their paths are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ub-"))
    bench = make_bench("local", folder, None)
    targets = folder / "targets.json"
    targets.write_text("[]")
    try:
        await bench.set_up()
        async with prometheus(keep, list(scrape_configs(helm, targets, bench.metrics_port)), SCRAPE_S) as server:
            started_s = time.time()
            ended_s = await _run(bench, folder, targets, seconds, random.Random(seed))
            yield Watched(server.url, started_s, ended_s)
    finally:
        await bench.tear_down()
        shutil.rmtree(folder, ignore_errors=True)


async def _run(bench: Bench, folder: Path, targets: Path, seconds: float, chance: random.Random) -> float:
    """Return the time of the end, when all jobs are still there."""
    namespaces = sorted({trained.namespace for trained in FLEET})
    async with AsyncExitStack() as stack:
        for namespace in namespaces:
            await stack.enter_async_context(bench.namespace(namespace))
        for trained in FLEET:
            flags = folder / trained.name
            flags.mkdir()
            await bench.apply(trained.namespace, trained.document(flags))
        watching = asyncio.create_task(_watch(bench, targets, namespaces))
        breaking = [asyncio.create_task(_break(bench, folder / trained.name, trained, chance)) for trained in FLEET]
        # How long the pictures are: nothing is tested here. Prometheus keeps wall-clock time.
        await asyncio.sleep(seconds)
        for task in (watching, *breaking):
            task.cancel()
        for outcome in await asyncio.gather(watching, *breaking, return_exceptions=True):
            # A task that failed must not pass for one that was cancelled: the pictures would lack its faults.
            if isinstance(outcome, Exception):
                raise outcome
        return time.time()


async def _watch(bench: Bench, targets: Path, namespaces: list[str]) -> None:
    while True:
        with suppress(CommandError):  # A busy machine: the next look will tell.
            await discover(bench, targets, *namespaces)
        await asyncio.sleep(DISCOVERY_PAUSE_S)


async def _break(bench: Bench, flags: Path, trained: Trained, chance: random.Random) -> None:
    """Do one fault after the other, at random times, once the job trains."""
    while not (flags / "checkpoint").exists():
        await asyncio.sleep(1.0)
    for number in range(10**6):
        fault = trained.faults[number % len(trained.faults)]
        rank = chance.randrange(trained.replicas * trained.ranks_per_pod)
        if fault == "pod":
            with suppress(CommandError):
                await _delete_a_pod(bench, trained, chance)
        else:
            (flags / f"{fault}-{rank}").touch()
        if fault == "link":
            # The check runs when something has happened.
            (flags / f"raise-{rank}").touch()
        await asyncio.sleep(chance.uniform(*BETWEEN_FAULTS_S))


async def _delete_a_pod(bench: Bench, trained: Trained, chance: random.Random) -> None:
    labels = f"unbroken.dev/job={trained.name},unbroken.dev/component=trainer,unbroken.dev/role=active"
    words = await bench.cluster.kubectl("get", "pods", "-n", trained.namespace, "-l", labels, "-o", "name")
    if names := words.split():
        await bench.cluster.kubectl("delete", chance.choice(names), "-n", trained.namespace, "--wait=false")
