"""What a LightningModule, callbacks and data keep beside the model is there again after a fault, or is refused."""

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unbroken import memory
from unbroken.integrations import lightning
from unbroken.integrations.samples import GlobalBatches
from unbroken.memory import Saved
from unbroken.memory.shard import is_stateful, state_dicts

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

NUM_SAMPLES, BATCH = 40, 4
QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)

RELOADS = {"val_check_interval": 4, "reload_dataloaders_every_n_epochs": 1}


class Memory:
    """A double of the checkpoints in memory."""

    def __init__(self) -> None:
        self.kept: tuple[int, dict[str, Any]] | None = None

    def save(self, state: Mapping[str, Any], step: int) -> Saved:
        """Copy it."""
        self.kept = step, copy.deepcopy(state_dicts(state))
        return Saved(step, 0)

    def load(self, state: dict[str, Any]) -> int | None:
        """Give it back."""
        if self.kept is None:
            return None
        step, kept = self.kept
        for name, one in state.items():
            if is_stateful(one):
                one.load_state_dict(copy.deepcopy(kept[name]))
            else:
                state[name] = kept[name]
        return step


class Call:
    """A call of the wrapped function, of one rank."""

    state = SimpleNamespace(active_rank=0, active_world_size=1)
    iteration = 0

    def ping(self, step: int | None = None) -> None:
        """Do nothing."""

    def on_move(self, save: object) -> None:
        """Do nothing."""

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    checkpoint = atomic


