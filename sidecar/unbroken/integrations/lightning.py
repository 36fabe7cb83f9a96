"""Lightning's Trainer: progress, checkpoints in memory, and the way back to them. Needs lightning.

A checkpoint is taken where the next batch begins: after the logs, validations and saves of the batch before it. So
what these draw from the random numbers is neither lost nor drawn twice. It is restored in `on_fit_start`, where groups,
model and optimizers are there, and Lightning has not yet restored what it read from a file of its own.
"""

import copy
import io
import logging
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from unbroken.integrations import versions

# Before anything of it is imported: other releases lack names.
versions.require("lightning", (2, 5), (2, 6))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from unbroken import inprocess, memory
from unbroken.integrations import (
    lightning_hooks,
    module_modes,
    one_training,
    random_numbers,
    text_states,
    whole_files,
)
from unbroken.integrations.module_values import ModuleValues
from unbroken.integrations.samples import GlobalBatches
from unbroken.integrations.waiting_gradients import WaitingGradients
from unbroken.memory.place import read_every

logger = logging.getLogger(__name__)

MAX_SKIPPED = 10
"""So many checkpoints may be left out of the memory, one after another, before a file of Lightning's is better."""

STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy")
"""Those whose checkpoints in memory were compared with an uninterrupted run."""


class Environment(TorchElasticEnvironment):  # type: ignore[misc]  # the package brings no types here
    """Tells Lightning which rank this process has in this iteration, also where hosts have ranks of unlike numbers."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Take any product: the world has as many ranks as the job has now."""


class WholeFiles(TorchCheckpointIO):  # type: ignore[misc]  # the package brings no types here
    """Lightning's own checkpoints, on a disk: once a save is over the file is there, whole, whatever ends.

    Lightning writes a file elsewhere (in TMPDIR) and moves it. To another file system that is a copy: a process that is
    killed leaves half of it under the name that training goes on from. Here it is written beside its place, to the disk
    and not to the page cache alone, read again, and renamed. What is no path of this host (`s3://...`) is written as
    before.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it. Raises OSError; a file that was there is as it was then."""
        target = _local_path(path)
        if target is None or storage_options is not None or target.is_dir():
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = io.BytesIO()
        torch.save(checkpoint, file)
        with file.getbuffer() as content:
            whole_files.write(target, content)


def _local_path(path: Any) -> Path | None:
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return None if "://" in text or "::" in text else Path(text)


