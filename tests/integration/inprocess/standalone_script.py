"""What the workers of test_standalone run, started by torchrun or with the variables alone; argv[1] is a mode.

Each line of the file TEST_EVENTS is one event: name, rank of the environment at the start, iteration, pid, value.
"""

import datetime
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unbroken import inprocess
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.standalone import hosting
from unbroken.inprocess.standalone.joining import JoinRequest

FIRST_RANK = os.environ.get("RANK", "-1")
MODE = sys.argv[1] if len(sys.argv) > 1 else "exception"
SHORT = {
    "soft_timeout": datetime.timedelta(seconds=4),
    "hard_timeout": datetime.timedelta(seconds=8),
    "barrier_timeout": datetime.timedelta(seconds=60),
    # No test waits for it: who is told to end does.
    "termination_grace_time": datetime.timedelta(seconds=30),
}
MEET_S = 120.0


def alone(barrier_s: float) -> dict[str, datetime.timedelta]:
    """Return options for a job whose workers wait for somebody who does not come. Nothing in it hangs."""
    return {
        "soft_timeout": datetime.timedelta(seconds=barrier_s - 2),
        "hard_timeout": datetime.timedelta(seconds=barrier_s - 1),
        "heartbeat_timeout": datetime.timedelta(seconds=8),
        "barrier_timeout": datetime.timedelta(seconds=barrier_s),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "hang": SHORT,
    # Within this time the host process and the root must be up, to know who is missing.
    "missing": alone(24),
    "adrift": alone(12),
    "abort": {"initialize": inprocess.initialize.RetryController(max_iterations=3)},
    "unhealthy": {"health_check": inprocess.Compose(inprocess.health_check.FaultCounter(max_rank_faults=0))},
    "spare": {"rank_assignment": inprocess.Compose(inprocess.rank_assignment.MaxActiveWorldSize(2))},
}


def note(name: str, iteration: int, value: object = "") -> None:
    """Write one event."""
    line = f"{name} {FIRST_RANK} {iteration} {os.getpid()} {value}\n"
    descriptor = os.open(os.environ["TEST_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def meet(name: str, count: int) -> None:
    """Wait until so many workers have written such an event."""
    until_s = time.monotonic() + MEET_S
    while Path(os.environ["TEST_EVENTS"]).read_text().count(f"{name} ") < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{name}: want it of {count} workers within {MEET_S:g} s")
        time.sleep(0.01)


def form_in_time() -> None:
    """Let the job form for as long as a busy machine takes: barrier_timeout, short here, is the limit for that, too."""
    invite = hosting._request

    def invite_for_long(options: WrapperOptions, environment: Mapping[str, str]) -> JoinRequest:
        found = invite(options, environment)
        return replace(found, limit_s=MEET_S, timeouts=replace(found.timeouts, startup_s=MEET_S))

    hosting._request = invite_for_long


def total() -> int:
    """All-reduce a one."""
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return int(tensor.item())


def train(call: inprocess.CallWrapper) -> str:
    """Train, with the mode's fault in the first iteration, until the file TEST_DONE is there."""
    dist.init_process_group("gloo")
    iteration = call.iteration
    note("started", iteration, f"{os.environ['RANK']}/{total()}@{os.environ['MASTER_ADDR']}")
    if MODE in ("exception", "abort", "unhealthy", "twice") and (iteration == 0 or MODE == "abort"):
        total()
        if FIRST_RANK == "1":
            raise ValueError("injected")
    while MODE in ("steps", "hang", "adrift") and total():
        done = torch.tensor([float(Path(os.environ["TEST_DONE"]).exists())])
        dist.all_reduce(done)
        if done.item():
            break
        time.sleep(0.01)  # The pace of the steps; nothing waits for it.
    dist.barrier()
    dist.destroy_process_group()
    return f"{os.environ['RANK']} in {iteration}"


def main() -> None:
    """Call the wrapped function and note how it ended."""
    wrapped = inprocess.Wrapper(**OPTIONS.get(MODE, {}))(train)
    if MODE == "adrift":
        form_in_time()
    if MODE == "missing":
        if FIRST_RANK == "1":
            return
        # The time runs from the first call: all that call are to be there by then, however slow their start was.
        note("ready", -1)
        meet("ready", 2)
    for _ in range(2 if MODE == "twice" else 1):
        try:
            value = wrapped()
        except BaseException as error:
            note("raised", -1, f"{type(error).__name__}: {error}".replace("\n", " "))
            raise
        note("returned", -1, value)


if __name__ == "__main__":
    main()
