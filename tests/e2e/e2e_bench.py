"""One cluster with an operator, on which the end-to-end tests run their jobs."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.ports import free_port
from tests.waiting import LIMIT_S, eventually

from unbroken_local.demo.observer import Observer
from unbroken_local.demo.snapshot import Snapshot
from unbroken_local.demo.tools import Cluster, CommandError, Service, operator_service
from unbroken_local.kube.client import KubeClient
from unbroken_local.kube.kubeconfig import read_kubeconfig

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "resilienttrainingjobs.yaml"
KUBECTL_PAUSE_S = 0.5
"""Each look with kubectl is a process of its own."""
CRD_WITHOUT_CEL = ROOT / "charts" / "unbroken" / "files" / "resilienttrainingjobs-without-cel.yaml"
Json = dict[str, Any]

OUR_OWN = pytest.param("local", marks=pytest.mark.nightly if os.environ.get("UNBROKEN_TEST_KUBECONFIGS") else ())
"""Our own cluster; where real API servers are named, what runs on them runs on it at night alone."""
FULL, MODERN = (pytest.param(name, marks=pytest.mark.cluster) for name in ("full", "modern"))
ON_ONE_REAL_SERVER = pytest.mark.parametrize("bench", [OUR_OWN, FULL], indirect=True)
"""For what hardly depends on the API server: our own, and the profile that has a scheduler and all controllers."""


@dataclass
class Bench:
    """A cluster with the CRD and a running operator."""

    profile: str
    cluster: Cluster
    operator: Service
    metrics_port: int
    """The operator's, on 127.0.0.1."""

    @property
    def has_rules(self) -> bool:
        """Whether the API server checks rules across fields (CEL); without them the operator alone does."""
        return self.profile != "full"

    async def set_up(self) -> None:
        """Start everything."""
        await self.cluster.up()
        await self.cluster.kubectl("apply", "-f", str(CRD if self.has_rules else CRD_WITHOUT_CEL))
        await eventually(self._serves_kind, "a kind that the API server serves", pause_s=KUBECTL_PAUSE_S)
        self.operator.start()

    async def _serves_kind(self) -> bool:
        """Whether the CRD is established; `kubectl wait` gives up on one of which nothing is said yet."""
        text = await self.cluster.kubectl("get", "-f", str(CRD_WITHOUT_CEL), "-o", "json")
        found = json.loads(text).get("status", {}).get("conditions") or ()
        return any(one["type"] == "Established" and one["status"] == "True" for one in found)

    async def tear_down(self) -> None:
        """Stop everything."""
        try:
            await self.operator.stop()
        finally:
            await self.cluster.down()

    async def apply(self, namespace: str, *objects: Json) -> str:
        """kubectl apply, as a user does. Raises CommandError with kubectl's words."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump_all(objects, file)
            file.flush()
            return await self.cluster.kubectl("apply", "-n", namespace, "-f", file.name)

    async def refusal(self, namespace: str, document: Json) -> str | None:
        """Apply an object; return kubectl's words when the API server refuses it, None when it is accepted."""
        try:
            await self.apply(namespace, document)
        except CommandError as error:
            return str(error)
        return None

    async def events(self, namespace: str, name: str) -> list[Json]:
        """Return the Events about a job."""
        text = await self.cluster.kubectl("get", "events", "-n", namespace, "-o", "json")
        return [item for item in json.loads(text)["items"] if item["involvedObject"].get("name") == name]

    async def wait_event(self, namespace: str, name: str, text: str, limit_s: float = LIMIT_S) -> Json:
        """Return the first Event about a job whose reason or message holds `text`. Fails when there is none in time."""
        found: list[Json] = []

        async def look() -> Json | None:
            found[:] = await self.events(namespace, name)
            return next((event for event in found if text in f"{event.get('reason')} {event.get('message')}"), None)

        def seen() -> str:
            texts = [f"{event.get('reason')}: {event.get('message')}" for event in found]
            return f"{name} has {texts}"

        return await eventually(look, f"an Event with {text!r}", limit_s, seen, KUBECTL_PAUSE_S)

    async def status(self, namespace: str, name: str) -> Json:
        """Return the status of a job."""
        text = await self.cluster.kubectl("get", "rtj", name, "-n", namespace, "-o", "json")
        status: Json = json.loads(text).get("status") or {}
        return status

    async def wait_status(self, job: str, what: str, is_so: Callable[[Json], object]) -> Json:
        """Return the status of a job, in the namespace of its name, once it is so."""
        seen: Json = {}

        async def look() -> bool:
            nonlocal seen
            seen = await self.status(job, job)
            return bool(is_so(seen))

        await eventually(look, what, describe=lambda: f"the status is {seen}", pause_s=KUBECTL_PAUSE_S)
        return seen

    async def wait_training(
        self, job: str, what: str = "a job that trains", is_so: Callable[[Json], object] = lambda _status: True
    ) -> Json:
        """Do the same, once the job trains besides."""
        return await self.wait_status(job, what, lambda status: status.get("state") == "Running" and is_so(status))

    async def wait_gone(self, namespace: str, job: str, limit_s: float = 150.0) -> None:
        """Wait until nothing of a job is left; a garbage collector may need a minute to notice a new kind of owner."""
        names: list[str] = []

        async def look() -> bool:
            label = f"unbroken.dev/job={job}"
            kinds = "pods,secrets,services"
            names[:] = (await self.cluster.kubectl("get", kinds, "-n", namespace, "-l", label, "-o", "name")).split()
            return not names

        await eventually(look, f"nothing left of {job}", limit_s, lambda: f"there is {names}", KUBECTL_PAUSE_S)

    @asynccontextmanager
    async def namespace(self, name: str) -> AsyncIterator[str]:
        """Make a namespace, and delete the jobs in it at the end."""
        await self.apply("default", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            yield name
        finally:
            await self.cluster.kubectl("delete", "rtj", "--all", "-n", name, "--wait=false")
            for job in await self._jobs_with_pods(name):
                await self.wait_gone(name, job)

    @asynccontextmanager
    async def observe(self, namespace: str, job: str) -> AsyncIterator[Observer]:
        """Follow a job."""
        async with KubeClient(read_kubeconfig(self.cluster.kubeconfig)) as client:
            observer = Observer(client, namespace, job)
            following = asyncio.create_task(observer.run())
            try:
                yield observer
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _jobs_with_pods(self, namespace: str) -> set[str]:
        text = await self.cluster.kubectl("get", "pods", "-n", namespace, "-o", "json")
        return {item["metadata"]["labels"]["unbroken.dev/job"] for item in json.loads(text)["items"]}


def make_bench(profile: str, folder: Path, api_server: Path | None) -> Bench:
    """Return a bench that is not set up yet."""
    cluster = Cluster(folder / "cluster", ROOT / "examples" / "nodes-10.yaml", api_server)
    operator, port = operator_service(cluster.env, folder / "operator.log"), free_port()
    operator.command += ("--metrics-listen", f"127.0.0.1:{port}")
    return Bench(profile, cluster, operator, port)


def condition(snapshot: Snapshot, kind: str) -> Json:
    """Return one condition of the job, or an empty object."""
    return next((item for item in snapshot.conditions if item["type"] == kind), {})


def job(name: str, command: list[str], **spec: Any) -> Json:
    """Return a small job that runs `command` in the example's image; `spec` replaces whole fields of its spec."""
    container: Json = {"name": "trainer", "image": "unbroken/trainer-example:0.1.0", "command": command}
    fields: Json = {
        "replicas": 1,
        "timeouts": {"softSeconds": 4, "hardSeconds": 6, "barrierSeconds": 60, "startupSeconds": 60},
        "template": {"spec": {"containers": [container]}},
    }
    return {
        "apiVersion": "unbroken.dev/v1alpha1",
        "kind": "ResilientTrainingJob",
        "metadata": {"name": name},
        "spec": fields | spec,
    }


__all__ = ["Bench", "CommandError", "condition", "job", "make_bench"]
