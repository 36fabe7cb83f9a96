"""`unbroken run` of scripts that go on after the training function: the run is as good as the ends of the processes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
WORKLOAD = Path(__file__).parents[1] / "ends_workload.py"


@pytest.mark.timeout(500)
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
        pytest.param(
            {"in 0": "exit 0", "in 1": "exit 0"}, 0, "complete: all 2 ranks completed", id="early stop on all ranks"
        ),
        pytest.param(
            {"in 0": "exit 3", "in 1": "exit 3"}, 3, "(SystemExit: 3); call sys.exit(0) for an early stop", id="give up"
        ),
        pytest.param(
            {"in 0": "mistake", "in 1": "mistake"},
            1,
            "(NameError: name 'undefined' is not defined); correct the script",
            id="a mistake",
        ),
        pytest.param({"1": "kill"}, 137, "failed: rank 1 in ends-workload-1 killed by signal 9", id="one is killed"),
        pytest.param({"0": "again", "1": "again"}, 1, "this is the second call in this process", id="second call"),
    ],
)
def test_run_is_complete_when_its_processes_have_ended_well(
    start_job: Start, ends: dict[str, str], code: int, text: str
) -> None:
    job = start_job("--pods", "2", workload="wrapped", command=[str(WORKLOAD), json.dumps(ends)])
    assert job.wait_for_exit(400.0) == code, job.text()
    assert text in job.text()
    assert ("complete:" in job.text()) == (code == 0)
    assert ("fault 1" in job.text()) == any(key.startswith("in") and "exit 0" not in end for key, end in ends.items())
    assert job.text().count("Traceback") <= 4, "each rank's own, twice"
    last = job.errors.read_text().splitlines()[-1]
    assert text in last
    assert "socket.cpp" not in last, "a message of torch is not what the script ended with"


@pytest.mark.timeout(200)
def test_job_is_not_complete_while_a_process_goes_on_after_the_training(start_job: Start, tmp_path: Path) -> None:
    job = start_job("--pods", "2", workload="wrapped", command=[str(WORKLOAD), json.dumps({"1": "wait"})])
    job.wait_for(lambda: "waits for their processes" in job.text(), "the wait in the story")
    assert job.status()["phase"] == "ending"
    assert "complete:" not in job.text()
    assert job.complete() == 0
    assert "complete: all 2 ranks completed" in job.text()


@pytest.mark.timeout(200)
def test_a_spare_that_stands_still_does_not_keep_a_complete_job_from_ending(start_job: Start) -> None:
    """Seen before: `unbroken run` waited for such a pod for ten minutes."""
    ends = json.dumps({"0": "wait"})
    job = start_job("--pods", "1", "--spares", "1", workload="wrapped", command=[str(WORKLOAD), ends])
    job.wait_for(lambda: job.status()["phase"] == "ending", "the end of the training")
    (spare,) = [pod["pod"] for pod in job.status()["pods"] if not pod["ranks"]]
    launcher = job.part_of_pod("unbroken.launch", spare)
    for part in (launcher, *launcher.children(recursive=True)):
        part.suspend()
    assert job.complete() == 0
    assert "complete: the only rank completed" in job.text()
    assert not launcher.is_running()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("script", "text"),
    [
        pytest.param("print('trained')", "leave in-process out of --rungs (process,pod,world,job)", id="never wrapped"),
        pytest.param(
            "import torch.distributed as dist\nfrom unbroken import inprocess\n"
            "dist.init_process_group('gloo')\ninprocess.Wrapper()(lambda: None)()",
            "only inside a function wrapped by unbroken.inprocess.Wrapper: move what needs one, such as "
            "init_process_group, into it, or, for a script as written for torchrun, leave in-process out of --rungs "
            "(process,pod,world,job)",
            id="a group without a rank, before the wrapped function or as written for torchrun",
        ),
        pytest.param(
            "import os\nimport torch.distributed as dist\nfrom unbroken import inprocess\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            "inprocess.Wrapper()(lambda: None)()",
            "Move init_process_group inside the wrapped function",
            id="a group made before",
        ),
        pytest.param(
            "from unbroken import inprocess\n@inprocess.Wrapper\ndef train():\n    pass\ntrain()",
            "Wrapper: must be written with parentheses (@unbroken.inprocess.Wrapper()) and takes options by name only",
            id="a decorator without parentheses",
        ),
        pytest.param("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", id="mistake"),
    ],
)
def test_script_that_cannot_start_is_tried_twice_and_told_what_to_change(
    start_job: Start, tmp_path: Path, script: str, text: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    job = start_job(workload="wrapped", command=[sys.executable, str(path)])
    assert job.wait_for_exit() == 1
    last = job.errors.read_text().splitlines()[-1]
    assert "failed: " in last
    assert "ended 2 times" in last
    assert text in last


@pytest.mark.timeout(200)
def test_module_that_does_not_exist_is_tried_twice(start_job: Start) -> None:
    job = start_job(workload="wrapped", command=["-m", "no_such_module_anywhere"])
    assert job.wait_for_exit() == 1
    last = job.errors.read_text().splitlines()[-1]
    assert "ended 2 times: exited with code 1: " in last
    assert "No module named no_such_module_anywhere" in last
