"""A training script for tests: each rank has a state of its own, which it keeps in memory after every step.

It appends "ITERATION RANK STEP STATE" to TEST_SAVES/saved before each save, and to TEST_SAVES/loaded what it has
restored: step -1 if that is nothing. The script ends once rank 0 sees the file TEST_DONE.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess, memory


class State:
    """Differs from rank to rank, and follows from all steps before."""

    def __init__(self, rank: int) -> None:
        self._name = f"rank-{rank}"
        self.value = torch.full((1,), float(rank), dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return it."""
        return {self._name: self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take it."""
        self.value = state[self._name]


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Compute and save until told to stop."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = State(rank)

    def note(name: str, step: int) -> None:
        with (Path(os.environ["TEST_SAVES"]) / name).open("a") as file:
            file.write(f"{call.iteration} {rank} {step} {float(state.value).hex()}\n")

    checkpoints = memory.Checkpointer(every=1)
    done = checkpoints.load({"state": state})
    step = -1 if done is None else done
    note("loaded", step)
    is_over = torch.zeros(1)
    while not is_over.item():
        step += 1
        is_over[0] = float(rank == 0 and Path(os.environ["TEST_DONE"]).exists())
        dist.all_reduce(is_over)
        state.value = torch.cos(state.value + step)
        note("saved", step)
        with call.atomic():
            checkpoints.save({"state": state}, step)
        call.ping(step=step)
        # The pace of the steps; nothing waits for it.
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
