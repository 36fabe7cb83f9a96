"""Hostile jobs of every kind beside honest ones, on a real API server: a small run of `benchmarks/fairness.py`.

What counts here is what happens. How soon is what the benchmark measures.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
NUM_KINDS = 11
LIMIT_S = 400


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("kubeconfig", [pytest.param("full", marks=pytest.mark.cluster)], indirect=True)
def test_beside_hostile_jobs_all_lost_pods_are_replaced_and_the_lease_is_kept(kubeconfig: Path) -> None:
    """Each pod that an honest job loses is waited for, and each hostile kind has what it was made for refused."""
    command = [sys.executable, str(ROOT / "benchmarks" / "fairness.py"), "--kubeconfig", str(kubeconfig)]
    numbers = ["--honest", "5", "--hostile", str(NUM_KINDS), "--seconds", "6", "--without-bars"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(
        [*command, *numbers], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert len(re.findall(r"pod lost to replacement created", done.stdout)) == 2
    (counts,) = re.findall(r"\| refused or held back \| (.*?) \|", done.stdout)
    assert "report " in counts
