"""Trainings of Hugging Face's Trainer with options that are drawn from a seed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.integrations.random_faults import Hooks, Iteration, count_hooks, tell_hooks
from tests.integrations.test_resumed_trainers import Model, building
from tests.integrations.test_trainers import Call
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from unbroken.integrations import huggingface

REFUSALS = (ValueError,)
"""What is raised for options that cannot be trained with."""
HAS_WHOLE_FILES = True
"""Whether a training goes on from files of the framework alone as if nothing had been."""
HOOKS = (
    "on_epoch_begin",
    "on_epoch_end",
    "on_evaluate",
    "on_log",
    "on_prediction_step",
    "on_save",
    "on_step_begin",
    "on_step_end",
    "on_train_end",
)
TIMES = ("runtime", "samples_per_second", "steps_per_second", "train_loss")
SCHEDULES: dict[str, dict[str, float]] = {
    "linear": {},
    "cosine": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {},
    "polynomial": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": 0.001},
    "warmup_stable_decay": {"num_decay_steps": 3},
    "reduce_lr_on_plateau": {},
}


def options(chance: random.Random) -> dict[str, Any]:
    """Return options of TrainingArguments; `stops_early` and `breaks_last` are ours."""
    schedule = chance.choice(list(SCHEDULES))
    found: dict[str, Any] = {
        "save_strategy": chance.choice(("no", "steps", "steps", "epoch", "best")),
        "eval_strategy": chance.choice(("no", "steps", "epoch")),
        "logging_strategy": chance.choice(("steps", "epoch")),
        "save_steps": chance.choice((1, 2, 3, 5, 10)),
        "eval_steps": chance.choice((1, 2, 3, 5, 10)),
        "logging_steps": chance.choice((1, 2, 3, 4, 7)),
        "gradient_accumulation_steps": chance.choice((1, 1, 2, 3, 4)),
        "per_device_train_batch_size": chance.choice((3, 4, 7)),
        "dataloader_drop_last": chance.random() < 0.3,
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": SCHEDULES[schedule],
        "warmup_steps": chance.choice((0, 3)),
        "save_total_limit": chance.choice((None, None, 1, 2)),
        "logging_first_step": chance.random() < 0.5,
        "eval_on_start": chance.random() < 0.3,
        "max_steps": chance.choice((7, 12, 20, 23)),
        "stops_early": chance.random() < 0.3,
        "breaks_last": chance.random() < 0.4,
    }
    if chance.random() < 0.5:
        found.update(max_steps=-1, num_train_epochs=chance.choice((1, 2, 3)))
    if found["eval_strategy"] == "no":
        found["stops_early"] = False
        found["save_strategy"] = "no" if found["save_strategy"] == "best" else found["save_strategy"]
        found["lr_scheduler_type"] = "linear" if schedule == "reduce_lr_on_plateau" else schedule
        return found
    found["metric_for_best_model"] = "loss"
    if found["stops_early"]:
        found["learning_rate"] = 0.5
    is_saved_then = found["save_strategy"] != "steps" or found["save_steps"] % found["eval_steps"] == 0
    if found["save_strategy"] in (found["eval_strategy"], "best") and is_saved_then:
        found["load_best_model_at_end"] = chance.random() < 0.5
    return found


class Breaking(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Tells of each call of a hook, which may raise."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks


class Noting(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """Notes what each step has seen, by its number."""

    def __init__(self, model: Model, seen: dict[int, list[int]]) -> None:
        self.model, self.seen = model, seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note it."""
        self.seen[state.global_step] = sorted(self.model.seen)
        self.model.seen.clear()


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]  # the package brings no types here
    """Counts calls of hooks, but for those that a fault makes come once more."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        """Return what checkpoints have of it."""
        return {"args": {}, "attributes": {"counts": dict(self.counts)}}


tell_hooks(Breaking, HOOKS)
count_hooks(Counting, ("on_step_begin", "on_step_end", "on_evaluate", "on_log", "on_epoch_begin", "on_epoch_end"))


def training(folder: Path, chosen: dict[str, Any]) -> Iteration:
    """Return an iteration of the training with these options."""
    ours = ("stops_early", "breaks_last")
    callbacks: Callable[[], list[Any]] = (lambda: [EarlyStoppingCallback(2)]) if chosen["stops_early"] else list
    build = building(callbacks, **{name: value for name, value in chosen.items() if name not in ours})
    seen: dict[int, list[int]] = {}

    def iteration(number: int, hooks: Hooks) -> dict[str, Any]:
        call: Any = Call()
        call.iteration = number
        model = Model()
        trainer = build(folder, model)
        counting, breaking = Counting(), Breaking(hooks)
        for one in (counting, Noting(model, seen)):
            trainer.add_callback(one)
        if chosen["breaks_last"]:
            _add_behind(trainer, breaking)
        else:
            trainer.add_callback(breaking)
        result = huggingface.train(trainer, call)
        return {**_come_out(trainer), "loss": result.training_loss, "seen": dict(seen), "counts": counting.counts}

    return iteration


def _add_behind(trainer: Trainer, last: TrainerCallback) -> None:
    """Add it behind the next callback that is added, which is the integration's."""
    add = trainer.add_callback

    def add_both(callback: Any) -> None:
        add(callback)
        add(last)

    # An attribute of this one object.
    trainer.add_callback = add_both


def _come_out(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state
    return {
        "weights": [one.tolist() for one in trainer.model.parameters()],
        "optimizer": repr(trainer.optimizer.state_dict()),
        "schedule": repr(trainer.lr_scheduler.state_dict()),
        "logs": [{name: one for name, one in log.items() if not name.endswith(TIMES)} for log in state.log_history],
        "random": torch.get_rng_state().tolist(),
        "step": state.global_step,
        "epoch": state.epoch,
        "best": (state.best_metric, state.best_global_step),
        "operations": state.total_flos,
    }
