"""Train with Hugging Face's Trainer, and lose no step to a fault.

    pip install 'unbroken[sidecar,huggingface]'
    unbroken run --pods 2 --ranks-per-pod 1 --memory 64Mi examples/hf_trainer.py

Rank 1 fails once, at step 7. The second run of the function goes on from there, with the same losses.
"""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from unbroken import inprocess
from unbroken.integrations import huggingface

GLOBAL_BATCH = 12


class Model(nn.Module):
    """A small classifier with dropout: its losses depend on the random numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, as the Trainer wants it."""
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Failing(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Fails once."""

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]  # as transformers names them
        """Raise on rank 1 after step 7."""
        if (args.process_index, state.global_step) == (1, 7):
            raise RuntimeError("rank 1 fails once")


@inprocess.Wrapper()
def train(output: str, call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(16), "labels": torch.tensor(i % 4)} for i in range(120)]
    args = TrainingArguments(  # makes the process group
        output_dir=output,
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=3,
        # The same samples in each step, whatever the size of the world.
        per_device_train_batch_size=GLOBAL_BATCH // (call.state.active_world_size or 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=True,  # the same sums in the first step after a restart
    )
    trainer = Trainer(Model(), args, train_dataset=samples, callbacks=[Failing()] if call.iteration == 0 else [])
    result = huggingface.train(trainer, call)
    if args.process_index == 0:
        print(f"trained: iteration={call.iteration} step={result.global_step}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="hf-trainer-output")
    train(parser.parse_args().output)
