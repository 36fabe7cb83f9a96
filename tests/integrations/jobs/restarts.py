"""A framework's job whose ranks fail in turn, one an iteration; every so many restarts each process says what it holds.

TEST_OUT=FOLDER TEST_FRAMEWORK=fsdp2 TEST_RESTARTS=1000 TEST_EVERY=50 unbroken run --pods 2 restarts.py
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.sidecar.restarts_workload import FLIGHT_RECORDER, Injected, sample, settle
from tests.integrations.jobs.training import GLOBAL_BATCH, OUT, make_model, make_samples, share
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from unbroken import inprocess, memory

RESTARTS, EVERY = int(os.environ["TEST_RESTARTS"]), int(os.environ["TEST_EVERY"])
STEPS = 2


def fsdp2(call: inprocess.CallWrapper) -> None:
    """Two steps, with a loader that has a process, and a checkpoint after each."""
    dist.init_process_group("gloo")
    samples, model = make_samples(), make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpoints = memory.Checkpointer()
    done = checkpoints.load(state) or 0
    loader: Any = DataLoader(samples, GLOBAL_BATCH, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]  # a list is a data set
    for step, batch in zip(range(done + 1, done + STEPS + 1), loader, strict=False):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        model.seen.clear()
        model.drawn.clear()
        checkpoints.save(state, step)
        call.ping(step=step)
        if step == done + STEPS:
            after_steps(call)


def hf(call: inprocess.CallWrapper) -> None:
    """Two steps of the Trainer; the integration takes the checkpoints."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from unbroken.integrations import huggingface

    begun: list[int] = []

    class AfterSteps(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)
            if state.global_step == begun[0] + STEPS:
                after_steps(call)

    args = TrainingArguments(
        output_dir=str(OUT / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS * (RESTARTS + 2),
        lr_scheduler_type="constant",
        per_device_train_batch_size=share(call),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = make_model()
    trainer = Trainer(model, args, train_dataset=make_samples(), callbacks=[AfterSteps()])
    huggingface.train(trainer, call)


class Done(Exception):
    """All restarts were made."""


def after_steps(call: inprocess.CallWrapper) -> None:
    """Say what this process holds, if it is time, then fail on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if call.iteration == 0:
        for _ in range(FLIGHT_RECORDER):
            dist.all_reduce(torch.ones(1))
    if call.iteration % EVERY == 0:
        settle()
        row = {"rank": rank, "pid": os.getpid(), "iteration": call.iteration, **sample()}
        with (OUT / "samples").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        dist.barrier()
    if call.iteration >= RESTARTS:
        raise Done
    if rank == call.iteration % size:
        raise Injected(f"in iteration {call.iteration}")
    dist.barrier()


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train until all restarts were made."""
    jobs: dict[str, Callable[[inprocess.CallWrapper], None]] = {"fsdp2": fsdp2, "hf": hf}
    try:
        jobs[os.environ["TEST_FRAMEWORK"]](call)
    except Done:
        return


if __name__ == "__main__":
    train()
