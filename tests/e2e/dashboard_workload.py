"""Trains nothing, with steps, until it is ended; the rank that a file in FLAGS names raises."""

import os
import time
from pathlib import Path

from unbroken import inprocess

FLAGS = Path(os.environ["FLAGS"])


@inprocess.Wrapper(health_check=inprocess.health_check.FaultCounter())
def train(call: inprocess.CallWrapper) -> None:
    """Count steps, again from the first after each fault, as after a restart from a checkpoint."""
    step = 0
    fault = FLAGS / f"raise-{os.environ['RANK']}"
    while True:
        step += 1
        call.ping(step=step)
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a fault of the test")
        time.sleep(0.05)  # The pace of the steps; nothing waits for it.


train()
