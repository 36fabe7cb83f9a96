"""A script whose workers step on, and break when a file in the folder BREAKS asks for it: for the page's picture."""

import os
import time
from pathlib import Path

from unbroken import inprocess

STEP_S = 0.05
BREAKS = Path(os.environ["BREAKS"])


def check_loss(step: int) -> None:
    """Raise where the file for this rank is there."""
    wish = BREAKS / f"raise-{os.environ['RANK']}"
    if wish.exists():
        wish.unlink()
        raise FloatingPointError(f"loss is nan at step {step} (learning rate 0.3, gradient norm 1.7e+05)")


def training_step(step: int) -> None:
    """Do what a step does."""
    time.sleep(STEP_S)
    check_loss(step)


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Step until the job is ended, from the last checkpoint on."""
    checkpoint = BREAKS / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while True:
        training_step(step)
        call.ping(step=step)
        step += 1
        if os.environ["RANK"] == "0":
            with call.atomic():
                fresh = checkpoint.with_suffix(".fresh")
                fresh.write_text(str(step))
                fresh.replace(checkpoint)


if __name__ == "__main__":
    train()
