"""Lightning's own checkpoints with `lightning.WholeFiles`: what ModelCheckpoint says is there is there, and whole."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from tests.integrations.test_trainers import DATA, Breaking, Call, Kept, Module
from torch.utils.data import DataLoader

from unbroken import memory
from unbroken.integrations import lightning
from unbroken.integrations.samples import GlobalBatches

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def trainer(folder: Path, call: Any, batches: GlobalBatches, **options: Any) -> tuple[Trainer, ModelCheckpoint]:
    """Return a Trainer of one rank, and who writes its files."""
    keep = ModelCheckpoint(folder, "{step}", monitor="step", mode="max", every_n_train_steps=2, save_top_k=2, **options)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    callbacks = [lightning.Resume(call, batches=batches), keep]
    plugins = [lightning.WholeFiles()]
    made = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, plugins=plugins, **quiet)
    return made, keep


def fit(folder: Path, ckpt_path: str | None = None, **options: Any) -> tuple[Trainer, ModelCheckpoint, Module, Call]:
    """Train one epoch of 10 batches."""
    call, batches, module = Call(), GlobalBatches(40, 4), Module()
    made, keep = trainer(folder, call, batches, **options)
    made.fit(module, DataLoader(DATA, batch_sampler=batches), ckpt_path=ckpt_path)
    return made, keep, module, call


def test_lightning_keeps_and_removes_its_files_as_without(tmp_path: Path) -> None:
    _trainer, keep, module, _call = fit(tmp_path, save_last=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]
    for name in (keep.best_model_path, keep.last_model_path):
        found = torch.load(name, weights_only=True)["state_dict"]
        assert all(torch.equal(found[key], value) for key, value in module.state_dict().items())


def test_training_goes_on_from_its_file_exactly(tmp_path: Path) -> None:
    _trainer, _keep, module, _call = fit(tmp_path / "a")
    _trainer, _keep, again, call = fit(tmp_path / "b", str(tmp_path / "a" / "step=8.ckpt"))
    assert call.steps == [9, 10]
    assert again.seen == module.seen[4 * 8 :]
    assert torch.equal(again.layer.weight, module.layer.weight)


def test_files_go_on_in_the_folder_that_lightning_chose_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger has another version after a fault: ModelCheckpoint would forget which one was best, and say another."""
    monkeypatch.setattr(memory, "Checkpointer", Kept)
    found = []
    for name, faults in (("calm", [None]), ("broken", [7, None])):
        monkeypatch.setattr(Kept, "kept", None)
        for after in faults:
            call: Any = Call()
            batches = GlobalBatches(40, 4)
            # The best one is that of the first steps.
            keep = ModelCheckpoint(None, "{step}", "step", every_n_train_steps=2, save_top_k=2)
            callbacks = [lightning.Resume(call, batches=batches), keep, *([Breaking(after)] if after else [])]
            quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
            made = Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                callbacks=callbacks,
                logger=CSVLogger(tmp_path / name),
                plugins=[lightning.WholeFiles()],
                **quiet,
            )
            with contextlib.nullcontext() if after is None else pytest.raises(RuntimeError, match="broken"):
                made.fit(Module(), DataLoader(DATA, batch_sampler=batches))
        written = sorted(str(path.relative_to(tmp_path / name)) for path in tmp_path.glob(f"{name}/**/*.ckpt"))
        best = Path(keep.best_model_path).relative_to(tmp_path / name)
        found.append((written, str(best), keep.best_model_score, keep.kth_value, keep.current_score))
    assert found[0] == found[1]


def test_a_failed_save_leaves_the_file_that_lightning_was_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, *_ = fit(tmp_path)
    path = tmp_path / "own.ckpt"
    made.save_checkpoint(path)
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        made.save_checkpoint(path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_file_of_this_host_lightning_writes(tmp_path: Path) -> None:
    files = lightning.WholeFiles()
    files.save_checkpoint({"a": 1}, "memory://here/one.ckpt")
    assert files.load_checkpoint("memory://here/one.ckpt") == {"a": 1}
    files.remove_checkpoint("memory://here/one.ckpt")
    files.save_checkpoint({"a": 2}, f"file://{tmp_path}/two.ckpt")
    assert torch.load(tmp_path / "two.ckpt") == {"a": 2}


def test_place_adds_it_unless_the_script_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    call: Any = Call()
    own = TorchCheckpointIO()
    assert [type(one).__name__ for one in lightning.place(call)["plugins"]] == ["Environment", "WholeFiles"]
    assert [type(one).__name__ for one in lightning.place(call, [own])["plugins"]] == [
        "Environment",
        "TorchCheckpointIO",
    ]
