"""Hugging Face's Trainer: progress, checkpoints in memory, and the way back to them. Needs transformers and accelerate.

A checkpoint is taken where the next step begins: after the logs, evaluations and saves of the step before it, and after
the next batch was fetched. So what these draw from the random numbers is neither lost nor drawn twice.
"""

import contextlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from unbroken.integrations import versions

# Before anything of it is imported: other releases lack names.
versions.require("transformers", (5, 0), (5, 23))
versions.require("accelerate", (1, 10), (1, 15))

import torch.distributed as dist
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import Trainer, TrainerCallback

from unbroken import inprocess, memory
from unbroken.integrations import one_training, random_numbers, text_states, trainer_extras, whole_files
from unbroken.memory.agreement import all_true
from unbroken.memory.place import read_every

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-([0-9]{1,18})")
_MARK = re.compile(r"unbroken-([0-9]{1,6})-of-([0-9]{1,6})")


def train(trainer: Trainer, call: inprocess.CallWrapper, *, every: int | None = None) -> Any:
    """Call `trainer.train()` from the newest checkpoint that all ranks can read, and return what it returns.

    Call it inside the wrapped function, with a Trainer and TrainingArguments that were made there, too. `every`: steps
    between two checkpoints in memory; None: as the job says, else 1. Checkpoints of the Trainer itself in its
    `output_dir` are taken where they are newer, if they were written during such a call, whole and by all ranks.

    Raises ValueError for what cannot be resumed exactly, with what to change.
    """
    _refuse(trainer)
    one_training.claim(call)
    callback = _Callback(trainer, call, every)
    eval_on_start = trainer.args.eval_on_start
    trainer.add_callback(callback)
    try:
        with _measured_saves(trainer, call), callback.newest() as folder:
            return trainer.train(resume_from_checkpoint=folder)
    finally:
        # Else the Trainer keeps itself alive until the next collection.
        trainer.remove_callback(callback)
        vars(trainer).pop("get_batch_samples", None)
        trainer.args.eval_on_start = eval_on_start


@contextlib.contextmanager
def _measured_saves(trainer: Trainer, call: inprocess.CallWrapper) -> Iterator[None]:
    """Let the Trainer's own checkpoints count as such, and not as progress."""
    save = trainer._save_checkpoint

    def measured(*args: Any, **kwargs: Any) -> Any:
        with call.checkpoint():
            return save(*args, **kwargs)

    # An attribute of this one object.
    trainer._save_checkpoint = measured
    try:
        yield
    finally:
        del trainer._save_checkpoint


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (args.process_index, args.world_size) != (rank, world_size):
        raise ValueError(
            f"TrainingArguments: want those of rank {rank} of {world_size}, got rank {args.process_index} of "
            f"{args.world_size}; make them, and the Trainer, inside the wrapped function"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("Trainer: want DDP or one process, got FSDP or DeepSpeed; write the loop with fully_shard")
    if trainer.model_init is not None:
        raise ValueError("Trainer(model_init=...): want a model, got a function; train() would make the model anew")
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size: want False, got True; a step must have the same samples after a restart"
        )
    if args.ignore_data_skip:
        raise ValueError("ignore_data_skip: want False, got True; samples would be trained twice after a restart")
    if args.dataloader_persistent_workers and args.dataloader_num_workers:
        raise ValueError(
            "dataloader_persistent_workers: want False, got True; new workers draw a random number, and after a "
            "restart they would be new in other epochs"
        )
    _refuse_order(trainer)
    if not hasattr(trainer, "_load_from_checkpoint"):
        raise ValueError("transformers: want a release whose Trainer has _load_from_checkpoint, got one without it")


