"""Starts workers as torchrun does, or with the variables alone, and looks at what they and their job leave."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import wait_until

from .forked import ForkedProcess, Forks

HERE = Path(__file__).parent
SCRIPT = HERE / "standalone_script.py"
NUM_PORTS = 12
LIMIT_S = 150.0
"""For anything that must happen; torch takes long to import on a busy machine."""
Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True)
class Event:
    """One line of the script."""

    name: str
    rank: int
    iteration: int
    pid: int
    value: str


class Job:
    """Use it as a context manager: all that it started is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Not below pytest's own folder: the path of a Unix socket must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="ubh-", dir="/tmp"))
        self._claim, self.port = _claim_ports()
        self.processes: list[Process] = []
        self._forks: Forks | None = None

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                # Those of a torchrun would go on without it, and keep the machine busy for the tests that follow.
                below = _below(process.pid)
                process.kill()
                _kill_all(below)
            process.wait()
        if self._forks is not None:
            self._forks.close()
        _kill_all(self.all_processes())
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._claim.close()

    # ---------------------------------------------------------------------------------------------------------- start

    def torchrun(self, num_workers: int, *command: str, max_restarts: int = 0) -> None:
        """Start torchrun on this machine."""
        options = ["--standalone", f"--nproc-per-node={num_workers}", f"--max-restarts={max_restarts}"]
        self._start([sys.executable, "-m", "torch.distributed.run", *options, *command], {})

    def plain(
        self,
        num_workers: int,
        mode: str,
        variables: Callable[[int], Mapping[str, str]] = lambda _: {},
        *,
        is_forked: bool = True,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Start workers with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; `variables` adds some by rank.

        All of them, or those of `ranks`. Forked ones differ from those that an interpreter starts in nothing but the
        time that torch takes to import.
        """
        for rank in range(num_workers) if ranks is None else ranks:
            base = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            words = [str(SCRIPT), mode]
            self._start(words if is_forked else [sys.executable, *words], {**base, **variables(rank)}, is_forked)

    def _start(self, command: Sequence[str], variables: Mapping[str, str], is_forked: bool = False) -> None:
        index = len(self.processes)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("UNBROKEN_")},
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.temporary),
            "TEST_EVENTS": str(self.folder / "events"),
            "TEST_DONE": str(self.folder / "done"),
            "UNBROKEN_LOG_DIR": str(self.folder / "logs"),
            **variables,
        }
        path = self.folder / f"out-{index}"
        if is_forked:
            self._forks = self._forks or Forks()
            self.processes.append(self._forks.start(command, environment, path))
            return
        with path.open("wb") as output:
            self.processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    # ----------------------------------------------------------------------------------------------------------- look

    def events(self, name: str) -> list[Event]:
        """Return the script's events of one name so far."""
        path = self.folder / "events"
        # The last line may not be there to its end.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        split = [line.split(" ", 4) for line in lines]
        return [
            Event(word, int(rank), int(it), int(pid), value) for word, rank, it, pid, value in split if word == name
        ]

    def standalone_processes(self) -> dict[str, list[psutil.Process]]:
        """Return host processes and roots of this job."""
        found: dict[str, list[psutil.Process]] = {"host": [], "root": []}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "unbroken.standalone" in words and any(word.startswith(str(self.temporary)) for word in words):
                found[words[words.index("unbroken.standalone") + 1]].append(process)
        return found

    def num_guests(self) -> int:
        """Return how many workers the host processes have taken in."""
        found = 0
        for host in self.standalone_processes()["host"]:
            with contextlib.suppress(psutil.Error):
                at_door = [one for one in host.net_connections("unix") if str(one.laddr).endswith("/workers.sock")]
                # One of them is the door itself.
                found += max(len(at_door) - 1, 0)
        return found

    def all_processes(self) -> list[psutil.Process]:
        """Return the same in one list."""
        found = self.standalone_processes()
        return found["host"] + found["root"]

    def wait_for(self, is_true: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """Wait for a condition and return its value; fails with all output when it does not come."""
        return wait_until(is_true, what, limit_s, self.text)

    def wait_for_world(self, size: int) -> None:
        """Wait until all of a world of this size have started in one iteration, whichever that is."""

        def is_there() -> bool:
            in_world = [event for event in self.events("started") if f"/{size}@" in event.value]
            return any(sum(one.iteration == event.iteration for one in in_world) == size for event in in_world)

        self.wait_for(is_there, f"a world of {size}")

    def wait_for_started(self, iteration: int, count: int) -> list[Event]:
        """Wait until so many workers run an iteration."""

        def started() -> list[Event]:
            return [event for event in self.events("started") if event.iteration == iteration]

        self.wait_for(lambda: len(started()) >= count, f"{count} workers in iteration {iteration}")
        return started()

    def finish(self) -> None:
        """Let the script's loop end."""
        (self.folder / "done").touch()

    def wait(self, codes: Sequence[int] | None = None, limit_s: float = LIMIT_S) -> None:
        """Wait for the end of all that was started; the exit codes must be these, all 0 by default."""
        ends = [process.poll for process in self.processes]
        self.wait_for(lambda: all(end() is not None for end in ends), "end of the workers", limit_s)
        found = [process.returncode for process in self.processes]
        if found != (list(codes) if codes is not None else [0] * len(found)):
            pytest.fail(f"exit codes: {found}\n{self.text()}")

    def wait_for_nobody(self, limit_s: float = LIMIT_S) -> None:
        """Wait until no process of the job is left."""
        self.wait_for(lambda: not self.all_processes(), "end of host processes and root", limit_s)

    def values(self) -> list[str]:
        """Return what the wrapped calls returned, sorted."""
        return sorted(event.value for event in self.events("returned"))

    def kill_all(self) -> None:
        """SIGKILL all workers."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)

    def text(self) -> str:
        """Return all output and logs."""
        paths = [*sorted(self.folder.glob("out-*")), self.folder / "events", *sorted(self.folder.glob("logs/*"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in paths if path.is_file())


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _claim_ports() -> tuple[socket.socket, int]:
    """Return the first of some free ports, below those that the system gives out, and what keeps other jobs off them.

    The first is MASTER_PORT, at which nobody listens but the socket that is returned.
    """
    while True:
        number = random.randrange(20000, 30000, NUM_PORTS)
        try:
            claim = socket.create_server(("127.0.0.1", number))
        except OSError:
            continue
        try:
            with contextlib.ExitStack() as stack:
                for port in range(number + 1, number + NUM_PORTS):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            claim.close()
            continue
        return claim, number
