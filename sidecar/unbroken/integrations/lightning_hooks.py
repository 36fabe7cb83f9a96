"""What hooks of a LightningModule, of callbacks and of a LightningDataModule add to a checkpoint of Lightning's.

A checkpoint in memory has its own parts. The hooks are called with what Lightning would give them, and what they add to
it, or put in the place of what is there, is kept; `restore` gives it back.
"""

from collections.abc import Sequence
from typing import Any

from unbroken.integrations.callback_values import CallbackValues, tell_lost

_WEIGHTS = "state_dict"
_HOOKS = ("on_save_checkpoint", "on_load_checkpoint")
_BASES = ("Callback", "CheckpointHooks")
"""Classes of Lightning whose hooks do nothing."""

CHANGE_WHAT_TRAINS = ("StochasticWeightAveraging", "BaseFinetuning", "ModelPruning")
"""Callbacks that add parameters, groups of them or schedules while the training goes on."""

TRY_BEFORE = ("LearningRateFinder", "BatchSizeFinder")
"""Callbacks that train for a while to find an option, each time when `fit` begins."""

OPTIONS = ("gradient_clip_val", "check_val_every_n_epoch", "val_check_batch")
"""Of a Trainer, which a training looks at in each step or epoch, and callbacks may set."""
_NUMBERS = (int, float, type(None))


class TrainerOptions:
    """These, and what callbacks keep without a state, as a training begins."""

    def __init__(self, trainer: Any) -> None:
        self._begun = {name: getattr(trainer, name) for name in OPTIONS}
        self._kept = CallbackValues(trainer.callbacks, _has_state, trainer.lightning_module)

    def changed(self, trainer: Any) -> dict[str, Any]:
        """Return what is another one now, for `put_back`."""
        now = {name: getattr(trainer, name) for name in OPTIONS}
        others = {name: one for name, one in now.items() if one != self._begun[name] and type(one) in _NUMBERS}
        return {"trainer": others, "lost": self._kept.changed(trainer.callbacks)}


def put_back(trainer: Any, changed: dict[str, Any]) -> None:
    """Set the options, and name what callbacks have not again."""
    vars(trainer).update(changed["trainer"])
    tell_lost(changed["lost"], "let it follow from trainer.global_step, or give them state_dict and load_state_dict")


def refuse(callbacks: Sequence[Any]) -> None:
    """Raise ValueError for callbacks after which a new Trainer has no place for what was saved, or other options."""
    for one in callbacks:
        names = {each.__name__ for each in type(one).__mro__}
        if names & set(TRY_BEFORE):
            raise ValueError(
                "Trainer(callbacks=...): want none that tries options out when training begins, got "
                f"{type(one).__name__}; after a fault it would do so again, in the middle of the training: find them "
                "in a job of their own"
            )
        if names & set(CHANGE_WHAT_TRAINS):
            raise ValueError(
                f"Trainer(callbacks=...): want none that adds parameters or schedules in mid-training, got "
                f"{type(one).__name__}; a new Trainer has no place for them after a fault"
            )


LEFT_OUT = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What a ModelCheckpoint goes on from, and does not take from its own state."""


def of_files(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return what each ModelCheckpoint leaves out, by the callback's key."""
    return {
        one.state_key: {name: getattr(one, name) for name in LEFT_OUT if hasattr(one, name)}
        for one in callbacks
        if _writes_files(one)
    }


def put_back_files(callbacks: Sequence[Any], kept: dict[str, dict[str, Any]]) -> None:
    """Set it."""
    for one in callbacks:
        if _writes_files(one):
            vars(one).update(kept.get(one.state_key, {}))


def without_folder(callbacks: Sequence[Any]) -> list[Any]:
    """Return each ModelCheckpoint that chooses its folder itself, once it is set up: that of the logger's version."""
    return [one for one in callbacks if _writes_files(one) and one.dirpath is None]


def put_back_folders(ones: Sequence[Any], states: dict[str, dict[str, Any]]) -> None:
    """Let each go on in the folder that it chose first, before it takes its state: another one's best it forgets."""
    for one in ones:
        one.dirpath = states.get(one.state_key, {}).get("dirpath", one.dirpath)


def _writes_files(one: Any) -> bool:
    return any(kind.__name__ == "ModelCheckpoint" for kind in type(one).__mro__)


