"""One job under random faults: start it, break it for a while, let it finish, and look at what it did."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.processes import is_gone
from tests.soak.victims import SCRIPT, Done, make_fault

EXAMPLE = Path(__file__).parents[2] / "examples" / SCRIPT
STEPS = 500
FAULTS_UNTIL_S = 40.0
LIMIT_S = 240.0
GIVEN_UP = ("giving up", "ended 5 times: killed by signal 9 (SIGKILL)")
"""What is said when a part was killed so often in a row, before it was of any use, that to give up is right."""
SHAPES = ((2, 1, 2), (3, 1, 1), (4, 1, 1), (2, 2, 2), (3, 0, 1))
"""Active pods, spare pods, ranks a pod."""


@dataclass
class Outcome:
    """What became of one job."""

    seed: int
    shape: tuple[int, int, int]
    folder: Path
    """Logs, checkpoints and evidence; gone when all was well."""
    violations: list[str] = field(default_factory=list)
    faults: list[Done] = field(default_factory=list)
    num_recoveries: int = 0
    has_given_up: bool = False
    """Whether the job ended since one part was killed too often in a row, and said so."""
    seconds: float = 0.0


def soak(seed: int) -> Outcome:
    """Run the job that a seed describes. Which process a fault hits depends on the machine's timing as well."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir="/tmp"))
    outcome = Outcome(seed, chance.choice(SHAPES), folder)
    (folder / "control").mkdir()
    with (folder / "output").open("wb") as output:
        started_s = time.monotonic()
        process = subprocess.Popen(
            _command(chance, outcome.shape, folder),
            env={**os.environ, "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        seen = _break(chance, process, outcome, started_s)
        outcome.seconds = time.monotonic() - started_s
    _judge(process, seen, outcome)
    (folder / "faults").write_text("".join(f"{fault}\n" for fault in outcome.faults))
    if not outcome.violations:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _command(chance: random.Random, shape: tuple[int, int, int], folder: Path) -> list[str]:
    pods, spares, ranks_per_pod = shape
    options = {
        "--pods": pods,
        "--spares": spares,
        "--ranks-per-pod": ranks_per_pod,
        "--min-pods": pods - chance.choice((0, 0, 1)),
        "--soft-timeout": chance.choice((6, 10)),
        "--heartbeat-timeout": 10,
        "--startup-timeout": 90,
        "--last-call": 1,
        "--max-replacements": 200,
        "--rungs": "in-process:1000,process:1000,pod:1000,world:1000,job:1000",
        "--log-dir": folder / "logs",
    }
    script = {"--checkpoints": folder / "ck", "--control": folder / "control", "--steps": STEPS, "--step-seconds": 0.03}
    # The job has no memory for checkpoints: each fault costs the steps since the last one on the disk.
    script["--save-every"] = 10
    return [sys.executable, "-m", "unbroken", "run", *_flat(options), str(EXAMPLE), *_flat(script)]


def _flat(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def _break(
    chance: random.Random, process: subprocess.Popen[bytes], outcome: Outcome, started_s: float
) -> set[psutil.Process]:
    """Make faults until the job ends or time is up; return all processes that it had."""
    run = psutil.Process(process.pid)
    mean_gap_s = chance.choice((0.6, 1.5, 4.0))
    pods, _, ranks_per_pod = outcome.shape
    seen: set[psutil.Process] = set()
    while process.poll() is None and (at_s := time.monotonic() - started_s) < LIMIT_S:
        with contextlib.suppress(psutil.Error):
            seen.update(run.children(recursive=True))
            if at_s < FAULTS_UNTIL_S:
                fault = make_fault(chance, run, outcome.folder / "control", pods * ranks_per_pod, at_s)
                outcome.faults += [fault] if fault else []
        # The gap between faults is the load that is wanted here, no synchronisation.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(chance.expovariate(1 / mean_gap_s), 10.0) if at_s < FAULTS_UNTIL_S else 1.0)
    return seen


def _judge(process: subprocess.Popen[bytes], seen: set[psutil.Process], outcome: Outcome) -> None:
    text = (outcome.folder / "output").read_text(errors="replace")
    outcome.num_recoveries = text.count("recovered ")
    if process.poll() is None:
        outcome.violations.append(f"did not end within {LIMIT_S:g} s")
        _keep_evidence(process, outcome.folder)
    elif process.returncode == 1 and any(words in text for words in GIVEN_UP):
        outcome.has_given_up = True
    elif process.returncode != 0:
        outcome.violations.append(f"ended with exit code {process.returncode}")
    else:
        result = json.loads((outcome.folder / "ck" / "result.json").read_text())
        if not result["steps_add_up"] or result["steps"] != STEPS:
            outcome.violations.append(f"want each of {STEPS} steps applied once and in order, got {result}")
    outcome.violations += [f"process {child.pid} outlived the job" for child in seen if _is_left(child)]


def _is_left(process: psutil.Process) -> bool:
    # Its number may be another one's by now, of which a job with many faults uses thousands.
    return process.is_running() and not is_gone(process.pid)


def _keep_evidence(process: subprocess.Popen[bytes], folder: Path) -> None:
    below = psutil.Process(process.pid).children(recursive=True)
    with (folder / "stacks").open("wb") as stacks:
        for child in below:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(child.pid)]
                subprocess.run(dump, stdout=stacks, stderr=subprocess.STDOUT, timeout=20, check=False)
    process.kill()
    process.wait()
    for child in below:
        with contextlib.suppress(psutil.Error):
            child.kill()
