"""Train with Accelerate and a loop of your own, and lose no step to a fault.

    pip install 'unbroken[sidecar,huggingface]'
    unbroken run --pods 2 --ranks-per-pod 1 --memory 64Mi examples/accelerate_loop.py

Rank 1 fails once, at step 7. The second run of the function goes on from there, with the same losses.
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unbroken import inprocess, memory
from unbroken.integrations import random_numbers
from unbroken.integrations.samples import GlobalBatches

NUM_STEPS = 30


def make_model() -> nn.Module:
    """A small classifier with dropout: its losses depend on the random numbers, too."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))


@inprocess.Wrapper()
def train(folder: str, call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    torch.manual_seed(0)
    # The same sums in the first step after a restart.
    same_sums = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[same_sums])  # makes the process group
    rank, world_size = accelerator.process_index, accelerator.num_processes
    data = TensorDataset(torch.randn(120, 16), torch.arange(120) % 4)
    bare = make_model()
    adamw = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.95)
    model, optimizer = accelerator.prepare(bare, adamw)
    batches = GlobalBatches(len(data), 12, steps=NUM_STEPS, seed=1)
    checkpoints, at_move = memory.Checkpointer(disk=folder), memory.Checkpointer(every=1)

    def state() -> dict[str, Any]:
        random = random_numbers.capture(rank, world_size)
        return {"model": bare, "optimizer": adamw, "schedule": schedule, "random": random}

    call.on_move(lambda step: at_move.save(state(), step))
    restored = state()
    done = checkpoints.load(restored) or 0
    if rank == 0:
        print(f"accelerate: iteration={call.iteration} restored step={done}", flush=True)
    if done == NUM_STEPS:
        return
    batches.start_at(done)
    loader = iter(DataLoader(data, batch_sampler=batches))  # before the restore: it draws a random number
    if done:
        random_numbers.restore(restored["random"], rank, world_size, seed=done)
    for step, batch in enumerate(loader, start=done + 1):
        if (call.iteration, rank, step) == (0, 1, 7):
            raise RuntimeError("rank 1 fails once")
        x, labels = send_to_device(batch, accelerator.device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        with call.atomic():  # a fault elsewhere waits until this rank has saved
            checkpoints.save(state(), step)
        call.ping(step=step)
    if rank == 0:
        print(f"accelerate: {NUM_STEPS} steps, loss={loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="accelerate-checkpoints")
    train(parser.parse_args().folder)
