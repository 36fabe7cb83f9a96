"""Hugging Face's Trainer after a fault: its logs, callbacks and end are those of a training without."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.test_trainers import Call, Kept
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR
from torch.utils.data import IterableDataset, WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from unbroken import memory
from unbroken.integrations import huggingface

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

CHANCE = torch.Generator().manual_seed(3)
SAMPLES = [
    {"x": torch.randn(4, generator=CHANCE), "labels": torch.randn(2, generator=CHANCE), "ids": torch.tensor(i)}
    for i in range(40)
]
BATCH = 4
Build = Callable[[Path, "Model"], Trainer]


class KeptOrOnDisk(Kept):
    """The newest one of both."""

    def __init__(self, **options: Any) -> None:
        self.disk = options.get("disk")

    def load(self, state: dict[str, Any]) -> int | None:
        """Take the disk's where it is newer."""
        steps = sorted(self.disk.steps()) if self.disk is not None else []
        newest = Kept.kept[0] + getattr(self.disk, "lag", 0) if Kept.kept is not None else -1
        if self.disk is not None and steps and steps[-1] > newest:
            self.disk.load(state, steps[-1])
            return int(steps[-1])
        return super().load(state)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Checkpointer", KeptOrOnDisk)
    monkeypatch.setattr(Kept, "kept", None)


class Model(torch.nn.Module):
    """Two layers; it remembers what it has seen since the last step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        if self.training:
            self.seen += ids.tolist()
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Broken(RuntimeError):
    """The fault."""


class Breaking(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Notes what each step has seen, and raises in the n-th call of one hook."""

    def __init__(self, model: Model, seen: dict[int, list[int]], hook: str, left: int) -> None:
        self.model, self.seen, self.hook, self.left = model, seen, hook, left

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self.seen[state.global_step] = list(self.model.seen)
        self.model.seen.clear()
        self._break("on_step_end")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step."""
        self._break("on_train_end")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before what the integration does there, so a checkpoint on the disk may be newer than one in memory."""
        self._break("on_step_begin")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """In a log."""
        self._break("on_log")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """In an evaluation."""
        self._break("on_prediction_step")

    def _break(self, hook: str) -> None:
        self.left -= hook == self.hook
        if hook == self.hook and self.left == 0:
            raise Broken


def trained(folder: Path, build: Build, hook: str = "", left: int = 0) -> dict[str, Any]:
    """Train, and once more after a fault in a hook's call of this number; return what has come out."""
    Kept.kept = None
    seen: dict[int, list[int]] = {}
    for iteration in range(2):
        call: Any = Call()
        call.iteration = iteration
        model = Model()
        trainer = build(folder, model)
        # Callbacks that were added before see a step first.
        trainer.add_callback(Breaking(model, seen, hook if iteration == 0 else "", left))
        with contextlib.suppress(Broken):
            result = huggingface.train(trainer, call)
            assert (iteration == 1) == bool(hook), "the fault was not reached"
            break
    times = ("runtime", "samples_per_second", "steps_per_second", "train_loss")
    return {
        "weights": [one.tolist() for one in model.parameters()],
        "optimizer": repr(trainer.optimizer.state_dict()),
        "schedule": repr(trainer.lr_scheduler.state_dict()),
        "logs": [
            {name: one for name, one in log.items() if not name.endswith(times)} for log in trainer.state.log_history
        ],
        "loss": result.training_loss,
        "random": torch.get_rng_state().tolist(),
        "seen": seen,
        "step": trainer.state.global_step,
        "callbacks": [one.count for one in trainer.callback_handler.callbacks if isinstance(one, Counting)],
    }


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]  # the package brings no types here
    """Has a state of its own."""

    def __init__(self) -> None:
        self.count = {"epochs begun": 0, "steps begun": 0, "steps": 0, "epochs": 0}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self.count["epochs begun"] += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self.count["steps begun"] += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self.count["steps"] += state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        self.count["epochs"] += 1

    def state(self) -> dict[str, Any]:
        """Return it."""
        return {"args": {}, "attributes": {"count": dict(self.count)}}


