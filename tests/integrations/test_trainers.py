"""What cannot go on exactly is refused when training begins; what can goes on from a file of the framework's own."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainingArguments

from unbroken import memory
from unbroken.integrations import huggingface, lightning
from unbroken.integrations.samples import GlobalBatches

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


class Call:
    """A call of the wrapped function, of one rank."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.state = SimpleNamespace(active_rank=rank, active_world_size=world_size)
        self.iteration = 0
        self.steps: list[int | None] = []
        self.num_checkpoints = 0

    def ping(self, step: int | None = None) -> None:
        """Remember it."""
        self.steps.append(step)

    def on_move(self, save: object) -> None:
        """Take it."""

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count it."""
        self.num_checkpoints += 1
        yield


class Module(LightningModule):  # type: ignore[misc]  # the package brings no types here
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        self.seen += batch[0][:, 0].tolist()
        loss: torch.Tensor = self.layer(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = TensorDataset(torch.arange(40.0).repeat(2, 1).T / 40)


def fit(
    call: Any,
    folder: Path,
    loader: Any,
    batches: GlobalBatches | None = None,
    more: Sequence[Any] = (),
    *,
    module: Module | None = None,
    val_dataloaders: Any = None,
    **options: Any,
) -> None:
    """Train one epoch with Lightning."""
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    callbacks = [lightning.Resume(call, batches=batches), *more]
    options = {"max_epochs": 1, **quiet, **options}
    trainer = LightningTrainer(accelerator="cpu", devices=1, callbacks=callbacks, default_root_dir=folder, **options)
    trainer.fit(module or Module(), loader, val_dataloaders)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_loader_that_would_begin_elsewhere_is_refused_before_the_first_step(tmp_path: Path, kind: Any) -> None:
    """The state of one with a state has the next batch fetched already."""
    call = Call()
    with pytest.raises(ValueError, match=rf"train_dataloader: want .* got {kind.__name__}, which would begin anew, or"):
        fit(call, tmp_path, kind(DATA, batch_size=4))
    assert call.steps == []


@pytest.mark.parametrize("is_for_validation", [False, True])
def test_loaders_that_share_their_place_are_refused_before_the_first_step(
    tmp_path: Path, is_for_validation: bool
) -> None:
    """After a fault one of two would begin where the other has to."""
    call, batches = Call(), GlobalBatches(40, 4)
    first, second = (DataLoader(DATA, batch_sampler=batches) for _ in range(2))
    train, check = (first, second) if is_for_validation else ([first, second], None)
    with pytest.raises(ValueError, match=r"dataloaders: want one with these GlobalBatches, got several.*StackDataset"):
        fit(call, tmp_path, train, batches, module=Patient(), val_dataloaders=check)
    assert set(call.steps) <= {None}, "batches of a validation at the most"


def test_lightning_reports_each_batch_where_the_loader_knows_its_place(tmp_path: Path) -> None:
    call, batches = Call(), GlobalBatches(40, 4)
    fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches)
    assert call.steps == list(range(1, 11))


def test_gradients_that_wait_for_more_batches_are_no_step_to_go_back_to(tmp_path: Path) -> None:
    call, batches = Call(), GlobalBatches(40, 4)
    fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches, accumulate_grad_batches=4)
    assert [step for step in call.steps if step is not None] == [4, 8, 10]


@pytest.mark.parametrize("at", [7, 10])
def test_lightning_goes_on_from_a_file_of_its_own_where_the_memory_has_nothing(tmp_path: Path, at: int) -> None:
    def train(call: Any, module: Module, **options: Any) -> None:
        batches = GlobalBatches(40, 4)
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=at, save_top_k=-1)
        trainer = LightningTrainer(
            accelerator="cpu",
            devices=1,
            callbacks=[lightning.Resume(call, batches=batches), keep],
            max_epochs=2,
            **quiet,
        )
        trainer.fit(module, DataLoader(DATA, batch_sampler=batches), **options)

    calls, modules = (Call(), Call()), (Module(), Module())
    train(calls[0], modules[0])
    assert calls[0].num_checkpoints >= len(list(tmp_path.glob("step=*.ckpt"))) > 0, "training waited for them"
    train(calls[1], modules[1], ckpt_path=str(tmp_path / f"step={at}.ckpt"))
    assert calls[1].steps == calls[0].steps[at:]
    assert modules[1].seen == modules[0].seen[4 * at :]
    assert torch.equal(modules[1].layer.weight, modules[0].layer.weight)


def test_trainer_of_another_rank_is_refused_by_lightnings_callback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Trainer: want rank 1 of 2, got 0 of 1; make it inside"):
        fit(Call(1, 2), tmp_path, DataLoader(DATA, batch_sampler=GlobalBatches(40, 4)))


def test_checkpoints_of_hugging_faces_trainer_are_told_as_such(tmp_path: Path) -> None:
    call: Any = Call()
    trainer = make_trainer(tmp_path, Regression(), save_strategy="steps", save_steps=2, max_steps=4, disable_tqdm=True)
    trainer.train_dataset = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 64
    huggingface.train(trainer, call)
    assert call.num_checkpoints == len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert "_save_checkpoint" not in vars(trainer)


def test_files_of_another_world_are_gone_on_from_with_batches_of_this_one(tmp_path: Path) -> None:
    """Older Trainers take a rank's batch from the file: a step of a smaller world would have half of its samples."""
    options = {"save_strategy": "steps", "save_steps": 2, "disable_tqdm": True}
    sizes: list[list[int]] = []
    for steps, size, accumulated in ((2, 4, 2), (4, 8, 1)):
        model = Regression()
        more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        trainer = make_trainer(tmp_path, model, max_steps=steps, **more, **options)
        trainer.train_dataset = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 64
        huggingface.train(trainer, Call())  # type: ignore[arg-type]  # a double
        sizes.append(model.sizes)
    assert sizes == [[4, 4, 4, 4], [8, 8]]
    assert list((tmp_path / "checkpoint-2").glob("unbroken-*")), "what was read is as it was"


