"""`unbroken run` whose output nobody reads any more, as when its terminal is closed, ends when it is told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = """
import threading
from unbroken import inprocess

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    pause = threading.Event()
    for step in range(1, 1_000_000):
        call.ping(step=step)
        pause.wait(0.1)

train()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_with_the_signals_code(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core")])
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken", "run", "--pods", "1", str(script)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=write,
        )
    finally:
        os.close(write)
    try:
        with os.fdopen(read) as said:
            assert any("training: iteration 0" in line for line in said)
        process.send_signal(number)
        assert process.wait(200) == 128 + number
    finally:
        process.kill()
        process.wait()