class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """One layer, and a mean of its weights that its hooks save."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean: torch.Tensor | None = None

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        now = self.layer.weight.detach().clone()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the mean."""
        checkpoint["mean"] = self.mean

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        self.mean = checkpoint["mean"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Data(LightningDataModule):  # type: ignore[misc]  # the package brings no types here
    """Counts batches."""

    def __init__(self, batches: GlobalBatches) -> None:
        super().__init__()
        self.batches = batches
        self.num_given = 0

    def train_dataloader(self) -> Any:
        """Return the loader."""
        data = TensorDataset(torch.arange(4.0 * NUM_SAMPLES).reshape(NUM_SAMPLES, 4) / 100)
        return DataLoader(data, batch_sampler=self.batches)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count it."""
        self.num_given += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.num_given = state_dict["num_given"]


class Fails(Callback):  # type: ignore[misc]  # the package brings no types here
    """Fails at a batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fail, when it is time."""
        if trainer.global_step == self.at:
            raise RuntimeError("fails")


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, store: Memory, *others: Callback) -> tuple[Module, Data]:
    """Train two epochs of ten batches, from what the memory has."""
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: store)
    call: Any = Call()
    batches = GlobalBatches(NUM_SAMPLES, BATCH)
    torch.manual_seed(1)
    module, data = Module(), Data(batches)
    resume = lightning.Resume(call, batches=batches)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=[*others, resume], default_root_dir=folder, **QUIET
    )
    trainer.fit(module, datamodule=data)
    return module, data


def means() -> list[Callback]:
    """Return callbacks that save by hooks, in releases that have some."""
    named = getattr(callbacks, "EMAWeightAveraging", None)
    return [] if named is None else [named(decay=0.9)]


def test_what_hooks_and_data_save_is_there_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    want, want_data = fit(monkeypatch, tmp_path, Memory(), *means())
    store = Memory()
    with pytest.raises(RuntimeError, match="fails"):
        fit(monkeypatch, tmp_path, store, *means(), Fails(13))
    assert store.kept is not None
    assert store.kept[0] == 12
    got, got_data = fit(monkeypatch, tmp_path, store, *means())
    assert got.mean is not None
    assert want.mean is not None
    assert torch.equal(got.mean, want.mean)
    assert got_data.num_given == want_data.num_given == 20
    # A callback that averages weights has put the averages in their place.
    assert torch.equal(got.layer.weight, want.layer.weight)


class Validates(Module):
    """Logs a value in each batch of a validation."""

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log it."""
        self.log("distance", self.layer(batch[0]).square().mean(), on_step=True, on_epoch=False)


class Notes(Callback):  # type: ignore[misc]  # the package brings no types here
    """What the counters of validations were as each batch began, and the numbers of what they logged."""

    def __init__(self) -> None:
        self.counted: dict[int, Any] = {}
        self.logged: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Note the counters."""
        self.counted[trainer.global_step] = trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict()

    def take(self, trainer: Any, metrics: dict[str, Any], step: int | None) -> None:
        """Note the number of a log."""
        if "distance" in metrics and step is not None:
            self.logged.setdefault(trainer.global_step, []).append(step)


@pytest.mark.parametrize("options", [{"val_check_interval": 3}, {"check_val_every_n_epoch": 2}, RELOADS], ids=str)
@pytest.mark.parametrize("at", [5, 6, 7, 13, 16, 25])
def test_validations_are_counted_and_numbered_as_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], at: int
) -> None:
    """Lightning would count one more that was due at the checkpoint, and number the logs of the next from 0."""

    def train(store: Memory, notes: Notes, *others: Callback) -> None:
        monkeypatch.setattr(memory, "Checkpointer", lambda **_options: store)
        call: Any = Call()
        batches = GlobalBatches(NUM_SAMPLES, BATCH)
        torch.manual_seed(1)
        trainer = Trainer(
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 4, "default_root_dir": tmp_path, **QUIET, **options},
            callbacks=[*others, lightning.Resume(call, batches=batches), notes],
        )
        log = trainer._logger_connector.log_metrics

        def note(metrics: dict[str, Any], step: int | None = None) -> None:
            notes.take(trainer, metrics, step)
            log(metrics, step)

        monkeypatch.setattr(trainer._logger_connector, "log_metrics", note)
        data = TensorDataset(torch.arange(4.0 * NUM_SAMPLES).reshape(NUM_SAMPLES, 4) / 100)
        trainer.fit(Validates(), DataLoader(data, batch_sampler=batches), DataLoader(data, 20))

    want, first, after, store = Notes(), Notes(), Notes(), Memory()
    train(Memory(), want)
    with pytest.raises(RuntimeError, match="fails"):
        train(store, first, Fails(at))
    train(store, after)
    assert store.kept is not None
    for notes in (first, after):
        assert notes.counted == {step: one for step, one in want.counted.items() if step in notes.counted}
        assert notes.logged == {step: one for step, one in want.logged.items() if step in notes.logged}
    assert first.counted.keys() | after.counted.keys() == want.counted.keys()
    assert first.logged.keys() | after.logged.keys() == want.logged.keys() != set()


class Best(Callback):  # type: ignore[misc]  # the package brings no types here
    """Keeps a number that cannot be read without running code, from some step on."""

    def __init__(self) -> None:
        self.best: Any = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Find a better one."""
        self.best = np.float64(trainer.global_step) if trainer.global_step > 3 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"best": self.best}


def test_what_could_not_be_read_again_is_refused_when_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Memory()
    with pytest.raises(TypeError, match=r"callbacks\.Best\.best: want tensors, numbers, text"):
        fit(monkeypatch, tmp_path, store, Best())
    assert store.kept is not None
    assert store.kept[0] == 3


class Unfreezes(callbacks.BaseFinetuning):  # type: ignore[misc]  # the package brings no types here
    """Trains more from some epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze nothing."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Add nothing."""


@pytest.mark.parametrize(
    "one",
    [
        callbacks.StochasticWeightAveraging(swa_lrs=0.1),
        Unfreezes(),
        callbacks.ModelPruning("l1_unstructured", amount=0.5),
    ],
)
def test_callbacks_that_change_what_trains_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one: Callback
) -> None:
    with pytest.raises(ValueError, match=f"want none that adds parameters or schedules .* got {type(one).__name__}"):
        fit(monkeypatch, tmp_path, Memory(), one)