@pytest.mark.parametrize("cut", ["", "4", '4\n{"max_st'])
def test_a_mark_that_was_cut_off_says_nothing_of_its_files(tmp_path: Path, cut: str) -> None:
    """As on a disk that was full meanwhile. Training went on from there without what it says, or never again."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "disable_tqdm": True}
    trainer = make_trainer(tmp_path, Regression(), **options)
    trainer.train_dataset = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 64
    huggingface.train(trainer, Call())  # type: ignore[arg-type]  # a double
    folders = huggingface._Folders(tmp_path, 0, 1)
    assert sorted(folders.steps()) == [2, 4]
    (tmp_path / "checkpoint-4" / "unbroken-0-of-1").write_text(cut)
    assert folders.steps() == [2]


@pytest.mark.parametrize(("is_split", "samples"), [(True, 4), (False, 8)])
def test_batch_that_ranks_share_is_one_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_split: bool, samples: int
) -> None:
    """Where it grew with a smaller world, a step would have other samples than the one of its number before."""
    options = {"per_device_train_batch_size": 4, "accelerator_config": {"split_batches": is_split}}
    trainer = make_trainer(tmp_path, Regression(), **options)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    call: Any = Call()
    assert huggingface._Callback(trainer, call, None)._samples() == samples


def test_batch_size_that_is_looked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size: want False, got True"):
        huggingface._refuse(make_trainer(tmp_path, auto_find_batch_size=True))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"accelerator_config": {"use_seedable_sampler": False}}, "accelerator_config: want use_seedable_sampler=True"),
        (
            {"train_sampling_strategy": "group_by_length"}
            if hasattr(TrainingArguments, "train_sampling_strategy")
            else {"group_by_length": True},
            "group_by_length",
        ),
    ],
)
def test_order_that_is_another_one_in_a_resumed_epoch_is_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"{problem}.*; an epoch that goes on in its middle would have another order"):
        huggingface._refuse(make_trainer(tmp_path, **options))


@pytest.mark.parametrize("framework", ["huggingface", "lightning"])
def test_second_training_in_one_call_is_refused(tmp_path: Path, framework: str) -> None:
    """It would go on from the checkpoints of the first."""
    call: Any = Call()

    def train() -> None:
        if framework == "lightning":
            batches = GlobalBatches(40, 4)
            fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches)
            return
        trainer = make_trainer(tmp_path, Regression(), save_strategy="no", max_steps=2, disable_tqdm=True)
        trainer.train_dataset = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 64
        huggingface.train(trainer, call)

    train()
    with pytest.raises(ValueError, match="training: want one in each job, got a second one in the same call"):
        train()
    call.iteration = 1
    train()


class Kept:
    """Checkpoints in the memory of this process alone."""

    kept: tuple[int, dict[str, Any]] | None = None

    def __init__(self, **options: Any) -> None:
        """Take any options."""

    def load(self, state: dict[str, Any]) -> int | None:
        """Give back what was saved last."""
        if Kept.kept is None:
            return None
        step, saved = Kept.kept
        for name, one in state.items():
            if hasattr(one, "load_state_dict"):
                one.load_state_dict(copy.deepcopy(saved[name]))
            else:
                state[name] = saved[name]
        return step

    def save(self, state: dict[str, Any], step: int) -> None:
        """Keep it."""
        values = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()}
        Kept.kept = (step, copy.deepcopy(values))


class Breaking(Callback):  # type: ignore[misc]  # the package brings no types here
    """Raises once so many batches were trained."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_train_batch_end(self, *args: Any) -> None:
        """Count."""
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("broken")


