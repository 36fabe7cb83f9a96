"""Rank 1 of the first iteration runs Python for ever while rank 0 waits for it in a collective; nobody pings."""

import os
import time

import torch
import torch.distributed as dist

from unbroken import inprocess


@inprocess.Wrapper()
def train() -> None:
    """Meet in a collective; in the first iteration rank 1 does not come."""
    dist.init_process_group("gloo")
    while os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    train()
