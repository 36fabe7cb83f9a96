"""Workers that raise, and what a restart leaves of what was."""

import os
import sys
import threading
import weakref
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from unbroken import inprocess

from .script import bind_no_port_twice, end_without_haste, is_first, my_rank, note, settle, start, total, wait_for_file


def exception_once() -> None:
    """Rank 1 raises while the others are inside all_reduce."""
    bind_no_port_twice()

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper, extra: int) -> str:
        world = start()
        nccl = os.environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS")
        note("started", iteration=call.iteration, world=world, extra=extra, nccl=nccl)
        if is_first(call):
            if my_rank() == 1:
                raise ValueError("injected")
            total()
        return f"value of {my_rank()} in {call.iteration}"

    note("returned", value=train(extra=7))


class ThreeArguments(Exception):
    """Cannot be copied or pickled, and has no text."""

    def __init__(self, one: object, two: object, three: object) -> None:
        super().__init__(one)
        self.numbers = (one, two, three)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def odd_exception() -> None:
    """Rank 1 raises what TEST_RAISE says in the first iteration."""
    what = os.environ["TEST_RAISE"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call) and my_rank() == 1:
            if what == "three arguments":
                raise ThreeArguments(1, 2, 3)
            if what == "huge":
                raise ValueError("x" * 100_000_000)
            if what == "system exit":
                sys.exit(5)
            if what == "keyboard interrupt":
                raise KeyboardInterrupt
            if what == "stop iteration":
                raise StopIteration
        return int(total())

    try:
        note("returned", value=train())
    except BaseException as error:
        note("raised", error=type(error).__name__, text=str(error)[:200])
        raise


def raises_again_and_again() -> None:
    """Two ranks raise at once, then another one raises during the recovery, before it joins the group."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        note("ran", iteration=call.iteration)
        if call.iteration == 1 and my_rank() == 0:
            raise ValueError("before the group")
        start()
        if call.iteration == 0 and my_rank() in (0, 1):
            raise ValueError("both")
        if call.iteration == 2 and my_rank() == 2:
            raise ValueError("third")
        return int(total())

    note("returned", value=train())


def no_collectives() -> None:
    """Never calls init_process_group; rank 1 raises once."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> str:
        note("ran", iteration=call.iteration)
        if is_first(call) and my_rank() == 1:
            raise ValueError("injected")
        return "done"

    note("returned", value=train())


def finishes_at_different_times() -> None:
    """Rank 0 returns at once; rank 1 raises once rank 0 has returned."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> str:
        note("ran", iteration=call.iteration)
        if is_first(call) and my_rank() == 1:
            wait_for_file("TEST_GO")
            raise ValueError("injected")
        return f"{my_rank()} in {call.iteration}"

    note("returned", value=train())


def many_restarts() -> None:
    """TEST_RESTARTS restarts; each notes whether the last one's tensors are gone, some what the process holds."""
    end_without_haste()
    count = int(os.environ["TEST_RESTARTS"])
    old: list[weakref.ref[torch.Tensor]] = []

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.cycle = self

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        alive = sum(reference() is not None for reference in old)
        old.clear()
        if call.iteration and call.iteration % (count // 5) == 0:
            settle()
            note("holds", iteration=call.iteration, alive=alive, **holdings())
        else:
            note("alive", iteration=call.iteration, alive=alive)
        start()
        tensor = torch.ones(1000)
        holder = Holder(torch.ones(1000))
        old.extend((weakref.ref(tensor), weakref.ref(holder.tensor)))
        if call.iteration < count:
            if my_rank() == call.iteration % dist.get_world_size():
                raise ThreeArguments(tensor, holder, 0)
            total()
        return int(total())

    value = train()
    note("returned", value=value, threads=[thread.name for thread in threading.enumerate()])


def holdings() -> dict[str, int]:
    """Return what a leak would raise."""
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "resident_bytes": process.memory_info().rss,
    }


MESHES: list[Any] = []


def keeps_a_mesh() -> None:
    """Makes one mesh in each process, and keeps it; in the first iteration rank 0 raises."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> list[int]:
        start()
        if not MESHES:
            MESHES.append(init_device_mesh("cpu", (2,)))
        total()
        if is_first(call) and my_rank() == 0:
            raise ValueError("injected")
        total()
        return [dist.get_rank(), MESHES[0].get_local_rank()]

    note("returned", value=train())
