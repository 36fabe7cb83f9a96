"""Rank 1 of the first iteration runs Python for ever while rank 0 waits for it in a collective; nobody pings.

Over gloo; with the argument `gpu` over NCCL, both ranks on the first device.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from tests.gpu.one_device import first_device, is_refusal

from unbroken import inprocess

ON_GPU = sys.argv[1:] == ["gpu"]


@inprocess.Wrapper()
def train() -> None:
    """Meet in two collectives; in the first iteration rank 1 does not come to the second."""
    numbers = torch.ones(1, device=first_device() if ON_GPU else "cpu")
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    try:
        dist.all_reduce(numbers)
    except dist.DistBackendError as error:
        if not is_refusal(error):
            raise
        print(f"REFUSED {error}", flush=True)
        return
    while os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.01)
    dist.all_reduce(numbers)
    numbers.item()


if __name__ == "__main__":
    train()
