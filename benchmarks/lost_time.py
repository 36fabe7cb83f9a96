"""What a fault costs until the training is where it was: seconds, and steps that are made twice; ours and the peers'.

    python benchmarks/lost_time.py --faults 5 --json lost_time.json
    python benchmarks/lost_time.py --quick --systems unbroken-memory,unbroken-disk,unbroken-process --kinds exception

A transformer of 30 M parameters under FSDP2 on two workers, a checkpoint on the disk every 10 steps, in memory after
each step, a fault 8 steps after one on the disk.
From the instant in which the last worker had made the last step before the fault, until the last one has made the
next step that had never been made. It is split twice. `terms` are those of docs/cost.md; `detect` ends when the system
says for the first time that it knows. `phases` say how far the workers are: `restart` until all are in the training
function again, `join` (process group), `model` (the user's), `restore`, `redo` (steps made again, and the new one).
`step_s` is the mean of all steps without a fault, checkpoints included: what the system costs while nothing fails.

Kinds: exception; sigkill of a worker; pod-lost (the worker and all that manages it; a spare takes over); hang (a loop
without a step; the timeout of 5 s is part of the figure). Systems, in turn for each kind:
- unbroken-memory: `unbroken run --memory`, `unbroken.memory.Checkpointer(every=1)`.
- unbroken-disk: the same with `dcp.save` and `dcp.load`, as all others.
- unbroken-process: a plain script, all processes are started again (`--rungs process`; for pod-lost also `pod`).
- torchrun: torch's own; ft_launcher: that of nvidia-resiliency-ext 0.4.1, its checks every 0.5 s. For pod-lost three
  launchers of one worker each, of which one waits.
- nvrx: the in-process restart of the same package: intervals of 10 ms, gloo freed by our abort; killed workers are
  replaced by ones that wait in reserve. With a lost pod goes the process that watches the worker; the others notice by
  its heartbeats, after 5 s (30 s by default).
- recreate: pods of the laptop cluster that a controller deletes and creates anew together, as JobSet does; for pod-lost
  one is deleted. See lost_time_recreate.py for what such a cluster leaves out.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from recovery import end_session, peer_python
from reports.lost_time_terms import PHASES, TERMS, Row, mean_step_s, recoveries
from systems.lost_time_job import HARD_S, SOFT_S, VARIABLE, WORLD_SIZE, Job, Mark, read_marks, write_mark
from systems.recovery_peers import free_ports

HERE = Path(__file__).resolve().parent
SYSTEMS = (
    *("unbroken-memory", "unbroken-disk", "unbroken-process"),
    *("torchrun", "nvrx", "ft_launcher", "recreate"),
)
KINDS = ("exception", "sigkill", "pod-lost", "hang")
CANNOT = {
    ("torchrun", "hang"): "finds no hang: it waits for the timeout of a collective, 30 minutes by default",
    ("unbroken-process", "hang"): "finds no hang of a plain script: only a wrapped one pings",
    ("recreate", "hang"): "finds no hang: no pod fails before the timeout of a collective, 30 minutes by default",
}
"""What a system has nothing for, and why."""
KNOWN = {
    "unbroken": re.compile(r"\s{2}fault \d+: "),
    "torchrun": re.compile(r"failed \(exitcode: "),
    "ft_launcher": re.compile(r"failed \(exitcode: |Did not get subsequent heartbeat"),
}
"""What systems say once they know of a fault. The others' workers, and the controller, leave a mark themselves."""


