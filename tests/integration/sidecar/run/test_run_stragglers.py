"""A rank that holds all others up, on real gloo: it is named, and moves to a spare where the job wants that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = str(Path(__file__).parents[1] / "straggler_workload.py")
RANKS = 4


def start(start_job: Callable[..., Any], folder: Path, kind: str, mode: str, *options: str) -> tuple[Any, str]:
    """Start a job, and let the pod of rank 2 be slow once all ranks train; return it and that pod."""
    shape = ("--pods", str(RANKS), "--last-call", "60", *options)
    stragglers = ("--stragglers", mode, "--straggler-window", "5", "--heartbeat-timeout", "10")
    job = start_job(*shape, *stragglers, workload="wrapped", command=[WORKLOAD, str(folder), kind])
    job.wait_for(lambda: len(list(folder.glob("rank-*-0"))) == RANKS, "a step of all ranks", 280)
    pod = next(str(pod["pod"]) for pod in job.status()["pods"] if pod["ranks"] == [2])
    part = folder / "slow.part"
    part.write_text(pod)
    part.rename(folder / "slow")
    return job, pod


def stragglers(job: Any) -> dict[str, str]:
    """Return the message of each straggler that the status has, by pod."""
    found = (job.status().get("health") or {}).get("findings", ())
    return {item["pod"]: item["finding"]["message"] for item in found if item["finding"]["check"] == "stragglers"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["spin", "sleep"])
def test_a_slow_rank_is_named_although_the_steps_of_all_ranks_take_equally_long(
    kind: str, start_job: Callable[..., Any], tmp_path: Path
) -> None:
    job, pod = start(start_job, tmp_path, kind, "Report")
    text = job.wait_for(lambda: stragglers(job).get(pod), "the straggler", 280)
    print(text)
    assert text.startswith("in two windows busy for ")
    assert job.status()["recoveries"] == []
    assert job.complete() == 0


@pytest.mark.timeout(600)
def test_a_slow_rank_moves_to_a_spare_once(start_job: Callable[..., Any], tmp_path: Path) -> None:
    job, pod = start(start_job, tmp_path, "spin", "Move", "--spares", "1")

    def moved() -> dict[str, Any] | None:
        found = [item for item in job.status()["recoveries"] if item["cause"] == "straggler" and item["pod"] == pod]
        return found[0] if found and found[0]["ended_at"] else None

    recovery = job.wait_for(moved, "the move", 280)
    assert (recovery["rung"], recovery["detail"].split(":")[0]) == ("pod", "slow-rank on rank 2 is suspect")
    assert next(item["ranks"] for item in job.status()["pods"] if item["pod"] == pod) == []
    assert job.complete() == 0
