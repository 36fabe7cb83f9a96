"""Real frameworks under `unbroken run`: after each kind of fault the weights are, bit for bit, those of a run without.

They need an environment with the packages of the frameworks: `make test-integrations` makes it, with RELEASES=older one
of the oldest that pyproject.toml allows, and with RELEASES=torchtitan one for torchtitan, which does not go with the
others.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.matrix import note, recoveries

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
FRAMEWORKS = {
    "accelerate_job": "accelerate",
    "fsdp2": "torch.distributed.checkpoint.state_dict_saver,torch.distributed.fsdp",
    "hf": "transformers.trainer,accelerate",
    "lightning_job": "lightning.pytorch",
    # More of it would start threads, and a process with threads cannot be copied.
    "torchtitan_job": "torch.distributed.checkpoint.state_dict_saver,torch.distributed.fsdp",
}
"""Script by name, and what a pod imports once for all of its workers, and for those that come after them."""
ONE_POD = ("--pods", "1", "--ranks-per-pod", "2")
NUM_STEPS = 30
TOLERANCE = 1e-5
"""Of each weight in worlds of other sizes: the sums of gradients are made in another order."""

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(2 * LIMIT_S + 20),
    pytest.mark.parametrize("framework", FRAMEWORKS),
]


@dataclass(frozen=True)
class Run:
    """What came out of a job."""

    result: dict[str, Any]
    text: str
    steps: dict[int, list[int]]
    """Samples of each step, over all ranks, as the iteration made them that got furthest."""
    drawn: dict[int, list[Any]]
    """Random numbers of each step, by rank."""
    worlds: dict[int, int]
    """Ranks that made each step."""


def run(framework: str, folder: Path, options: Sequence[str], **environment: str) -> Run:
    """Run a job of two ranks."""
    folder.mkdir(exist_ok=True)
    script = ROOT / "tests" / "integrations" / "jobs" / f"{framework}.py"
    command = [sys.executable, "-m", "unbroken", "run", "--memory", "64Mi", *options, str(script)]
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)])
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            **{"PYTHONPATH": path, "TEST_OUT": str(folder), "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
            **{"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONSAFEPATH": "1"},
            **{"UNBROKEN_PREIMPORT": FRAMEWORKS[framework]},
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


def _steps(folder: Path) -> tuple[dict[int, list[int]], dict[int, list[Any]], dict[int, int]]:
    rows = [json.loads(line) for file in folder.glob("steps-*") for line in file.read_text().splitlines()]
    last = {step: max(row[1] for row in rows if row[0] == step) for step, *_ in rows}
    made = {step: sorted(row for row in rows if row[:2] == [step, last[step]]) for step in last}
    samples = {step: sorted(one for row in rows for one in row[3]) for step, rows in made.items()}
    drawn = {step: [row[4] for row in rows] for step, rows in made.items()}
    return samples, drawn, {step: len(rows) for step, rows in made.items()}


@functools.cache
def uninterrupted(framework: str) -> Run:
    """Return a run without faults, made once."""
    with tempfile.TemporaryDirectory() as folder:
        return run(framework, Path(folder), ONE_POD)


def trained(one: Run) -> Counter[int]:
    """Return how often each sample was trained."""
    return Counter(sample for step in range(1, NUM_STEPS + 1) for sample in one.steps[step])


@pytest.mark.xdist_group("uninterrupted")
def test_weights_after_each_kind_of_fault_are_those_of_a_run_without(tmp_path: Path, framework: str) -> None:
    want = uninterrupted(framework)
    faults = {"exception": 7, "kill": 13, "hang": 20}
    # torchtitan builds its Trainer anew in each iteration: seconds, on a machine that is busy.
    soft_s = "20" if framework == "torchtitan_job" else "6"
    options = (*ONE_POD, "--soft-timeout", soft_s, "--hard-timeout", "40")
    got = run(framework, tmp_path, options, TEST_FAULTS=json.dumps(faults))
    assert re.findall(r"recovered \d+: rung ([a-z-]+)", got.text)[:2] == ["in-process", "process"]
    assert all((tmp_path / f"broken-{fault}").exists() for fault in faults)
    assert got.result["iteration"] == 3
    assert (got.steps, got.drawn) == (want.steps, want.drawn)
    assert (got.result["step"], got.result["digest"]) == (NUM_STEPS, want.result["digest"])
    assert set(trained(got).values()) == {3}
    for fault, recovery in zip(faults, recoveries(got.text), strict=True):
        note(framework, fault, "bit for bit", recovery)


@pytest.mark.xdist_group("uninterrupted")
def test_world_that_shrinks_and_grows_trains_each_sample_as_often(tmp_path: Path, framework: str) -> None:
    want = uninterrupted(framework)
    got = run(
        framework,
        tmp_path,
        ("--pods", "2", "--min-pods", "1", "--rungs", "in-process,pod,world", "--grow-back", "0.5"),
        TEST_FAULTS=json.dumps({"kill": 7}),
        TEST_MUST_GROW="yes",
    )
    assert [got.worlds[1], got.worlds[9], got.worlds[NUM_STEPS]] == [2, 1, 2]
    assert got.steps == want.steps
    assert set(trained(got).values()) == {3}
    assert got.result["weights"] == pytest.approx(want.result["weights"], abs=TOLERANCE)
    by_sizes = {recovery.sizes: recovery for recovery in recoveries(got.text)}
    for scenario, sizes in (("shrink", (2, 1)), ("grow", (1, 2))):
        note(framework, scenario, f"each sample as often, weights within {TOLERANCE:.5f}", by_sizes[sizes])
