"""What hooks of a LightningModule, of callbacks and of data add comes back; nothing here imports Lightning."""

from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.integrations import lightning_hooks


class Callback:
    """As Lightning's: its hooks do nothing."""

    state_key = "callback"

    def state_dict(self) -> dict[str, Any]:
        return {}

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


def make_trainer(module: Any, data: Any, *callbacks: Any) -> Any:
    return SimpleNamespace(
        callbacks=[Callback(), *callbacks],
        lightning_module=module,
        datamodule=data,
        current_epoch=0,
        global_step=7,
        fit_loop=SimpleNamespace(state_dict=dict),
        optimizers=[],
        lr_scheduler_configs=[],
    )


class Averaging(Callback):
    """Puts other weights into the checkpoint, and those that are trained beside them."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["trained"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {"weight": 0.5}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.given = {name: checkpoint[name] for name in ("trained", "state_dict")}


def test_what_hooks_add_comes_back() -> None:
    own = Counting(99)
    saved = lightning_hooks.collect(make_trainer(Module(), None, own, Counting(3)), own)
    assert saved == {"added": {"count": 3, "note": "saved in step 7"}, "weights": []}
    module, counting = Module(), Counting(0)
    lightning_hooks.restore(make_trainer(module, None, own, counting), own, saved)
    assert (module.note, counting.count, own.count) == ("saved in step 7", 3, 99)


def test_what_takes_the_place_of_the_weights_comes_back_and_they_are_kept_once() -> None:
    module: Any = SimpleNamespace(state_dict=lambda: {"weight": 1})
    saved = lightning_hooks.collect(make_trainer(module, None, Averaging()), None)
    assert saved == {"added": {"state_dict": {"weight": 0.5}}, "weights": ["trained"]}
    averaging = Averaging()
    lightning_hooks.restore(make_trainer(module, None, averaging), None, saved)
    assert averaging.given == {"trained": {"weight": 1}, "state_dict": {"weight": 0.5}}


def test_data_has_a_state_where_there_is_a_module_of_data() -> None:
    assert lightning_hooks.data_state(make_trainer(Module(), Data(5))) == {"at": 5}
    assert lightning_hooks.data_state(make_trainer(Module(), None)) == {}


def test_without_hooks_nothing_is_added() -> None:
    module = SimpleNamespace(state_dict=lambda: pytest.fail("weights are not gathered"))
    trainer = make_trainer(module, None)
    saved = lightning_hooks.collect(trainer, None)
    assert saved == {}
    lightning_hooks.restore(trainer, None, saved)
