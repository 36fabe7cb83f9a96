"""The controller that recreates all pods (`lost_time_recreate.py`): what it decides, and a small run on a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIMIT_S = 500.0


def pod(phase: str, *, is_going: bool = False) -> dict[str, Any]:
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if is_going else {}
    return {"metadata": metadata, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("pods", "step"),
    [
        pytest.param([], "create", id="no pod"),
        pytest.param([pod("Pending"), pod("Running")], "wait", id="they start"),
        pytest.param([pod("Running"), pod("Running")], "wait", id="they run"),
        pytest.param([pod("Running"), pod("Succeeded")], "wait", id="one is done"),
        pytest.param([pod("Succeeded"), pod("Succeeded")], "done", id="all are done"),
        pytest.param([pod("Running"), pod("Failed")], "delete", id="one failed"),
        pytest.param([pod("Succeeded"), pod("Failed")], "delete", id="one failed when the other was done"),
        pytest.param([pod("Running")], "delete", id="one is missing"),
        pytest.param([pod("Running"), pod("Running", is_going=True)], "delete", id="one is deleted by someone else"),
        pytest.param([pod("Failed", is_going=True), pod("Running", is_going=True)], "wait", id="all go"),
        pytest.param([pod("Failed", is_going=True)], "wait", id="the last goes"),
        pytest.param([pod("Succeeded"), pod("Succeeded", is_going=True)], "delete", id="one that was done is deleted"),
        pytest.param([{"metadata": {}}, pod("Pending")], "wait", id="no status yet"),
    ],
)
def test_all_pods_of_a_job_run_or_none(monkeypatch: pytest.MonkeyPatch, pods: list[Any], step: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from systems.lost_time_recreate import next_step

    assert next_step(pods, 2).value == step


@pytest.mark.nightly
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", ["exception", "pod-lost"])
def test_after_a_fault_all_pods_are_created_again_and_go_on_from_the_checkpoint(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "lost_time.py"), "--quick", "--kinds", kind, "--loud"]
    done = subprocess.run(
        [*command, "--systems", "recreate", "--limit", str(LIMIT_S), "--json", str(file)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(BENCHMARKS)},
        timeout=LIMIT_S + 120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())
    assert (row["system"], row["fault"], row["steps_redone"], row["reason"]) == ("recreate", kind, 2, ""), done.stdout
    (fault,) = row["faults"]
    assert fault["is_known"]
    assert sum(fault["terms"].values()) == pytest.approx(fault["lost_s"], abs=0.001)
    # There was a time without all pods, and the processes that trained after it were new ones.
    assert fault["terms"]["waiting"] > 0 < fault["terms"]["restart"]
    # torch leaves a folder of its own.
    assert [*tmp_path.glob("recreate-*"), *tmp_path.glob("lost-time-*")] == []
    left = [one for one in psutil.process_iter() if str(tmp_path) in _settings(one)]
    assert left == []


def _settings(process: psutil.Process) -> str:
    try:
        return process.environ().get("BENCH_LOST_TIME", "")
    except psutil.Error:
        return ""
