"""What a LightningModule, callbacks and a LightningDataModule add to a checkpoint of Lightning's by hooks of theirs.

In memory the weights have a place of their own, so hooks get a checkpoint to which they can add, and no more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

_BASES = ("Callback", "CheckpointHooks", "LightningDataModule")
"""Classes of Lightning whose hooks do nothing."""


def collect(trainer: Any, own: Any) -> dict[str, Any]:
    """Return what hooks add, but those of the callback `own`. Raises ValueError for what could not be brought back."""
    module, added = trainer.lightning_module, {}
    hooks: list[tuple[Any, Callable[[dict[str, Any]], None]]] = [
        (one, partial(one.on_save_checkpoint, trainer, module))
        for one in trainer.callbacks
        if one is not own and _has(one, "on_save_checkpoint")
    ]
    if _has(module, "on_save_checkpoint"):
        hooks.append((module, module.on_save_checkpoint))
    if hooks:
        checkpoint = _checkpoint(trainer)
        before = dict(checkpoint)
        for one, hook in hooks:
            hook(checkpoint)
            _refuse_changes(before, checkpoint, one)
        added = {name: value for name, value in checkpoint.items() if name not in before}
    data = trainer.datamodule
    return {"added": added, "data": data.state_dict() if data is not None and _has(data, "state_dict") else {}}


def restore(trainer: Any, own: Any, collected: dict[str, Any]) -> None:
    """Give it back, as Lightning does: the data, the module, callbacks."""
    if collected["data"]:
        trainer.datamodule.load_state_dict(collected["data"])
    module = trainer.lightning_module
    hooks = [module.on_load_checkpoint] if _has(module, "on_load_checkpoint") else []
    hooks += [
        partial(one.on_load_checkpoint, trainer, module)
        for one in trainer.callbacks
        if one is not own and _has(one, "on_load_checkpoint")
    ]
    checkpoint = {**_checkpoint(trainer), **collected["added"]} if hooks else {}
    for hook in hooks:
        hook(checkpoint)


def _has(one: Any, hook: str) -> bool:
    """Return whether it has this hook of its own."""
    found = next((base for base in type(one).__mro__ if hook in vars(base)), None)
    return hook in vars(one) or (found is not None and found.__name__ not in _BASES)


def _checkpoint(trainer: Any) -> dict[str, Any]:
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": trainer.lightning_module.state_dict(),
        **{"loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []},
    }


def _refuse_changes(before: dict[str, Any], after: dict[str, Any], one: Any) -> None:
    if changed := [name for name, value in before.items() if after.get(name) is not value]:
        raise ValueError(
            f"{type(one).__name__}.on_save_checkpoint: want one that adds to the checkpoint, got one that replaces "
            f"{', '.join(changed)}: weights in memory are those that are trained, and it would begin anew after a fault"
        )