def collect(trainer: Any, own: Any) -> dict[str, Any]:
    """Return what hooks add, but those of the callback `own`; empty without hooks. They may wait for other ranks."""
    callbacks = [one for one in trainer.callbacks if one is not own and _has_hooks(one)]
    module = trainer.lightning_module
    modules = [module] if _has_hooks(module) else []
    if not callbacks and not modules:
        return {}
    checkpoint = _checkpoint(trainer, own)
    given = dict(checkpoint)
    for one in callbacks:
        one.on_save_checkpoint(trainer, module, checkpoint)
    for one in modules:
        one.on_save_checkpoint(checkpoint)
    added = {name: value for name, value in checkpoint.items() if value is not given.get(name)}
    # The weights themselves are saved beside this.
    again = [name for name, value in added.items() if value is given[_WEIGHTS]]
    return {"added": {name: value for name, value in added.items() if name not in again}, "weights": again}


def restore(trainer: Any, own: Any, collected: dict[str, Any]) -> None:
    """Give the hooks what they had added, in the order of Lightning."""
    if not collected:
        return
    checkpoint = _checkpoint(trainer, own)
    weights = checkpoint[_WEIGHTS]
    checkpoint.update(collected["added"])
    checkpoint.update(dict.fromkeys(collected["weights"], weights))
    module = trainer.lightning_module
    if _has_hooks(module):
        module.on_load_checkpoint(checkpoint)
    for one in trainer.callbacks:
        if one is not own and _has_hooks(one):
            one.on_load_checkpoint(trainer, module, checkpoint)


class Validations:
    """How many batches validations have had: Lightning counts them, and numbers by that what they log in each batch.

    Its own counters say so only until it resumes: it believes that a checkpoint was taken before a validation that was
    due with it, and adds that one once more; of what numbers the logs it saves nothing.
    """

    def __init__(self, trainer: Any, kept: dict[str, Any]) -> None:
        self._loop = trainer.fit_loop.epoch_loop.val_loop
        self._kept = kept
        # A loader that Lightning makes anew then begins anew in a training without a fault, too.
        self._is_made_anew = bool(trainer.reload_dataloaders_every_n_epochs)

    @staticmethod
    def read(trainer: Any) -> dict[str, Any]:
        """Return what to keep."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        seen, made_in = dict(loop._seen_batches_per_dataloader), loop._last_val_dl_reload_epoch
        return {"progress": loop.batch_progress.state_dict(), "seen": seen, "made_in": made_in}

    def put_back(self) -> bool:
        """Set it before the first batch after a fault; return whether the first validation needs it once more."""
        if not self._kept:
            return False
        self._loop.batch_progress.load_state_dict(self._kept["progress"])
        self._loop._last_val_dl_reload_epoch = self._kept["made_in"]
        self.number_logs()
        return self._loop._combined_loader is None and not self._is_made_anew

    def number_logs(self) -> None:
        """Set the number of the next log. A validation that makes its loader first sets it to 0."""
        self._loop._seen_batches_per_dataloader.clear()
        self._loop._seen_batches_per_dataloader.update(self._kept["seen"])


def data_state(trainer: Any) -> dict[str, Any]:
    """Return the state of the LightningDataModule, if there is one and it has one."""
    module = getattr(trainer, "datamodule", None)
    return {} if module is None else dict(module.state_dict())


def _has_hooks(one: Any) -> bool:
    return any(_has(one, hook) for hook in _HOOKS)


def _has_state(one: Any) -> bool:
    return _has_hooks(one) or _has(one, "state_dict")


def _has(one: Any, hook: str) -> bool:
    """Return whether it has this hook of its own."""
    found = next((base for base in type(one).__mro__ if hook in vars(base)), None)
    return hook in vars(one) or (found is not None and found.__name__ not in _BASES)


def _checkpoint(trainer: Any, own: Any) -> dict[str, Any]:
    """Return what a hook finds in a checkpoint of Lightning's."""
    others = [one for one in trainer.callbacks if one is not own]
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        _WEIGHTS: dict(trainer.lightning_module.state_dict()),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {one.state_key: kept for one in others if (kept := one.state_dict())},
        "optimizer_states": [one.state_dict() for one in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
