"""The benchmark of health measures what it says: an event of a driver passes watch, agent and rendezvous."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(300)
def test_each_event_is_measured_from_the_driver_to_the_rendezvous_api() -> None:
    words = [sys.executable, str(ROOT / "benchmarks/health.py"), "--parts", "xid,checks", "--samples", "3"]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = re.findall(r"^- (\S+) .* p99 [\d.]+ ms, most [\d.]+ ms, n=3$", done.stdout, re.MULTILINE)
    assert figures == ["XID", "ChainedGPUHealthCheck", "ChainedNVLHealthCheck"]
