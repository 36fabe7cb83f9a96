"""FSDP2 with shards of one size; saves, reads the file back, raises once; the ranks are reversed in each iteration.

Prints a line for each rank and iteration: "saved RANK ITERATION PID RIGHT", RIGHT being 1 where the file holds what
was trained.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unbroken import inprocess
from unbroken.inprocess import rank_assignment as ra

FOLDER = Path(sys.argv[1])
NUM_ITERATIONS = 3


class Backwards(ra.RankAssignment):
    """The last is the first."""

    def __call__(self, ctx: ra.RankAssignmentCtx) -> ra.RankAssignmentCtx:
        """Renumber."""
        ctx = ra.ShiftRanks()(ctx)
        ctx.state.rank = ctx.state.world_size - 1 - (ctx.state.rank or 0)
        return ctx


@inprocess.Wrapper(rank_assignment=Backwards())
def train(call: inprocess.CallWrapper) -> None:
    """Train a step, save, and look at what was saved."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.rand(4, 16)).sum().backward()
    optimizer.step()
    checkpoint = FOLDER / str(call.iteration)
    save({"model": model.state_dict()}, checkpoint_id=checkpoint)
    dist.barrier()
    is_right = True
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = parameter.full_tensor()
        read = {name: torch.zeros_like(whole)}
        load({"model": read}, checkpoint_id=checkpoint, no_dist=True)
        is_right = is_right and torch.equal(read[name], whole)
    print("saved", dist.get_rank(), call.iteration, os.getpid(), int(is_right), flush=True)
    dist.barrier()
    if call.iteration + 1 < NUM_ITERATIONS and dist.get_rank() == 0:
        raise ValueError("injected")
    dist.barrier()


train()
