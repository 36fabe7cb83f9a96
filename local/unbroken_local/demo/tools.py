"""Programs that the demonstration starts, each by the command that a user types: cluster, operator, kubectl."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken_core.conventions.images import image_of
from unbroken_core.vocabulary.errors import UnbrokenError

BIN = Path(sys.executable).parent
STOP_LIMIT_S = 15.0
SIDECAR_IMAGE = image_of("sidecar")
"""Image for which the local kubelet runs this Python environment."""


class CommandError(UnbrokenError):
    """A program ended with an error, or did not end."""


async def run(*command: str, env: Mapping[str, str] | None = None, limit_s: float = 60.0) -> str:
    """Run a program and return its standard output. Raises CommandError with what it said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=None if env is None else dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise CommandError(f"{' '.join(command)}: want it to end within {limit_s:.0f} s, got no end") from error
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        said = (errors or output).decode(errors="replace").strip()
        raise CommandError(f"{' '.join(command)}: exit code {process.returncode}: {said[-2000:]}")
    return output.decode(errors="replace")


@dataclass
class Service:
    """A program that runs in the background, with its output in a file."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def exit_code(self) -> int | None:
        """Exit code, or None while it runs or was never started."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; its output is appended to the log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """End it by SIGTERM, after `limit_s` by SIGKILL; no-op when it does not run."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)


def operator_service(env: Mapping[str, str], log: Path) -> Service:
    """Return an operator for the cluster that KUBECONFIG in `env` names; it is not started yet."""
    command = (str(BIN / "python"), "-m", "unbroken_operator", "--all-namespaces", "--sidecar-image", SIDECAR_IMAGE)
    return Service("operator", command, env, log)


@dataclass(frozen=True)
class Cluster:
    """One local cluster; its state lies in `folder`."""

    folder: Path
    nodes: Path
    api_server: Path | None = None
    """Kubeconfig of an API server that is there already; None for one of our own."""

    @property
    def kubeconfig(self) -> Path:
        """File that kubectl and the operator read."""
        return self.api_server or self.folder / "kubeconfig"

    @property
    def env(self) -> dict[str, str]:
        """Environment in which kubectl and the operator talk to this cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    async def up(self) -> None:
        """Start what a cluster needs, kubelets included; returns when all nodes are ready. Raises CommandError."""
        other = ("--api-server", str(self.api_server)) if self.api_server else ()
        await self._local("up", "--nodes", str(self.nodes), *other, limit_s=90.0)

    async def down(self) -> None:
        """End the cluster and every process of its pods. Raises CommandError."""
        await self._local("down", limit_s=60.0)

    async def fail_node(self, name: str) -> None:
        """Make a node fail: its processes are killed, and its lease is not renewed any more. Raises CommandError."""
        await self._local("node", "fail", name)

    async def silence_node(self, name: str) -> None:
        """Let a node's kubelet fall silent; its processes run on. Raises CommandError."""
        await self._local("node", "silence", name)

    async def recover_node(self, name: str) -> None:
        """Bring a node back that failed or fell silent. Raises CommandError."""
        await self._local("node", "recover", name)

    async def kubectl(self, *words: str, limit_s: float = 30.0) -> str:
        """Run kubectl and return what it printed. Raises CommandError."""
        return await run(str(BIN / "kubectl"), *words, env=self.env, limit_s=limit_s)

    async def _local(self, *words: str, limit_s: float = 30.0) -> None:
        await run(str(BIN / "unbroken"), "local", *words, "--dir", str(self.folder), limit_s=limit_s)
