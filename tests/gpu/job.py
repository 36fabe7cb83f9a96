"""Two ranks on one device: a collective that blocks, then restarts. Without a GPU the same over gloo.

GPU_CHECK_OUT=FOLDER GPU_CHECK_RESTARTS=100 GPU_CHECK_WARM_UP=20 unbroken run --pods 1 --ranks-per-pod 2 job.py

Each rank appends what it has seen to FOLDER/notes-RANK, a JSON object a line; times are of CLOCK_MONOTONIC.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.one_device import first_device, is_refusal
from tests.integration.sidecar.restarts_workload import sample, settle

from unbroken import inprocess

OUT = Path(os.environ["GPU_CHECK_OUT"])
RESTARTS, WARM_UP = int(os.environ["GPU_CHECK_RESTARTS"]), int(os.environ["GPU_CHECK_WARM_UP"])
HAS_GPU = torch.cuda.is_available()
ELEMENTS = 1 << 20
WAIT_S = 60.0
BLOCKED_S = 0.5
"""How long rank 0 is in its collective at least when rank 1 raises: nothing tells that a kernel waits. No result hangs
on it: a rank that is free before rank 1 raises fails the check."""
KEPT = ("memory_kib", "threads", "descriptors")


class Injected(Exception):
    """The fault."""


def note(rank: int, event: str, **values: object) -> None:
    """Write down what was seen."""
    with (OUT / f"notes-{rank}").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "at_s": time.monotonic(), "rank": rank, **values}) + "\n")


def finish_work() -> None:
    """Wait for the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


def hold() -> dict[str, Any]:
    """Return what this process holds, of the host and of the device."""
    settle()
    held: dict[str, Any] = {name: value for name, value in sample().items() if name in KEPT}
    held["gpu_allocated"] = torch.cuda.memory_allocated() if HAS_GPU else 0
    free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
    return {**held, "gpu_used": total - free}


def block(rank: int, tensor: torch.Tensor) -> None:
    """Let rank 0 wait on its device for rank 1, which raises."""
    if rank == 1:
        deadline_s = time.monotonic() + WAIT_S
        while not (OUT / "blocks").exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank 0: want it in a collective within {WAIT_S:g} s, it is not")
            time.sleep(0.01)
        time.sleep(BLOCKED_S)
        note(rank, "raised", iteration=0)
        raise Injected("while rank 0 waits")
    work = dist.all_reduce(tensor, async_op=True)
    (OUT / "blocks").touch()
    note(rank, "blocks")
    try:
        work.wait()
        finish_work()
    except BaseException as error:
        note(rank, "freed", by=f"{type(error).__name__}: {error}"[:200])
        raise
    note(rank, "freed", by="")


def first_collective(call: inprocess.CallWrapper, rank: int, size: int) -> torch.Tensor | None:
    """Make the group and use it; return None if NCCL does not let two ranks use one device."""
    where = first_device()
    began_s = time.monotonic()
    try:
        dist.init_process_group("nccl" if HAS_GPU else "gloo")
        tensor = torch.ones(ELEMENTS, device=where)
        dist.all_reduce(tensor)
        finish_work()
    except dist.DistBackendError as error:
        if call.iteration == 0 and is_refusal(error):
            note(rank, "refused", words=str(error)[:300])
            return None
        raise
    seen = float(tensor[-1].item())
    if seen != size:
        raise ValueError(f"all_reduce: want {size}, got {seen}")
    note(rank, "works", iteration=call.iteration, pid=os.getpid(), seconds=time.monotonic() - began_s)
    return tensor


health_check = inprocess.health_check.CudaHealthCheck() if HAS_GPU else None


@inprocess.Wrapper(health_check=health_check)
def train(call: inprocess.CallWrapper) -> None:
    """Go through one fault an iteration."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tensor = first_collective(call, rank, size)
    if tensor is None:
        return
    call.ping(step=call.iteration)
    if call.iteration == 0 and size == 2:
        block(rank, tensor)
    if call.iteration in (WARM_UP, RESTARTS):
        note(rank, "holds", iteration=call.iteration, **hold())
        dist.all_reduce(tensor)
    if call.iteration >= RESTARTS:
        return
    if rank == call.iteration % size:
        note(rank, "raised", iteration=call.iteration)
        raise Injected(f"in iteration {call.iteration}")
    dist.all_reduce(tensor)
    finish_work()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
