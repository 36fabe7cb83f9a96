"""Runs of memory_workload.py to their end, and what they leave."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOAD = str(Path(__file__).with_name("memory_workload.py"))
SHAPE = ("--pods", "2", "--ranks-per-pod", "2", "--memory", "8Mi", "--reconnect-timeout", "60")
LIMIT_S = 400.0
Calm = Callable[[str], dict[tuple[int, int], set[str]]]


def train(start_job: Callable[..., Any], folder: Path, kind: str, *faults: str, shape: tuple[str, ...] = SHAPE) -> Any:
    """Run the workload to its end; return the job."""
    folder.mkdir()
    # Without it MKL computes another last bit where a tensor's memory begins elsewhere.
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    job = start_job(*shape, workload="wrapped", command=[WORKLOAD, kind, str(folder), *faults])
    assert job.process.wait(LIMIT_S) == 0, job.text()
    return job


def losses(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return all losses that were computed, by rank and step."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        _, rank, step, bits = line.split()
        found.setdefault((int(rank), int(step)), set()).add(bits)
    return found


def restored(folder: Path) -> dict[int, set[str]]:
    """Return the steps that were restored in each iteration: one, if all ranks agreed."""
    found: dict[int, set[str]] = {}
    for line in (folder / "restored").read_text().splitlines():
        iteration, _, _, step = line.split()
        found.setdefault(int(iteration), set()).add(step)
    return found
