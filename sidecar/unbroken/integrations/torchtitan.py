"""torchtitan's Trainer: progress, checkpoints in memory, and the way back to them. Needs torchtitan, and what it needs.

The place for all this is the Trainer's checkpoint manager, which its configuration names: it is called once before the
first step and once after each one. Nothing of torchtitan is changed.
"""

import contextlib
import copy
import dataclasses
import json
import logging
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.integrations import versions

# Before anything of it is imported: other releases lack names.
versions.require("torchtitan", (0, 3), (0, 3))

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtitan.components.checkpoint import DATALOADER, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from unbroken import inprocess, memory
from unbroken.integrations import one_training, random_numbers, whole_files
from unbroken.memory.agreement import all_true
from unbroken.memory.disk import steps_on_disk
from unbroken.memory.place import read_every
from unbroken.memory.shard import state_dicts

logger = logging.getLogger(__name__)

_RANDOM = "random"
_WORLDS = "unbroken-worlds.json"
"""Beside torchtitan's own checkpoints: in a world of which size each step was saved."""
MAX_WORLDS = 256
_MARK = ".metadata"
"""What torch writes last into the folder of a step."""


def train(
    config: Trainer.Config, call: inprocess.CallWrapper, *, every: int | None = None, any_world: bool = False
) -> Trainer:
    """Build the Trainer of this configuration, train from the newest checkpoint that all ranks can read, and return it.

    Call it inside the wrapped function. `every`: steps between two checkpoints in memory; None: as the job says, else
    1. torchtitan's own checkpoints in its folder are written as the configuration says, and taken where they are newer.

    `any_world`: the configuration's loader, one of your own, goes on in a world of another size from what its
    `state_dict` returned on rank 0.

    Raises ValueError for a configuration that cannot be resumed exactly, with what to change.
    """
    _refuse(config)
    one_training.claim(call)
    own = {field.name: getattr(config.checkpoint, field.name) for field in dataclasses.fields(config.checkpoint)}
    checkpoints = MemoryCheckpoints.Config(
        **own | {"enable": True},
        _writes=own["enable"],
        _call=call,
        _every=read_every() if every is None else every,
        _any_world=any_world,
        _last_step=config.training.steps,
    )
    # Building a Trainer writes into the model's configuration, by the world of then.
    spec = dataclasses.replace(config.model_spec, model=copy.deepcopy(config.model_spec.model))
    config = dataclasses.replace(config, checkpoint=checkpoints, model_spec=spec)
    trainer = config.build()
    try:
        with _validations(trainer, call):
            trainer.train()
    finally:
        trainer.close()
    return trainer


@contextlib.contextmanager
def _validations(trainer: Trainer, call: inprocess.CallWrapper) -> Iterator[None]:
    """Let validations leave the random numbers as they were, tell of their progress, and be made again after a fault.

    torchtitan validates once the step is saved: a training that goes on from there has not told what it would have
    found, and would have other random numbers than without the fault.
    """
    if not trainer.config.validator.enable:
        yield
        return
    validator, rank, world_size = trainer.validator, dist.get_rank(), dist.get_world_size()
    validate, load = validator.validate, trainer.checkpointer.load
    # Each batch of torchtitan's own one goes through this; one of your own may lack it.
    of_batch: Any = getattr(validator, "post_dataloading_process", None)
    begun_at = 0

    def validated(*args: Any, **kwargs: Any) -> Any:
        before = random_numbers.capture(rank, world_size)
        found = validate(*args, **kwargs)
        random_numbers.restore(before, rank, world_size, seed=0)
        return found

    def pinged(*args: Any, **kwargs: Any) -> Any:
        # The first ping starts the clock for hangs: it waits until the first step, which may take long.
        if trainer.step > begun_at:
            call.ping()
        return of_batch(*args, **kwargs)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun_at
        found = load(*args, **kwargs)
        begun_at = trainer.step
        if begun_at and validator.should_validate(begun_at):
            validated(trainer.model_parts, begun_at)
        return found

    # Attributes of these objects.
    ours = [(validator, "validate", validated), (trainer.checkpointer, "load", loaded)]
    if of_batch is not None:
        ours.append((validator, "post_dataloading_process", pinged))
    for one, name, function in ours:
        setattr(one, name, function)
    try:
        yield
    finally:
        for one, name, _ in ours:
            delattr(one, name)


