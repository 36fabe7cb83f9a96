"""A rank that stands still for checkpoints, and others that do not: stall_workload.py FOLDER

Rank 0 writes to FOLDER/stalled how long its checkpoint took, at least and at most, and steps on until TEST_DONE.
"""

import os
import sys
import time
from pathlib import Path

from unbroken import inprocess

STEP_S, STALL_S = 0.01, 1.5
"""The paces of steps and of the checkpoint; no test waits for them."""
FOLDER = Path(sys.argv[1])


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Step; one step has a checkpoint."""
    rank, step = int(os.environ["RANK"]), 0
    while not Path(os.environ["TEST_DONE"]).exists():
        step += 1
        call.ping(step=step)
        if (rank, step) == (0, 5):
            save(call)
        time.sleep(STEP_S)


def save(call: inprocess.CallWrapper) -> None:
    """Stand still as a save on a disk does."""
    began_s = time.monotonic()
    with call.checkpoint():
        time.sleep(STALL_S)
    part = FOLDER / "stalled.part"
    part.write_text(f"{STALL_S} {time.monotonic() - began_s}\n")
    part.rename(FOLDER / "stalled")


train()
