"""What a training of Hugging Face's Trainer is made of, and its Trainer does not put back by itself.

callbacks     what an ExportableState exports, such as the patience that EarlyStoppingCallback has left
loss          the sum since the last log, else a log would leave out the steps before a fault
frozen        the parameters that a callback has frozen meanwhile
values        of modules, such as the adapter in use, or the rate of a dropout
options       TrainingArguments that a callback has changed, and the names of what callbacks keep by themselves
epoch         its number of steps, which must stay: a step would mean another place in the data
groups        of parameters: a schedule, which is made later, sets rates in them, and momentum or betas
max_steps     the end that a callback has set meanwhile
flos          floating-point operations that are not in the state yet
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerControl

from unbroken.integrations import text_states
from unbroken.integrations.callback_values import CallbackValues, tell_lost
from unbroken.integrations.module_values import ModuleValues, PlainValues

MAX_LOGS = 1_000
"""Entries of the Trainer's log history in a checkpoint in memory: the newest."""


class RunningLoss:
    """The sum of losses since the last log, as the Trainer adds them up, of this rank."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sum = torch.tensor(0.0)
        self._since = 0
        self._is_restored = False

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add up the losses of the Trainer's steps."""
        training_step = self._trainer.training_step

        def step(*args: Any, **kwargs: Any) -> Any:
            return self._added(training_step(*args, **kwargs))

        # An attribute of this one object.
        self._trainer.training_step = step
        try:
            yield
        finally:
            del self._trainer.training_step

    def state(self) -> dict[str, Any]:
        """Return it, after a step."""
        self._forget_logged()
        total = float(getattr(self._trainer, "_total_loss_scalar", 0.0))
        return {"sum": float(self._sum), "since": self._since, "total": total}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from it, when a training begins."""
        trainer = self._trainer
        trainer._globalstep_last_logged = self._since = int(state["since"])
        trainer._total_loss_scalar = float(state["total"])
        # Newer Trainers divide the total by the steps of this call.
        trainer._initial_global_step = 0
        self._sum = torch.tensor(float(state["sum"]))
        self._is_restored = True

    def close(self) -> None:
        """Let the total have it, where no step follows."""
        self._trainer._total_loss_scalar += float(self._sum)

    def _added(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the Trainer is to add: all of it in the first step, and the loss of the step afterwards."""
        trainer = self._trainer
        self._forget_logged()
        before = self._sum = self._sum.to(loss.device)
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            # As the Trainer does.
            self._sum = before + before / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        else:
            self._sum = before + loss
        if not self._is_restored:
            return loss
        self._is_restored = False
        return self._sum

    def _forget_logged(self) -> None:
        # There is none before a training begins.
        logged = getattr(self._trainer, "_globalstep_last_logged", 0)
        if self._since != logged:
            self._since = logged
            self._sum = torch.tensor(0.0)


class Begun:
    """What callbacks may change meanwhile, as it is when a training begins."""

    def __init__(self, trainer: Trainer) -> None:
        self.max_steps = trainer.state.max_steps
        self.values = ModuleValues(trainer.model)
        self._args = PlainValues(trainer.args)
        self._kept = CallbackValues(trainer.callback_handler.callbacks, _has_state, trainer.model)

    def options(self, trainer: Trainer) -> dict[str, Any]:
        """Return what `put_back` takes of it, for JSON."""
        args = text_states.for_json(self._args.changed(trainer.args))
        return {"args": args, "lost": self._kept.changed(trainer.callback_handler.callbacks)}


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState)


def read(trainer: Trainer, loss: RunningLoss, begun: Begun | None) -> dict[str, Any]:
    """Return what `put_back` takes, for JSON. `begun`: None before a training begins."""
    last = trainer.state.max_steps
    return {
        # Not the planned one, which TrainingArguments say anew.
        "max_steps": None if begun is None or last == begun.max_steps else last,
        "loss": loss.state(),
        "flos": float(trainer.current_flos),
        "frozen": [name for name, one in trainer.model.named_parameters() if not one.requires_grad],
        "values": {} if begun is None else begun.values.changed(trainer.model),
        "options": None if begun is None else begun.options(trainer),
        "epoch": steps_of_epoch(trainer),
    }


