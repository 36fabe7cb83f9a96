"""Workers with a GPU each, and NCCL."""

import os
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.gpu.one_device import first_device

from unbroken import inprocess

from .script import is_first, my_rank, note, wait_for_file

GIB = 1 << 30
SPIN_CYCLES = 1 << 36
"""Of a kernel that spins: half a minute at 2 GHz, longer than the health check waits."""


def _device() -> torch.device:
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return first_device()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def nccl_blocked() -> None:
    """Rank 0 waits on its GPU, in a collective of TEST_GROUPS groups of NCCL, for rank 1, which raises."""

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck())
    def train(call: inprocess.CallWrapper) -> float:
        device = _device()
        note("memory", iteration=call.iteration, bytes=torch.cuda.memory_allocated())
        dist.init_process_group("nccl", device_id=device)
        groups = [dist.new_group() for _ in range(int(os.environ["TEST_GROUPS"]))]
        big = torch.ones(GIB // 4, device=device)
        dist.all_reduce(big)
        for group in groups:
            # The first collective of a group makes its communicator, and waits for the others in doing so.
            dist.all_reduce(torch.ones(1, device=device), group=group)
        torch.cuda.synchronize()
        note("started", iteration=call.iteration, pid=os.getpid())
        if is_first(call):
            if my_rank() == 1:
                wait_for_file("TEST_GO")
                raise ValueError("injected")
            for group in groups:
                dist.all_reduce(big, group=group, async_op=True)
            dist.all_reduce(big)
            note("blocks")
            began_s = time.monotonic()
            try:
                torch.cuda.synchronize()
            finally:
                note("freed", seconds=time.monotonic() - began_s)
            note("went_on", value=float(big[0].item()))
        return float(big[0].item())

    note("returned", value=train())


def nccl_queued() -> None:
    """Rank 0 saves while a collective that is queued on its GPU waits for rank 1, which raises.

    TEST_SECTION: "atomic", or "error" for a save in the handler of an error.
    """
    is_atomic = os.environ["TEST_SECTION"] == "atomic"

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck())
    def train(call: inprocess.CallWrapper) -> float:
        device = _device()
        dist.init_process_group("nccl")
        tensor = torch.ones(1 << 20, device=device)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        note("started", iteration=call.iteration, pid=os.getpid())
        if is_first(call):
            if my_rank() == 1:
                wait_for_file("TEST_GO")
                raise ValueError("injected")
            dist.all_reduce(tensor)
            if is_atomic:
                note("blocks")
                with call.atomic():
                    note("saved", value=float(tensor.cpu()[0].item()))
            else:
                try:
                    raise OSError("the script's own")
                except OSError:
                    note("blocks")
                    note("saved", value=float(tensor.cpu()[0].item()))
        return float(tensor[0].item())

    note("returned", value=train())


def gpu_memory() -> None:
    """Raises while its frame holds a GiB of GPU memory, and notes what is left of it when it starts again."""
    held: list[weakref.ref[torch.Tensor]] = []

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck())
    def train(call: inprocess.CallWrapper) -> int:
        device = _device()
        note("memory", iteration=call.iteration, bytes=torch.cuda.memory_allocated(), alive=_num_alive(held))
        dist.init_process_group("nccl", device_id=device)
        tensor = torch.ones(GIB // 4, device=device, requires_grad=True)
        held.append(weakref.ref(tensor))
        dist.all_reduce(tensor.detach())
        if is_first(call):
            raise ValueError("injected", (tensor * 2).sum())
        return 1

    note("returned", value=train())


def _num_alive(held: list["weakref.ref[torch.Tensor]"]) -> int:
    return sum(reference() is not None for reference in held)


def sick_gpu() -> None:
    """Rank 1 leaves its GPU as TEST_SICKNESS says and raises; the health check is to make it leave."""

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=2)))
    def train(call: inprocess.CallWrapper) -> int:
        device = _device()
        torch.ones(1, device=device)
        dist.init_process_group("gloo")
        if is_first(call) and my_rank() == 1:
            if os.environ["TEST_SICKNESS"] == "assert":
                torch.zeros(4, device=device)[torch.tensor([9], device=device)]
            else:
                # The kernel is the fault: nobody waits for it.
                torch.cuda._sleep(SPIN_CYCLES)
            raise ValueError("injected")
        dist.barrier()
        return int(os.environ["WORLD_SIZE"])

    note("returned", value=train())