def _refuse(config: Trainer.Config) -> None:
    if config.model_spec is None:
        raise ValueError("model_spec: want a model, got None; take a configuration of torchtitan's registry")
    if type(config.checkpoint) is not CheckpointManager.Config:
        raise ValueError(
            f"checkpoint: want torchtitan's CheckpointManager.Config, got {type(config.checkpoint).__qualname__}; "
            "what another manager saves cannot be resumed together with checkpoints in memory"
        )
    if config.checkpoint.create_seed_checkpoint:
        raise ValueError("checkpoint.create_seed_checkpoint: want False, got True; make the seed in a job of its own")


class MemoryCheckpoints(CheckpointManager):  # type: ignore[misc]  # the package brings no types here
    """torchtitan's checkpoints in its folder, and newer ones in memory. Made by `train`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # the package brings no types here
        """Those of the manager in whose place this one is."""

        _call: Any = None
        _every: int = 1
        _writes: bool = False
        """Whether checkpoints are written to the folder, or loaded from it."""
        _any_world: bool = False
        """Whether the loader goes on in a world of another size."""
        _last_step: int = -1

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._call: inprocess.CallWrapper = config._call
        self._every = config._every
        self._writes = config._writes
        self._any_world = config._any_world
        self._last_step = config._last_step
        self._checkpoints = memory.Checkpointer(every=self._every, disk=_Folder(self) if self._writes else None)
        self._at_moves = memory.Checkpointer(every=1)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._wanted = -1
        """The step that the configuration asks for, -1 for the newest."""

    def _load(self, step: int = -1) -> bool:
        """Bring everything back to the newest step, in memory or in the folder, else begin as torchtitan does."""
        self._wanted = step
        self._call.on_move(self._save_at_move)
        state = self._state()
        found = self._checkpoints.load(state)
        if found is None:
            return self._load_own(step) if self._writes else False
        if state[_RANDOM] is not None and not self._is_own:
            self._refuse_another_world(random_numbers.world_size_of(state[_RANDOM]))
            if not random_numbers.restore(state[_RANDOM], self._rank, self._world_size, seed=found):
                logger.warning(
                    "random numbers: new seeds, since this rank or the world size is another: step=%d", found
                )
            logger.info("restored from memory: step=%d", found)
            self._write_again(found)
        return True

    def _write_again(self, step: int) -> None:
        """Write what a fault has cut short: the memory had this step before the folder, so it is not made again."""
        is_last = step == self._last_step
        if self._writes and self._should_save(step, is_last) and not all_true(self._is_written(step, is_last)):
            logger.info("torchtitan's own checkpoint is written again, which a fault has cut short: step=%d", step)
            self._write(step, is_last)

    def _is_written(self, step: int, is_last: bool) -> bool:
        """Return whether all of it is there. Of a last one for Hugging Face nothing says so."""
        if is_last and self.last_save_in_hf:
            return False
        return bool(filesystem.isfile(filesystem.join(self._create_checkpoint_id(step), _MARK)))

    def _refuse_another_world(self, saved: int) -> None:
        """Raise ValueError where the loader may take a rank's place in a world of this size for one in another."""
        loader = self.states[DATALOADER]
        # torchtitan's own refuse another number of data-parallel ranks themselves, and go on with the same number.
        if saved == self._world_size or self._any_world or isinstance(loader, ParallelAwareDataloader):
            return
        raise ValueError(
            f"dataloader: want a world of {saved}, in which the checkpoint was taken, got {self._world_size}: "
            f"{type(loader).__qualname__} may go on at other samples; call train(..., any_world=True) if its "
            "load_state_dict takes what another world has saved, or leave out minReplicas (--min-pods)"
        )

    def refuse_file_of_another_world(self, step: int) -> None:
        """Raise ValueError where a checkpoint of torchtitan's own is of a world as above."""
        if (saved := self._worlds().get(str(step))) is not None:
            self._refuse_another_world(saved)
        elif not (self._any_world or isinstance(self.states[DATALOADER], ParallelAwareDataloader)):
            logger.warning("nothing says in which world this was saved, which must have %d ranks", self._world_size)

    def _note_world(self, step: int) -> None:
        if self._rank or filesystem.is_remote(self.folder):
            return
        kept = sorted((self._worlds() | {str(step): self._world_size}).items(), key=lambda item: int(item[0]))
        try:
            whole_files.write(Path(self.folder) / _WORLDS, json.dumps(dict(kept[-MAX_WORLDS:])).encode())
        except OSError as error:
            logger.warning("the size of the world was not noted: step=%d error=%s", step, error)

    def _worlds(self) -> dict[str, int]:
        try:
            found = json.loads((Path(self.folder) / _WORLDS).read_bytes())
        except (OSError, ValueError):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {step: size for step, size in pairs if step.isdecimal() and isinstance(size, int)}

    _is_own = False
    """Whether what was loaded is a checkpoint of torchtitan's own."""

    def _load_own(self, step: int) -> bool:
        self._is_own = True
        return bool(super()._load(step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save in memory, say so, and write to the folder when that is due."""
        if curr_step % self._every == 0:
            with self._call.checkpoint():
                # torchtitan's models ask all ranks for what is fused in them: nothing may hold this rank there.
                state = state_dicts(self._state())
            with self._call.atomic():  # a fault elsewhere waits until this rank has saved
                self._checkpoints.save(state, curr_step)
        self._call.ping(step=curr_step)
        if not self._writes or not self._should_save(curr_step, last_step):
            return False
        return self._write(curr_step, last_step)

    def _write(self, step: int, is_last: bool) -> bool:
        with self._call.checkpoint():
            self._note_world(step)
            self._unmark(step)
            return bool(super()._save(step, is_last))

    def _unmark(self, step: int) -> None:
        """Let a folder that is written once more not pass for whole meanwhile.

        Rank 0 does it before it plans what all ranks write.
        """
        if self._rank == 0 and not filesystem.is_remote(self.folder):
            (Path(self._create_checkpoint_id(step)) / _MARK).unlink(missing_ok=True)

    def _save_at_move(self, step: int) -> None:
        """Save in memory, and in the folder where the memory has no room."""
        saved = isinstance(self._at_moves.save(self._state(), step), memory.Saved)
        if not all_true(saved) and self._writes:
            super().maybe_wait_for_saving()
            self._note_world(step)
            self._unmark(step)
            super().dcp_save(
                self._flattened_model_states_sd(), self._create_checkpoint_id(step), type(self.async_mode).DISABLED
            )

    def _state(self) -> dict[str, Any]:
        return dict(self.states) | {_RANDOM: random_numbers.capture(self._rank, self._world_size)}


class _Folder:
    """torchtitan's own checkpoints, which it loads itself."""

    def __init__(self, manager: MemoryCheckpoints) -> None:
        self._manager = manager

    def steps(self) -> list[int]:
        """Return the step that the configuration names, else the newest from which the training can go on; or none.

        By default torchtitan's last checkpoint has the model alone.
        """
        if self._manager._wanted != -1:
            return [self._manager._wanted]
        if filesystem.is_remote(self._manager.folder):
            found = self._manager._find_load_step()
            return [found] if found >= 0 else []
        folder = Path(self._manager.folder)
        return next(([step] for step in steps_on_disk(folder) if _is_full(folder / f"step-{step}")), [])

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Let torchtitan load it."""
        self._manager.refuse_file_of_another_world(step)
        logger.warning("restored from the disk: step=%d folder=%s", step, self._manager.folder)
        self._manager._load_own(step)


def _is_full(path: Path) -> bool:
    """Whether a checkpoint has more than the model."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    return any(name.startswith("train_state.") for name in names)
