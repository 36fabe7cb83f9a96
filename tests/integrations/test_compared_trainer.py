"""`unbroken compare` finds what no integration can know of: a callback of the Trainer with a state of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("jobs") / "compared_trainer.py"
PROGRAM = "import sys; from unbroken.comparing import main; sys.exit(main())"
LIMIT_S = 400.0

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(LIMIT_S + 20)]


@pytest.mark.parametrize(("kind", "code"), [("right", 0), ("flaw", 1)])
def test_a_callback_that_changes_the_dropout_is_found_unless_it_goes_by_the_trainers_step(
    tmp_path: Path, kind: str, code: int
) -> None:
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core")])
    options = ["--memory", "64Mi", "--fault", "exception", "--fault", "kill", "-o", "json"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options, str(SCRIPT), kind],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout)
    broken = said["runs"][1:]
    assert [one["outcome"] for one in broken] == ["equal" if kind == "right" else "different"] * 2
    assert [one["extent"]["num_steps"] >= 4 for one in broken] == [True, True]
    if kind == "flaw":
        # The dropout itself is in the progress; what it was once too often is in the layers.
        named = [{name.partition(".")[0] for name in one["difference"]["names"]} for one in broken]
        assert all(names & {"progress", "model"} for names in named), named
        assert "progress.extras.values.dropout.p" in broken[0]["difference"]["names"]
        assert [one["difference"]["num_steps"] >= 4 for one in broken] == [True, True]
    assert list(tmp_path.iterdir()) == []