def place(call: inprocess.CallWrapper, plugins: Sequence[Any] = (), strategy: Any = "ddp") -> dict[str, Any]:
    """Return what `Trainer(...)` has to know of this iteration: `Trainer(**place(call), ...)`.

    `plugins`: others that the Trainer shall have. Without a CheckpointIO among them Lightning's own checkpoints are
    written by `WholeFiles`. `strategy`: a kind of DDP; with `ddp_find_unused_parameters_true` more than two ranks add
    gradients up in the same order after a restart as before.
    """
    files = [] if any(isinstance(one, CheckpointIO) for one in plugins) else [WholeFiles()]
    world_size = call.state.active_world_size or 1
    devices = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    return {
        **{"strategy": strategy, "devices": devices, "num_nodes": max(world_size // devices, 1)},
        **{"plugins": [Environment(), *files, *plugins], "use_distributed_sampler": False},
    }


class Resume(Callback):  # type: ignore[misc]  # the package brings no types here
    """Takes `Trainer.fit` back to the newest checkpoint that all ranks can read: `Trainer(callbacks=[Resume(call)])`.

    Make it, Trainer, model and data inside the wrapped function. Where `fit` is given a `ckpt_path`, that checkpoint is
    taken if the memory has none that is as new.

    Args:
        call: of the wrapped function.
        batches: what the training data's loader has as `batch_sampler`. `fit` refuses to train without.
        every: batches between two checkpoints in memory; None: as the job says, else 1.

    `fit` raises ValueError for what cannot be resumed exactly, with what to change.
    """

    def __init__(
        self, call: inprocess.CallWrapper, *, batches: GlobalBatches | None = None, every: int | None = None
    ) -> None:
        self._call = call
        self._batches = batches
        self._every = read_every() if every is None else every
        self._from_file = _FromFile()
        self._checkpoints = memory.Checkpointer(every=self._every, disk=self._from_file)
        self._at_moves = memory.Checkpointer(every=1)
        self._trainer: Any = None
        self._begun_at = 0
        self._in_memory: int | None = None
        """Batches of the newest checkpoint in memory; None without, and where more than a few were left out since."""
        self._num_skipped = 0
        """Those that were due and left out since."""
        self._random: Any = None
        self._waiting: WaitingGradients | None = None
        self._metrics: dict[str, Any] | None = None
        """What callbacks and schedules looked at before; None where nothing is restored, or it has none."""
        self._modes: dict[str, Any] | None = None
        """Which parts of the module trained; None as above."""
        self._values: ModuleValues | None = None
        """Those of the module as training begins; None before."""
        self._changed: Any = None
        """Which of them were others; None as above."""
        self._options: lightning_hooks.TrainerOptions | None = None
        """What callbacks may change, as training begins; None before."""
        self._changed_options: dict[str, Any] | None = None
        """What they had changed; None where nothing is restored."""
        self._validations: lightning_hooks.Validations | None = None
        """What they have counted, as restored; None once it is put back."""
        self._num_fetched = 0
        """Batches that a module which takes them by itself had taken when this one began."""
        self._accumulates = 1
        """Batches of one step, as the epoch that is restored has begun."""
        self._num_stepped: dict[str, int] = {}
        """Batches after which the optimizer stepped, by the name under which Lightning has it, as restored."""
        self._data: dict[str, Any] = {}
        """State of the LightningDataModule, as it was before the next batch was fetched."""
        self._without_folder: list[Any] = []
        """ModelCheckpoints to which the script has given no folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would go on in another way than it was."""
        if stage != "fit":
            return
        one_training.claim(self._call)
        self._trainer = trainer
        self._measure_saves(trainer)
        if (name := type(trainer.strategy).__name__) not in STRATEGIES:
            raise ValueError(f"Trainer(strategy=...): want ddp or one device, got {name}; write the loop with FSDP2")
        want = (self._call.state.active_rank, self._call.state.active_world_size)
        if (trainer.global_rank, trainer.world_size) != want:
            raise ValueError(
                f"Trainer: want rank {want[0]} of {want[1]}, got {trainer.global_rank} of {trainer.world_size}; "
                "make it inside the wrapped function, with Trainer(**place(call), ...)"
            )
        lightning_hooks.refuse(trainer.callbacks)
        # Lightning has them choose one next.
        self._without_folder = lightning_hooks.without_folder(trainer.callbacks)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave Lightning's own checkpoints alone again."""
        if stage == "fit":
            vars(trainer).pop("save_checkpoint", None)

    def _measure_saves(self, trainer: Any) -> None:
        """Let Lightning's own checkpoints count as such, and not as progress."""
        save = type(trainer).save_checkpoint

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self._call.checkpoint():
                return save(trainer, *args, **kwargs)

        # An attribute of this one object.
        trainer.save_checkpoint = measured

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring model, optimizers and progress back."""
        self._call.on_move(self._save_at_move)
        self._data = lightning_hooks.data_state(trainer)
        self._values = ModuleValues(pl_module, vars(LightningModule()))
        state = self._state(trainer)
        done = self._checkpoints.load(state)
        self._begun_at = done or 0
        if done is not None and not self._from_file.is_chosen:
            self._restore(trainer, text_states.read(state["progress"]))
            self._random = state["random"]
            self._in_memory = done
            logger.info("restored from memory: batches=%d", done)
        if self._batches is not None:
            self._batches.start_at(self._begun_at)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse data that begin anew, or at another place: samples would come twice, or never."""
        loaders, others = _listed(trainer.train_dataloader), _listed(trainer.val_dataloaders)
        if len([one for one in loaders + others if getattr(one, "batch_sampler", None) is self._batches]) > 1:
            raise ValueError(
                "dataloaders: want one with these GlobalBatches, got several, which would take each other's batches "
                "after a fault; give one training loader a data set that has what the others have, such as a "
                "StackDataset"
            )
        for loader in loaders:
            if self._batches is None or getattr(loader, "batch_sampler", None) is not self._batches:
                # Lightning asks one with a state when the next batch is fetched already, and it would be left out.
                raise ValueError(
                    "train_dataloader: want DataLoader(batch_sampler=batches) with Resume(batches=batches), got "
                    f"{type(loader).__name__}, which would begin anew, or at another batch, after a fault"
                )
        self._refuse_epochs(trainer)
        self._options = lightning_hooks.TrainerOptions(trainer)
        self._waiting = WaitingGradients(trainer.optimizers)

    def _refuse_epochs(self, trainer: Trainer) -> None:
        """An epoch that leaves the rest of a pass out has the number of a batch elsewhere in the data."""
        seen = trainer.num_training_batches
        if (every := trainer.reload_dataloaders_every_n_epochs) > 1:
            raise ValueError(
                f"reload_dataloaders_every_n_epochs: want 0 or 1, got {every}; Lightning counts from the epoch that is "
                "resumed, and would make the loaders anew in other epochs after a fault"
            )
        if self._batches is not None and trainer.max_epochs != 1 and seen != len(self._batches):
            raise ValueError(
                f"batches of an epoch: want as many as a pass of GlobalBatches has steps ({len(self._batches)}), got "
                f"{seen}; make GlobalBatches(..., steps={seen}) and leave limit_train_batches and overfit_batches out: "
                "else samples would be trained twice or left out after a fault"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an epoch whose beginning no number of batches says."""
        done, passes = _progress_of(trainer).completed, trainer.current_epoch
        if self._batches is not None and done != passes * len(self._batches):
            raise ValueError(
                f"epoch: want one that begins after {passes * len(self._batches)} batches ({passes} passes of "
                f"GlobalBatches), got {done}; after a fault in it the training would go on elsewhere in the data: let "
                "no on_train_batch_start return -1, and let GlobalBatches have the steps that it had in a checkpoint"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save and report the batches before this one."""
        progress = _progress_of(trainer)
        done = progress.completed
        waits = self._waiting is not None and self._waiting.are_left_by_batch()
        if self._metrics is not None:
            # Without what it monitors, Lightning would leave out a ReduceLROnPlateau at the end of this epoch.
            trainer._logger_connector._callback_metrics.update(_on(trainer.strategy.root_device, self._metrics))
            trainer.fit_loop._restarting = False
            self._metrics = None
        if self._modes is not None:
            module_modes.put_back(pl_module, self._modes)
            self._modes = None
        if self._changed is not None and self._values is not None:
            self._values.put_back(pl_module, self._changed)
            self._changed = None
        if self._changed_options is not None:
            lightning_hooks.put_back(trainer, self._changed_options)
            self._changed_options = None
        self._num_fetched = _num_fetched(trainer)
        if self._random is not None:
            self._go_on(trainer, done)
        if done == self._begun_at:
            return
        # Gradients that wait for more batches are in no checkpoint.
        if batch_idx % trainer.accumulate_grad_batches == 0 and not waits:
            if done % self._every == 0:
                self._save(trainer, done)
            self._call.ping(step=done)
        else:
            self._call.ping()

    def _save(self, trainer: Any, done: int) -> None:
        with self._call.checkpoint():
            state = self._state(trainer)
        with self._call.atomic():  # a fault elsewhere waits until this rank has saved
            saved = self._checkpoints.save(state, done)
        self._num_skipped = self._num_skipped + 1 if isinstance(saved, memory.Skipped) else 0
        if not self._num_skipped:
            self._in_memory = done
        elif self._num_skipped > MAX_SKIPPED:
            self._in_memory = None

    def _go_on(self, trainer: Any, done: int) -> None:
        """Set, before the first batch after a fault, what Lightning counts otherwise when it resumes."""
        # It counts a batch that was begun and not ended once more, and validates by that number.
        _progress_of(trainer).ready = done + 1
        # So it may count a step once more, by which it numbers what it logs.
        vars(trainer.fit_loop.epoch_loop).update(self._num_stepped)
        # GradientAccumulationScheduler sets it when an epoch begins, and wants 1 before; this one goes on.
        trainer.accumulate_grad_batches = self._accumulates
        if self._validations is not None and not self._validations.put_back():
            self._validations = None
        rank, world_size = trainer.global_rank, trainer.world_size
        if not random_numbers.restore(self._random, rank, world_size, seed=done):
            logger.warning("random numbers: new seeds, since this rank or the world size is another: at=%d", done)
        self._random = None

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Remember the data's state, before the next batch is fetched. Refuse a module that has taken another one."""
        if (taken := _num_fetched(trainer) - self._num_fetched) > 1:
            raise ValueError(
                f"training_step(dataloader_iter): want one batch taken in each call, got {taken}; after a fault those "
                "that were taken ahead would be left out, or trained twice"
            )
        self._data = copy.deepcopy(lightning_hooks.data_state(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Number the logs of the first validation after a fault, where it has only now made its loader."""
        if self._validations is not None and not trainer.sanity_checking:
            self._validations.number_logs()
            self._validations = None

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A validation makes progress, too."""
        self._call.ping()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last batch."""
        if (done := _progress_of(trainer).completed) > self._begun_at:
            self._call.ping(step=done)

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning's own checkpoints have of this."""
        batches = 0 if self._trainer is None else _progress_of(self._trainer).processed
        metrics = {} if self._trainer is None else _metrics_of(self._trainer)
        modes = None if self._trainer is None else module_modes.read(self._trainer.lightning_module)
        changed = self._changed_values()
        # A file lacks random numbers, and what was to come after it in the same hook: a memory that is a little older
        # goes on exactly. Another rank may have left out other checkpoints than this one, which writes the file.
        lag = 0 if self._in_memory is None else batches - self._in_memory + MAX_SKIPPED * self._every
        found = {
            "batches": batches,
            "lag": lag,
            "samples": self._samples(),
            "metrics": metrics,
            "modes": modes,
            "values": changed,
        }
        return found | {"options": self._options_now()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what Lightning has read from a file."""
        self._refuse_samples(state_dict.get("samples") or {})
        self._from_file.batches = int(state_dict["batches"])
        self._from_file.lag = int(state_dict.get("lag", 0))
        self._metrics = state_dict.get("metrics")
        self._modes = state_dict.get("modes")
        self._changed = state_dict.get("values")
        self._changed_options = state_dict.get("options")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember it: what it says of optimizers and progress is restored after `on_fit_start`."""
        self._from_file.checkpoint = checkpoint

    def _save_at_move(self, step: int) -> None:
        saved = self._at_moves.save(self._state(self._trainer), step)
        if not isinstance(saved, memory.Saved):
            logger.warning("not saved before a move: step=%d reason=%s", step, saved.reason)

    def _state(self, trainer: Any) -> dict[str, Any]:
        optimizers = {f"optimizer{i}": one for i, one in enumerate(trainer.optimizers)}
        return {
            "model": trainer.lightning_module,
            **optimizers,
            "progress": text_states.write(self._progress(trainer)),
            "random": random_numbers.capture(trainer.global_rank, trainer.world_size),
        }

    def _progress(self, trainer: Any) -> dict[str, Any]:
        others = [one for one in trainer.callbacks if one is not self]
        return {
            "loops": trainer.fit_loop.state_dict(),
            "samples": self._samples(),
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "callbacks": {one.state_key: kept for one in others if (kept := one.state_dict())},
            "files": lightning_hooks.of_files(others),
            "precision": trainer.precision_plugin.state_dict(),
            "hooks": lightning_hooks.collect(trainer, self),
            "data": self._data,
            "accumulates": trainer.accumulate_grad_batches,
            "metrics": _metrics_of(trainer),
            "modes": module_modes.read(trainer.lightning_module),
            "values": self._changed_values(),
            "options": self._options_now(),
            "should_stop": bool(trainer.should_stop),
            "validations": lightning_hooks.Validations.read(trainer),
        }

    def _restore(self, trainer: Any, progress: dict[str, Any]) -> None:
        self._refuse_samples(progress["samples"])
        self._accumulates = progress["accumulates"]
        counted = progress["loops"].get("epoch_loop.state_dict", {})
        self._num_stepped = {name: one for name, one in counted.items() if name == "_batches_that_stepped"}
        self._metrics = progress["metrics"]
        self._modes = progress["modes"]
        self._changed = progress.get("values")
        self._changed_options = progress.get("options")
        self._validations = lightning_hooks.Validations(trainer, progress.get("validations", {}))
        # Something has asked for the end, and Lightning goes on until `min_steps` or `min_epochs`.
        trainer.should_stop = progress["should_stop"]
        trainer.fit_loop.load_state_dict(progress["loops"])
        for config, kept in zip(trainer.lr_scheduler_configs, progress["schedulers"], strict=True):
            # Some take things out of what they are given, which Lightning may want to restore next.
            config.scheduler.load_state_dict(copy.deepcopy(kept))
        lightning_hooks.put_back_folders(self._without_folder, progress["callbacks"])
        for callback in trainer.callbacks:
            if kept := progress["callbacks"].get(callback.state_key):
                callback.load_state_dict(kept)
        lightning_hooks.put_back_files(trainer.callbacks, progress.get("files", {}))
        if progress["precision"]:
            trainer.precision_plugin.load_state_dict(progress["precision"])
        lightning_hooks.restore(trainer, self, progress["hooks"])
        if progress["data"]:
            self._data = progress["data"]
            trainer.datamodule.load_state_dict(self._data)
        if (checkpoint := self._from_file.checkpoint) is not None:
            # Lightning restores this next.
            checkpoint["loops"]["fit_loop"] = progress["loops"]
            checkpoint["lr_schedulers"] = progress["schedulers"]
            checkpoint["optimizer_states"] = [one.state_dict() for one in trainer.optimizers]
            checkpoint[type(trainer.precision_plugin).__qualname__] = progress["precision"]

    def _changed_values(self) -> Any:
        return {} if self._values is None else self._values.changed(self._trainer.lightning_module)

    def _options_now(self) -> dict[str, Any] | None:
        return None if self._options is None else self._options.changed(self._trainer)

    def _samples(self) -> dict[str, Any]:
        return {} if self._batches is None else self._batches.describe()

    def _refuse_samples(self, before: dict[str, Any]) -> None:
        if self._batches is not None and before:
            self._batches.check(before)


class _FromFile:
    """The checkpoint that Lightning itself has read, if `fit` was given one."""

    def __init__(self) -> None:
        self.batches: int | None = None
        self.checkpoint: dict[str, Any] | None = None
        self.is_chosen = False
        self.lag = 0
        """By so many batches the newest one in memory was older, as the file was written: it is taken before it."""

    def steps(self) -> list[int]:
        """Return the number of batches that it has seen."""
        return [] if self.batches is None else [self.batches]

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Leave it to Lightning, which has loaded the model and goes on with the rest."""
        self.is_chosen = True
        logger.warning("restored by Lightning: batches=%d", step)


def _listed(loaders: Any) -> list[Any]:
    if loaders is None:
        return []
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def _progress_of(trainer: Any) -> Any:
    """Return how many batches were made ready, begun and ended over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total


def _num_fetched(trainer: Any) -> int:
    """Return how many batches of this pass a module has taken by itself (`training_step(dataloader_iter)`); else 0.

    Otherwise Lightning fetches one ahead, which is not in the number of batches that have ended.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return int(fetcher.fetched) if type(fetcher).__name__ == "_DataLoaderIterDataFetcher" else 0


def _metrics_of(trainer: Any) -> dict[str, Any]:
    """Return the newest values of what was logged, and compute none: that may wait for other ranks."""
    return _on(torch.device("cpu"), trainer._logger_connector._callback_metrics)


def _on(device: torch.device, metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(one).detach().to(device) for name, one in metrics.items()}
