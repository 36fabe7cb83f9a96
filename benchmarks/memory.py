"""How long `Checkpointer.save` and `load` block, beside plain copies of the same bytes in the same process.

    python benchmarks/memory.py --mib 256 --tensors 100 --runs 7

In turn, in each run: a copy into warm memory, a save; a copy out of a warm slot, a load, which compares all digests
first. "First" is the first save after `reserve` in a fresh slot. Ratios are of medians.
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

from unbroken.memory import Checkpointer, Saved
from unbroken_core.pod.memory_messages import KEEPER_SOCKET
from unbroken_core.settings import JobSettings
from unbroken_core.wire import settings_to_json

LIMIT_S = 60.0


def start_keeper(folder: Path, root: Path, limit_bytes: int) -> "subprocess.Popen[bytes]":
    """Start a keeper, and make this process its worker."""
    values = {
        "UNBROKEN_DIR": str(folder),
        "UNBROKEN_SETTINGS": settings_to_json(JobSettings(job="benchmark", uid="benchmark")),
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


def measure(num_bytes: int, num_tensors: int, num_runs: int) -> dict[str, Any]:
    """Return medians in seconds and their ratios."""
    bench = Bench(num_bytes, num_tensors)
    problem = bench.checkpointer.reserve(dict(bench.state))
    if problem:
        raise RuntimeError(problem)
    times: dict[str, list[float]] = {"copy": [timed(bench.copy)], "save": [], "copy_out": [], "load": []}
    first_s = [timed(bench.save), timed(bench.save)]
    bench.load()
    for _ in range(num_runs):
        times["copy"].append(timed(bench.copy))
        times["save"].append(timed(bench.save))
        # The keeper digests on another processor; a load at once would wait for it.
        bench.load()
        times["copy_out"].append(timed(bench.copy_out))
        times["load"].append(timed(bench.load))
    seconds = {name: statistics.median(found) for name, found in times.items()}
    first = statistics.mean(first_s)
    return {
        "bytes": num_bytes,
        "tensors": num_tensors,
        "runs": num_runs,
        **{f"{name}_s": round(value, 5) for name, value in seconds.items()},
        "first_save_s": round(first, 5),
        "save_ratio": round(seconds["save"] / seconds["copy"], 2),
        "first_save_ratio": round(first / seconds["copy"], 2),
        "load_ratio": round(seconds["load"] / seconds["copy_out"], 2),
    }


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the shard (256)")
    parser.add_argument("--tensors", type=int, default=100, help="tensors of one size in it (100)")
    parser.add_argument("--runs", type=int, default=7, help="runs (7)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ubm-"))
    root = Path(tempfile.mkdtemp(prefix="ubm-", dir="/dev/shm"))
    keeper = start_keeper(folder, root, 4 * options.mib << 20)
    try:
        print(json.dumps(measure(options.mib << 20, options.tensors, options.runs)))
    finally:
        keeper.kill()
        keeper.wait()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
