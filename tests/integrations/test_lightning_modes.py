"""Lightning after a fault: what a module has frozen stays so, and what would go on elsewhere in the data is refused."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint
from tests.integrations.test_lightning_states import QUIET, Call, Fails, Memory
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unbroken import memory
from unbroken.integrations import lightning, lightning_hooks
from unbroken.integrations.samples import GlobalBatches

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

CHANCE = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(40, 4, generator=CHANCE))
EPOCHS, PER_EPOCH = 3, 10


class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """Two layers and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return it for a batch."""
        out: torch.Tensor = self.last(self.norm(self.first(batch[0])))
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Freezing(Module):
    """Begins with a frozen layer, thaws it, and stops the statistics of its norm."""

    def on_train_start(self) -> None:
        """Also in the middle of a training that goes on."""
        self.first.requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Change what trains."""
        if self.global_step == 4:
            self.first.requires_grad_(True)
        if self.global_step == 6:
            self.norm.eval()
            self.last.bias.requires_grad_(False)


def fit(folder: Path, module: Module, *others: Callback, path: str | None = None, **options: Any) -> list[Any]:
    """Train from what there is, and return weights and statistics."""
    call: Any = Call()
    batches = GlobalBatches(len(DATA), len(DATA) // PER_EPOCH)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[lightning.Resume(call, batches=batches), *others],
        default_root_dir=folder,
        **{**QUIET, "max_epochs": EPOCHS, **options},
    )
    trainer.fit(module, DataLoader(DATA, batch_sampler=batches), ckpt_path=path)
    return [one.tolist() for one in module.state_dict().values()]


@pytest.mark.parametrize("at", [5, 8, 17, 20])
def test_what_trains_after_a_fault_is_what_trained_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int
) -> None:
    store = Memory()
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: store)
    with pytest.raises(RuntimeError, match="fails"):
        fit(tmp_path, Freezing(), Fails(at))
    got = fit(tmp_path, Freezing())
    store.kept = None
    assert got == fit(tmp_path, Freezing())


def test_what_trains_after_a_file_of_lightnings_own_is_what_trained_before(tmp_path: Path) -> None:
    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    want = fit(tmp_path, Freezing(), files, enable_checkpointing=True)
    assert fit(tmp_path, Freezing(), path=str(tmp_path / "step=8.ckpt")) == want


class Clipping(Callback):  # type: ignore[misc]  # the package brings no types here
    """Clips more from some step on, and counts without a state."""

    num_steps = 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Count and clip."""
        self.num_steps += 1
        if trainer.global_step == 4:
            trainer.gradient_clip_val = 0.01


@pytest.mark.parametrize("has_file", [False, True])
def test_options_of_the_trainer_stay_and_what_a_callback_counts_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_file: bool
) -> None:
    store = Memory()
    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    if not has_file:
        monkeypatch.setattr(memory, "Checkpointer", lambda **options: store)
        with pytest.raises(RuntimeError, match="fails"):
            fit(tmp_path, Module(), Clipping(), Fails(8), gradient_clip_val=1.0)
        got = fit(tmp_path, Module(), Clipping(), gradient_clip_val=1.0)
        store.kept = None
        assert got == fit(tmp_path, Module(), Clipping(), gradient_clip_val=1.0)
    else:
        want = fit(tmp_path, Module(), Clipping(), files, gradient_clip_val=1.0, enable_checkpointing=True)
        path = str(tmp_path / "step=8.ckpt")
        assert fit(tmp_path, Module(), Clipping(), path=path, gradient_clip_val=1.0) == want
    assert "callbacks begin anew with what they had changed: names=1: Clipping.num_steps;" in caplog.text


class Thinning(Module):
    """Drops more from some step on, and counts without saying so in a checkpoint."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.Dropout(0.1))  # type: ignore[assignment]  # another first layer

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Change both."""
        self.num_steps += 1
        if self.global_step == 4:
            self.first[1].p = 0.6  # type: ignore[index]  # it is a Sequential now


def test_rate_of_a_dropout_stays_and_a_count_that_is_lost_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Memory()
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: store)
    with pytest.raises(RuntimeError, match="fails"):
        fit(tmp_path, Thinning(), Fails(8))
    got = fit(tmp_path, Thinning())
    assert "changed in training and not restored: names=1: num_steps; keep in a checkpoint" in caplog.text
    store.kept = None
    assert got == fit(tmp_path, Thinning())


class Leaving(Module):
    """Leaves the rest of the second epoch out."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Say so."""
        return -1 if (self.current_epoch, batch_idx) == (1, 6) else None


class Taking(Module):
    """Takes its batches by itself."""

    num_taken = 1

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]  # as Lightning has it
        """Return the loss of some batches."""
        return torch.stack([self.loss(next(dataloader_iter)[0]) for _ in range(self.num_taken)]).sum()


class TakingAhead(Taking):
    """Takes two at a time."""

    num_taken = 2


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (Leaving, r"epoch: want one that begins after 20 batches \(2 passes of GlobalBatches\), got 16; .* return -1"),
        (TakingAhead, r"training_step\(dataloader_iter\): want one batch taken in each call, got 2"),
    ],
)
def test_batches_whose_number_is_not_their_place_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: type[Module], problem: str
) -> None:
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: Memory())
    with pytest.raises(ValueError, match=problem):
        fit(tmp_path, module())


def test_loaders_that_would_be_made_anew_in_other_epochs_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: Memory())
    with pytest.raises(ValueError, match=r"reload_dataloaders_every_n_epochs: want 0 or 1, got 2; .* in other epochs"):
        fit(tmp_path, Module(), reload_dataloaders_every_n_epochs=2)


def test_module_that_takes_a_batch_by_itself_goes_on_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Memory()
    monkeypatch.setattr(memory, "Checkpointer", lambda **options: store)
    with contextlib.suppress(RuntimeError):
        fit(tmp_path, Taking(), Fails(17))
    assert store.kept is not None
    got = fit(tmp_path, Taking())
    store.kept = None
    assert got == fit(tmp_path, Taking())


@pytest.mark.parametrize("kind", [LearningRateFinder, BatchSizeFinder])
def test_callbacks_that_try_options_out_are_refused(kind: type[Callback]) -> None:
    """After a fault they would find others, in the middle of the training."""
    with pytest.raises(ValueError, match=f"want none that tries options out when training begins, got {kind.__name__}"):
        lightning_hooks.refuse([kind()])


def test_strategy_of_ddp_may_be_named() -> None:
    """More than two ranks sum exactly as before with this one alone."""
    call: Any = Call()
    named = lightning.place(call, strategy="ddp_find_unused_parameters_true")
    assert named | {"strategy": "ddp", "plugins": []} == lightning.place(call) | {"plugins": []}
    assert named["strategy"] == "ddp_find_unused_parameters_true"
