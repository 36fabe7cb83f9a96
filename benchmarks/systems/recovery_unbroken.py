"""The script of our own workers, as a user writes it."""

import os

import torch
import torch.distributed as dist

from reports.recovery_marks import Scenario, after_first_collective
from unbroken import inprocess


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Join, do the first collective, and go through the fault of this iteration."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    after_first_collective(Scenario.read(), call.iteration, rank, world_size, call.ping)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
