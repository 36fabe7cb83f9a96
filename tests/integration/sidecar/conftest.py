"""Starts `unbroken run` as a user does, and looks at its processes from the outside."""

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import environment_of, words_of
from tests.waiting import LIMIT_S, wait_until

from unbroken_core.conventions.tls import client_context

from .memory_runs import Calm, losses, train

WORKLOAD = Path(__file__).with_name("sidecar_workload.py")
TORCH_WORKLOAD = Path(__file__).with_name("torch_workload.py")
"""The same with torch: a launcher imports it once for its workers."""


@dataclass(frozen=True)
class WorkloadEvent:
    """One line of the workload."""

    name: str
    rank: int
    iteration: int
    pid: int


class RunningJob:
    """One `unbroken run`, or another program that does what it does."""

    def __init__(
        self, folder: Path, options: list[str], command: list[str], program: tuple[str, ...] = ("-m", "unbroken", "run")
    ) -> None:
        self.folder = folder
        self._events = folder / "events"
        self._done = folder / "done"
        self.errors = folder / "stderr"
        self.output = folder / "stdout"
        # Not below pytest's own folder: the path of a Unix socket must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="ubt-", dir="/tmp"))
        environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "TEST_EVENTS": str(self._events),
            "TEST_DONE": str(self._done),
            "GLOO_SOCKET_IFNAME": "lo",
            # aiohttp reads the system's authorities at its import, twice, in each process; nobody here trusts them.
            "SSL_CERT_FILE": os.devnull,
            "SSL_CERT_DIR": str(folder),
        }
        with self.errors.open("wb") as errors, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, *options, *command],
                env=environment,
                stdout=output,
                stderr=errors,
            )

    def events(self, name: str) -> list[WorkloadEvent]:
        """Return the workload's events of one name so far."""
        if not self._events.exists():
            return []
        lines = [line.split() for line in self._events.read_text().splitlines()]
        return [WorkloadEvent(n, int(r), int(i), int(p)) for n, r, i, p in lines if n.startswith(name)]

    def wait_for(self, is_true: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """Wait for a condition and return its value; fails with all output when it does not come."""
        return wait_until(is_true, what, limit_s, self.text)

    def wait_started(self, iteration: int, num_ranks: int) -> dict[int, int]:
        """Wait until all ranks of an iteration have trained a step; return pid by rank."""

        def pids() -> dict[int, int] | None:
            found = {event.rank: event.pid for event in self.events("started") if event.iteration == iteration}
            return found if len(found) == num_ranks else None

        return dict(self.wait_for(pids, f"iteration {iteration} on {num_ranks} ranks"))

    def text(self) -> str:
        """Return what the run has said."""
        return self.errors.read_text(errors="replace") + self.output.read_text(errors="replace")

    def parts(self, module: str) -> list[psutil.Process]:
        """Return the processes of one part: unbroken.agent, unbroken.launch or unbroken.rendezvous."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if module in words_of(child) and environment_of(child)]

    def part_of_pod(self, module: str, pod: str) -> psutil.Process:
        """Return the agent or launcher of one pod."""
        (found,) = [part for part in self.parts(module) if environment_of(part).get("UNBROKEN_POD") == pod]
        return found

    def private(self, name: str) -> Path:
        """Return the path of a file in the run's own folder."""
        (folder,) = self.temporary.glob("unbroken-*")
        return folder / name

    @property
    def uid(self) -> str:
        """The job's uid."""
        return f"local-{self.process.pid}"

    def request(self, path: str, token: str | None = None, data: bytes | None = None) -> tuple[int, bytes]:
        """Ask the rendezvous; `token` None means the right one."""
        listen = self.parts("unbroken.rendezvous")[0].environ()["UNBROKEN_LISTEN"]
        right = self.private("token").read_text()
        authority = self.private("ca.crt")
        context = client_context(authority.read_text()) if authority.exists() else None
        request = urllib.request.Request(
            f"{'http' if context is None else 'https'}://{listen}{path}",
            data=data,
            method="GET" if data is None else "PUT",
            headers={"Authorization": f"Bearer {right if token is None else token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def status(self) -> dict[str, Any]:
        """Return the job's status.

        Asked again where a connection broke: a rendezvous drops handshakes that take 5 s, also on a busy machine.
        """

        def answer() -> tuple[int, bytes] | None:
            if self.process.poll() is not None:
                pytest.fail(f"the run has ended with {self.process.returncode}:\n{self.text()}")
            if not self.parts("unbroken.rendezvous"):
                return None
            try:
                return self.request("/v1/status")
            except (OSError, http.client.HTTPException, psutil.NoSuchProcess):
                return None

        code, body = self.wait_for(answer, "an answer of the rendezvous")
        assert code == 200
        return dict(json.loads(body))

    def complete(self) -> int:
        """Tell the workload to stop, and return the exit code of the run."""
        self._done.touch()
        return self.wait_for_exit()

    def wait_for_exit(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code of the run."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end:\n{self.text()}")

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            for process in below:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., RunningJob]]:
    """Start `unbroken run` with the workload `bare`, `plain` or `wrapped`, or with a command of its own."""
    jobs: list[RunningJob] = []

    def start(*options: str, workload: str = "bare", command: list[str] | None = None) -> RunningJob:
        rungs = [] if workload == "wrapped" else ["--rungs", "process,pod,world,job"]
        folder = tmp_path / f"job-{len(jobs)}" if jobs else tmp_path
        folder.mkdir(exist_ok=True)
        script = WORKLOAD if workload == "bare" else TORCH_WORKLOAD
        job = RunningJob(folder, [*rungs, *options], command or [str(script), workload])
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def calm(start_job: Callable[..., Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the losses of a run without faults; those of one kind are computed once, whoever asks first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def of(kind: str) -> dict[tuple[int, int], set[str]]:
        kept = shared / f"calm-{kind}"
        with (shared / f"calm-{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                train(start_job, tmp_path / "calm", kind)
                # Under its name only when it is whole.
                (tmp_path / "calm").rename(kept)
        return losses(kept)

    return of
