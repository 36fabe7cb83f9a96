"""A training script for tests: reduces with its peers in every step, and saves.

Every rank overwrites TEST_SAVES/<rank> with "iteration pid step" as a checkpoint would be, and notes in the file "late"
when it finds the work of a later iteration there: only one worker at a time may have a rank. The script ends once rank
0 sees the file TEST_DONE.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess


def save(rank: int, step: int) -> None:
    """Replace this rank's checkpoint, in one go."""
    folder = Path(os.environ["TEST_SAVES"])
    iteration = os.environ["TORCHELASTIC_RESTART_COUNT"]
    saved = folder / str(rank)
    if saved.exists() and int(saved.read_text().split()[0]) > int(iteration):
        with (folder / "late").open("a") as late:
            late.write(f"rank {rank} of iteration {iteration}, pid {os.getpid()}, step {step}\n")
    new = folder / f".{rank}-{os.getpid()}"
    new.write_text(f"{iteration} {os.getpid()} {step}")
    new.replace(saved)


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Reduce and save until told to stop; the world must agree in every step."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    step = 0
    while True:
        total = torch.ones(2)
        total[1] = float(rank == 0 and Path(os.environ["TEST_DONE"]).exists())
        dist.all_reduce(total)
        assert total[0].item() == size
        call.ping()
        save(rank, step)
        step += 1
        if total[1].item() > 0:
            break
        # The pace of the steps; nothing waits for it.
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