def test_gradients_are_accumulated_after_a_fault_as_the_epoch_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GradientAccumulationScheduler sets it when an epoch begins, and has no state."""
    monkeypatch.setattr(memory, "Checkpointer", Kept)
    monkeypatch.setattr(Kept, "kept", None)
    seen: list[list[int | None]] = []
    for breaks_after in (100, 18, 100):
        if breaks_after == 18:
            Kept.kept = None
        call, batches = Call(), GlobalBatches(40, 4)
        more = [GradientAccumulationScheduler({0: 2, 1: 5}), Breaking(breaks_after)]
        with contextlib.suppress(RuntimeError):
            fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches, more=more, max_epochs=2)
        seen.append([step for step in call.steps if step is not None])
    assert seen == [[2, 4, 6, 8, 10, 15, 20], [2, 4, 6, 8, 10, 15], [20]]


class Told(Logger):  # type: ignore[misc]  # the package brings no types here
    """Remembers the number of the step that each log has."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Take any."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Remember it."""
        self.steps.append(step)


class Telling(Module):
    """Logs each batch."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Log its loss."""
        loss = super().training_step(batch, index)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("accumulates", [1, 2, 3])
@pytest.mark.parametrize("breaks_after", [7, 10, 13])
def test_logs_after_a_fault_have_the_steps_of_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulates: int, breaks_after: int
) -> None:
    """Lightning counts the batch that it resumes from once more at times: not where gradients wait for others."""
    monkeypatch.setattr(memory, "Checkpointer", Kept)
    told: list[Told] = []
    for after in (1000, breaks_after, 1000):
        if len(told) < 2:  # the last one goes on
            monkeypatch.setattr(Kept, "kept", None)
        batches, logger = GlobalBatches(40, 4), Told()
        train = DataLoader(DATA, batch_sampler=batches)
        options = {"max_epochs": 2, "log_every_n_steps": 1, "accumulate_grad_batches": accumulates, "logger": logger}
        with contextlib.suppress(RuntimeError):
            fit(Call(), tmp_path, train, batches, [Breaking(after)], module=Telling(), **options)
        told.append(logger)
    calm, _, after_fault = (one.steps for one in told)
    assert after_fault == calm[-len(after_fault) :]


