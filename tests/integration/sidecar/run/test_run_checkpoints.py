"""What a user of sharded checkpoints sees when ranks change places in processes that go on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = str(Path(__file__).parents[1] / "checkpoint_workload.py")


@pytest.mark.timeout(300)
def test_checkpoint_is_right_after_the_ranks_were_reversed_in_the_same_processes(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """With torch's caches of the iteration before, `save` succeeds, and the file differs in every tensor."""
    job = start_job("--pods", "4", workload="wrapped", command=[WORKLOAD, str(tmp_path / "checkpoints")])
    assert job.wait_for_exit() == 0
    said = re.findall(r"saved (\d) (\d) (\d+) (\d)", job.text())
    assert sorted((int(iteration), int(rank), right) for rank, iteration, _, right in said) == [
        (iteration, rank, "1") for iteration in range(3) for rank in range(4)
    ]
    # The same processes, each with another rank than before.
    ranks_by_pid: dict[str, list[str]] = {}
    for rank, _, pid, _ in sorted(said, key=lambda one: one[1]):
        ranks_by_pid.setdefault(pid, []).append(rank)
    assert len(ranks_by_pid) == 4
    assert all(first != second for first, second, _ in ranks_by_pid.values())
