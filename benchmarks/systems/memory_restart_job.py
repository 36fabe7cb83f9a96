"""The job of benchmarks/memory_restart.py: one rank a pod, large states, and a fault in each iteration.

The fault comes while both ranks' newest checkpoints are on their way to the other pod, or once both are there and all
is quiet, in turn.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from unbroken import inprocess, memory
from unbroken.keeper.digests import read_slot_head
from unbroken.memory import arena
from unbroken_core.pod.memory_slots import SlotState

NUM_FAULTS, NUM_BYTES = int(os.environ["BENCH_FAULTS"]), int(os.environ["BENCH_BYTES"])
MARKS = Path(os.environ["BENCH_MARKS"])
NUM_TENSORS = 100
SETTLE_S = 0.3
"""Quiet time before each fault without copies."""
LIMIT_S = 120.0
COPYING, QUIET = "copying", "quiet"


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Join, restore, save one step, and have the fault of this iteration."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    joined_ns = time.monotonic_ns()
    state = _state()
    made_ns = time.monotonic_ns()
    checkpoints = memory.Checkpointer()
    done = checkpoints.load(state)
    restored_ns = time.monotonic_ns()
    step = call.iteration
    mode = COPYING if step % 2 else QUIET
    is_copying = step > 0 and _is_copied(step - 1, SlotState.WRITING)
    _mark("end", step, joined_ns=joined_ns, made_ns=made_ns, restored_ns=restored_ns, is_copying=is_copying)
    if done != (step - 1 if step else None):
        raise SystemExit(f"want step {step - 1}, got {done}")
    if step == NUM_FAULTS:
        return
    with call.disable_hang_protection():
        if step:
            _until(lambda: _is_copied(step - 1, SlotState.SEALED))
        _until(lambda: isinstance(checkpoints.save(state, step), memory.Saved))
        _until(lambda: _is_copied(step, SlotState.WRITING if mode == COPYING else SlotState.SEALED))
        if mode == QUIET:
            time.sleep(SETTLE_S)
        dist.barrier()
        is_copying = _is_copied(step, SlotState.WRITING)
        _mark("fault", step, mode=mode, is_copying=is_copying, at_ns=time.monotonic_ns())
        if dist.get_rank() == step // 2 % 2:
            raise RuntimeError("injected by the benchmark")
        dist.barrier()


_made: dict[str, torch.Tensor] = {}


def _state() -> dict[str, torch.Tensor]:
    """Return this rank's state, of the same tensors in each iteration: a real job would keep its model as well."""
    if not _made:
        part = NUM_BYTES // NUM_TENSORS // 4
        _made.update({f"layer.{i}.weight": torch.full((part,), float(i + dist.get_rank())) for i in range(NUM_TENSORS)})
    return _made


def _is_copied(step: int, state: SlotState) -> bool:
    """Return whether this rank's checkpoint of a step is in this state with the other pod."""
    own = arena._arena
    if own is None or not own._slots:
        return False
    folder = Path(own._slots[0].path).parent
    for path in folder.parents[1].glob("*/*/copies/*.slot"):
        head = read_slot_head(path)
        if head is not None and (head.rank, head.moment.step, head.state) == (dist.get_rank(), step, state):
            return True
    return False


def _until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > end_s:
            raise SystemExit(f"want it within {LIMIT_S:g} s")
        time.sleep(0.002)


def _mark(name: str, iteration: int, **more: object) -> None:
    line = json.dumps({"name": name, "iteration": iteration, "rank": dist.get_rank(), **more}) + "\n"
    descriptor = os.open(MARKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
