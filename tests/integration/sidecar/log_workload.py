"""Workers that print what a test wants: log_workload.py KIND

Each prints "step N" for as long as the test runs, and KIND decides what else. Without torch: the wrapper needs none.
"""

import os
import sys
import time
from pathlib import Path

from unbroken import inprocess

KIND = sys.argv[1]
ASKED = Path(os.environ["TEST_DONE"]).with_name("asked")
STEP_S = 0.02
GARBAGE = bytes(range(256)).replace(b"\n", b"")


def say(text: bytes) -> None:
    """Write to stdout as C code does, past Python's buffers."""
    while text:
        text = text[os.write(1, text) :]


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Print until the test says that it is over."""
    rank, step = int(os.environ["RANK"]), 0
    if KIND == "once" and rank == 1 and call.iteration == 0:
        say(b"fatal: the disk is gone\n")
    if KIND == "raise" and rank == 1:
        say(b"fatal: the disk is gone\n")
        raise ValueError("the disk is gone")
    if KIND == "flood":
        say(b"x" * (10 << 20))
        for _ in range(100):
            say(b"step is what it is not\n" * 1000)
            say(GARBAGE * 4)
        say(b"\nflooded\n")
    while not Path(os.environ["TEST_DONE"]).exists():
        step += 1
        if KIND == "asked" and rank == 1 and ASKED.exists():
            ASKED.unlink()
            say(b"fatal: the disk is gone\n")
        if KIND != "silent" or step == 1:
            say(b"step %d\n" % step)
        time.sleep(STEP_S)


train()
