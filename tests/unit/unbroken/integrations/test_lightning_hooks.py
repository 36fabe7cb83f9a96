"""What hooks of a LightningModule, of callbacks and of data add comes back; nothing here imports Lightning."""

from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.integrations import lightning_hooks


class Callback:
    """As Lightning's: its hooks do nothing."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        raise AssertionError("Lightning's own is not called")

    on_load_checkpoint = on_save_checkpoint


class Counting(Callback):
    """Has a number of its own, in a checkpoint and nowhere else."""

    def __init__(self, count: int) -> None:
        self.count = count

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


class Module:
    """Notes in which step it was saved, and takes a name out of its weights."""

    def __init__(self, note: str = "") -> None:
        self.note = note

    def state_dict(self) -> dict[str, int]:
        return {"weight": 1}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"] = f"saved in step {checkpoint['global_step']}"
        del checkpoint["state_dict"]["weight"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class Data:
    """Has a state."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_trainer(module: Any, data: Any, *callbacks: Any) -> Any:
    return SimpleNamespace(
        callbacks=[Callback(), *callbacks], lightning_module=module, datamodule=data, current_epoch=0, global_step=7
    )


def test_what_hooks_add_comes_back() -> None:
    own = Counting(99)
    saved = lightning_hooks.collect(make_trainer(Module(), Data(5), own, Counting(3)), own)
    assert saved == {"added": {"count": 3, "note": "saved in step 7"}, "data": {"at": 5}}
    module, data, counting = Module(), Data(0), Counting(0)
    lightning_hooks.restore(make_trainer(module, data, own, counting), own, saved)
    assert (module.note, data.at, counting.count, own.count) == ("saved in step 7", 5, 3, 99)


def test_without_hooks_nothing_is_added() -> None:
    module = SimpleNamespace(state_dict=lambda: pytest.fail("weights are not gathered"))
    trainer = make_trainer(module, None)
    saved = lightning_hooks.collect(trainer, None)
    assert saved == {"added": {}, "data": {}}
    lightning_hooks.restore(trainer, None, saved)
