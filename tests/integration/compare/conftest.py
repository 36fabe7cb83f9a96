"""Calls `unbroken compare` as a user does."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LOOP = Path(__file__).with_name("compared_loop.py")
PROGRAM = "import sys; from unbroken.comparing import main; sys.exit(main())"
LIMIT_S = 500.0


@dataclass(frozen=True)
class Said:
    """What a call of the command has left."""

    code: int
    value: dict[str, Any]
    """What it printed as JSON; empty for none."""
    errors: str

    def run(self, number: int) -> dict[str, Any]:
        """Return what is said of the run with a number, as people count them: 2 is the second calm one."""
        found: dict[str, Any] = self.value["runs"][number - 2]
        return found


Compare = Callable[..., Said]


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Compare]:
    """Return the command with JSON as its output, in a folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="ubc-", dir="/tmp") as temporary:

        def call(*words: str, program: str = PROGRAM, script: Path = LOOP) -> Said:
            options = [word for word in words if word.startswith("--")]
            environment = {**os.environ, "TMPDIR": temporary, "GLOO_SOCKET_IFNAME": "lo", "MKL_CBWR": "COMPATIBLE"}
            environment |= {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": temporary}
            command = [sys.executable, "-c", program, "--memory=256Mi", "-o", "json", *options, str(script)]
            command += [word for word in words if not word.startswith("--")]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            said = Said(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)
            print(done.stdout, done.stderr)
            assert [path.name for path in Path(temporary).glob("unbroken-*")] == [], "nothing stays"
            return said

        yield call
