"""A job whose pods keep copies of each other's checkpoints in memory, each pod on a host of its own."""

import contextlib
import http.client
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil

from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.protocol.messages import Observation, PodObservation
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import encode, settings_to_json

from .partition_job import PORT, Job
from .partition_network import Network

_KEY = "k" * 64
_LIMIT_BYTES = 16 << 20


class MemoryJob(Job):
    """Keepers want certificates, so there is a job key, and an operator that names the pods."""

    workload = Path(__file__).with_name("memory_workload.py")

    def __init__(self, network: Network, settings: JobSettings) -> None:
        super().__init__(network, settings)
        self._memory = Path(tempfile.mkdtemp(prefix="ubp-", dir="/dev/shm"))
        self._token = derive_token(_KEY, Kind.OPERATOR, settings.uid)
        (self.folder / "key").write_text(_KEY)
        self._lost: set[int] = set()

    # --------------------------------------------------------------------------------------------------------- parts

    def start_rendezvous(self, host: str = "rendezvous") -> None:
        """Start a rendezvous, and tell it which pods there are."""
        environment = {
            "UNBROKEN_SETTINGS": settings_to_json(self.settings),
            "UNBROKEN_JOB_KEY_FILE": str(self.folder / "key"),
            "UNBROKEN_LISTEN": f"0.0.0.0:{PORT}",
        }
        self.rendezvous[host] = self._start(host, host, [sys.executable, "-m", "unbroken.rendezvous"], environment)
        self.wait_for(self.observe, "rendezvous that hears the operator")

    def observe(self) -> bool:
        """Name all pods that there are; False while nobody answers."""
        indices = set(range(self.settings.replicas + self.settings.spares)) - self._lost
        pods = {f"uid-{index}": PodObservation(f"pod-{index}", f"node-{index}", ()) for index in indices}
        request = urllib.request.Request(
            f"http://{self.network['rendezvous'].address}:{PORT}/v1/observation",
            data=encode(Observation(pods, is_accounted=True)).encode(),
            method="PUT",
            headers={"Authorization": f"Bearer {self._token}"},
        )

        def put() -> int:
            with urllib.request.urlopen(request, timeout=5) as response:
                return int(response.status)

        try:
            return self.network["rendezvous"].call(put) == 204
        except (OSError, http.client.HTTPException):
            return False

    def start_agent(self, index: int) -> None:
        """Start the agent of a pod, also instead of one that has ended."""
        for folder in (self.folder / str(index), self._memory / str(index)):
            folder.mkdir(mode=0o700, exist_ok=True)
        token = self.folder / f"token-{index}"
        token.write_text(derive_token(_KEY, Kind.AGENT, self.settings.uid, f"pod-{index}"))
        environment = {
            **self._identity(index),
            "UNBROKEN_SETTINGS": settings_to_json(self.settings),
            "UNBROKEN_TOKEN_FILE": str(token),
            "UNBROKEN_RENDEZVOUS_URL": f"http://{self.network['rendezvous'].address}:{PORT}",
        }
        command = [sys.executable, "-m", "unbroken.agent"]
        self.agents[index] = self._start(f"pod-{index}", f"agent-{index}", command, environment)

    def _identity(self, index: int) -> dict[str, str]:
        memory = {"UNBROKEN_MEMORY_DIR": str(self._memory / str(index)), "UNBROKEN_MEMORY_LIMIT": str(_LIMIT_BYTES)}
        return super()._identity(index) | memory

    # -------------------------------------------------------------------------------------------------------- faults

    def kill_rendezvous(self) -> None:
        """Kill the rendezvous, and start no other one."""
        self.rendezvous["rendezvous"].kill()
        self.rendezvous["rendezvous"].wait()

    def lose_pod(self, index: int) -> None:
        """Kill all processes of a pod; its memory goes with it, and the operator sees it no more."""
        for process in (self.agents[index], self.launchers[index]):
            _kill_all(process)
        shutil.rmtree(self._memory / str(index))
        self._lost.add(index)

    # ------------------------------------------------------------------------------------------------------- looking

    def protected(self) -> int:
        """Return the newest step that the status calls protected; -1: none."""
        status = self.status()
        return -1 if status is None or status.memory is None else status.memory.protected_step

    def said(self, what: str) -> list[tuple[int, int, int, str]]:
        """Return iteration, rank, step and state of each line that the workload has written of `what`."""
        path = self.folder / "saves" / what
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(iteration), int(rank), int(step), state) for iteration, rank, step, state in lines]

    def close(self) -> None:
        """Kill what is left, and remove all files."""
        super().close()
        shutil.rmtree(self._memory, ignore_errors=True)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for child in below:
        with contextlib.suppress(psutil.Error):
            child.kill()
