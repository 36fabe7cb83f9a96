"""A checkpoint that training waits for is told as such, from the worker to the status and the metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = str(Path(__file__).parents[1] / "stall_workload.py")


@pytest.mark.timeout(300)
def test_a_checkpoint_between_two_steps_is_checkpoint_and_not_progress(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    job = start_job("--pods", "2", workload="wrapped", command=[WORKLOAD, str(tmp_path)])
    job.wait_for((tmp_path / "stalled").exists, "the end of the checkpoint")
    least_s, most_s = map(float, (tmp_path / "stalled").read_text().split())

    def told() -> dict[str, Any] | None:
        time: dict[str, Any] = job.status()["time"] or {}
        return time if time.get("checkpoint_s", 0.0) > 0.0 else None

    time = job.wait_for(told, "the checkpoint in the status")
    assert least_s <= time["checkpoint_s"] <= most_s + 0.001
    assert job.complete() == 0
