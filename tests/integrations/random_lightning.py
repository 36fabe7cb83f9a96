"""Trainings of Lightning's Trainer with options that are drawn from a seed."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from tests.integrations.random_faults import Hooks, Iteration, count_hooks, tell_hooks
from tests.integrations.test_trainers import Call
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from unbroken.integrations import lightning
from unbroken.integrations.samples import GlobalBatches

NUM_SAMPLES = 40
DATA = TensorDataset(torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(5)), torch.arange(NUM_SAMPLES))
REFUSALS = (ValueError, MisconfigurationException)
"""What is raised for options that cannot be trained with."""
HAS_WHOLE_FILES = False
"""Whether a training goes on from files of the framework alone as if nothing had been; these lack random numbers."""
HOOKS = (
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_save_checkpoint",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_validation_start",
)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 4),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, 3, cycle_momentum=False),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=100),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, total_iters=3), lr_scheduler.ExponentialLR(one, 0.9)], [3]
    ),
    "step": lambda one: lr_scheduler.StepLR(one, 3, 0.9),
}
VALIDATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"val_check_interval": 0.5},
    {"val_check_interval": 0.25},
    {"val_check_interval": 3},
    {"val_check_interval": 7, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 2},
)
FILES: tuple[dict[str, Any], ...] = (
    {"save_last": True},
    {"every_n_train_steps": 2, "save_top_k": -1},
    {"every_n_train_steps": 3, "save_last": True},
    {"every_n_epochs": 2, "save_top_k": -1},
    {"save_on_train_epoch_end": True},
)


def options(chance: random.Random) -> dict[str, Any]:
    """Return options of the training; those of `trainer` are Lightning's, those of `files` are of ModelCheckpoint."""
    steps_by_hand = chance.random() < 0.25
    validates = chance.random() < 0.75
    trainer: dict[str, Any] = {
        "max_epochs": chance.choice((1, 2, 3, 4)),
        "max_steps": chance.choice((-1, -1, 6, 11, 17)),
        "num_sanity_val_steps": chance.choice((0, 2)),
        "limit_val_batches": chance.choice((1.0, 2)),
    }
    found: dict[str, Any] = {
        "steps_by_hand": steps_by_hand,
        "accumulates": chance.choice((1, 2, 3)),
        "schedule": chance.choice((None, *SCHEDULES)),
        "is_schedule_of_steps": chance.random() < 0.6,
        "batch": chance.choice((4, 5, 8)),
        "steps": chance.choice((None, None, 7)),
        "validates": validates,
        "breaks_first": chance.random() < 0.5,
        "accumulation": None,
        "stops_early": validates and chance.random() < 0.25,
        "files": chance.choice(FILES) if chance.random() < 0.6 else None,
        "from_files": chance.random() < 0.5,
        "trainer": trainer,
    }
    if validates:
        trainer.update(chance.choice(VALIDATIONS))
    if not steps_by_hand:
        trainer.update(
            accumulate_grad_batches=chance.choice((1, 1, 2, 3)), gradient_clip_val=chance.choice((None, 0.5))
        )
        if trainer["accumulate_grad_batches"] == 1 and chance.random() < 0.3:
            found["accumulation"] = chance.choice(({0: 2, 1: 3}, {0: 1, 2: 4}, {1: 2}))
    return found


class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """Two layers with a dropout, of which it takes random numbers when it validates as well."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        self.automatic_optimization = not chosen["steps_by_hand"]
        self.chosen = chosen
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        self.seen = batch[1].tolist()
        loss: torch.Tensor = self.layers(batch[0]).square().mean() + (self.layers(batch[0]) - 1).abs().mean()
        self.log("loss", loss.detach())
        if not self.automatic_optimization:
            self._step(loss, is_last=(index + 1) % self.chosen["accumulates"] == 0)
        return loss

    def _step(self, loss: torch.Tensor, *, is_last: bool) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None and self.chosen["schedule"] != "plateau":
                schedule.step()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log a value that has a part of chance."""
        self.log("validation", self.layers(batch[0]).square().mean() + torch.rand(1)[0] * 0.01)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its schedule if there is one."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if (name := self.chosen["schedule"]) is None:
            return optimizer
        interval = "step" if self.chosen["is_schedule_of_steps"] else "epoch"
        config = {"scheduler": SCHEDULES[name](optimizer), "interval": interval}
        if name == "plateau":
            config.update(monitor="validation", strict=False, interval="epoch")
        return {"optimizer": optimizer, "lr_scheduler": config}


