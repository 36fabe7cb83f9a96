"""The examples end with the very numbers of a run without their fault, as they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
FAULT = 'raise RuntimeError("rank 1 fails once")'

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2 * LIMIT_S + 20)]


def last_loss(folder: Path, script: str) -> str:
    """Run it to its end; return the last loss that it prints."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core")])
    flags = ["--pods", "2", "--ranks-per-pod", "1", "--memory", "64Mi"]
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", *flags, "script.py"],
        cwd=folder,
        # Without MKL's, sums in another place of the memory may differ in the last bit.
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert ("rank 1 fails once" in done.stdout + done.stderr) == (FAULT in script)
    return str(re.findall(r"loss=(\S+)", done.stdout)[-1])


@pytest.mark.parametrize("name", ["accelerate_loop", "fsdp2"])
def test_an_example_ends_with_the_losses_of_a_run_without_its_fault(tmp_path: Path, name: str) -> None:
    script = (ROOT / "examples" / f"{name}.py").read_text().replace("loss.item():.4f", "loss.item():.17g")
    assert FAULT in script
    faultless = script.replace(FAULT, "pass")
    assert last_loss(tmp_path / "fault", script) == last_loss(tmp_path / "calm", faultless)
