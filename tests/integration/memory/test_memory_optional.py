"""Jobs without `unbroken run`, and jobs without checkpoints in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.folders import lock_folder

ROOT = Path(__file__).parents[3]
WORKLOAD = ROOT / "tests/integration/sidecar/memory_workload.py"
LIMIT_S = 240.0


def torchrun(folder: Path, memory: str, *faults: str, num_workers: int = 2) -> "subprocess.CompletedProcess[str]":
    """Train with some workers in standalone mode."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
    environment = {
        **os.environ,
        "UNBROKEN_MEMORY": memory,
        "GLOO_SOCKET_IFNAME": "lo",
        "MKL_CBWR": "COMPATIBLE",
    }
    return subprocess.run(
        [*command, str(WORKLOAD), "fsdp2", str(folder), *faults],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def lines(folder: Path, name: str) -> list[list[str]]:
    return [line.split() for line in (folder / name).read_text().splitlines()]


@pytest.mark.timeout(600)
def test_the_standalone_mode_keeps_checkpoints_in_memory_if_it_is_told_a_size(tmp_path: Path) -> None:
    calm = torchrun(tmp_path / "calm", "8Mi")
    assert calm.returncode == 0, calm.stderr
    broken = torchrun(tmp_path / "broken", "8Mi", "raise:0:1:7")
    assert broken.returncode == 0, broken.stderr
    assert {step for iteration, *_, step in lines(tmp_path / "broken", "restored") if iteration == "1"} <= {"4", "6"}
    losses = [
        {(rank, step, bits) for _, rank, step, bits in lines(tmp_path / run, "losses")} for run in ("calm", "broken")
    ]
    assert losses[0] == losses[1]
    # Nothing is left; folders of jobs that live are locked.
    base = Path("/dev/shm", f"unbroken-{os.getuid()}")
    assert [folder for folder in base.iterdir() if lock_folder(folder) is not None] == []


@pytest.mark.timeout(600)
def test_a_size_that_is_none_is_told_to_the_workers(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "wrong", "much", num_workers=1)
    assert done.returncode != 0
    assert "UNBROKEN_MEMORY: want bytes, or a number with Ki, Mi, Gi or Ti, such as 2Gi, got 'much'" in done.stderr


@pytest.mark.parametrize("module", ["unbroken.inprocess", "unbroken.launch.launcher", "unbroken.agent.shell"])
def test_who_does_not_use_it_loads_nothing_of_it(module: str) -> None:
    code = (
        f"import {module}, sys; print([n for n in sys.modules if n.startswith(('unbroken.memory', 'unbroken.keeper'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "[]"