class Breaking(Callback):  # type: ignore[misc]  # the package brings no types here
    """Tells of each call of a hook, which may raise."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks


class Noting(Callback):  # type: ignore[misc]  # the package brings no types here
    """Notes what each batch had, by its number over all epochs."""

    def __init__(self, seen: dict[int, list[int]]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Note it."""
        self.seen[int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)] = module.seen


class Counting(Callback):  # type: ignore[misc]  # the package brings no types here
    """Counts calls of hooks, but for those that a fault makes come once more."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """Return what checkpoints have of it."""
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from it."""
        self.counts = dict(state_dict)


tell_hooks(Breaking, HOOKS)
count_hooks(
    Counting,
    (
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_batch_start",
        "on_train_epoch_end",
        "on_validation_batch_end",
        "on_validation_end",
    ),
)


def training(folder: Path, chosen: dict[str, Any]) -> Iteration:
    """Return an iteration of the training with these options."""
    seen: dict[int, list[int]] = {}

    def iteration(number: int, hooks: Hooks) -> dict[str, Any]:
        call: Any = Call()
        call.iteration = number
        batches = GlobalBatches(NUM_SAMPLES, chosen["batch"], **({"steps": chosen["steps"]} if chosen["steps"] else {}))
        counting, breaking = Counting(), Breaking(hooks)
        module, others = Module(chosen), _others(folder, chosen)
        ours = [lightning.Resume(call, batches=batches), counting, Noting(seen), *others]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[breaking, *ours] if chosen["breaks_first"] else [*ours, breaking],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=bool(chosen["files"]),
            **chosen["trainer"],
        )
        files = sorted(folder.glob("last*.ckpt")) if chosen["from_files"] else []
        trainer.fit(
            module,
            DataLoader(DATA, batch_sampler=batches),
            DataLoader(DATA, 8) if chosen["validates"] else None,
            ckpt_path=str(files[-1]) if files else None,
        )
        states = {type(one).__name__: repr(_without_names(folder, one.state_dict())) for one in others}
        return {**_come_out(trainer, module), "seen": dict(seen), "counts": counting.counts, **states}

    return iteration


def _others(folder: Path, chosen: dict[str, Any]) -> list[Callback]:
    others: list[Callback] = []
    if chosen["files"]:
        watched = "validation" if chosen["validates"] and chosen["files"].get("save_top_k") != -1 else None
        others.append(ModelCheckpoint(folder, "{epoch}-{step}", watched, **chosen["files"]))
    if chosen["stops_early"]:
        others.append(EarlyStopping("validation", patience=2, check_finite=False, strict=False))
    if chosen["accumulation"]:
        others.append(GradientAccumulationScheduler(chosen["accumulation"]))
    return others


def _without_names(folder: Path, state: dict[str, Any]) -> dict[str, str]:
    """Leave out folders, and the versions of files: a file that a fault has made one too many keeps its name."""
    return {name: re.sub(r"-v[0-9]+(?=\.ckpt)", "", str(one).replace(str(folder), "")) for name, one in state.items()}


def _come_out(trainer: Trainer, module: Module) -> dict[str, Any]:
    loops = trainer.fit_loop.state_dict()
    return {
        "weights": [one.tolist() for one in module.parameters()],
        "optimizer": repr(trainer.optimizers[0].state_dict()),
        "schedules": repr([one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]),
        "random": torch.get_rng_state().tolist(),
        "step": (trainer.global_step, trainer.current_epoch),
        # Those of validations say how often this process has validated.
        "loops": repr({name: one for name, one in loops.items() if "val" not in name}),
        "metrics": repr({name: float(one) for name, one in trainer.callback_metrics.items()}),
    }
