"""One job whose rendezvous and pods are processes on the hosts of a network that can be cut."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from tests.waiting import wait_until

from unbroken.agent.adapters.memory_file import read_memory
from unbroken_core.protocol.messages import JobStatus, PodStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import decode, settings_to_json
from unbroken_core.vocabulary.reasons import JobPhase, Role, WorkerPhase

from .partition_network import Network

T = TypeVar("T")

WORKLOAD = Path(__file__).with_name("partition_workload.py")
PORT = 29600


@dataclass(frozen=True)
class Save:
    """The newest checkpoint of one rank."""

    iteration: int
    pid: int
    step: int


class Job:
    """Rendezvous on host `rendezvous`, another one on host `second`, and pod i on host `pod-i`."""

    workload = WORKLOAD

    def __init__(self, network: Network, settings: JobSettings, service: str = "") -> None:
        """`service` is the address at which agents look for a rendezvous; "" means that of host `rendezvous`."""
        self.network = network
        self.settings = settings
        self._service = service or network["rendezvous"].address
        # Short: the path of a Unix socket has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="ubp-", dir="/tmp"))
        self._token = "partition-test-" + "x" * 32
        (self.folder / "token").write_text(self._token)
        (self.folder / "saves").mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.rendezvous: dict[str, subprocess.Popen[bytes]] = {}
        """The last one that was started, by host."""
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    # --------------------------------------------------------------------------------------------------------- parts

    def start_rendezvous(self, host: str = "rendezvous") -> None:
        """Start a rendezvous."""
        environment = {
            "UNBROKEN_SETTINGS": settings_to_json(self.settings),
            "UNBROKEN_TOKEN_FILE": str(self.folder / "token"),
            "UNBROKEN_LISTEN": f"0.0.0.0:{PORT}",
        }
        self.rendezvous[host] = self._start(host, host, [sys.executable, "-m", "unbroken.rendezvous"], environment)

    def start_pods(self) -> None:
        """Start all pods."""
        for index in range(self.settings.replicas + self.settings.spares):
            self.start_agent(index)
            self.launchers[index] = self._start_launcher(index)

    def start_agent(self, index: int) -> None:
        """Start the agent of a pod, also instead of one that has ended."""
        (self.folder / str(index)).mkdir(exist_ok=True)
        environment = {
            **self._identity(index),
            "UNBROKEN_SETTINGS": settings_to_json(self.settings),
            "UNBROKEN_TOKEN_FILE": str(self.folder / "token"),
            "UNBROKEN_RENDEZVOUS_URL": f"http://{self._service}:{PORT}",
        }
        command = [sys.executable, "-m", "unbroken.agent"]
        self.agents[index] = self._start(f"pod-{index}", f"agent-{index}", command, environment)

    def _start_launcher(self, index: int) -> subprocess.Popen[bytes]:
        environment = {
            **self._identity(index),
            "UNBROKEN_RANKS_PER_POD": str(self.settings.ranks_per_pod),
            "TEST_SAVES": str(self.folder / "saves"),
            "TEST_DONE": str(self.folder / "done"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "unbroken.launch", "--grace", "2", "--", sys.executable, str(self.workload)]
        return self._start(f"pod-{index}", f"launcher-{index}", command, environment)

    def _identity(self, index: int) -> dict[str, str]:
        return {
            "UNBROKEN_POD": f"pod-{index}",
            "UNBROKEN_POD_UID": f"uid-{index}",
            "UNBROKEN_NODE": f"node-{index}",
            "UNBROKEN_POD_IP": self.network[f"pod-{index}"].address,
            "UNBROKEN_DIR": str(self.folder / str(index)),
        }

    def _start(self, host: str, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.network[host].inside(*command),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    # ------------------------------------------------------------------------------------------------------- looking

    def wait_for(self, look: Callable[[], T | None], what: str) -> T:
        """Wait until `look` returns something that is true, and return it; fails with all logs when it never does."""
        return wait_until(look, what, describe=self.text)

    def text(self) -> str:
        """Return what all parts have said."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    def status(self, host: str = "rendezvous") -> JobStatus | None:
        """Ask a rendezvous, on its own host, for its status; None while it does not answer."""
        url = f"http://{self.network[host].address}:{PORT}/v1/status"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})

        def ask() -> bytes:
            with urllib.request.urlopen(request, timeout=5) as response:
                return bytes(response.read())

        try:
            status: JobStatus = decode(self.network[host].call(ask), JobStatus)
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return None
        return status

    def pods(self, host: str = "rendezvous") -> dict[str, PodStatus]:
        """Return the pods as a rendezvous knows them, by name; empty while it does not answer."""
        status = self.status(host)
        return {} if status is None else {pod.pod: pod for pod in status.pods}

    def saves(self) -> dict[int, Save]:
        """Return the newest checkpoint by rank."""
        found = {}
        for path in (self.folder / "saves").iterdir():
            if path.name.isdigit():
                found[int(path.name)] = Save(*map(int, path.read_text().split()))
        return found

    # ------------------------------------------------------------------------------------------------------- waiting

    def wait_trained(self, iteration: int) -> dict[int, Save]:
        """Wait until every rank has saved in this iteration, twice; return the newer checkpoints."""
        first: dict[int, Save] = {}

        def look() -> dict[int, Save] | None:
            saves = {rank: save for rank, save in self.saves().items() if save.iteration == iteration}
            for rank, save in saves.items():
                first.setdefault(rank, save)
            is_newer = all(save.step > first[rank].step for rank, save in saves.items())
            return saves if len(saves) == self.num_ranks and is_newer else None

        return self.wait_for(look, f"step of all ranks in iteration {iteration}")

    def wait_steps(self, count: int) -> dict[int, Save]:
        """Wait until every rank has made so many more steps in the iteration that it is in."""
        before = self.saves()

        def look() -> dict[int, Save] | None:
            now = self.saves()
            return now if all(now[rank].step >= save.step + count for rank, save in before.items()) else None

        return self.wait_for(look, f"{count} more steps")

    def wait_running(self, iteration: int, host: str = "rendezvous") -> JobStatus:
        """Wait until a rendezvous says that this iteration runs."""

        def look() -> JobStatus | None:
            status = self.status(host)
            is_running = status is not None and status.phase is JobPhase.RUNNING and status.iteration == iteration
            return status if is_running else None

        return self.wait_for(look, f"running iteration {iteration}")

    def wait_spare(self, pod: str) -> None:
        """Wait until a pod is there again, and ready to take over."""

        def look() -> bool:
            seen = self.pods().get(pod)
            is_spare = seen is not None and seen.role is Role.SPARE and seen.is_connected
            return is_spare and seen is not None and set(seen.workers) == {WorkerPhase.READY}

        self.wait_for(look, f"spare {pod}")

    def wait_fenced(self, index: int, iteration: int) -> None:
        """Wait until the agent of a pod that is cut off has ended this iteration by itself."""
        folder = self.folder / str(index)
        self.wait_for(lambda: read_memory(folder).interrupted >= iteration, f"fenced pod {index}")

    def pod_of(self, rank: int, host: str = "rendezvous") -> int:
        """Return the number of the pod that has a rank now."""

        def look() -> list[str]:
            return [pod for pod, seen in self.pods(host).items() if rank in seen.ranks]

        # A rendezvous that is busy may not answer in time.
        (found,) = self.wait_for(look, f"pod with rank {rank}")
        return int(found.removeprefix("pod-"))

    def wait_phase(self, phase: JobPhase) -> JobStatus:
        """Wait until the rendezvous is in this phase."""

        def look() -> JobStatus | None:
            status = self.status()
            return status if status is not None and status.phase is phase else None

        return self.wait_for(look, f"phase {phase}")

    @property
    def num_ranks(self) -> int:
        """World size of the whole job."""
        return self.settings.replicas * self.settings.ranks_per_pod

    # ----------------------------------------------------------------------------------------------------------- end

    def complete(self) -> None:
        """Let the script end, and wait until all launchers have ended well."""
        (self.folder / "done").touch()
        codes = self.wait_for(self._exit_codes, "end of the launchers")
        assert codes == dict.fromkeys(self.launchers, 0), self.text()
        late = self.folder / "saves" / "late"
        assert not late.exists(), late.read_text()

    def _exit_codes(self) -> dict[int, int] | None:
        codes = {index: launcher.poll() for index, launcher in self.launchers.items()}
        ended = {index: code for index, code in codes.items() if code is not None}
        return ended if len(ended) == len(codes) else None

    def close(self) -> None:
        """Kill what is left, and remove all files."""
        for process in self._processes:
            if process.poll() is None:
                below = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGKILL)
                for child in below:
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
