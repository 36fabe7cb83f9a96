"""Trains next to nothing until it is ended, with checkpoints in memory; the rank that a file in FLAGS names raises."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unbroken import inprocess, memory

FLAGS = Path(os.environ["FLAGS"])


@inprocess.Wrapper(health_check=inprocess.health_check.FaultCounter())
def train(call: inprocess.CallWrapper) -> None:
    """Count steps, from the newest checkpoint on."""
    dist.init_process_group("gloo")
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    checkpoints = memory.Checkpointer()
    done = checkpoints.load(state)
    step = 0 if done is None else done
    fault = FLAGS / f"raise-{os.environ['RANK']}"
    while True:
        step += 1
        checkpoints.save(state, step)
        call.ping(step=step)
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a fault of the test")
        time.sleep(0.05)  # The pace of the steps; nothing waits for it.


train()
