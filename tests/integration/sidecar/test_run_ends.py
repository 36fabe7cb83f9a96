"""`unbroken run` of scripts that go on after the training function: the run is as good as the ends of the processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
WORKLOAD = Path(__file__).with_name("ends_workload.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ends", "code", "text"),
    [
        pytest.param({}, 0, "complete: all 2 ranks completed", id="all end well"),
        pytest.param({"0": "return 0", "1": "exit 0"}, 0, "complete: all 2 ranks completed", id="exit with 0"),
        pytest.param(
            {"0": "raise", "1": "raise"},
            1,
            "exited with code 1 after its training function had returned: RuntimeError: no disk",
            id="all raise",
        ),
        pytest.param(
            {"1": "exit 3"},
            3,
            "failed: rank 1 in ends-workload-1 exited with code 3 after its training function had returned",
            id="one exits",
        ),
        pytest.param({"1": "kill"}, 137, "failed: rank 1 in ends-workload-1 killed by signal 9", id="one is killed"),
        pytest.param({"0": "again", "1": "again"}, 1, "this is the second call in this process", id="second call"),
    ],
)
def test_run_is_complete_when_its_processes_have_ended_well(
    start_job: Start, ends: dict[str, str], code: int, text: str
) -> None:
    job = start_job("--pods", "2", workload="wrapped", command=[str(WORKLOAD), json.dumps(ends)])
    assert job.wait_for_exit() == code, job.text()
    assert text in job.text()
    assert ("complete:" in job.text()) == (code == 0)


@pytest.mark.timeout(200)
def test_job_is_not_complete_while_a_process_goes_on_after_the_training(start_job: Start, tmp_path: Path) -> None:
    job = start_job("--pods", "2", workload="wrapped", command=[str(WORKLOAD), json.dumps({"1": "wait"})])
    job.wait_for(lambda: "waits for their processes" in job.text(), "the wait in the story")
    assert job.status()["phase"] == "ending"
    assert "complete:" not in job.text()
    assert job.complete() == 0
    assert "complete: all 2 ranks completed" in job.text()
