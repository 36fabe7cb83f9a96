"""Train a sharded model with checkpoints in memory and on the disk, and leave no sample out in any world.

    unbroken run --pods 2 --ranks-per-pod 1 --memory 64Mi examples/fsdp2.py

Rank 1 fails once, at step 27. The second run of the function goes on from step 26.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unbroken import inprocess, memory
from unbroken.integrations.samples import GlobalBatches

NUM_STEPS = 40


@inprocess.Wrapper()
def train(folder: str, call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(400, 64))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    batches = GlobalBatches(len(data), 32, steps=NUM_STEPS, seed=1)
    checkpoints, at_move = memory.Checkpointer(disk=folder), memory.Checkpointer(every=1)
    call.on_move(lambda step: at_move.save(state, step))
    done = checkpoints.load(state) or 0
    if rank == 0:
        print(f"fsdp2: iteration={call.iteration} restored step={done}", flush=True)
    if done == NUM_STEPS:
        return
    batches.start_at(done)
    for step, (sample,) in enumerate(DataLoader(data, batch_sampler=batches), start=done + 1):
        if (call.iteration, rank, step) == (0, 1, 27):
            raise RuntimeError("rank 1 fails once")
        optimizer.zero_grad()
        loss = (model(sample) - sample).square().mean()
        loss.backward()
        optimizer.step()
        with call.atomic():  # a fault elsewhere waits until this rank has saved
            checkpoints.save(state, step)
        if step % 10 == 0:
            with call.checkpoint():  # not in atomic(): it waits for the other ranks, one of which may have failed
                save(state, checkpoint_id=f"{folder}/step-{step}")
        call.ping(step=step)
    if rank == 0:
        print(f"fsdp2: {NUM_STEPS} steps, loss={loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="fsdp2-checkpoints")
    train(parser.parse_args().folder)
