"""A training that all ranks must agree on in each step, for the recording of a killed rendezvous.

Each step is an all-reduce over gloo; rank 0 then applies it, and nothing may cut in there: it takes APPLY_S, as a
checkpoint does, so that an interruption lasts long enough to be seen. Appends the number of each step that was applied
to `applied`, and "rank pid" to `pids` at each start of the function, both in the folder PLACE.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess

NUM_STEPS = 24
APPLY_S = 0.5
PLACE = Path(os.environ["PLACE"])


def append(name: str, line: str) -> None:
    """Append a line; one write is atomic."""
    with (PLACE / name).open("a") as file:
        file.write(line + "\n")


def num_applied() -> int:
    """Return how many steps the checkpoint has: the state comes from there alone."""
    file = PLACE / "applied"
    return len(file.read_text().splitlines()) if file.exists() else 0


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train from the checkpoint on."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    append("pids", f"{rank} {os.getpid()}")
    first = torch.tensor([num_applied()])
    dist.broadcast(first, 0)
    for step in range(int(first), NUM_STEPS):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == size
        if rank == 0:
            with call.atomic():
                time.sleep(APPLY_S)
                append("applied", str(step))
        call.ping(step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
