"""How long a recovery takes: ours, the peer's, and the floor that gloo itself sets; in turn, on this machine.

    python benchmarks/recovery.py --sizes 2,4,8,16 --faults 10 --kill-jobs 3 --json recovery.json

From the instant of the fault (CLOCK_MONOTONIC, read by the failing worker) until ALL surviving workers have finished
their first collective after the restart.

- unbroken: `unbroken run` with one pod of N workers: real rendezvous, agent and launcher. The launcher forks
  workers from a process that has imported torch, as it does by default. For a kill there are N pods of one worker,
  each with its agent and launcher; the killed one is not replaced (rungs in-process and world), as the peer
  does not replace it either. `--kinds pods,spare` shows an exception in such pods, and a kill with one warm spare;
  `--kinds hang,blocked` a Python loop that does not ping, and a call that does not return, in one pod, with a soft
  timeout of 1 s and a hard one of 2 s: the figures contain the soft one, and `blocked` the quarter of the difference
  by which a rank that may only be waiting for another is named later.
- nvrx-default, nvrx-tight: nvidia-resiliency-ext 0.4.1 with an added Abort that frees gloo; default options, and every
  interval 10 ms with last_call_wait 0. nvrx-documented: as it comes, with a gloo timeout of 10 s. Its workers are
  forked from a process that has imported torch, and one c10d store serves all iterations. c10d's reverse DNS lookups,
  which can stall either side for five seconds, are switched off for it as they are for us.
- floor: gloo's sockets shut down, the old group destroyed in the background, init_process_group and an all_reduce, by
  workers that know the instant beforehand: no detection, no coordination.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reports.recovery_marks import HANGS, HARD_S, SOFT_S, Scenario, read_marks, recoveries_ms
from reports.recovery_report import Row, to_json, to_table

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "recovery"
PEER = "nvidia-resiliency-ext==0.4.1"
PEER_NEEDS = ("nvidia-ml-py", "pynvml", "defusedxml", "packaging", "psutil>=6", "pyyaml")
KINDS = ("exception", "kill", "pods", "spare", *HANGS)
SYSTEMS = ("unbroken", "nvrx-tight", "nvrx-default", "nvrx-documented", "floor")
JOB_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    kind: str
    size: int
    num_faults: int


def peer_python() -> Path:
    """Return the interpreter of the peer's environment; make it first when it is not there."""
    folder = CACHE / PEER
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    print(f"making an environment with {PEER} in {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # torch and our own package (the added Abort) come from the environment that this runs in.
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", PEER, *PEER_NEEDS], check=True)
    (folder / "complete").touch()
    return python


def command(job: Job) -> list[str]:
    """Return the command of a job."""
    if job.system == "unbroken":
        options = ["--pods", "1", "--ranks-per-pod", str(job.size), "--quiet"]
        if job.kind in HANGS:
            options += ["--soft-timeout", str(SOFT_S), "--hard-timeout", str(HARD_S)]
        elif job.kind != "exception":
            # A pod is lost whole with its worker.
            options = ["--pods", str(job.size), "--ranks-per-pod", "1", "--quiet"]
        if job.kind == "spare":
            options += ["--spares", "1"]
        if job.kind == "kill":
            options += ["--rungs", "in-process,world", "--min-pods", "1", "--max-replacements", "0"]
        return [sys.executable, "-m", "unbroken", "run", *options, str(HERE / "systems" / "recovery_unbroken.py")]
    python = sys.executable if job.system == "floor" else str(peer_python())
    return [python, str(HERE / "systems" / "recovery_peers.py"), job.system, str(job.size)]


def run(job: Job, is_loud: bool) -> list[float]:
    """Run a job; return the milliseconds of each recovery. Raises RuntimeError when one did not happen."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        scenario = Scenario(job.kind, job.num_faults, Path(folder) / "marks")
        # One thread for arithmetic, on all sides alike.
        environment = {**os.environ, **scenario.variables(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        output = None if is_loud else subprocess.DEVNULL
        process = subprocess.Popen(
            command(job), env=environment, stdout=output, stderr=output, start_new_session=True, cwd=folder
        )
        try:
            process.wait(JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{job}: not over after {JOB_TIMEOUT_S:g} s", file=sys.stderr)
        finally:
            end_session(process)
        found = recoveries_ms(read_marks(scenario.marks))
    if len(found) != job.num_faults:
        raise RuntimeError(f"{job}: want {job.num_faults} recoveries, got {len(found)}")
    return found


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End whatever is left of a job."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Run everything, the systems of one size in turn."""
    rows: list[Row] = []
    for kind in arguments.kinds:
        for size in map(int, arguments.sizes.split(",")):
            if kind == "kill" and size < 3:
                # One survivor has nobody to do a collective with.
                continue
            for system in arguments.systems:
                if kind != "exception" and system == "floor":
                    # The floor of all kinds is that of an exception: there is nothing to detect.
                    continue
                if kind in ("spare", "pods") and system != "unbroken":
                    # The peer has neither pods nor a spare for a worker that was killed.
                    continue
                if kind in HANGS and system not in ("unbroken", "nvrx-tight"):
                    # The peer's default intervals are too long for such timeouts.
                    continue
                is_kill = kind in ("kill", "spare")
                num_jobs = arguments.kill_jobs if is_kill else 1
                faults = 1 if is_kill else arguments.faults
                if system == "nvrx-documented":
                    num_jobs, faults = 1, min(faults, 2)
                rows.append(measure_one(Job(system, kind, size, faults), num_jobs, arguments.loud))
                print(to_table([rows[-1]], has_head=False), file=sys.stderr)
    return rows


def measure_one(job: Job, num_jobs: int, is_loud: bool) -> Row:
    """Return the row of one system; a failure is a row without figures, not the end of the benchmark."""
    found: list[float] = []
    for _ in range(num_jobs):
        try:
            found += run(job, is_loud)
        except RuntimeError as error:
            print(error, file=sys.stderr)
    return Row(job.kind, job.size, job.system, tuple(found))


def _some_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := sorted(set(words) - set(known)):
            raise argparse.ArgumentTypeError(f"want some of {','.join(known)}, got {','.join(unknown)}")
        return words

    return parse


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="2,4,8,16", help="workers (%(default)s)")
    parser.add_argument("--kinds", type=_some_of(KINDS), default="exception,kill", help="faults (%(default)s)")
    parser.add_argument("--systems", type=_some_of(SYSTEMS), default=",".join(SYSTEMS), help="%(default)s")
    parser.add_argument("--faults", type=int, default=10, help="exceptions a job (%(default)s)")
    parser.add_argument("--kill-jobs", type=int, default=3, help="jobs with one kill each (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--loud", action="store_true", help="show what the jobs say")
    arguments = parser.parse_args()
    rows = measure(arguments)
    print(to_table(rows))
    if arguments.json is not None:
        arguments.json.write_text(to_json(rows))


if __name__ == "__main__":
    main()
