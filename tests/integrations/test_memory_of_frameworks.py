"""Jobs of frameworks that restart in their processes again and again hold no more afterwards than before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.sidecar.test_many_restarts import Holding, growth

ROOT = Path(__file__).parents[2]
RESTARTS = int(os.environ.get("TEST_RESTARTS", "1000"))
WARM_UP = 100
"""Before it, torch's cache of shared memory (128 entries) and what a plan knows of earlier loads (32) are not full."""
LIMIT_S = 7_200.0
MEMORY_KIB = 8 * 1024
"""Of a worker. Seen before what all ranks go back to left the environment: 4 to 10 KiB a restart. A model and its
optimizer's state have 18 KiB, a group 20 KiB."""


@pytest.mark.integrations
@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("framework", ["fsdp2", "hf"])
def test_a_framework_holds_no_more_after_many_restarts(tmp_path: Path, framework: str) -> None:
    """Memory, threads, descriptors and objects of workers stay the same."""
    script = ROOT / "tests" / "integrations" / "jobs" / "restarts.py"
    command = [sys.executable, "-m", "unbroken", "run", "--pods", "1", "--ranks-per-pod", "2", "--memory", "64Mi"]
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)])
    with (tmp_path / "log").open("w") as log:
        code = subprocess.run(
            [*command, "--rungs", f"in-process:{10 * RESTARTS}", str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TEST_OUT": str(tmp_path)},
                **{"TEST_FRAMEWORK": framework, "TEST_RESTARTS": str(RESTARTS), "TEST_EVERY": str(WARM_UP)},
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        ).returncode
    assert code == 0, (tmp_path / "log").read_text()[-8000:]
    rows = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    before, after = of_iteration(rows, WARM_UP), of_iteration(rows, RESTARTS)
    assert len(before) == 2
    assert before.keys() == after.keys(), "a worker was started again"
    assert {rank: growth(before[rank], after[rank], MEMORY_KIB) for rank in before} == {rank: {} for rank in before}


def of_iteration(rows: list[Holding], iteration: int) -> dict[int, Holding]:
    """Return what each process held in this iteration."""
    return {row["pid"]: row for row in rows if row["iteration"] == iteration}