def steps_of_epoch(trainer: Trainer) -> int | None:
    """Return how many steps the Trainer counts in an epoch; None where the data have no length."""
    try:
        num_batches = len(trainer.callback_handler.train_dataloader)
    except TypeError:
        return None
    steps: int = math.ceil(num_batches / trainer.args.gradient_accumulation_steps)
    return max(steps, 1)


def no_epoch_begins(trainer: Trainer) -> bool:
    """Return whether the Trainer, as it is when a training begins, is behind the last epoch."""
    steps = steps_of_epoch(trainer) or trainer.state.max_steps
    return bool(trainer.state.global_step // max(steps, 1) >= trainer.state.num_train_epochs)


def put_back(trainer: Trainer, loss: RunningLoss, begun: Begun, saved: dict[str, Any]) -> None:
    """Put it back, once the Trainer has wrapped its model: what is frozen now may be trained later.

    Raises ValueError where the step's number would mean another place in the data.
    """
    before, now = saved.get("epoch"), steps_of_epoch(trainer)
    if before is not None and now is not None and before != now:
        raise ValueError(
            f"steps of an epoch: want {before}, as in the checkpoint, got {now}; the step's number would mean another "
            "place in the data: let the data set be as long as it was, and with dataloader_drop_last let "
            "gradient_accumulation_steps be the same in each world"
        )
    loss.restore(saved["loss"])
    if (last := saved.get("max_steps")) is not None:
        trainer.state.max_steps = last
    trainer.current_flos = saved["flos"]
    frozen = set(saved["frozen"])
    for name, one in trainer.model.named_parameters():
        one.requires_grad_(name not in frozen)
    begun.values.put_back(trainer.model, saved.get("values", {}))
    if (options := saved.get("options")) is not None:
        vars(trainer.args).update(text_states.from_json(options["args"]))
        tell_lost(options["lost"], "let it follow from state.global_step, or make them an ExportableState")


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what groups of parameters have beside these."""
    named = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(named)


def put_back_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Set it. A tensor stays the one that compiled code knows."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for name, value in values.items():
            if isinstance(now := group.get(name), torch.Tensor):
                now.copy_(torch.as_tensor(value))
            else:
                group[name] = value


def exported(trainer: Trainer) -> dict[str, Any]:
    """Return the Trainer's state as its own checkpoints have it."""
    logs = trainer.state.log_history
    state = dataclasses.asdict(dataclasses.replace(trainer.state, log_history=logs[-MAX_LOGS:]))
    found: dict[str, list[Any]] = {}
    for one in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(one, ExportableState):
            found.setdefault(type(one).__name__, []).append(one.state())
    state["stateful_callbacks"] = {name: all_[0] if len(all_) == 1 else all_ for name, all_ in found.items()}
    return state


def put_back_callbacks(trainer: Trainer, state: dict[str, Any]) -> None:
    """Set what callbacks have exported."""
    callbacks: dict[str, list[Any]] = {}
    for one in trainer.callback_handler.callbacks:
        if isinstance(one, ExportableState):
            callbacks.setdefault(type(one).__name__, []).append(one)
    for name, ones in callbacks.items():
        saved = _saved_of(state, name)
        # The Trainer appends to a list at each of its checkpoints.
        for one, its in zip(ones, saved[-len(ones) :], strict=False):
            for attribute, value in its.get("attributes", {}).items():
                setattr(one, attribute, copy.deepcopy(value))


def has_ended(state: dict[str, Any]) -> bool:
    """Return whether something has ended the training at this checkpoint, before its last step."""
    control = _saved_of(state, TrainerControl.__name__)
    stopped = bool(control and control[-1].get("args", {}).get("should_training_stop"))
    return stopped and state["global_step"] < state["max_steps"]


def _saved_of(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    saved = state.get("stateful_callbacks", {}).get(name, [])
    return saved if isinstance(saved, list) else [saved]
