"""A script that saves before ranks move: each rank keeps its newest step in a file, and notes all that it makes.

A rank stays in its step while FOLDER/hold-<rank> exists.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess

FOLDER = Path(os.environ["TEST_EVENTS"]).parent
STEP_S = 0.01
"""The pace of steps; no test waits for it."""


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> int:
    """Step until told to stop; all ranks must begin at the same step, and make each at the same time."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saved, steps = FOLDER / f"saved-{rank}", FOLDER / f"steps-{rank}"

    def save(step: int) -> None:
        # A collective, as the checkpoint of a sharded model has it: all ranks are there.
        dist.barrier()
        with call.atomic():
            saved.write_text(f"{step}")

    call.on_move(save)
    newest = next((path for path in (saved, FOLDER / "saved-0") if path.exists()), None)
    step = 0 if newest is None else int(newest.read_text())
    is_done = False
    while not is_done:
        while (FOLDER / f"hold-{rank}").exists():
            time.sleep(STEP_S)  # between two looks at the file, which alone ends the wait, or else the end of the job
        word = torch.tensor([float(step), float(step), float(rank == 0 and Path(os.environ["TEST_DONE"]).exists())])
        dist.all_reduce(word, dist.ReduceOp.MAX)
        assert word[0].item() == step, f"rank {rank} is at step {step}, another one at {word[0].item()}"
        step, is_done = step + 1, word[2].item() > 0
        with steps.open("a") as file:
            file.write(f"{call.iteration} {step}\n")
        call.ping(step=step)
        time.sleep(STEP_S)
    dist.destroy_process_group()
    return step


train()