class Freezing(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Freezes the first layer for some steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Freeze or thaw."""
        if state.global_step in (2, 7):
            model.layers[0].requires_grad_(state.global_step == 7)


class Thinning(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Drops more, and counts in the model."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Change both."""
        model.num_steps = state.global_step
        if state.global_step == 4:
            model.layers[1].p = 0.6


class Clipping(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Clips more from some step on, and counts without a state."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count and clip."""
        self.num_steps += 1
        if state.global_step == 4:
            args.max_grad_norm = 0.01


class Accumulating(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Lets later steps have more batches."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say so."""
        if state.global_step == 4:
            args.gradient_accumulation_steps = 2


def building(callbacks: Callable[[], list[Any]] = list, **options: Any) -> Build:
    """Return what builds a Trainer with these options."""
    usual: dict[str, Any] = {
        "max_steps": 12,
        "logging_steps": 4,
        "learning_rate": 0.05,
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH,
    }

    def build(folder: Path, model: Model) -> Trainer:
        args = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            **{**usual, **options},
        )
        return Trainer(model, args, train_dataset=SAMPLES, eval_dataset=SAMPLES[:8], callbacks=callbacks())

    return build


def scheduled(rate: Any, schedule: Callable[[Any], Any]) -> Build:
    """Return what builds a Trainer with an optimizer and a schedule of its own."""

    def build(folder: Path, model: Model) -> Trainer:
        args = building()(folder, model).args
        optimizer = torch.optim.Adam(model.parameters(), lr=rate() if callable(rate) else rate)
        return Trainer(model, args, train_dataset=SAMPLES, optimizers=(optimizer, schedule(optimizer)))

    return build


class OneCycle(Trainer):  # type: ignore[misc]  # the package brings no types here
    """Makes a schedule of rates and momentum once it trains."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make it: in a new optimizer's groups it sets where both begin."""
        self.lr_scheduler: Any = OneCycleLR(optimizer or self.optimizer, 0.1, total_steps=num_training_steps + 1)
        return self.lr_scheduler


def one_cycle(folder: Path, model: Model) -> Trainer:
    """Return a Trainer with such a schedule."""
    trainer = building()(folder, model)
    trainer.__class__ = OneCycle
    return trainer


class Sooner(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Lets the training end after the ninth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say so once."""
        if state.global_step == 4:
            state.max_steps = 9


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
BY_EPOCH: dict[str, Any] = {**SAVED, "eval_strategy": "epoch"}
STOPPING: dict[str, Any] = {"max_steps": 60, "learning_rate": 0.5, **EVALUATED}


def patient() -> list[Any]:
    """End a training whose evaluations get no better."""
    return [EarlyStoppingCallback(3)]


@pytest.mark.parametrize(
    ("build", "hook", "left"),
    [
        pytest.param(building(), "on_step_end", 7, id="a log of steps before and after the fault"),
        pytest.param(building(**SAVED), "on_step_begin", 7, id="such a log, from a file"),
        pytest.param(building(gradient_accumulation_steps=2), "on_step_end", 7, id="such a log, of several batches"),
        pytest.param(building(lambda: [Counting()]), "on_step_end", 7, id="a callback's state"),
        pytest.param(building(lambda: [Counting()], **SAVED), "on_step_begin", 7, id="a callback's state, from a file"),
        pytest.param(
            building(lambda: [Counting()], **SAVED), "on_train_end", 1, id="a callback's state, from a file of the end"
        ),
        pytest.param(building(**BY_EPOCH), "on_prediction_step", 1, id="a fault in an evaluation after an epoch"),
        pytest.param(building(**BY_EPOCH), "on_prediction_step", 2, id="a fault in an evaluation after the last step"),
        pytest.param(
            building(**SAVED, logging_strategy="epoch"), "on_log", 1, id="a fault in a log after an epoch's last step"
        ),
        pytest.param(
            building(**{**EVALUATED, "save_strategy": "best", "logging_strategy": "epoch"}, learning_rate=0.01),
            "on_log",
            6,
            id="such a fault, after the best file",
        ),
        pytest.param(
            scheduled(0.05, lambda one: MultiStepLR(one, [2, 5, 5, 9])),
            "on_step_end",
            3,
            id="a schedule whose state has numbers as keys",
        ),
        pytest.param(
            scheduled(lambda: torch.tensor(0.05), lambda one: MultiStepLR(one, [2, 9])),
            "on_step_end",
            3,
            id="a rate that is a tensor",
        ),
        pytest.param(one_cycle, "on_step_end", 7, id="a schedule of momentum that is made when it trains"),
        pytest.param(building(lambda: [Sooner()]), "on_step_end", 6, id="an end that a callback has set"),
        pytest.param(building(lambda: [Sooner()], **SAVED), "on_step_begin", 7, id="such an end, from a file"),
        pytest.param(building(lambda: [Freezing()]), "on_step_end", 5, id="frozen parameters"),
        pytest.param(building(lambda: [Freezing()], **SAVED), "on_step_begin", 5, id="frozen parameters, from a file"),
        pytest.param(building(lambda: [Thinning()]), "on_step_end", 6, id="the rate of a dropout"),
        pytest.param(building(lambda: [Thinning()], **SAVED), "on_step_begin", 6, id="such a rate, from a file"),
        pytest.param(building(lambda: [Clipping()]), "on_step_end", 6, id="an argument that a callback has changed"),
        pytest.param(building(lambda: [Clipping()], **SAVED), "on_step_begin", 7, id="such an argument, from a file"),
        pytest.param(building(patient, **STOPPING), "on_step_end", 6, id="patience"),
        pytest.param(
            building(patient, **STOPPING, **SAVED, load_best_model_at_end=True),
            "on_prediction_step",
            5,
            id="a fault in an evaluation",
        ),
        pytest.param(
            building(patient, eval_on_start=True, **STOPPING), "on_step_end", 6, id="an evaluation at the start"
        ),
        pytest.param(building(**SAVED), "on_train_end", 1, id="a file after the last step"),
        pytest.param(building(save_strategy="epoch"), "on_train_end", 1, id="a fault after the last step"),
        pytest.param(
            building(max_steps=-1, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch"),
            "on_train_end",
            1,
            id="a file after the last epoch",
        ),
        pytest.param(
            building(patient, **STOPPING, **SAVED, load_best_model_at_end=True),
            "on_train_end",
            1,
            id="a file after a callback has ended the training",
        ),
        pytest.param(building(**SAVED, save_only_model=True), "on_step_begin", 7, id="a file without an optimizer"),
        pytest.param(building(dataloader_num_workers=2, **EVALUATED), "on_step_end", 7, id="workers of the loader"),
    ],
)
def test_trainer_goes_on_as_if_there_had_been_no_fault(tmp_path: Path, build: Build, hook: str, left: int) -> None:
    want = trained(tmp_path / "calm", build)
    got = trained(tmp_path / "broken", build, hook, left)
    assert got == want


def test_what_a_model_has_changed_and_has_not_again_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A count may be one of this process alone, so it is not put back."""
    trained(tmp_path, building(lambda: [Thinning()]), "on_step_end", 6)
    assert "changed in training and not restored: names=1: num_steps; keep in a checkpoint" in caplog.text


def test_what_a_callback_keeps_without_a_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, building(lambda: [Clipping(), Counting()]), "on_step_end", 6)
    assert "callbacks begin anew with what they had changed: names=3: Clipping.num_steps, Breaking" in caplog.text


class Stream(IterableDataset[Any]):
    """All samples, in their order, without a length."""

    def __iter__(self) -> Any:
        """Begin anew."""
        return iter(SAMPLES)


class Ending(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Ends the first epoch early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say so."""
        control.should_epoch_stop = state.global_step == 4


class Weighing(Trainer):  # type: ignore[misc]  # the package brings no types here
    """Draws its samples."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * len(SAMPLES), len(SAMPLES))


def with_data(folder: Path, model: Model) -> Trainer:
    """Return a Trainer that has samples for less steps than it shall make."""
    trainer = building()(folder, model)
    trainer.train_dataset = Stream()
    return trainer


def with_weights(folder: Path, model: Model) -> Trainer:
    """Return a Trainer with a sampler of its own."""
    trainer = building()(folder, model)
    trainer.__class__ = Weighing
    return trainer


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        pytest.param(building(ignore_data_skip=True), "ignore_data_skip: want False, got True", id="no skipping"),
        pytest.param(
            building(dataloader_num_workers=1, dataloader_persistent_workers=True),
            "dataloader_persistent_workers: want False, got True",
            id="workers that stay",
        ),
        pytest.param(with_weights, "train_dataloader: want .* got one of WeightedRandomSampler", id="weights"),
        pytest.param(
            building(accelerator_config={"dispatch_batches": True}),
            "accelerator_config: want dispatch_batches=False, got True; .* trained twice",
            id="batches that rank 0 hands out",
        ),
        pytest.param(with_data, r"epoch: .* got an end after 0\.8333 epochs at step 10; .* __len__", id="a stream"),
        pytest.param(
            building(lambda: [Accumulating()]),
            r"samples of a step: want 4, as when the training began, got 8; .* gradient_accumulation_steps",
            id="longer steps",
        ),
        pytest.param(
            building(lambda: [Ending()]), r"epoch: .* got an end after 0\.4000 epochs at step 4", id="a shorter epoch"
        ),
    ],
)
def test_data_whose_place_a_step_does_not_say_are_refused(tmp_path: Path, build: Build, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        trained(tmp_path, build)


class Late(Trainer):  # type: ignore[misc]  # the package brings no types here
    """Makes an optimizer of its own when the schedule is made, as with create_optimizer_and_scheduler."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make both."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return super().create_scheduler(num_training_steps, self.optimizer)


def with_late_optimizer(folder: Path, model: Model) -> Trainer:
    """Return a Trainer whose optimizer is made when it trains."""
    trainer = building()(folder, model)
    trainer.__class__ = Late
    return trainer


def test_optimizer_to_which_nothing_would_be_restored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want one whose create_optimizer makes the optimizer, got one .* later"):
        trained(tmp_path, with_late_optimizer)


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_epoch_of_another_number_of_steps_is_refused_after_a_fault(tmp_path: Path, save_strategy: str) -> None:
    """A step has as many samples, but without its rest an epoch of such batches has one step more."""
    usual: dict[str, Any] = {"dataloader_drop_last": True, "save_strategy": save_strategy, "save_steps": 2}
    usual["max_steps"] = 9

    def build(folder: Path, model: Model) -> Trainer:
        size = 2 if builds else 6
        builds.append(size)
        options: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 12 // size}
        return building(**options, **usual)(folder, model)

    builds: list[int] = []
    with pytest.raises(ValueError, match=r"steps of an epoch: want 3, as in the checkpoint, got 4; .*drop_last"):
        trained(tmp_path, build, "on_step_begin" if save_strategy == "steps" else "on_step_end", 5)
    assert builds == [6, 2]
