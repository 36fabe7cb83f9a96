"""Train with Lightning's Trainer, and lose no step to a fault.

    pip install 'unbroken[sidecar,lightning]'
    unbroken run --pods 2 --ranks-per-pod 1 --memory 64Mi examples/lightning_trainer.py

Rank 1 fails once, at step 7. The second run of the function goes on from there, with the same losses.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unbroken import inprocess
from unbroken.integrations import lightning
from unbroken.integrations.samples import GlobalBatches


class Classifier(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """A small classifier with dropout: its losses depend on the random numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Failing(Callback):  # type: ignore[misc]  # the package brings no types here
    """Fails once."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Raise on rank 1 after step 7."""
        if (trainer.global_rank, trainer.global_step) == (1, 7):
            raise RuntimeError("rank 1 fails once")


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train from the newest checkpoint that all ranks can read."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(120, 16), torch.arange(120) % 4)
    batches = GlobalBatches(len(data), 12, seed=1)
    trainer = Trainer(
        **lightning.place(call),
        accelerator="cpu",
        max_epochs=3,
        callbacks=[lightning.Resume(call, batches=batches), *([Failing()] if call.iteration == 0 else [])],
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False),
    )
    trainer.fit(Classifier(), DataLoader(data, batch_sampler=batches))
    if trainer.global_rank == 0:
        print(f"trained: iteration={call.iteration} step={trainer.global_step}", flush=True)


if __name__ == "__main__":
    train()
