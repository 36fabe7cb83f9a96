"""What a fault costs until the training is where it was: seconds, and steps that are made twice; ours and the peers'.

    python benchmarks/lost_time.py --faults 5 --json lost_time.json
    python benchmarks/lost_time.py --quick --systems unbroken-memory,unbroken-disk,unbroken-process --kinds exception

A transformer of 30 M parameters under FSDP2 on two workers, a checkpoint on the disk every 10 steps, in memory after
each step, a fault 8 steps after one on the disk.
From the instant in which the last worker had made the last step before the fault, until the last one has made the
next step that had never been made. Terms: `restart` until all are in the training function again, `join` (process
group), `model` (the user's), `restore`, `redo` (steps made again, and the new one). `step` is the mean of all steps
without a fault, checkpoints included: what the system costs while nothing fails.

Kinds: exception; sigkill of a worker; pod-lost (the worker and all that manages it; a spare takes over); hang (a loop
without a step; the timeout of 5 s is part of the figure). Systems, in turn for each kind:
- unbroken-memory: `unbroken run --memory`, `unbroken.memory.Checkpointer(every=1)`.
- unbroken-disk: the same with `dcp.save` and `dcp.load`, as all others.
- unbroken-process: a plain script, all processes are started again (`--rungs process`; for pod-lost also `pod`).
- torchrun: torch's own; ft_launcher: that of nvidia-resiliency-ext 0.4.1, its checks every 0.5 s. For pod-lost three
  launchers of one worker each, of which one waits.
- nvrx: the in-process restart of the same package: intervals of 10 ms, gloo freed by our abort; killed workers are
  replaced by ones that wait in reserve.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lost_time_job import HARD_S, SOFT_S, WORLD_SIZE, Job, Mark, read_marks
from recovery import end_session, peer_python
from recovery_peers import free_ports

HERE = Path(__file__).resolve().parent
SYSTEMS = ("unbroken-memory", "unbroken-disk", "unbroken-process", "torchrun", "nvrx", "ft_launcher")
KINDS = ("exception", "sigkill", "pod-lost", "hang")
PHASES = {"entered": "restart", "joined": "join", "built": "model", "restored": "restore"}
CANNOT = {
    ("torchrun", "hang"): "finds no hang: it waits for the timeout of a collective, 30 minutes by default",
    ("unbroken-process", "hang"): "finds no hang of a plain script: only a wrapped one pings",
}
"""What a system has nothing for, and why."""


@dataclass(frozen=True)
class Recovery:
    """One fault."""

    lost_s: float
    steps_redone: int
    terms: dict[str, float]


@dataclass(frozen=True)
class Row:
    """All faults of one kind in one system."""

    system: str
    fault: str
    recoveries: list[Recovery] = field(default_factory=list)
    reason: str = ""
    """Why there is no figure."""
    step_s: float | None = None
    """Mean of the steps without a fault, checkpoints included."""

    def to_dict(self) -> dict[str, object]:
        """Return it as in the file: medians, and each figure."""
        found = self.recoveries
        median = statistics.median
        return {
            "system": self.system,
            "fault": self.fault,
            "lost_s": round(median(one.lost_s for one in found), 4) if found else None,
            "steps_redone": median(one.steps_redone for one in found) if found else None,
            "terms": {name: round(median(one.terms[name] for one in found), 4) for name in found[0].terms}
            if found
            else {},
            "step_s": None if self.step_s is None else round(self.step_s, 4),
            "all_lost_s": [round(one.lost_s, 4) for one in found],
            "reason": self.reason,
        }


def commands(job: Job) -> list[list[str]]:
    """Return what is started for a job; the first one's end is the job's."""
    script = str(HERE / "lost_time_job.py")
    is_lost = job.fault == "pod-lost"
    if job.system.startswith("unbroken"):
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
        return [[sys.executable, "-m", "unbroken", "run", *options, script]]
    if job.system == "nvrx":
        return [[str(peer_python()), str(HERE / "lost_time_nvrx.py")]]
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


def run(job: Job, limit_s: float, is_loud: bool) -> Row:
    """Run a job; return what each fault has cost. Raises RuntimeError when it did not come back from one."""
    # A port of its own for each round: gloo meets the addresses of the round before otherwise.
    environment = {**os.environ, **job.variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    output = None if is_loud else subprocess.DEVNULL
    processes = []
    until_s = time.monotonic() + limit_s
    try:
        for command in commands(job):
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=job.folder
                )
            )
        processes[0].wait(max(until_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        print(f"{job.system} {job.fault}: not over after {limit_s:g} s", file=sys.stderr)
    finally:
        for process in processes:
            end_session(process)
    marks = read_marks(Path(job.folder))
    found = recoveries(marks, job.fault_steps)
    if len(found) != job.num_faults:
        raise RuntimeError(f"want {job.num_faults} recoveries, got {len(found)} within {limit_s:g} s")
    return Row(job.system, job.fault, found, step_s=mean_step_s(marks))


def mean_step_s(marks: Sequence[Mark]) -> float | None:
    """Return the mean seconds of a step of rank 0 that followed another one with nothing between; None without any."""
    seconds = []
    before: Mark | None = None
    for mark in sorted((one for one in marks if one.rank == 0 or one.name == "fault"), key=lambda one: one.at_ns):
        if mark.name == "step" and before is not None and before.name == "step" and mark.step == before.step + 1:
            seconds.append((mark.at_ns - before.at_ns) / 1e9)
        before = mark
    return statistics.mean(seconds) if seconds else None


def recoveries(marks: Sequence[Mark], fault_steps: Sequence[int]) -> list[Recovery]:
    """Return what each fault has cost; nothing of those after which the next step was not made by all."""
    found = []
    for step in fault_steps:
        at_ns = next((one.at_ns for one in marks if (one.name, one.step) == ("fault", step)), None)
        if at_ns is None:
            continue
        before = [one.at_ns for one in marks if (one.name, one.step) == ("step", step - 1) and one.at_ns < at_ns]
        again: dict[int, int] = {}
        for one in marks:
            if (one.name, one.step) == ("step", step) and one.at_ns > at_ns:
                again.setdefault(one.rank, one.at_ns)
        if len(again) < WORLD_SIZE or not before:
            continue
        start_ns, end_ns = max(before), max(again.values())
        between = [one for one in marks if at_ns < one.at_ns <= end_ns]
        terms: dict[str, float] = {}
        last_ns = start_ns
        for name, term in PHASES.items():
            reached_ns = max((one.at_ns for one in between if one.name == name), default=last_ns)
            terms[term] = (reached_ns - last_ns) / 1e9
            last_ns = reached_ns
        terms["redo"] = (end_ns - last_ns) / 1e9
        restored = min(one.step for one in between if one.name == "restored")
        found.append(Recovery((end_ns - start_ns) / 1e9, step - 1 - restored, terms))
    return found


def measure(options: argparse.Namespace) -> list[Row]:
    """Run everything, the systems of one kind in turn."""
    rows = []
    for kind in options.kinds.split(","):
        for system in options.systems.split(","):
            rows.append(measure_one(system, kind, options))
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
    except RuntimeError as error:
        return Row(system, kind, reason=f"did not come back: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def to_table(rows: Sequence[Row]) -> str:
    """Return a markdown table of medians."""
    terms = [*PHASES.values(), "redo"]
    lines = [
        f"| fault | system | lost s | steps redone | {' | '.join(terms)} | step | faults |",
        "|---|---|--:|--:|" + "--:|" * (len(terms) + 2),
    ]
    for row in rows:
        data = row.to_dict()
        if not row.recoveries:
            lines.append(f"| {row.fault} | {row.system} | {row.reason} |" + " |" * (len(terms) + 3))
            continue
        medians = {term: statistics.median(one.terms[term] for one in row.recoveries) for term in terms}
        seconds = " | ".join(f"{medians[term]:.2f}" for term in terms)
        lines.append(
            f"| {row.fault} | {row.system} | {data['lost_s']:.2f} | {data['steps_redone']} | {seconds} | "
            f"{'-' if row.step_s is None else format(row.step_s, '.2f')} | {len(row.recoveries)} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the file; return 1 when one of our own systems has no figure."""
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
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers, options.faults, options.every, options.after = 32, 1, 1, 3, 2
        options.memory_every = 3
    rows = measure(options)
    print(to_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=2))
    return int(any(row.system.startswith("unbroken") and row.reason.startswith("did not") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
