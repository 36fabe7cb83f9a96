"""Ranks raise in turn, one an iteration; every so many restarts each process writes what it holds.

Appends one JSON object a sample to the file that the last argument names: python restarts_workload.py 1000 50 FILE
"""

import contextlib
import gc
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess

SETTLED_LIMIT_S = 30.0
FLIGHT_RECORDER = 2000
"""Collectives that torch remembers, 1 KiB each: memory grows until there were so many, restarts or not."""


class Injected(Exception):
    """The fault."""


def settle() -> None:
    """Wait until the groups of former iterations are destroyed, which happens in the background."""
    deadline_s = time.monotonic() + SETTLED_LIMIT_S
    while any(thread.name == "unbroken-destroy" for thread in threading.enumerate()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"old groups: want them destroyed within {SETTLED_LIMIT_S:g} s, they are not")
        time.sleep(0.005)
    gc.collect()


def sample() -> dict[str, object]:
    """Return what this process holds: anonymous memory, threads by name, descriptors by kind, objects by type."""
    status = Path("/proc/self/status").read_text()
    descriptors: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            descriptors[re.sub(r"[0-9]+", "N", str(link.readlink()))] += 1
        except OSError:
            # The listing's own descriptor is closed again.
            continue
    threads: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        # One may end after it was listed.
        with contextlib.suppress(OSError):
            threads[(task / "comm").read_text().strip()] += 1
    objects = Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    return {
        "memory_kib": int(status.split("RssAnon:")[1].split()[0]),
        "threads": threads,
        "descriptors": descriptors,
        "objects": objects,
    }


def main(num_restarts: int, every: int, samples: Path) -> None:
    """Train until so many restarts are done."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        call.ping(step=call.iteration)
        if call.iteration == 0:
            for _ in range(FLIGHT_RECORDER):
                dist.all_reduce(total)
        if call.iteration % every == 0:
            settle()
            line = json.dumps({"rank": rank, "pid": os.getpid(), "iteration": call.iteration, **sample()}) + "\n"
            with samples.open("a") as file:
                file.write(line)
            dist.barrier()
        if call.iteration < num_restarts:
            if rank == call.iteration % size:
                raise Injected(f"in iteration {call.iteration}")
            dist.all_reduce(total)
        while not Path(os.environ["TEST_DONE"]).exists():
            time.sleep(0.01)  # Until the run is ended; the test bounds it.
        dist.destroy_process_group()

    train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
