"""A job that restarts in its processes again and again holds no more afterwards than before."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

WORKLOAD = Path(__file__).parents[1] / "restarts_workload.py"
NUM_RANKS = 4
PARTS = ("unbroken.rendezvous", "unbroken.agent", "unbroken.launch")
MEMORY_KIB = 1024
"""Seen in a worker: 100 to 250 KiB in 1,000 restarts, most of it in the first 300 (the allocator's fragments). What a
restart could leave behind is larger than a thousandth of this: a group has 20 KiB, a thread touches 12 KiB of stack."""
OTHER_MEMORY_KIB = 3 * 1024
"""Of the parts beside the workers: three arenas of Python's allocator, which come and go as a whole."""
NUM_THREADS = NUM_DESCRIPTORS = 3
"""One that is on its way out, and the two of its neighbours; a leak has one or more a restart."""
NUM_OBJECTS = 10
"""Of each type. Seen: up to 5 (a thread object that is not collected yet)."""

Holding = Mapping[str, Any]


def growth(before: Holding, after: Holding, memory_kib: int = MEMORY_KIB) -> dict[str, int]:
    """Return what there is more of than chance allows, with the number by which it grew."""
    by_name = {"memory KiB": (after["memory_kib"] - before["memory_kib"], memory_kib)}
    threads = sum(after["threads"].values()) - sum(before["threads"].values())
    by_name["threads"] = (threads, NUM_THREADS)
    for what, margin in (("descriptors", NUM_DESCRIPTORS), ("objects", NUM_OBJECTS)):
        for kind in after[what]:
            by_name[f"{what}: {kind}"] = (after[what][kind] - before[what].get(kind, 0), margin)
    return {name: grown for name, (grown, margin) in by_name.items() if grown > margin}


def holding_of(process: psutil.Process) -> Holding:
    """Return what a part of the job holds, as the workload says it of itself."""
    links = Counter(file.name for file in Path(f"/proc/{process.pid}/fd").iterdir())
    return {
        "memory_kib": process.memory_info().rss // 1024,
        "threads": {"all": process.num_threads()},
        "descriptors": {"all": links.total()},
        "objects": {},
    }


@pytest.mark.parametrize(
    ("num_restarts", "warm_up"),
    [
        pytest.param(60, 20, id="sixty restarts", marks=pytest.mark.timeout(300)),
        pytest.param(1000, 50, id="a thousand restarts", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_job_holds_no_more_after_many_restarts(
    start_job: Callable[..., Any], tmp_path: Path, num_restarts: int, warm_up: int
) -> None:
    """2.17: memory, threads, descriptors and objects of workers, agents, launchers and rendezvous stay the same."""
    samples = tmp_path / "samples"
    arguments = [str(num_restarts), str(warm_up), str(samples)]
    job = start_job(
        *("--pods", "2", "--ranks-per-pod", "2", "--rungs", f"in-process:{10 * num_restarts}"),
        command=[str(WORKLOAD), *arguments],
    )

    def of_iteration(iteration: int) -> dict[int, Holding] | None:
        lines = samples.read_text().splitlines(keepends=True) if samples.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        by_pid = {item["pid"]: item for item in found if item["iteration"] == iteration}
        return by_pid if len(by_pid) == NUM_RANKS else None

    def of_parts() -> dict[int, Holding]:
        return {process.pid: holding_of(process) for part in PARTS for process in job.parts(part)}

    before = job.wait_for(lambda: of_iteration(warm_up), "end of the warm-up")
    parts_before = of_parts()
    after = job.wait_for(lambda: of_iteration(num_restarts), "last restart", limit_s=600.0)
    parts_after = of_parts()
    assert job.complete() == 0
    assert before.keys() == after.keys(), "a worker was started again"
    assert {pid: growth(before[pid], after[pid]) for pid in before} == {pid: {} for pid in before}
    assert {pid: growth(parts_before[pid], parts_after[pid], OTHER_MEMORY_KIB) for pid in parts_before} == {
        pid: {} for pid in parts_after
    }
