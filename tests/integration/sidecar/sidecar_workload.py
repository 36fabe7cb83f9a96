"""A training script for tests: `plain` as written for torchrun, `wrapped` with the in-process wrapper.

Appends "name rank iteration pid" to TEST_EVENTS, and trains until rank 0 sees the file TEST_DONE.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess


def note(name: str, rank: int) -> None:
    """Append one event; a write of one line is atomic."""
    iteration = os.environ.get("TORCHELASTIC_RESTART_COUNT", "?")
    with Path(os.environ["TEST_EVENTS"]).open("a") as file:
        file.write(f"{name} {rank} {iteration} {os.getpid()}\n")


def train(call: inprocess.CallWrapper | None = None) -> int:
    """Reduce until told to stop; the world must agree in every step."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    is_noted = False
    while True:
        total = torch.ones(2)
        total[1] = float(rank == 0 and Path(os.environ["TEST_DONE"]).exists())
        dist.all_reduce(total)
        assert total[0].item() == size
        if call is not None:
            call.ping()
        if not is_noted:
            note("started", rank)
            is_noted = True
        if total[1].item() > 0:
            break
        time.sleep(0.01)
    dist.destroy_process_group()
    note("finished", rank)
    return rank


if __name__ == "__main__":
    if "--grandchild" in sys.argv:
        child = subprocess.Popen(["sleep", "1000"])
        note(f"grandchild-{child.pid}", 0)
    if sys.argv[1] == "plain":
        train()
    else:

        @inprocess.Wrapper()
        def wrapped(call: inprocess.CallWrapper) -> int:
            """Get the call by annotation."""
            return train(call)

        wrapped()