def commands(job: Job) -> list[list[str]]:
    """Return what is started for a job; the first one's end is the job's."""
    script = str(HERE / "systems" / "lost_time_job.py")
    is_lost = job.fault == "pod-lost"
    if job.system == "recreate":
        return [[sys.executable, str(HERE / "systems" / "lost_time_recreate.py")]]
    if job.system.startswith("unbroken"):
        return [[sys.executable, "-m", "unbroken", "run", *_own_options(job), script]]
    if job.system == "nvrx":
        return [[str(peer_python()), str(HERE / "systems" / "lost_time_nvrx.py")]]
    if job.system == "ft_launcher":
        launcher = [str(peer_python()), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
        timeout_s = SOFT_S if job.fault == "hang" else 120.0
        launcher += ["--ft-param-initial_rank_heartbeat_timeout=120", "--ft-param-workload_check_interval=0.5"]
        launcher += [f"--ft-param-rank_heartbeat_timeout={timeout_s:g}"]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run"]
    common = [f"--max-restarts={job.num_faults + 1}", "--rdzv-backend=c10d", "--monitor-interval=0.1"]
    port = free_ports()[0]
    common += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost-time"]
    if not is_lost:
        return [[*launcher, *common, "--nnodes=1", f"--nproc-per-node={WORLD_SIZE}", script]]
    common += [f"--nnodes={WORLD_SIZE}", "--nproc-per-node=1"]
    return [
        [*launcher, *common, f"--rdzv-conf=is_host={int(number == 0)}", script]
        for number in range(WORLD_SIZE + job.num_faults)
    ]


def _own_options(job: Job) -> list[str]:
    """Return the options of `unbroken run`."""
    is_lost = job.fault == "pod-lost"
    options = ["--pods", str(WORLD_SIZE), "--ranks-per-pod", "1", "--quiet"]
    if job.fault == "hang":
        # Not for the others: on a busy machine a step may take longer.
        options += ["--soft-timeout", str(SOFT_S), "--hard-timeout", str(HARD_S)]
    if is_lost:
        options += ["--spares", "1"]
    if job.system == "unbroken-process":
        options += ["--rungs", "process,pod" if is_lost else "process"]
    if job.system == "unbroken-memory":
        # 12 bytes a parameter in two slots, and room for the small things.
        parameters = 12 * job.width**2 * job.layers + 9000 * job.width
        options += ["--memory", str(2 * 12 * parameters // WORLD_SIZE + (64 << 20))]
    return options


def run(job: Job, limit_s: float, is_loud: bool) -> Row:
    """Run a job; return what each fault has cost. Raises RuntimeError when it did not come back from one."""
    # A port of its own for each round: gloo meets the addresses of the round before otherwise.
    environment = {**os.environ, **job.variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    python_path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    until_s = time.monotonic() + limit_s
    try:
        for command in commands(job):
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                cwd=job.folder,
            )  # fmt: skip
            processes.append(process)
            threading.Thread(target=_follow, args=(job, process.stdout, is_loud), daemon=True).start()
        processes[0].wait(max(until_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        print(f"{job.system} {job.fault}: not over after {limit_s:g} s", file=sys.stderr)
    finally:
        for process in processes:
            end_session(process)
        end_workers(job)
    marks = read_marks(Path(job.folder))
    found = recoveries(marks, job.fault_steps)
    if len(found) != job.num_faults:
        raise RuntimeError(f"want {job.num_faults} recoveries, got {len(found)} within {limit_s:g} s")
    return Row(job.system, job.fault, found, step_s=mean_step_s(marks))


def end_workers(job: Job) -> None:
    """End what a system has left of a job, in sessions of its own."""
    wanted = job.variables()[VARIABLE]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(VARIABLE) == wanted:
                process.kill()


def _follow(job: Job, output: IO[bytes], is_loud: bool) -> None:
    """Mark when a system says that it knows of a fault, until its output ends."""
    known = KNOWN.get("unbroken" if job.system.startswith("unbroken") else job.system)
    for line in output:
        at_ns = time.monotonic_ns()
        text = line.decode(errors="replace")
        if known is not None and known.search(text):
            write_mark(Path(job.folder), Mark("known", -1, -1, at_ns))
        if is_loud:
            sys.stdout.write(text)


def measure(options: argparse.Namespace) -> list[Row]:
    """Run everything, the systems of one kind in turn."""
    rows = []
    for kind in options.kinds.split(","):
        for system in options.systems.split(","):
            rows.append(measure_one(system, kind, options))
            if options.json is not None:
                # After each: who ends it early keeps what was measured.
                options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=2))
            print(to_table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def measure_one(system: str, kind: str, options: argparse.Namespace) -> Row:
    """Return the row of one system; a failure is a row with its reason, not the end of the benchmark."""
    if (system, kind) in CANNOT:
        return Row(system, kind, reason=CANNOT[system, kind])
    folder = tempfile.mkdtemp(prefix="lost-time-")
    try:
        job = Job(
            system, kind, options.faults, options.width, options.layers, options.every, options.after, folder,
            options.memory_every,
        )  # fmt: skip
        return run(job, options.limit, options.loud)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return Row(system, kind, reason=f"did not come back: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def to_table(rows: Sequence[Row]) -> str:
    """Return a markdown table of medians."""
    phases = [*PHASES.values(), "redo"]
    heads = [*TERMS, *(f"({phase})" for phase in phases), "step", "faults"]
    lines = [
        f"| fault | system | lost s | steps redone | {' | '.join(heads)} |",
        "|---|---|--:|--:|" + "--:|" * len(heads),
    ]
    for row in rows:
        if not row.recoveries:
            lines.append(f"| {row.fault} | {row.system} | {row.reason} |" + " |" * (len(heads) + 1))
            continue
        data = row.to_dict()
        medians = [statistics.median(one.terms[term] for one in row.recoveries) for term in TERMS]
        medians += [statistics.median(one.phases[phase] for one in row.recoveries) for phase in phases]
        seconds = " | ".join(f"{value:.2f}" for value in medians)
        lines.append(
            f"| {row.fault} | {row.system} | {data['lost_s']:.2f} | {data['steps_redone']} | {seconds} | "
            f"{'-' if row.step_s is None else format(row.step_s, '.2f')} | {len(row.recoveries)} |"
        )
    return "\n".join(lines)


def some_of(known: tuple[str, ...], name: str, text: str) -> None:
    """Refuse words that nobody knows: they would be measured as something else."""
    if unknown := sorted(set(text.split(",")) - set(known)):
        sys.exit(f"{name}: want some of {','.join(known)}, got {','.join(unknown)}")


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults (%(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="%(default)s")
    parser.add_argument("--faults", type=int, default=5, help="faults a job (%(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the transformer (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer (%(default)s)")
    parser.add_argument(
        "--every", type=int, default=10, help="steps from checkpoint to checkpoint on the disk (%(default)s)"
    )
    parser.add_argument("--memory-every", type=int, default=1, help="the same in memory (%(default)s)")
    parser.add_argument("--after", type=int, default=8, help="steps from a checkpoint to a fault (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model, one fault, 2 of 3 steps: for tests")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a job may take (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--loud", action="store_true", help="show what the jobs say")
    return parser


def main() -> int:
    """Measure, print the table, write the file; return 1 when one of our own systems has no figure."""
    options = make_parser().parse_args()
    some_of(KINDS, "--kinds", options.kinds)
    some_of(SYSTEMS, "--systems", options.systems)
    if options.quick:
        options.width, options.layers, options.faults, options.every, options.after = 32, 1, 1, 3, 2
        options.memory_every = 3
    rows = measure(options)
    print(to_table(rows))
    return int(any(row.system.startswith("unbroken") and row.reason.startswith("did not") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