class Patient(Module):
    """Lowers its rate where the newest validation, of the epoch before at times, is no better."""

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log what the schedule looks at."""
        self.log("val", self.layer(batch[0]).abs().sum())

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val", "strict": False}}


class Accumulating(Module):
    """Steps after each third batch, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Add up gradients, and step when it is time."""
        optimizer = self.optimizers()
        loss: torch.Tensor = self.layer(batch[0]).square().sum()
        self.manual_backward(loss)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize(
    ("kind", "options", "breaks_after"),
    [
        pytest.param(Patient, {}, 7, id="a schedule that looks at this epoch"),
        pytest.param(Patient, {"check_val_every_n_epoch": 2}, 24, id="a schedule that looks at the epoch before"),
        pytest.param(Accumulating, {}, 8, id="gradients that the module adds up"),
    ],
)
def test_weights_and_rates_after_a_fault_are_those_of_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Module], options: dict[str, Any], breaks_after: int
) -> None:
    monkeypatch.setattr(memory, "Checkpointer", Kept)
    found: list[Any] = []
    for faults in ([], [breaks_after]):
        monkeypatch.setattr(Kept, "kept", None)
        for after in [*faults, 1000]:
            torch.manual_seed(1)
            call, module, batches = Call(), kind(), GlobalBatches(40, 4)
            more = {"max_epochs": 5, "num_sanity_val_steps": 0, **options}
            train, check = DataLoader(DATA, batch_sampler=batches), DataLoader(DATA, 8)
            with contextlib.suppress(RuntimeError):
                fit(call, tmp_path, train, batches, [Breaking(after)], module=module, val_dataloaders=check, **more)
        assert call.steps[-1] == 50
        rates = [one["lr"] for one in module.trainer.optimizers[0].param_groups]
        found.append((rates, module.layer.weight.tolist()))
    assert found[0] == found[1]


class Ending(Breaking):
    """Asks for the end after the twelfth batch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Ask."""
        trainer.should_stop = trainer.should_stop or trainer.global_step == 12
        super().on_train_batch_end(trainer, *args)


def test_end_that_was_asked_for_before_a_fault_comes_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning goes on until `min_steps`, and keeps in no state that somebody has asked."""
    monkeypatch.setattr(memory, "Checkpointer", Kept)
    monkeypatch.setattr(Kept, "kept", None)
    steps: list[int | None] = []
    for breaks_after in (18, 1000):
        call, batches = Call(), GlobalBatches(40, 4)
        with contextlib.suppress(RuntimeError):
            loader = DataLoader(DATA, batch_sampler=batches)
            fit(call, tmp_path, loader, batches, [Ending(breaks_after)], min_steps=25, max_epochs=5)
        steps += call.steps
    assert steps == list(range(1, 26))


def test_gradients_that_a_module_adds_up_are_no_step_to_go_back_to(tmp_path: Path) -> None:
    call, batches = Call(), GlobalBatches(40, 4)
    fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches, module=Accumulating())
    assert [step for step in call.steps if step is not None] == [3, 6, 9, 10]


def test_epoch_that_leaves_batches_of_a_pass_out_is_refused(tmp_path: Path) -> None:
    call, batches = Call(), GlobalBatches(40, 4)
    with pytest.raises(ValueError, match=r"batches of an epoch: want .* \(10\), got 7; make GlobalBatches.*steps=7"):
        fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches, limit_train_batches=7, max_epochs=2)
    assert call.steps == []


class Naming(Callback):  # type: ignore[misc]  # the package brings no types here
    """Adds what could not be read without running code."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add a path."""
        checkpoint["path"] = Path("x")


def test_hook_that_adds_what_could_not_be_read_is_refused_before_the_first_step(tmp_path: Path) -> None:
    call, batches = Call(), GlobalBatches(40, 4)
    with pytest.raises(TypeError, match=r"hooks\.added\.path: want tensors, numbers, text"):
        fit(call, tmp_path, DataLoader(DATA, batch_sampler=batches), batches, more=[Naming()])
    assert call.steps == []


def test_arguments_of_another_rank_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"want those of rank 1 of 2, got rank 0 of 1; make them, and the Trainer, in"):
        huggingface._refuse(trainer)


class Regression(torch.nn.Module):
    """One layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        self.sizes.append(len(x))
        return {"loss": (self.layer(x) - labels).square().mean()}


def make_trainer(folder: Path, model: torch.nn.Module | None = None, **arguments: Any) -> Any:
    """Return a Trainer of Hugging Face's."""
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **arguments)
    return Trainer(model or torch.nn.Linear(2, 2), args, train_dataset=DATA)
