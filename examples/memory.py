"""Train a sharded model with checkpoints in memory, and lose no more than a few steps to a fault.

    unbroken run --pods 2 --ranks-per-pod 2 --memory 256Mi examples/memory.py

Rank 1 fails once, at step 27. The second run of the function goes on from step 24, which all ranks have in memory.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unbroken import inprocess, memory

NUM_STEPS = 40
EVERY = 4


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    checkpoints = memory.Checkpointer(every=EVERY)
    done = checkpoints.load(state)
    if rank == 0:
        print(f"memory: iteration={call.iteration} restored step={done}", flush=True)
    for step in range(0 if done is None else done + 1, NUM_STEPS):
        if (call.iteration, rank, step) == (0, 1, 27):
            raise RuntimeError("rank 1 fails once")
        data = torch.rand(32, 64, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        with call.atomic():  # a fault elsewhere waits until this rank has saved
            checkpoints.save(state, step)
        call.ping(step=step)
    if rank == 0:
        print(f"memory: {NUM_STEPS} steps, loss={loss.item():.4f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    train()
