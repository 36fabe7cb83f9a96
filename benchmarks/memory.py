"""How long `Checkpointer.save` and `load` block, beside plain copies of the same bytes in the same process.

    python benchmarks/memory.py --mib 256 --tensors 100 --runs 7 --threads 1 --processes 2

In turn, in each run: a copy into warm memory, a save; a copy out of a warm slot, a load, which compares all digests
first. "First" are the saves into both slots right after `reserve`, in fresh slots each time. Ratios are of medians;
`first_save_max_ratio` is of the slowest. With more processes than one each has its keeper, and all measure at once.

On a machine that is busy with other things give `--threads 1`: torch's threads meet after each tensor, and wait there
for whichever of them has no processor. That makes single copies a hundred times slower, ours and the plain ones.

    python benchmarks/memory.py --restarts 10

measures something else: a restart while checkpoints are copied to other pods (see memory_restart.py).
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memory_restart
from unbroken.memory import Checkpointer, Saved
from unbroken_core.pod.memory_messages import KEEPER_SOCKET
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json

LIMIT_S = 60.0
NUM_FIRST = 5
"""How often a save is the first one: each time another place of the pod has slots of its own."""


def start_keeper(folder: Path, root: Path, limit_bytes: int) -> "subprocess.Popen[bytes]":
    """Start a keeper, and make this process its worker."""
    values = {
        "UNBROKEN_DIR": str(folder),
        "UNBROKEN_SETTINGS": settings_to_json(JobSettings(job="benchmark", uid="benchmark", ranks_per_pod=NUM_FIRST)),
        "UNBROKEN_POD_UID": "pod",
        "UNBROKEN_MEMORY_DIR": str(root),
        "UNBROKEN_MEMORY_LIMIT": str(limit_bytes),
    }
    os.environ.update(values, UNBROKEN_LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT="0")
    keeper = subprocess.Popen([sys.executable, "-P", "-m", "unbroken.keeper"])
    until_s = time.monotonic() + LIMIT_S
    while not (folder / KEEPER_SOCKET).exists():
        if keeper.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"keeper: want it to listen within {LIMIT_S:g} s, got exit code {keeper.poll()}")
        time.sleep(0.001)
    return keeper


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


class Bench:
    """One state, a warm copy of it, and a checkpointer."""

    def __init__(self, num_bytes: int, num_tensors: int) -> None:
        part = num_bytes // num_tensors // 4
        self.state = {f"layer.{index}.weight": torch.ones(part) * index for index in range(num_tensors)}
        self.warm = {name: one.clone() for name, one in self.state.items()}
        self.checkpointer = Checkpointer()
        self.step = 0

    def copy(self) -> None:
        """Copy into warm memory."""
        for name, one in self.state.items():
            self.warm[name].copy_(one)

    def copy_out(self) -> None:
        """Copy back."""
        for name, one in self.state.items():
            one.copy_(self.warm[name])

    def save(self) -> None:
        """Save the next step."""
        self.step += 1
        result = self.checkpointer.save(dict(self.state), self.step)
        if not isinstance(result, Saved):
            raise RuntimeError(result.reason)

    def load(self) -> None:
        """Load the last step."""
        if Checkpointer().load(dict(self.state)) != self.step:
            raise RuntimeError(f"want step {self.step}")


def first_saves(bench: Bench, root: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of saves into fresh slots, and of the copies before them."""
    copies, saves = [], []
    for place in reversed(range(NUM_FIRST)):
        os.environ["UNBROKEN_LOCAL_RANK"] = str(place)
        problem = bench.checkpointer.reserve(dict(bench.state))
        if problem:
            raise RuntimeError(problem)
        for _ in range(2):
            copies.append(timed(bench.copy))
            saves.append(timed(bench.save))
        # Its digests are there: the keeper is at rest.
        bench.load()
        if place:
            for slot in root.rglob(f"{place}-*.slot*"):
                slot.unlink()
    return copies, saves


def measure(num_bytes: int, num_tensors: int, num_runs: int, root: Path) -> dict[str, Any]:
    """Return medians in seconds and their ratios."""
    bench = Bench(num_bytes, num_tensors)
    bench.copy()
    copies, firsts = first_saves(bench, root)
    times: dict[str, list[float]] = {"copy": [], "save": [], "copy_out": [], "load": []}
    for _ in range(num_runs):
        times["copy"].append(timed(bench.copy))
        times["save"].append(timed(bench.save))
        # The keeper digests on another processor; a load at once would wait for it.
        bench.load()
        times["copy_out"].append(timed(bench.copy_out))
        times["load"].append(timed(bench.load))
    seconds = {name: statistics.median(found) for name, found in times.items()}
    first, beside = statistics.median(firsts), statistics.median(copies)
    return {
        "bytes": num_bytes,
        "tensors": num_tensors,
        "runs": num_runs,
        "threads": torch.get_num_threads(),
        **{f"{name}_s": round(value, 5) for name, value in seconds.items()},
        "first_save_s": round(first, 5),
        "save_ratio": round(seconds["save"] / seconds["copy"], 2),
        "first_save_ratio": round(first / beside, 2),
        "first_save_max_ratio": round(max(firsts) / beside, 2),
        "load_ratio": round(seconds["load"] / seconds["copy_out"], 2),
    }


def run_together(num_processes: int, arguments: list[str]) -> int:
    """Run as many benchmarks at once; return how many failed."""
    command = [sys.executable, __file__, *arguments, "--processes", "1"]
    together = {**os.environ, "LOCAL_WORLD_SIZE": str(num_processes)}
    running = [subprocess.Popen(command, env=together) for _ in range(num_processes)]
    return sum(process.wait() != 0 for process in running)


def main() -> int:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the shard (256)")
    parser.add_argument("--tensors", type=int, default=100, help="tensors of one size in it (100)")
    parser.add_argument("--runs", type=int, default=7, help="runs (7)")
    parser.add_argument("--threads", type=int, help="threads of torch (its own choice)")
    parser.add_argument("--processes", type=int, default=1, help="how many of these run at once (1)")
    parser.add_argument("--restarts", type=int, default=0, help="restarts of each kind, in a job with copies (0)")
    parser.add_argument("--loud", action="store_true", help="show what that job says")
    options = parser.parse_args()
    if options.restarts:
        print(json.dumps(memory_restart.measure(options.mib << 20, options.restarts, options.loud)))
        return 0
    if options.processes > 1:
        return run_together(options.processes, sys.argv[1:])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix="ubm-"))
    root = Path(tempfile.mkdtemp(prefix="ubm-", dir="/dev/shm"))
    keeper = start_keeper(folder, root, 6 * options.mib << 20)
    try:
        print(json.dumps(measure(options.mib << 20, options.tensors, options.runs, root)))
    finally:
        keeper.kill()
        keeper.wait()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
