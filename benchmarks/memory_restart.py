"""How long a restart takes while checkpoints are copied to other pods, beside one while all is quiet.

    python benchmarks/memory.py --restarts 10

A job of two pods with a rank each restarts in its processes, again and again: while both ranks' checkpoints are being
copied to the other pod, and once they are there, in turn in one run. From the instant of the fault until all ranks have

    restart_s     finished their first collective again
    restored_s    read the same step from their memory as well

Ratios are of medians: copying / quiet (wanted: at most 1.1). `still_copying` counts restarts at whose end both
checkpoints were still being copied.

With real-time priority (`chrt -r 10`) figures are steadier on a busy machine, and worse: keepers' threads stand back
(nice 19), and this lets them have as much as the trainers. In Kubernetes it is in between: agent and trainer are two
containers, and their requests say who gets how much.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from recovery import end_session

HERE = Path(__file__).resolve().parent
WARM_UP = 2
"""So many faults do not count: memory is allocated, and slots are mapped."""
LIMIT_S = 900.0


def run_job(num_bytes: int, num_faults: int, is_loud: bool) -> list[dict[str, Any]]:
    """Run the job; return what its ranks have written down. Raises RuntimeError when it fails."""
    # Two slots and two copies of a part, as much again to spare.
    mib = max(8 * num_bytes >> 20, 16)
    options = ["--pods", "2", "--ranks-per-pod", "1", "--memory", f"{mib}Mi", "--memory-replicas", "1"]
    options += [
        "--rungs",
        f"in-process:{2 * num_faults}",
        "--no-progress-limit",
        str(2 * num_faults),
        *([] if is_loud else ["--quiet"]),
    ]
    with tempfile.TemporaryDirectory(prefix="memory-restart-") as folder:
        marks = Path(folder) / "marks"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_MARKS": str(marks),
            "BENCH_FAULTS": str(num_faults), "BENCH_BYTES": str(num_bytes),
        }  # fmt: skip
        output = None if is_loud else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken", "run", *options, str(HERE / "systems" / "memory_restart_job.py")],
            env=environment, stdout=output, stderr=output, start_new_session=True, cwd=folder,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_S)
        finally:
            end_session(process)
        if code:
            raise RuntimeError(f"job: want exit code 0, got {code}; --loud shows why")
        return [json.loads(line) for line in marks.read_text().splitlines()]


def restarts(marks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the seconds of each restart, by what went on meanwhile."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fault in sorted({one["iteration"] for one in marks if one["name"] == "fault"}):
        before = [one for one in marks if one["name"] == "fault" and one["iteration"] == fault]
        after = [one for one in marks if one["name"] == "end" and one["iteration"] == fault + 1]
        mode, is_copying = before[0]["mode"], all(one["is_copying"] for one in before)
        if fault < WARM_UP or is_copying != (mode == "copying"):
            # A copy may be whole before the other rank has come.
            continue
        at_ns = max(one["at_ns"] for one in before)
        joined_ns = max(one["joined_ns"] for one in after)
        # Not what it takes to make the state, which is made once a process.
        restored_ns = max(one["restored_ns"] for one in after)
        found[mode].append(
            {
                "restart_s": (joined_ns - at_ns) / 1e9,
                "restored_s": (restored_ns - at_ns) / 1e9,
                "is_copying": all(one["is_copying"] for one in after),
            }
        )
    return found


def measure(num_bytes: int, num_restarts: int, is_loud: bool) -> dict[str, Any]:
    """Return medians in seconds and their ratios."""
    found = restarts(run_job(num_bytes, WARM_UP + 2 * num_restarts, is_loud))
    result: dict[str, Any] = {"bytes": num_bytes}
    for mode in ("quiet", "copying"):
        result[f"{mode}_restarts"] = len(found[mode])
        for name in ("restart_s", "restored_s"):
            seconds = [one[name] for one in found[mode]]
            if not seconds:
                raise RuntimeError(f"{mode}: no restart was measured")
            result[f"{mode}_{name}"] = round(statistics.median(seconds), 4)
    result["still_copying"] = sum(one["is_copying"] for one in found["copying"])
    for name in ("restart", "restored"):
        result[f"{name}_ratio"] = round(result[f"copying_{name}_s"] / result[f"quiet_{name}_s"], 2)
    return result
