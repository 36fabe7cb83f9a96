"""torchrun itself, with `--rdzv-backend=unbroken --logs-specs=unbroken`: every kind of loss, one after another."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.integration.inprocess.forked import ZYGOTE, ForkedProcess, Forks
from tests.waiting import wait_until

from unbroken.run.loopback_block import LoopbackBlock

WORKER = Path(__file__).with_name("torchrun_worker.py")
RUN_ID = "story"

pytestmark = pytest.mark.timeout(400)
"""Above the sum of the waits on a busy machine; each has its own limit, and says what it waited for."""


@pytest.fixture(scope="module", autouse=True)
def _zygote() -> Iterator[None]:
    yield
    ZYGOTE.close()


@dataclass(frozen=True)
class Begin:
    """A worker has begun."""

    node: str
    pid: int
    rank: int
    world_size: int
    group_rank: int
    torchelastic_restart_count: int


class Job:
    """Some torchruns on this machine, which meet at one address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.block = LoopbackBlock()
        self.endpoint = f"{self.block.rendezvous}:29400"
        self.log = folder / "rendezvous.log"
        self.forks = Forks()
        self.nodes: dict[str, ForkedProcess] = {}

    def start(self, name: str) -> None:
        """Start the torchrun of a node."""
        options = [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-backend=unbroken",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={RUN_ID}",
            "--rdzv-conf=last_call_timeout=60,join_timeout=90,reconnect_timeout=1,heartbeat_timeout=60,"
            f"name={name},log_file={self.log}",
            "--max-restarts=3",
            "--logs-specs=unbroken",
            f"--log-dir={self.folder / name}",
            "--tee=3",
        ]
        argv = ["-m", "torch.distributed.run", *options, str(WORKER), str(self.folder)]
        # One torchrun a process: there is no terminal, and no proxy, between it and the rendezvous.
        environment = {**os.environ, "TEST_NODE": name, "UNBROKEN_SECRET": str(self.folder), "OMP_NUM_THREADS": "1"}
        self.nodes[name] = self.forks.start(argv, environment, self.folder / f"{name}.txt")

    def begun(self) -> list[Begin]:
        """Return all workers that have begun, in their order."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "events").read_text().splitlines()
            return [Begin(**json.loads(line)) for line in lines]
        return []

    def wait_begun(self, num_before: int, world: dict[str, int]) -> list[Begin]:
        """Wait until workers with these ranks by node, and no others, have begun after the first `num_before`."""

        def is_there() -> list[Begin] | None:
            new = self.begun()[num_before:]
            return new if {event.node: event.rank for event in new} == world and len(new) == len(world) else None

        return wait_until(is_there, f"workers {world}", describe=self.text)

    def kill(self, name: str) -> None:
        """End a node: torchrun and its workers at once."""
        self.nodes[name].kill()
        self.nodes.pop(name).wait()
        self._kill_workers([event for event in self.begun() if event.node == name])

    def _kill_workers(self, begun: list[Begin]) -> None:
        for event in begun:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(event.pid)
                # The number of one that has ended may be somebody else's by now.
                if str(self.folder) in process.cmdline():
                    process.kill()

    def wait_came(self, name: str, times: int = 1) -> None:
        """Wait until the rendezvous has met a node, after its restart once more."""

        def has_come() -> bool:
            return self.log.exists() and self.log.read_text().count(f"node came: name={name} ") >= times

        wait_until(has_come, f"node {name}", describe=self.text)

    def rendezvous(self) -> list[psutil.Process]:
        """Return the processes that serve this job's address."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "unbroken.rounds" in command and f"--listen={self.endpoint}" in command:
                    found.append(process)
        return found

    def text(self) -> str:
        """Return what all torchruns have said."""
        paths = [*self.folder.glob("*.txt"), self.log]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths if path.exists())

    def close(self) -> None:
        """End all that is left."""
        for node in self.nodes.values():
            node.kill()
        self.forks.close()
        self._kill_workers(self.begun())
        for process in self.rendezvous():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.block.release()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    try:
        yield job
    finally:
        job.close()


def test_torchrun_goes_on_after_every_loss_and_takes_new_nodes_in(job: Job) -> None:
    """3.31, 3.32, 3.33, 3.34, 3.35: start, a worker that fails, rank 0's node lost, the rendezvous killed, fewer nodes,
    a node that is new, and an end with success on all, also on one that was not needed (3.21). Logs (4.10): no attempt
    is written over."""
    job.start("a")
    job.start("b")
    job.wait_begun(0, {"a": 0, "b": 1})

    (job.folder / "fail-b").touch()
    again = job.wait_begun(2, {"a": 0, "b": 1})
    # A restart is counted where the worker has failed; the other node came because it was called.
    assert {event.node: event.torchelastic_restart_count for event in again} == {"a": 0, "b": 1}

    job.start("c")
    job.wait_came("c")
    job.kill("a")
    job.wait_begun(4, {"c": 0, "b": 1})

    (first,) = job.rendezvous()
    first.kill()
    for name in "bc":
        job.wait_came(name, 2)
    assert len(job.begun()) == 6, "nobody was interrupted"

    job.kill("c")
    job.wait_begun(6, {"b": 0})

    job.start("d")
    job.wait_begun(7, {"b": 0, "d": 1})

    job.start("spare")
    job.wait_came("spare")
    (job.folder / "finish").touch()
    for name, node in job.nodes.items():
        assert node.wait() == 0, f"{name}\n{job.text()}"
    logs = sorted(path.relative_to(job.folder / "b") for path in (job.folder / "b").rglob("stdout.log"))
    assert [path.parts[1] for path in logs] == ["attempt_0", "attempt_1", "attempt_1.1", "attempt_1.2", "attempt_1.3"]
    assert "rank 1 of b" in (job.folder / "b.txt").read_text()


def test_torchrun_with_another_secret_is_refused_in_words(job: Job) -> None:
    """Nothing listens without authentication."""
    job.start("a")
    # It listens for sure: where nobody does, the stranger starts a rendezvous with its own secret.
    job.wait_came("a")
    environment = {**os.environ, "TEST_NODE": "x", "UNBROKEN_SECRET": "another secret than theirs"}
    options = ["--nnodes=1:2", "--rdzv-backend=unbroken", f"--rdzv-endpoint={job.endpoint}"]
    argv = ["-m", "torch.distributed.run", *options, f"--rdzv-id={RUN_ID}", str(WORKER), str(job.folder)]
    stranger = job.forks.start(argv, environment, job.folder / "x.txt")
    assert stranger.wait() != 0
    assert "want the token of this run, it refuses ours (401)" in (job.folder / "x.txt").read_text()
