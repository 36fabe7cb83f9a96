"""Ranks that all reduce after each step, one of which works longer: straggler_workload.py FOLDER KIND

The worker of the pod that FOLDER/slow names is slow: it computes (KIND spin), or stands in its own code (KIND sleep).
FOLDER/rank-<rank>-<iteration> exists once a rank has trained.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess

WORK_S, EXTRA_S = 0.02, 0.2
"""A slow worker works many times as long: others may be held up for a while by what else this machine does."""
FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Step until the test says that it is over."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    step = 0
    while True:
        step += 1
        work(WORK_S)
        if read(FOLDER / "slow") == os.environ["UNBROKEN_POD"]:
            work(EXTRA_S) if KIND == "spin" else time.sleep(EXTRA_S)
        is_over = torch.tensor([float(rank == 0 and Path(os.environ["TEST_DONE"]).exists())])
        dist.all_reduce(is_over)
        call.ping(step=step)
        (FOLDER / f"rank-{rank}-{call.iteration}").touch()
        if is_over.item():
            break
    dist.destroy_process_group()


def work(seconds: float) -> None:
    """Use a core for so long."""
    began_s = time.thread_time()
    while time.thread_time() - began_s < seconds:
        torch.ones(64, 64) @ torch.ones(64, 64)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


train()
