"""The recipe of docs/integrations/fsdp2.md: a loop of one's own, FSDP2, checkpoints in memory and on the disk."""

from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from unbroken import inprocess, memory
from unbroken.integrations import random_numbers
from unbroken.integrations.samples import GlobalBatches

SAVE_EVERY = 8


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples, model = make_samples(), make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = GlobalBatches(len(samples), GLOBAL_BATCH, steps=NUM_STEPS)
    loader = DataLoader(samples, batch_sampler=batches, num_workers=1, persistent_workers=True)  # type: ignore[arg-type, var-annotated]  # a list is a data set
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "random": random_numbers.capture(rank, world_size)}
    checkpoints, at_move = memory.Checkpointer(disk=OUT / "disk"), memory.Checkpointer(every=1)

    def captured() -> dict[str, Any]:
        return state | {"random": random_numbers.capture(rank, world_size)}

    def save_at_move(step: int) -> None:
        at_move.save(captured(), step)

    call.on_move(save_at_move)
    done = checkpoints.load(state) or 0
    batches.start_at(done)
    batch_of_step = iter(loader)
    if done:
        random_numbers.restore(state["random"], rank, world_size, seed=done)
    for step in range(done + 1, NUM_STEPS + 1):
        batch = next(batch_of_step)
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        with call.atomic():
            checkpoints.save(captured(), step)
            note_step(step, call, model)
        if step % SAVE_EVERY == 0:
            with call.checkpoint():
                save(captured(), checkpoint_id=OUT / "disk" / f"step-{step}")
        break_after(step, call)
        call.ping(step=step)
    finish(model, NUM_STEPS, call)


if __name__ == "__main__":
    started()
    train()
