"""`unbroken run` of a script whose ranks do not ping, with gloo: who is blamed for a hang."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = Path(__file__).with_name("hang_workload.py")


@pytest.mark.timeout(200)
def test_rank_that_is_not_in_the_collective_is_blamed_without_any_ping(start_job: Callable[..., Any]) -> None:
    job = start_job("--pods", "2", "--soft-timeout", "12", workload="wrapped", command=[str(WORKLOAD)])
    assert job.wait_for_exit() == 0, job.text()
    # Who waits is reported first, since it is the one that has stopped; then the one that it waits for.
    told = [line.partition("fault 1: ")[2] for line in job.text().splitlines() if "fault 1: " in line]
    assert re.match(r"soft-timeout of rank 1 in hang-workload-\d: was not in a collective", told[-1]), job.text()
    assert "fault 2" not in job.text()
