"""`unbroken run`: the example on this machine without Kubernetes, through an exception and a killed worker."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken_local.demo.processes import Process, find_worker, read_processes
from unbroken_local.demo.tools import BIN

from .e2e_bench import ROOT


def started_by(pid: int) -> list[int]:
    """Return all descendants of a process."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def worker_of(run: int, pod: str, local_rank: int) -> int | None:
    """Return the pid of a worker of the run with that pid."""
    processes = read_processes(started_by(run))
    uids = {process.environment.get("UNBROKEN_POD_UID", "") for process in processes.values() if is_of(process, pod)}
    return find_worker(processes, uids.pop(), local_rank) if uids else None


def is_of(process: Process, pod: str) -> bool:
    """Whether a process belongs to the pod of that name."""
    return process.environment.get("UNBROKEN_POD") == pod


class Run:
    """One `unbroken run` with its output in a file."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [str(BIN / "unbroken"), "run", *arguments],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(LIMIT_S)

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self._output.read_text()

    def wait(self, what: str, is_there: Callable[[str], bool]) -> None:
        """Wait until the output is as `is_there` wants it."""
        wait_until(
            lambda: is_there(self.text) or self.process.poll() is not None, what, describe=lambda: self.text[-3000:]
        )
        assert is_there(self.text), f"{what}: want it, got exit code {self.process.poll()} and\n{self.text[-3000:]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(["--memory", "64Mi", "--memory-replicas", "1"], id="each step in memory"),
        pytest.param([], id="on the disk alone"),
    ],
)
def test_example_survives_an_exception_and_a_killed_worker_without_kubernetes(
    memory: list[str], tmp_path: Path
) -> None:
    control, checkpoints = tmp_path / "control", tmp_path / "checkpoints"
    control.mkdir()
    (control / "step-seconds").write_text("0.1")
    shape = ["--pods", "2", "--spares", "1", "--ranks-per-pod", "2", "--soft-timeout", "30"]
    script = [str(ROOT / "examples" / "digits.py"), f"--checkpoints={checkpoints}", f"--control={control}"]
    with Run(tmp_path / "output.log", *shape, *memory, *script, "--steps=300", "--save-every=10") as run:
        run.wait("training with a spare", lambda text: "2 spare" in text and any(checkpoints.glob("step-*/.metadata")))
        (control / "fault").write_text("raise 3")
        run.wait("first recovery", lambda text: "recovered 1: rung in-process" in text)
        pid = worker_of(run.process.pid, "digits-1", 1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        run.wait("second recovery", lambda text: "recovered 2: rung pod" in text)
        (control / "step-seconds").write_text("0")
        assert run.process.wait(LIMIT_S) == 0, run.text[-3000:]
    result = json.loads((checkpoints / "result.json").read_text())
    assert (result["steps"], result["steps_add_up"], result["iterations"]) == (300, True, 3)
    assert result["accuracy"] >= 0.9
