"""Real frameworks under `unbroken run`: after each kind of fault the weights are, bit for bit, those of a run without.

They need an environment with the packages of the frameworks; `make test` leaves them out.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
FRAMEWORKS = ("hf",)

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2 * LIMIT_S + 20)]


@dataclass(frozen=True)
class Run:
    """What came out of a job."""

    result: dict[str, Any]
    text: str
    steps: dict[int, list[int]]
    """Samples of each step, over all ranks, as the iteration made them that got furthest."""
    worlds: dict[int, int]
    """Ranks that made each step."""


def run(framework: str, folder: Path, options: Sequence[str] = (), pods: int = 2, **environment: str) -> Run:
    """Run a job of this many pods with one rank each."""
    folder.mkdir(exist_ok=True)
    script = ROOT / "tests" / "integrations" / "jobs" / f"{framework}.py"
    command = [sys.executable, "-m", "unbroken", "run", "--pods", str(pods), "--memory", "64Mi", *options, str(script)]
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)])
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            **{"PYTHONPATH": path, "TEST_OUT": str(folder), "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
            **{"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONSAFEPATH": "1"},
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-8000:]
    return Run(json.loads((folder / "result.json").read_text()), text, *_steps(folder))


def _steps(folder: Path) -> tuple[dict[int, list[int]], dict[int, int]]:
    rows = [json.loads(line) for file in folder.glob("steps-*") for line in file.read_text().splitlines()]
    last = {step: max(row[1] for row in rows if row[0] == step) for step, *_ in rows}
    made = {step: [row for row in rows if row[:2] == [step, last[step]]] for step in last}
    samples = {step: sorted(one for row in rows for one in row[3]) for step, rows in made.items()}
    return samples, {step: len(rows) for step, rows in made.items()}


@functools.cache
def uninterrupted(framework: str, steps: int = 30) -> Run:
    """Return a run without faults, made once."""
    with tempfile.TemporaryDirectory() as folder:
        return run(framework, Path(folder), TEST_STEPS=str(steps))


def seen(one: Run, steps: int) -> Counter[int]:
    """Return how often each sample was trained in so many steps."""
    return Counter(sample for step in range(1, steps + 1) for sample in one.steps[step])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ("exception", (), "rung in-process"),
        ("kill", (), "rung process"),
        ("hang", ("--soft-timeout", "4", "--hard-timeout", "8"), "recovered 1: rung"),
    ],
)
def test_weights_after_a_fault_are_those_of_a_run_without(
    tmp_path: Path, framework: str, fault: str, options: tuple[str, ...], words: str
) -> None:
    want = uninterrupted(framework)
    seen_here = run(framework, tmp_path, options, TEST_FAULT=fault)
    assert words in seen_here.text
    assert (tmp_path / "broken").exists()
    assert seen_here.steps == want.steps
    assert (seen_here.result["step"], seen_here.result["digest"]) == (30, want.result["digest"])
    assert set(seen(seen_here, 30).values()) == {3}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_smaller_world_goes_on_and_leaves_no_sample_out(tmp_path: Path, framework: str) -> None:
    one = run(
        framework,
        tmp_path,
        ("--min-pods", "1", "--rungs", "in-process,world", "--max-replacements", "0"),
        TEST_FAULT="kill",
    )
    assert (one.result["step"], one.result["world_size"]) == (30, 1)
    assert set(seen(one, 30).values()) == {3}
    assert {one.worlds[1], one.worlds[30]} == {1, 2}
    assert one.steps == uninterrupted(framework).steps
