"""Ranks of a pod that is to leave move between two steps, with real processes and gloo: no step is made twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken_core import wire
from unbroken_core.messages import Observation, PodObservation
from unbroken_core.reasons import Cause

WORKLOAD = Path(__file__).with_name("moves_workload.py")


def steps_of(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Return (iteration, step) of each step that a rank has made, in order."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(iteration), int(step)) for iteration, step in (line.split() for line in lines)]


@pytest.mark.timeout(200)
def test_pod_that_is_to_leave_gives_its_ranks_away_after_a_step_that_all_have_saved(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """As when a node is cordoned: the operator tells, a spare takes over, and training goes on at the next step."""
    job = start_job("--pods", "2", "--spares", "1", "--last-call", "20", workload="wrapped", command=[str(WORKLOAD)])
    job.wait_for(lambda: all(len(steps_of(tmp_path, rank)) >= 3 for rank in range(2)), "the first steps")
    pods = job.status()["pods"]
    leaving = next(pod["pod"] for pod in pods if pod["ranks"] == [1])
    seen = {
        pod["uid"]: PodObservation(
            pod["pod"], pod["node"], (), gone=Cause.POD_LEAVING if pod["pod"] == leaving else None
        )
        for pod in pods
    }
    assert job.request("/v1/observation", data=wire.encode(Observation(seen)).encode())[0] == 204
    job.wait_for(lambda: steps_of(tmp_path, 1)[-1][0] == 1, "steps of the next iteration")
    recovery = job.status()["recoveries"][-1]
    assert job.complete() == 0
    for rank in range(2):
        made = [step for _iteration, step in steps_of(tmp_path, rank)]
        assert made == list(range(1, len(made) + 1))
    last = max(step for iteration, step in steps_of(tmp_path, 1) if iteration == 0)
    assert (recovery["cause"], recovery["pod"], recovery["rung"]) == ("pod-leaving", leaving, "pod")
    assert recovery["detail"] == f"moves after step {last}", json.dumps(recovery)
