"""`make gpu-check` where there is no GPU: it says so; its job runs over gloo."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.__main__ import FAULTS, NO_GPU, ROOT, job, training
from tests.gpu.report import Result


def test_machine_without_a_gpu_is_told_in_one_sentence(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)])
    out = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == NO_GPU, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpu-check: want a GPU and a torch that was built for it, got no device, and torch ")
    assert line.endswith("; nothing was checked")
    assert not out.exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 1])
def test_job_of_the_check_aborts_restarts_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The same script that runs on a GPU, with gloo in NCCL's place."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = job(tmp_path / "job", ranks, 240.0, restarts=6, warm_up=3)
    abort = ["abort of a blocked collective"] if ranks == 2 else []
    name = "2 ranks on one device" if ranks == 2 else "1 rank"
    assert [row.phase for row in rows] == [name, *abort, "recovery", *(f"memory of rank {n}" for n in range(ranks))]
    # What a process holds after three restarts more is the allocator's chance: the numbers are there, and no more.
    assert [row for row in rows[:-ranks] if row.result is not Result.OK] == []
    flat = r"from restart 3 to 6: \+0 MiB used on the device, \+0 B allocated by torch, [+-]\d+ KiB of the host, "
    assert [row.seen for row in rows[-ranks:] if not re.match(flat, row.seen)] == []
    assert rows[0].seen == "6 restarts in the same processes"


@pytest.mark.timeout(300)
def test_training_of_the_check_is_compared_with_one_without_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    row = training(tmp_path / "training", "fsdp2", 240.0)
    assert row.result is Result.OK, row
    assert row.seen == f"30 steps and {len(FAULTS)} faults, bit for bit as without; 0 steps done twice"
