"""A local cluster, its API, and short words for the pods that the tests run in it."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import LIMIT_S, wait_until

from unbroken_local.kube.client import ApiError, KubeClient
from unbroken_local.kube.kubeconfig import read_kubeconfig

T = TypeVar("T")
Json = dict[str, Any]
IMAGE = "unbroken/sidecar:test"
FORCE = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


def unbroken_local(*words: str, limit_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Run `unbroken local`."""
    command = [sys.executable, "-m", "unbroken_local", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


def is_alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Bench:
    """One running cluster."""

    name: str
    directory: Path
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    client: KubeClient | None = None

    def connect(self) -> None:
        """Open the client."""

        async def enter() -> KubeClient:
            return await KubeClient(read_kubeconfig(self.directory / "kubeconfig")).__aenter__()

        self.client = self.runner.run(enter())

    def close(self) -> None:
        """Close the client."""
        if self.client is not None:
            self.runner.run(self.client.__aexit__(None, None, None))
        self.runner.close()

    def call(self, work: Callable[[KubeClient], Awaitable[Json]]) -> Json:
        """Use the client once."""
        client = self.client
        assert client is not None

        async def run() -> Json:
            return await work(client)

        coroutine: Coroutine[Any, Any, Json] = run()
        return self.runner.run(coroutine)

    def get(self, path: str) -> Json | None:
        """Return an object; None when there is none."""
        try:
            return self.call(lambda client: client.get(path))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def create(self, path: str, body: Json) -> Json:
        """Create an object."""
        return self.call(lambda client: client.create(path, body))

    def patch(self, path: str, body: Json) -> Json:
        """Change an object."""
        return self.call(lambda client: client.merge_patch(path, body))

    def delete(self, path: str, body: Json | None = None) -> None:
        """Delete an object, if it is there."""
        try:
            self.call(lambda client: client.delete(path, body))
        except ApiError as error:
            if error.status != 404:
                raise

    def kubectl(self, *words: str) -> str:
        """Run kubectl and return what it printed."""
        kubectl = str(Path(sys.executable).with_name("kubectl"))
        environment = {**os.environ, "KUBECONFIG": str(self.directory / "kubeconfig")}
        return subprocess.run(
            [kubectl, *words], env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def node(self, action: str, name: str) -> None:
        """Make a node fail or recover."""
        done = unbroken_local("node", action, name, "--dir", str(self.directory))
        assert done.returncode == 0, done.stderr


@dataclass
class Space:
    """A namespace of one test, and a folder that its pods see as /shared."""

    bench: Bench
    name: str
    folder: Path

    @property
    def pods(self) -> str:
        """Path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.name}/pods"

    def make(self, plural: str, name: str, **content: Any) -> Json:
        """Create a Secret, ConfigMap or Service."""
        return self.bench.create(f"/api/v1/namespaces/{self.name}/{plural}", {"metadata": {"name": name}, **content})

    def run(self, name: str, *containers: Json, labels: Json | None = None, **spec: Any) -> Json:
        """Create a pod; the first container is enough for most tests."""
        volumes = [{"name": "shared", "hostPath": {"path": str(self.folder)}}, *spec.pop("volumes", [])]
        body = {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {
                # Whoever obeys SIGTERM ends long before: nobody is killed for being slow on a busy machine.
                "terminationGracePeriodSeconds": 60,
                "automountServiceAccountToken": False,
                "containers": list(containers),
                "volumes": volumes,
                **spec,
            },
        }

        def create() -> Json | None:
            try:
                return self.bench.create(self.pods, body)
            except ApiError as error:  # A new namespace has no service account, or it no token, for a moment.
                if error.status != 403 and not error.is_passing:
                    raise
                return None

        return wait_until(create, f"pod {name} is accepted")

    def pod(self, name: str) -> Json | None:
        """Return a pod; None when there is none."""
        return self.bench.get(f"{self.pods}/{name}")

    def wait(self, name: str, check: Callable[[Json], object], what: str, limit_s: float = LIMIT_S) -> Json:
        """Wait until a pod's status satisfies `check`; return the pod."""
        seen: Json | None = None

        def look() -> Json | None:
            nonlocal seen
            seen = self.pod(name)
            return seen if seen is not None and check(seen.get("status") or {}) else None

        return wait_until(look, what, limit_s, lambda: self._describe(seen))

    def _describe(self, pod: Json | None) -> str:
        """Return a pod as it was seen last, what was said of the namespace's pods, and the end of the cluster's log."""
        events = (self.bench.get(f"/api/v1/namespaces/{self.name}/events") or {}).get("items", [])
        said = [f"{e['involvedObject'].get('uid')} {e.get('reason')}: {e.get('message')}" for e in events]
        log_end = (self.bench.directory / "cluster.log").read_text().splitlines()[-20:]
        return "\n".join([json.dumps(pod, indent=1), *said, *log_end])

    def wait_phase(self, name: str, phase: str) -> Json:
        """Wait until a pod is in a phase."""
        return self.wait(name, lambda status: status.get("phase") == phase, f"pod {name} is {phase}")

    def wait_ready(self, name: str) -> Json:
        """Wait until a pod is ready."""
        return self.wait(name, is_ready, f"pod {name} is ready")

    def wait_gone(self, name: str, uid: str = "") -> None:
        """Wait until a pod, or this one of its name, is gone."""

        def is_gone() -> bool:
            pod = self.pod(name)
            return pod is None or (bool(uid) and pod["metadata"]["uid"] != uid)

        wait_until(is_gone, f"pod {name} is gone")

    def read(self, name: str) -> str:
        """Return a file of the shared folder; empty when there is none."""
        try:
            return (self.folder / name).read_text()
        except OSError:
            return ""

    def wait_file(self, name: str) -> str:
        """Wait until a file of the shared folder has a whole line; return it without its end."""
        return wait_until(lambda: self.read(name) if self.read(name).endswith("\n") else None, f"file {name}").rstrip(
            "\n"
        )

    def wait_lines(self, name: str, number: int) -> list[str]:
        """Wait until a file of the shared folder has so many whole lines: a container runs before it writes them."""
        wait_until(lambda: self.read(name).count("\n") >= number, f"{number} lines in file {name}")
        return self.read(name).splitlines()

    def log(self, pod: Json, container: str, restarts: int = 0) -> str:
        """Return what a container wrote."""
        metadata = pod["metadata"]
        folder = f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        path = self.bench.directory / "logs" / folder / container / f"{restarts}.log"
        return path.read_text() if path.exists() else ""


def sh(script: str, *, name: str = "main", **more: Any) -> Json:
    """Return a container that runs a shell script and sees the shared folder."""
    mounts = [{"name": "shared", "mountPath": "/shared"}, *more.pop("volumeMounts", [])]
    return {"name": name, "image": IMAGE, "command": ["sh", "-c", script], "volumeMounts": mounts, **more}


def is_ready(status: Json) -> bool:
    """Return whether a pod's status says Ready."""
    return condition(status, "Ready").get("status") == "True"


def condition(status: Json, kind: str) -> Json:
    """Return one condition, or an empty object."""
    return next((c for c in status.get("conditions") or [] if c["type"] == kind), {})


def container(status: Json, name: str = "main") -> Json:
    """Return one container's status, or an empty object."""
    everyone = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    return next((c for c in everyone if c["name"] == name), {})


def waiting_reason(status: Json, name: str = "main") -> str:
    """Return why a container waits; empty when it does not."""
    return str(((container(status, name).get("state") or {}).get("waiting") or {}).get("reason", ""))


def terminated(status: Json, name: str = "main") -> Json:
    """Return how a container ended; empty when it did not."""
    return (container(status, name).get("state") or {}).get("terminated") or {}


def new_name(prefix: str) -> str:
    """Return a name that no other test has."""
    return f"{prefix}-{secrets.token_hex(3)}"