def _refuse_order(trainer: Trainer) -> None:
    """An order that is drawn from the random numbers when an epoch begins is another one when it is resumed."""
    problem = ""
    if not trainer.accelerator.use_seedable_sampler:
        problem = "accelerator_config: want use_seedable_sampler=True, got False"
    elif getattr(trainer.args, "group_by_length", False):
        problem = "group_by_length: want False, got True"
    elif (strategy := str(getattr(trainer.args, "train_sampling_strategy", "random"))) not in ("random", "sequential"):
        problem = f"train_sampling_strategy: want random or sequential, got {strategy}"
    if problem:
        raise ValueError(f"{problem}; an epoch that goes on in its middle would have another order of samples")


def _refuse_sampler(loader: Any) -> None:
    """Likewise, where a Trainer of one's own makes its loader or its sampler, or Accelerate skips too few of them."""
    is_dispatched = any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__)
    if is_dispatched and not loader.split_batches and not isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "accelerator_config: want dispatch_batches=False, got True; after a restart Accelerate skips a rank's part "
            "of the batches that were trained, and the rest of them would be trained twice"
        )
    batches = getattr(loader, "batch_sampler", None)
    # Accelerate wraps one of each rank's around that of the loader.
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    # Not what is derived from them: Accelerate's own one follows from seed and epoch.
    if type(sampler) in (RandomSampler, WeightedRandomSampler, SubsetRandomSampler):
        raise ValueError(
            f"train_dataloader: want an order of samples that follows from seed and epoch, got one of "
            f"{type(sampler).__name__}; an epoch that goes on in its middle would have another order: give it a "
            "sampler with set_epoch"
        )


