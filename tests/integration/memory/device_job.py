"""Two ranks that train on one device, and save each step in memory; rank 1 fails twice, if TEST_FAULTS says so.

Each rank writes what it has at the end to TEST_OUT/state-RANK. Without a GPU the same on the processor.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from unbroken import inprocess, memory

OUT = Path(os.environ["TEST_OUT"])
FAULTS = {(0, 7), (1, 13)} if os.environ["TEST_FAULTS"] == "1" else set()
NUM_STEPS = 20
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train from the newest step that both ranks have."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    checkpoints = memory.Checkpointer(every=1)
    problem = checkpoints.reserve(state)
    if problem:
        raise RuntimeError(problem)
    done = checkpoints.load(state)
    print(f"iteration {call.iteration} rank {rank}: restored {done}", flush=True)
    for step in range(0 if done is None else done + 1, NUM_STEPS):
        if rank == 1 and (call.iteration, step) in FAULTS:
            raise RuntimeError("rank 1 fails")
        data = torch.rand(64, 256, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
        with call.atomic():
            saved = checkpoints.save(state, step)
        if not isinstance(saved, memory.Saved):
            raise TypeError(f"step {step}: {saved}")
        call.ping(step=step)
        dist.barrier()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    torch.save(tree_map(lambda one: one.cpu(), whole), OUT / f"state-{rank}")


if __name__ == "__main__":
    train()
