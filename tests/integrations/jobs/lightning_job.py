"""A training of Lightning's Trainer: with validations, a schedule of learning rates, clipping and files of its own."""

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tests.integrations.jobs.training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    OUT,
    after_step,
    finish,
    make_model,
    make_samples,
    started,
)
from torch.utils.data import DataLoader

from unbroken import inprocess
from unbroken.integrations import lightning
from unbroken.integrations.samples import GlobalBatches

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """The model of all jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.num_trained = 0

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss, which depends on what no state_dict has."""
        self.num_trained += 1
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss * (1 + self.num_trained / 100)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add it to a checkpoint."""
        checkpoint["num_trained"] = self.num_trained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it from there."""
        self.num_trained = checkpoint["num_trained"]

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        """Log what EarlyStopping looks at, and draw a random number."""
        self.log("val_loss", self.model(**batch)["loss"] + 1e-6 * torch.rand(1)[0], sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Let the rates fall at each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AfterStep(Callback):  # type: ignore[misc]  # the package brings no types here
    """Calls `after_step`."""

    def __init__(self, call: inprocess.CallWrapper) -> None:
        self.call = call

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As its name says."""
        after_step(trainer.global_step, self.call, pl_module.model)


def check_files(files: Any, trainer: Any) -> None:
    """What Lightning was told of, and says it has, is there, can be read, and is of its step."""
    if trainer.global_rank:
        return
    known = {path: int(step) for path, step in files.best_k_models.items()}
    # Older releases write one after the last step, too.
    assert sorted(known.values()) in ([NUM_STEPS - 6, NUM_STEPS - 3], [NUM_STEPS - 3, NUM_STEPS]), known
    for path, step in known.items():
        assert torch.load(path, weights_only=True)["global_step"] == step, path
    # Lightning writes the last step again only if it knows of no file yet, as after a restart.
    assert torch.load(files.last_model_path, weights_only=True)["global_step"] in (NUM_STEPS - 3, NUM_STEPS)
    assert not list((OUT / "files").glob(".*")), "a part that is left over"


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train three rounds through the data, which are epochs of 10 steps."""
    samples, module = make_samples(), Module()
    batches = GlobalBatches(len(samples), GLOBAL_BATCH)
    files = ModelCheckpoint(
        OUT / "files", "{step}", "step", mode="max", every_n_train_steps=3, save_top_k=2, save_last=True
    )
    trainer = Trainer(
        **lightning.place(call),
        accelerator="cpu",
        max_epochs=3,
        val_check_interval=4,
        gradient_clip_val=1.0,
        callbacks=[
            lightning.Resume(call, batches=batches),
            AfterStep(call),
            EarlyStopping("val_loss", patience=100),
            files,
        ],
        default_root_dir=OUT,
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False),
    )
    loader: Any = DataLoader(samples, batch_sampler=batches)  # type: ignore[arg-type]  # a list is a data set
    validation: Any = DataLoader(samples[:24], batch_size=6)  # type: ignore[arg-type]  # a list is a data set
    trainer.fit(module, loader, validation)
    assert trainer.global_step == NUM_STEPS
    check_files(files, trainer)
    finish(module.model, trainer.global_step, call)


if __name__ == "__main__":
    started()
    train()