class _Callback(TrainerCallback):  # type: ignore[misc]  # the package brings no types here
    """What the Trainer calls, for one iteration."""

    def __init__(self, trainer: Trainer, call: inprocess.CallWrapper, every: int | None) -> None:
        self._trainer = trainer
        self._call = call
        self._every = read_every() if every is None else every
        self._folders = _Folders(Path(trainer.args.output_dir), trainer.args.process_index, trainer.args.world_size)
        self._checkpoints = memory.Checkpointer(every=self._every, disk=self._folders)
        self._at_moves = memory.Checkpointer(every=1)
        self._begun_at = 0
        self._loss = trainer_extras.RunningLoss(trainer)
        self._begun: trainer_extras.Begun | None = None
        """What callbacks may change, as training begins; None before."""
        self._num_samples = self._samples()
        self._trainer_state: dict[str, Any] | None = None
        """What the Trainer goes on from; None at the start."""
        self._saved_extras: dict[str, Any] | None = None
        self._is_over = False
        self._saves_at_end = False
        """Whether the last step of this epoch asks for a checkpoint, which the end of the epoch writes."""
        self._is_at_end = False
        """Whether this epoch has ended, and only what its end logs, evaluates and saves may be left."""
        self._num_epochs = 0
        """Those that have begun in this iteration."""
        self._restored: dict[str, Any] | None = None
        self._random: Any = None
        self._optimizer: Any = None
        """What was restored, or would have been."""
        self._groups: list[dict[str, Any]] = []
        """Its groups of parameters, as they were restored."""

    @contextlib.contextmanager
    def newest(self) -> Iterator[str | None]:
        """Load the newest checkpoint; yield the folder from which the Trainer takes up the rest, None at the start."""
        trainer = self._trainer
        trainer.create_optimizer()
        self._optimizer = _plain(trainer.optimizer)
        state = self._state()
        step = self._checkpoints.load(state)
        if step is None or self._folders.chosen is not None:
            if self._folders.chosen is not None:
                self._refuse_samples(self._folders.samples(self._folders.chosen), step or 0)
                self._trainer_state, self._saved_extras = self._folders.state(), self._folders.extras()
            self._begun_at = step or 0
            with self._loss.measured(), self._folders.of_batches(trainer.args.train_batch_size) as chosen:
                yield chosen
            return
        self._restored, self._random, self._begun_at = json.loads(state["progress"]), state["random"], step
        self._trainer_state, self._saved_extras = self._restored["trainer"], self._restored["extras"]
        self._refuse_samples(self._restored["samples"], step)
        self._groups = trainer_extras.groups(self._optimizer)
        logger.info("restored from memory: step=%d", step)
        with self._loss.measured(), tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
            # A rank's batch of this world. Trainers of transformers 5.0 would take that of the world before.
            progress = self._restored["trainer"] | {"train_batch_size": trainer.args.train_batch_size}
            (Path(folder) / _STATE).write_text(json.dumps(progress), encoding="utf-8")
            # The weights are there already. An attribute of this one object.
            trainer._load_from_checkpoint = lambda *args, **kwargs: None
            try:
                yield folder
            finally:
                del trainer._load_from_checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back what the Trainer has made since, such as the schedule of learning rates."""
        _refuse_sampler(self._trainer.callback_handler.train_dataloader)
        if _plain(self._trainer.optimizer) is not self._optimizer:
            raise ValueError(
                "Trainer: want one whose create_optimizer makes the optimizer, got one that makes another later, such "
                "as in create_optimizer_and_scheduler; nothing would be restored to it after a fault: override "
                "create_optimizer and create_scheduler, or give it optimizers=(...)"
            )
        self._call.on_move(self._save_at_move)
        if self._trainer_state is not None:
            # It is no start, and callbacks have counted that evaluation.
            args.eval_on_start = False
        self._begun = trainer_extras.Begun(self._trainer)
        if self._trainer_state is not None and not args.restore_callback_states_from_checkpoint:
            # Else the Trainer has.
            trainer_extras.put_back_callbacks(self._trainer, self._trainer_state)
        if self._saved_extras is not None:
            trainer_extras.put_back(self._trainer, self._loss, self._begun, self._saved_extras)
            if trainer_extras.no_epoch_begins(self._trainer):
                self._loss.close()
        if self._restored is None:
            return
        self._trainer.lr_scheduler.load_state_dict(text_states.from_json(self._restored["scheduler"]))
        # A schedule that was made since has begun with rates of its own, and those of momentum.
        trainer_extras.put_back_groups(self._optimizer, self._groups)
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and self._restored["scaler"]:
            scaler.load_state_dict(self._restored["scaler"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse an epoch that could not be resumed. Make no step after the last one, where a checkpoint has it."""
        self._num_epochs += 1
        self._is_at_end = False
        if self._num_epochs > 1 and state.epoch != int(state.epoch):
            raise ValueError(
                f"epoch: want one that ends after as many steps as the Trainer counts in it, got an end after "
                f"{state.epoch:.4f} epochs at step {state.global_step}; a fault in the next one would lead to another "
                "place in the data: give an IterableDataset a __len__, or all of its passes in one, and let no "
                "callback set should_epoch_stop"
            )
        if self._trainer_state is None:
            return
        if self._restored is not None or state.epoch != int(state.epoch):
            # This epoch's beginning is in it, which callbacks have now seen once more.
            trainer_extras.put_back_callbacks(self._trainer, self._trainer_state)
        self._is_over = state.global_step >= state.max_steps or trainer_extras.has_ended(self._trainer_state)
        if not self._is_over:
            self._trainer_state = None
        else:
            control.should_training_stop = True
            self._loss.close()
            # The Trainer would take at least one. An attribute of this one object.
            self._trainer.get_batch_samples = lambda *args, **kwargs: ([], None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and report the step before this one."""
        step = state.global_step
        if self._random is not None and self._restored is not None:
            seed = args.seed + step
            if not random_numbers.restore(self._random, args.process_index, args.world_size, seed):
                logger.warning("random numbers: new seeds, since this rank or the world size is another: step=%d", step)
            self._random = None
            # They have seen the beginning of this step once more.
            trainer_extras.put_back_callbacks(self._trainer, self._restored["trainer"])
        if step == self._begun_at:
            return
        if step % self._every == 0:
            self._refuse_longer_steps()
            with self._call.atomic():  # a fault elsewhere waits until this rank has saved
                self._checkpoints.save(self._state(), step)
        self._call.ping(step=step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A folder that is written again is not whole meanwhile. What an epoch's last step saves comes at its end."""
        if control.should_save and _ends_epoch(state, control):
            self._saves_at_end, control.should_save = True, False
        if control.should_save:
            self._folders.unmark(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Likewise; what belongs to the end of a training that had ended was done then."""
        control.should_save |= self._saves_at_end
        self._is_at_end, self._saves_at_end = True, False
        if self._is_over and self._trainer_state is not None:
            control.should_log = control.should_evaluate = control.should_save = False
            trainer_extras.put_back_callbacks(self._trainer, self._trainer_state)
        if control.should_save:
            self._folders.unmark(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """This rank's part of the Trainer's own checkpoint is there."""
        if _ends_epoch(state, control) and not self._is_at_end:
            # The best one, or one that the step's evaluation made the last: without what the epoch's end evaluates.
            self._saves_at_end = True
            self._folders.unmark(state.global_step)
        elif not args.save_only_model:  # else there is no optimizer to go on with
            self._folders.mark(state.global_step, self._samples(), self._extras())
        self._call.ping()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation makes progress, too."""
        self._call.ping()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last step. Where none was left, the Trainer may not have put back the random numbers."""
        if self._folders.chosen is not None and state.global_step == self._begun_at:
            self._trainer._load_rng_state(str(self._folders.chosen))
        if state.global_step > self._begun_at:
            self._call.ping(step=state.global_step)

    def _save_at_move(self, step: int) -> None:
        """Save in memory, and on the disk where the Trainer saves there or the memory has no room."""
        saved = isinstance(self._at_moves.save(self._state(), step), memory.Saved)
        if not all_true(saved) or str(self._trainer.args.save_strategy) not in ("no", "SaveStrategy.NO"):
            self._folders.unmark(step)
            args, save_only_model = self._trainer.args, self._trainer.args.save_only_model
            args.save_only_model = False
            try:
                self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
            finally:
                args.save_only_model = save_only_model
            self._folders.mark(step, self._samples(), self._extras())

    def _state(self) -> dict[str, Any]:
        args = self._trainer.args
        return {
            "model": self._trainer.model,
            "optimizer": _plain(self._trainer.optimizer),
            "progress": json.dumps(self._progress()),
            "random": random_numbers.capture(args.process_index, args.world_size),
        }

    def _progress(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler, schedule = trainer.accelerator.scaler, trainer.lr_scheduler
        return {
            "trainer": trainer_extras.exported(trainer),
            "extras": self._extras(),
            "samples": self._samples(),
            "scheduler": {} if schedule is None else text_states.for_json(schedule.state_dict()),
            "scaler": {} if scaler is None else scaler.state_dict(),
        }

    def _extras(self) -> dict[str, Any]:
        return trainer_extras.read(self._trainer, self._loss, self._begun)

    def _samples(self) -> int:
        """Return how many samples one step has, on all ranks."""
        args = self._trainer.args
        # Ranks share a batch, or have one each.
        num_batches = 1 if self._trainer.accelerator.split_batches else args.world_size
        return int(args.train_batch_size * num_batches * args.gradient_accumulation_steps)

    def _refuse_longer_steps(self) -> None:
        if self._samples() != self._num_samples:
            raise ValueError(
                f"samples of a step: want {self._num_samples}, as when the training began, got {self._samples()}; "
                "after a fault the step's number would mean another place in the data: let no callback change "
                "gradient_accumulation_steps"
            )

    def _refuse_samples(self, before: int, step: int) -> None:
        """Raise ValueError where the step's number would mean another place in the data."""
        if before != self._samples():
            raise ValueError(
                f"samples of a step: want {before}, as in the checkpoint of step {step}, got {self._samples()}; let "
                "per_device_train_batch_size x gradient_accumulation_steps x WORLD_SIZE be the same in each world: "
                "else samples would be trained twice or left out"
            )


class _Folders:
    """The Trainer's own checkpoints. One counts when every rank that wrote it has said that its part is there."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._name = f"unbroken-{rank}-of-{world_size}"
        self.chosen: Path | None = None

    def steps(self) -> list[int]:
        """Return the steps of whole checkpoints."""
        try:
            found = [(entry, match) for entry in self._folder.iterdir() if (match := _FOLDER.fullmatch(entry.name))]
        except OSError:
            return []
        return [int(match[1]) for entry, match in found if self._is_whole(entry)]

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Remember the folder: the Trainer loads it itself."""
        self.chosen = self._of(step)
        logger.warning("restored from the disk: step=%d folder=%s", step, self.chosen)

    def state(self) -> dict[str, Any]:
        """Return the Trainer's state in the chosen folder; nothing where none is chosen."""
        if self.chosen is None:
            return {}
        found: dict[str, Any] = json.loads((self.chosen / _STATE).read_text(encoding="utf-8"))
        return found

    def extras(self) -> dict[str, Any] | None:
        """Return what this rank, or another one, has marked the chosen folder with; None where that is of before."""
        marks = [] if self.chosen is None else sorted(self.chosen.glob("unbroken-*-of-*"))
        marks.sort(key=lambda path: path.name != self._name)
        lines = marks[0].read_text(encoding="utf-8").splitlines() if marks else []
        found: dict[str, Any] | None = json.loads(lines[1]) if len(lines) > 1 else None
        return found

    @contextlib.contextmanager
    def of_batches(self, size: int) -> Iterator[str | None]:
        """Yield the chosen folder, if any: where another world wrote it, one like it for a rank's batches of this size.

        Trainers of transformers 5.0 go on with the size that the folder names.
        """
        state = self.state()
        if self.chosen is None or state.get("train_batch_size") in (None, size):
            yield None if self.chosen is None else str(self.chosen)
            return
        with tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
            for path in self.chosen.iterdir():
                if path.name != _STATE:
                    (Path(folder) / path.name).symlink_to(path.resolve())
            (Path(folder) / _STATE).write_text(json.dumps(state | {"train_batch_size": size}), encoding="utf-8")
            yield folder

    def mark(self, step: int, samples: int, extras: dict[str, Any]) -> None:
        """Say that this rank's part is there, and what else it goes on from."""
        folder = self._of(step)
        if folder.is_dir():
            whole_files.write(folder / self._name, f"{samples}\n{json.dumps(extras)}\n".encode())

    def unmark(self, step: int) -> None:
        """Take it back, before the folder is written again, perhaps by a world of another size."""
        for path in self._of(step).glob("unbroken-*-of-*"):
            path.unlink(missing_ok=True)

    def samples(self, folder: Path) -> int:
        """Return how many samples a step had; 0 where that cannot be read."""
        first = next((path.read_text(encoding="utf-8") for path in folder.glob("unbroken-*-of-*")), "")
        text = first.partition("\n")[0][:20].strip()
        return int(text) if text.isascii() and text.isdecimal() else 0

    def _of(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    def _is_whole(self, folder: Path) -> bool:
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError:
            return False
        found = {name: match for name in names if (match := _MARK.fullmatch(name))}
        marks = {(int(match[1]), int(match[2])) for name, match in found.items() if _is_whole_mark(folder / name)}
        sizes = {size for _, size in marks}
        return _STATE in names and any(all((rank, size) in marks for rank in range(size)) for size in sizes if size)


def _is_whole_mark(path: Path) -> bool:
    """Return whether all of it is there, which a full disk or a crash of the node may have cut off."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    # Those of before have the first line alone.
    return text.partition("\n")[0].isdecimal() and text.endswith("\n")


def _ends_epoch(state: Any, control: Any) -> bool:
    """Return whether the step that was made is the last one of its epoch."""
    return bool(control.should_training_stop or control.should_epoch_stop or state.epoch == int(state.epoch))


def _plain(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
