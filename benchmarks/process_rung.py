"""How long it takes until a killed worker's job computes again when processes must be started: ours and torchrun's.

    python benchmarks/process_rung.py --sizes 2,4 --faults 10

One worker kills itself with SIGKILL; no spare is there. From that instant (CLOCK_MONOTONIC) until ALL workers have
finished the first collective of the next attempt, the systems in turn in one run.

- unbroken: `unbroken run` with one pod of N workers, which its launcher forks from a process that has imported torch.
- unbroken-alone: the same with UNBROKEN_PREIMPORT= : each worker is an interpreter of its own that imports torch.
- torchrun: `torchrun --standalone --max-restarts`, its monitor interval as it comes (0.1 s). Each attempt has a prefix
  of its own in torchrun's store: without it gloo meets the addresses of the attempt before, and nothing comes back.

Kinds: plain joins and reduces. training makes a model, DDP and an optimizer first, as a script does; torch imports as
much again for its first optimizer. wrapped is plain in `inprocess.Wrapper`: only the killed worker is started again
(torchrun, which always starts all, runs the plain script).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from recovery import end_session
from reports.recovery_marks import Scenario, read_marks, recoveries_ms
from reports.recovery_report import Row, to_json, to_table

HERE = Path(__file__).resolve().parent
SYSTEMS = ("unbroken", "unbroken-alone", "torchrun")
JOB_TIMEOUT_S = 900.0


def command(system: str, kind: str, size: int, num_faults: int) -> list[str]:
    """Return the command of a job."""
    script = [
        str(HERE / "systems" / "process_rung_script.py"),
        kind if system != "torchrun" or kind != "wrapped" else "plain",
    ]
    if system == "torchrun":
        torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or "torchrun"
        options = ["--standalone", f"--nproc-per-node={size}", f"--max-restarts={num_faults}"]
        return [torchrun, *options, *script]
    rungs = "in-process,process" if kind == "wrapped" else "process"
    options = ["--pods", "1", "--ranks-per-pod", str(size), "--quiet", "--rungs", rungs]
    return [sys.executable, "-m", "unbroken", "run", *options, *script]


def run(system: str, kind: str, size: int, num_faults: int, is_loud: bool) -> list[float]:
    """Run a job; return the milliseconds of each recovery. Raises RuntimeError when one did not happen."""
    with tempfile.TemporaryDirectory(prefix="process-rung-") as folder:
        scenario = Scenario(kind, num_faults, Path(folder) / "marks")
        environment = {**os.environ, **scenario.variables(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        if system == "unbroken-alone":
            environment["UNBROKEN_PREIMPORT"] = ""
        output = None if is_loud else subprocess.DEVNULL
        process = subprocess.Popen(
            command(system, kind, size, num_faults),
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )
        try:
            process.wait(JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{system} {kind}: not over after {JOB_TIMEOUT_S:g} s", file=sys.stderr)
        finally:
            end_session(process)
        found = recoveries_ms(read_marks(scenario.marks))
    if len(found) != num_faults:
        raise RuntimeError(f"{system} {kind}: want {num_faults} recoveries, got {len(found)}")
    return found


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="2,4", help="workers (%(default)s)")
    parser.add_argument("--kinds", default="plain,training,wrapped", help="scripts (%(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="%(default)s")
    parser.add_argument("--faults", type=int, default=10, help="kills a job (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--loud", action="store_true", help="show what the jobs say")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for kind in arguments.kinds.split(","):
        for size in map(int, arguments.sizes.split(",")):
            for system in arguments.systems.split(","):
                try:
                    found = run(system, kind, size, arguments.faults, arguments.loud)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    found = []
                rows.append(Row(kind, size, system, tuple(found)))
                print(to_table([rows[-1]], has_head=False), file=sys.stderr)
    print(to_table(rows))
    if arguments.json is not None:
        arguments.json.write_text(to_json(rows))


if __name__ == "__main__":
    main()
