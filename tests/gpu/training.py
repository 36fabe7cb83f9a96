"""A training on the first device, whose dropout draws its numbers there; without a GPU the same on the processor.

TEST_OUT=FOLDER unbroken run --pods 1 --ranks-per-pod 1 --memory 64Mi training.py fsdp2|compiled|huggingface|lightning

TEST_FAULTS breaks it, as that of the jobs of all frameworks.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.one_device import first_device
from tests.integrations.jobs.training import NUM_STEPS, OUT, Model, after_step, finish, make_samples, started
from torch import nn

from unbroken import inprocess

BATCH = 12
HAS_GPU = torch.cuda.is_available()


class Dropping(Model):
    """The classifier of all jobs, wider, with dropout; it notes each loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and scores."""
        scores = self.layers(x)
        loss = nn.functional.cross_entropy(scores.float(), labels)
        if self.training:
            self.seen += ids.tolist()
            self.drawn += [torch.rand(1, device=x.device).item(), loss.item()]
        return {"loss": loss, "logits": scores}


def make_model() -> Dropping:
    """Return the same model in each iteration."""
    torch.manual_seed(1)
    return Dropping()


@inprocess.Wrapper()
def loop(is_compiled: bool, call: inprocess.CallWrapper) -> None:
    """Train in a loop of one's own: FSDP2, or DDP's place taken by a compiled model, in float16 with a scaler."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from unbroken import memory
    from unbroken.integrations import random_numbers

    device = first_device()
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples, model = make_samples(), make_model().to(device)
    if is_compiled:
        model.layers = torch.compile(model.layers, mode="reduce-overhead" if HAS_GPU else "default")  # type: ignore[assignment]  # a function for a module
    else:
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, growth_interval=5)

    def captured() -> dict[str, Any]:
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": scaler,
            "random": random_numbers.capture(rank, world_size),
        }

    state = captured()
    checkpoints = memory.Checkpointer(every=1)
    done = checkpoints.load(state) or 0
    if done:
        random_numbers.restore(state["random"], rank, world_size, seed=done)
    for step in range(done + 1, NUM_STEPS + 1):
        chosen = [samples[(step * BATCH + index) % len(samples)] for index in range(BATCH)]
        batch = {name: torch.stack([one[name] for one in chosen]).to(device) for name in chosen[0]}
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16 if HAS_GPU else torch.bfloat16):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with call.atomic():
            saved = checkpoints.save(captured(), step)
        if not isinstance(saved, memory.Saved):
            raise TypeError(f"step {step}: {saved}")
        after_step(step, call, model)
        call.ping(step=step)
    finish(model, NUM_STEPS, call)


@inprocess.Wrapper()
def huggingface(call: inprocess.CallWrapper) -> None:
    """Train with its Trainer, in float16."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from unbroken.integrations import huggingface

    class AfterStep(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            after_step(state.global_step, call, model)

    first_device()
    args = TrainingArguments(
        output_dir=str(OUT / "trainer"),
        use_cpu=not HAS_GPU,
        fp16=HAS_GPU,
        ddp_backend="nccl" if HAS_GPU else "gloo",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        warmup_steps=5,
        **dict.fromkeys(("eval_strategy", "logging_strategy"), "steps"),
        **{"eval_steps": 3, "logging_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
    )
    samples, model = make_samples(), make_model()
    trainer = Trainer(model, args, train_dataset=samples, eval_dataset=samples[:24], callbacks=[AfterStep()])
    result = huggingface.train(trainer, call)
    finish(model, result.global_step, call)


@inprocess.Wrapper()
def lightning(call: inprocess.CallWrapper) -> None:
    """Train with its Trainer, in float16."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from unbroken.integrations import lightning
    from unbroken.integrations.samples import GlobalBatches

    class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class AfterStep(Callback):  # type: ignore[misc]  # the package brings no types here
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            after_step(trainer.global_step, call, pl_module.model)

    first_device()
    samples, module = make_samples(), Module()
    batches = GlobalBatches(len(samples), BATCH)
    trainer = Trainer(
        **lightning.place(call),
        accelerator="gpu" if HAS_GPU else "cpu",
        precision="16-mixed" if HAS_GPU else "32-true",
        max_epochs=3,
        callbacks=[lightning.Resume(call, batches=batches), AfterStep()],
        default_root_dir=OUT,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False),
    )
    loader: Any = DataLoader(samples, batch_sampler=batches)  # type: ignore[arg-type]  # a list is a data set
    trainer.fit(module, loader)
    finish(module.model, trainer.global_step, call)


def main(kind: str) -> None:
    """Train in this way."""
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if kind in ("fsdp2", "compiled"):
        started()
        loop(kind == "compiled")
        return
    __import__({"huggingface": "transformers"}.get(kind, kind))
    started()
    {"huggingface": huggingface, "lightning": lightning}[kind]()


if __name__ == "__main__":
    main(sys.argv[1])
