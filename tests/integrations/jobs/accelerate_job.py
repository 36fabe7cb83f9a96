"""The recipe of docs/integrations/accelerate.md: a loop of one's own, with Accelerate, a schedule and clipping."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import send_to_device
from tests.integrations.jobs.training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    OUT,
    break_after,
    finish,
    make_model,
    make_samples,
    note_step,
    started,
)
from torch.utils.data import DataLoader

from unbroken import inprocess, memory
from unbroken.integrations import random_numbers
from unbroken.integrations.samples import GlobalBatches


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    rank, world_size = accelerator.process_index, accelerator.num_processes
    # A state of the iteration before would say so.
    assert (rank, world_size) == (call.state.active_rank, call.state.active_world_size)
    assert world_size == 1 or (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    samples, bare = make_samples(), make_model()
    rule = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(rule, 0.95)
    model, optimizer = accelerator.prepare(bare, rule)
    batches = GlobalBatches(len(samples), GLOBAL_BATCH, steps=NUM_STEPS)
    loader = DataLoader(samples, batch_sampler=batches, num_workers=1)  # type: ignore[arg-type, var-annotated]  # a list is a data set
    checkpoints, at_move = memory.Checkpointer(disk=OUT / "disk"), memory.Checkpointer(every=1)

    def state() -> dict[str, Any]:
        random = random_numbers.capture(rank, world_size)
        return {"model": bare, "optimizer": rule, "schedule": schedule, "random": random}

    def save_at_move(step: int) -> None:
        at_move.save(state(), step)

    call.on_move(save_at_move)
    restored = state()
    done = checkpoints.load(restored) or 0
    batches.start_at(done)
    batch_of_step = iter(loader)
    if done:
        random_numbers.restore(restored["random"], rank, world_size, seed=done)
    for step in range(done + 1, NUM_STEPS + 1):
        batch = send_to_device(next(batch_of_step), accelerator.device)
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with call.atomic():
            checkpoints.save(state(), step)
            note_step(step, call, bare)
        break_after(step, call)
        call.ping(step=step)
    finish(bare, NUM_STEPS, call)


if __name__ == "__main__":
    started()
    train()
