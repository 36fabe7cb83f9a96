"""Trains nothing, at its own pace, from checkpoints; files in FLAGS make its ranks fail in several ways."""

import ctypes
import os
import signal
import time
from pathlib import Path

from unbroken import inprocess
from unbroken.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from unbroken.inprocess.state import FrozenState

FLAGS = Path(os.environ["FLAGS"])
CHECKPOINT = FLAGS / "checkpoint"
STEP_S = 0.1
STEPS_A_CHECKPOINT = 40


def is_told(fault: str) -> bool:
    """Return whether this rank shall fail in this way now, once."""
    try:
        (FLAGS / f"{fault}-{os.environ['RANK']}").unlink()
    except FileNotFoundError:
        return False
    return True


class LinkCheck(HealthCheck):
    """Fails when it is told to."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise OSError then."""
        if state.iteration > 0 and is_told("link"):
            raise OSError("NIC mlx5_0: link is down")
        return state


def break_down() -> None:
    """Do what a file tells."""
    if is_told("raise"):
        raise RuntimeError("loss is NaN")
    if is_told("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_told("exit"):
        os._exit(7)
    if is_told("hang"):
        # It keeps the GIL, as a stuck driver call may; a sleep would end at the signal that asks for the stack.
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):
            library.pthread_mutex_lock(mutex)


@inprocess.Wrapper(health_check=inprocess.Compose(CudaHealthCheck(), LinkCheck(), FaultCounter()))
def train(call: inprocess.CallWrapper) -> None:
    """Count steps from the last checkpoint on."""
    step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    while True:
        step += 1
        call.ping(step=step)
        if os.environ["RANK"] == "0" and step % STEPS_A_CHECKPOINT == 0:
            CHECKPOINT.with_suffix(".new").write_text(str(step))
            CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)
        break_down()
        time.sleep(STEP_S)  # The pace of the steps; nothing waits for it.


train()
