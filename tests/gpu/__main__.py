"""Everything that needs a GPU, in under 8 minutes on one: python -m tests.gpu [--out FILE].

The exit code is 0 when all is well, 1 when something is not, 2 when there is no GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.report import Result, Row, of_job, of_tests, of_training, table

ROOT = Path(__file__).parents[2]
TOTAL_S = 470.0
LOOK_S, TESTS_S, TRAININGS_S, JOB_S = 90.0, 250.0, 150.0, 200.0
END_S = 10.0
RESTARTS, WARM_UP = 100, 20
NO_GPU = 2
TRAININGS = {"fsdp2": "torch", "compiled": "torch", "huggingface": "transformers", "lightning": "lightning"}
"""What each kind of training needs."""
FAULTS = {"exception": 7, "kill": 13, "exception-2": 22}
"""And the step after which each comes."""


def main() -> int:
    """Look for a GPU, then run one phase after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Check everything that needs a GPU.")
    parser.add_argument("--out", type=Path, default=Path("test-output/gpu-check.md"), help="file of the table")
    out: Path = parser.parse_args().out
    end_s = time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        began_s = time.monotonic()
        code, said = bounded([sys.executable, "-m", "tests.gpu.device"], LOOK_S, Path(folder), {})
        device = read_device(code, said)
        if isinstance(device, str):
            print(f"gpu-check: want a GPU and a torch that was built for it, got {device}; nothing was checked")
            return NO_GPU
        title = "{name}, {gib} GiB, torch {torch}, CUDA {cuda}, NCCL {nccl}".format(**{"nccl": "none"} | device)
        print(f"gpu-check: {title}", flush=True)
        check = f"CudaHealthCheck passed in {1000 * device['health_check_s']:.0f} ms"
        rows = [Row("device", time.monotonic() - began_s, Result.OK, check)]
        for phase in (marked_tests, jobs, trainings):
            rows += _run(phase, Path(folder), end_s)
    text = table(title, rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {out}")
    return int(any(row.result is Result.FAILED for row in rows))


def _run(phase: Callable[[Path, float], list[Row]], folder: Path, end_s: float) -> list[Row]:
    left_s = end_s - time.monotonic()
    if left_s < END_S:
        return [Row(phase.__name__, 0.0, Result.FAILED, f"not begun: {TOTAL_S:g} s are over")]
    rows = phase(folder, left_s)
    for row in rows:
        print(f"gpu-check: {row.phase}: {row.result}, {row.seen}", flush=True)
    return rows


def read_device(code: int, said: str) -> dict[str, Any] | str:
    """Return what was found, or in words why there is none."""
    if code != 0:
        return f"an error: {' '.join(said.split())[-300:] or f'exit code {code}'}"
    try:
        seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        return f"an answer that cannot be read: {said[-300:]!r}"
    if seen["devices"] == 0:
        return f"no device, and torch {seen['torch']} built for CUDA {seen['cuda']}"
    return seen


def marked_tests(folder: Path, left_s: float) -> list[Row]:
    """Run every test marked gpu."""
    report = folder / "tests.xml"
    limit_s = min(TESTS_S, left_s)
    # The others are not even read: they need packages that a machine with a GPU may not have.
    files = [str(file) for file in (ROOT / "tests/integration").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "--durations=5"]
    began_s = time.monotonic()
    code, said = bounded([*command, *sorted(files)], limit_s, folder, {})
    seconds = time.monotonic() - began_s
    print(said[-4000:], flush=True)
    if not report.exists():
        return [Row("tests marked gpu", seconds, Result.FAILED, f"no report, exit code {code}: {said[-200:]}")]
    return [of_tests(ElementTree.parse(report).getroot(), seconds)]


def jobs(folder: Path, left_s: float) -> list[Row]:
    """Run two ranks on the device; where NCCL does not let them, one rank."""
    end_s = time.monotonic() + left_s
    rows: list[Row] = []
    for ranks in (2, 1):
        rows += job(folder / f"ranks-{ranks}", ranks, min(JOB_S, end_s - time.monotonic()), RESTARTS, WARM_UP)
        if rows[0].result is not Result.NOT_RUN:
            break
    return rows


def job(folder: Path, ranks: int, limit_s: float, restarts: int, warm_up: int) -> list[Row]:
    """Run one job of so many ranks; return its rows."""
    folder.mkdir()
    command = [sys.executable, "-m", "unbroken", "run", "--quiet", "--pods", "1", "--ranks-per-pod", str(ranks)]
    command += ["--rungs", f"in-process:{10 * restarts}", str(Path(__file__).with_name("job.py"))]
    numbers = {"GPU_CHECK_RESTARTS": str(restarts), "GPU_CHECK_WARM_UP": str(warm_up)}
    began_s = time.monotonic()
    code, said = bounded(command, limit_s, folder, {"GPU_CHECK_OUT": str(folder), **numbers})
    seconds = time.monotonic() - began_s
    if code != 0:
        print(said[-4000:], flush=True)
    ending = "" if code == 0 else f"exit code {code}" if seconds < limit_s else f"not done within {limit_s:.0f} s"
    notes = [
        json.loads(line)
        for file in sorted(folder.glob("notes-*"))
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return of_job(notes, restarts, ranks, seconds, ending)


def trainings(folder: Path, left_s: float) -> list[Row]:
    """Run each kind of training, without faults and with some, all at once; compare what came out."""
    limit_s = min(TRAININGS_S, left_s)
    kinds = [kind for kind, package in TRAININGS.items() if find_spec(package)]
    rows = [
        Row(f"training: {kind}", 0.0, Result.NOT_RUN, f"needs {package}, which is not installed")
        for kind, package in TRAININGS.items()
        if kind not in kinds
    ]
    with ThreadPoolExecutor(len(kinds) or 1) as threads:
        return [*threads.map(lambda kind: training(folder / kind, kind, limit_s), kinds), *rows]


def training(folder: Path, kind: str, limit_s: float) -> Row:
    """Run one kind of training twice, side by side; return its row."""
    folder.mkdir()
    command = [sys.executable, "-m", "unbroken", "run", "--quiet", "--pods", "1", "--ranks-per-pod", "1"]
    command += ["--memory", "64Mi", "--rungs", "in-process:9,process:9", str(Path(__file__).with_name("training.py"))]
    began_s = time.monotonic()

    def run(name: str, faults: Mapping[str, int]) -> str:
        (folder / name).mkdir()
        variables = {"TEST_OUT": str(folder / name), "TEST_FAULTS": json.dumps(faults)}
        code, said = bounded([*command, kind], limit_s, folder / name, variables)
        if code != 0:
            print(f"{kind}, {name}: {said[-3000:]}", flush=True)
        return "" if code == 0 else f"{name}: exit code {code}"

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(run, "calm", {}), threads.submit(run, "faults", FAULTS)]
        problems = [end.result() for end in ends if end.result()]
    seconds = time.monotonic() - began_s
    if problems:
        return Row(f"training: {kind}", seconds, Result.FAILED, "; ".join(problems))
    try:
        calm, broken = read_training(folder / "calm"), read_training(folder / "faults")
    except (OSError, ValueError) as error:
        return Row(f"training: {kind}", seconds, Result.FAILED, f"exit code 0, but its results cannot be read: {error}")
    return of_training(kind, calm, broken, len(FAULTS), seconds)


def read_training(folder: Path) -> dict[str, Any]:
    """Return what the job has written: its result, and of each step what it was made of, the last time that it was."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    lines = [
        json.loads(line)
        for file in folder.glob("steps-*")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]  # fmt: skip
    lines.sort(key=lambda line: line[1])
    return result | {"steps": {line[0]: line[3:] for line in lines}, "lines": len(lines)}


def bounded(command: list[str], limit_s: float, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a command from the root of the repository, end it after a limit; return its exit code and what it said."""
    path = os.pathsep.join([str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **variables}
    said = folder / f"said-{len(list(folder.iterdir()))}"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, said.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
