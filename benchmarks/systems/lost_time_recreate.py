"""The system `recreate` of lost_time.py: a controller that deletes all pods of a job and creates them anew.

    python lost_time_recreate.py        Its settings are the variable BENCH_LOST_TIME; see lost_time_job.Job.

It does what JobSet does with its failure policy (recreate all), on a laptop cluster of its own: a pod that failed, or
that is missing, makes it delete the others; once all are gone it creates them again. The pods run the script itself,
with the variables that torchrun would set, and are processes of this machine.

So this is a lower bound of what recreation costs. Nothing is pulled or unpacked, no volume is mounted, no network is
made for a pod, two pods are scheduled at once, there is no Job controller between, and no other user of the API server.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from systems.lost_time_job import WORLD_SIZE, Job, Mark, read_marks, write_mark
from systems.recovery_peers import free_ports
from unbroken_core.conventions.images import image_of
from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError, KubeClient, retry
from unbroken_local.kube.informer import Informer
from unbroken_local.kube.kubeconfig import read_kubeconfig

NAMESPACE = "lost-time"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
ATTEMPT = "lost-time/attempt"
NODES = "- {name: node-1}\n- {name: node-2}\n- {name: node-3}\n"
INHERITED = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
LOOK_S = 0.005
NOW: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


class Step(Enum):
    """What is to be done next."""

    WAIT = "wait"
    DELETE = "delete"
    CREATE = "create"
    DONE = "done"


def next_step(pods: Sequence[Json], num_pods: int) -> Step:
    """Return what the pods of a job call for: all of them run, or none."""
    if not pods:
        return Step.CREATE
    going = [pod for pod in pods if pod["metadata"].get("deletionTimestamp")]
    phases = [(pod.get("status") or {}).get("phase") for pod in pods]
    if not going and len(pods) == num_pods and all(phase == "Succeeded" for phase in phases):
        return Step.DONE
    if len(going) == len(pods):
        return Step.WAIT
    return Step.DELETE if going or len(pods) < num_pods or "Failed" in phases else Step.WAIT


def pod_of(job: Job, rank: int, attempt: int, port: int) -> Json:
    """Return one pod: a worker of a script for torchrun."""
    variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
    variables |= job.variables()
    variables |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD_SIZE)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = str(Path(__file__).with_name("lost_time_job.py"))
    return {
        "metadata": {"name": f"worker-{rank}", "labels": {ATTEMPT: str(attempt)}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "trainer",
                    "image": image_of("sidecar"),
                    "workingDir": job.folder,
                    "command": [sys.executable, script],
                    "env": [{"name": name, "value": value} for name, value in variables.items()],
                }
            ],
        },
    }


class Controller:
    """Keeps the pods of one job."""

    def __init__(self, client: KubeClient, job: Job) -> None:
        self._client, self._job = client, job
        self._attempt = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Return when all pods have succeeded. Raises RuntimeError after more attempts than there are faults."""
        informer = Informer(self._client, PODS)
        informer.listen(lambda _before, _after: self._changed.set())
        watching = asyncio.create_task(informer.run())
        losing = asyncio.create_task(self._lose_pods())
        try:
            await informer.synced.wait()
            while await self._act():
                await self._changed.wait()
        finally:
            watching.cancel()
            losing.cancel()

    async def _act(self) -> bool:
        """Look at the pods and do what they call for; return False when the job is over."""
        self._changed.clear()
        pods = (await retry("list pods", lambda: self._client.get(PODS)))["items"]
        step = next_step(pods, WORLD_SIZE)
        if step is Step.DELETE:
            if not any(pod["metadata"].get("deletionTimestamp") for pod in pods):
                self._mark("known")
            for pod in pods:
                if not pod["metadata"].get("deletionTimestamp"):
                    await self._delete(pod["metadata"]["name"])
        elif step is Step.CREATE:
            self._attempt += 1
            if self._attempt > self._job.num_faults + 1:
                raise RuntimeError(f"want at most {self._job.num_faults} failures, got one more")
            port = free_ports()[0]
            for rank in range(WORLD_SIZE):
                body = pod_of(self._job, rank, self._attempt, port)
                await self._create(body)
            self._mark("created")
        return step is not Step.DONE

    async def _create(self, body: Json) -> None:
        for _ in range(100):
            try:
                await retry("create a pod", lambda: self._client.create(PODS, body))
            except ApiError as error:
                if error.status != 403:
                    raise
                # A new namespace has no service account for a moment.
                await asyncio.sleep(0.05)
            else:
                return
        raise RuntimeError("want a namespace that takes pods, got none")

    async def _delete(self, name: str, options: Json | None = None) -> None:
        try:
            await retry("delete a pod", lambda: self._client.delete(f"{PODS}/{name}", options))
        except ApiError as error:
            if error.status != 404:
                raise

    async def _lose_pods(self) -> None:
        """Delete the pod of each fault of the kind pod-lost at once, as the cluster does with those of a lost node."""
        if self._job.fault != "pod-lost":
            return
        lost = 0
        while lost < self._job.num_faults:
            await asyncio.sleep(LOOK_S)
            if sum(mark.name == "fault" for mark in read_marks(Path(self._job.folder))) > lost:
                lost += 1
                await self._delete(f"worker-{WORLD_SIZE - 1}", NOW)

    def _mark(self, name: str) -> None:
        write_mark(Path(self._job.folder), Mark(name, -1, -1, time.monotonic_ns()))


async def run_job(kubeconfig: Path, job: Job) -> None:
    """Run a job on a cluster until it is over, or until SIGTERM."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with KubeClient(read_kubeconfig(kubeconfig)) as client:
        await retry("make a namespace", lambda: client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}))
        await Controller(client, job).run()


def unbroken_local(*words: str) -> None:
    """Run `unbroken local`; what it says goes to the errors."""
    subprocess.run([sys.executable, "-m", "unbroken_local", *words], check=True, stdout=sys.stderr)


def main() -> int:
    """Start a cluster, run the job, end the cluster."""
    # Names of sockets are short: the job's folder may be anywhere.
    folder = Path(tempfile.mkdtemp(prefix="recreate-"))
    (folder / "nodes.yaml").write_text(NODES)
    directory = str(folder / "cluster")
    try:
        unbroken_local("up", "--nodes", str(folder / "nodes.yaml"), "--dir", directory)
        asyncio.run(run_job(folder / "cluster" / "kubeconfig", Job.read()))
    except asyncio.CancelledError:
        return 1
    finally:
        unbroken_local("down", "--dir", directory)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
