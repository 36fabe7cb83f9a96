"""`python -m unbroken.rounds` as a process of its own, which somebody keeps running for many runs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.answers import ask
from tests.waiting import LIMIT_S, wait_until

from unbroken.rounds.__main__ import main
from unbroken.run.loopback_block import LoopbackBlock

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """Start a rendezvous for torchrun; return its address."""
    (tmp_path / "token").write_text(TOKEN)
    block = LoopbackBlock()
    command = [sys.executable, "-m", "unbroken.rounds", f"--token-file={tmp_path / 'token'}"]
    command += [f"--listen={block.rendezvous}:29400", f"--metrics-listen={block.rendezvous}:29401"]
    process = subprocess.Popen(command)
    yield block.rendezvous
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    block.release()


def test_who_lacks_the_token_is_refused_and_counted_for_prometheus(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: ask(f"http://{host}:29401/healthz") == (200, "ok\n"), "metrics")
    assert ask(f"http://{host}:29400/v1/rounds/run")[0] == 401
    lines = ask(f"http://{host}:29401/metrics")[1].splitlines()
    assert 'unbroken_refused_total{reason="unauthorized"} 1.0' in lines
    assert "unbroken_torchrun_nodes 0.0" in lines
    second = [f"--listen={host}:29402", f"--metrics-listen={host}:29401", f"--token-file={tmp_path / 'token'}"]
    assert main(second) == 2
    assert f"--metrics-listen: port 29401 on {host}: Address already in use" in capsys.readouterr().err
