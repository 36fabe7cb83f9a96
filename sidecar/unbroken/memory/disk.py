"""Ordinary checkpoints in a folder, to fall back to: those of torch.distributed.checkpoint, or of a framework."""

import logging
import re
from collections.abc import Collection, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from unbroken.memory.agreement import gather
from unbroken.memory.new_state.lazy_state import LazyState, refuse_lost
from unbroken.memory.new_state.nested import LoadPlanner

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-([0-9]{1,18})")


class Disk(Protocol):
    """Checkpoints on a disk in a format of their own.

    They count where they are newer than those in memory. One whose checkpoints lack something may have an attribute
    `lag`, the same on all ranks: then they count where they are newer by more than so many steps.
    """

    def steps(self) -> list[int]:
        """Return the steps of whole checkpoints that this rank sees."""

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Load one on all ranks together, or remember that it is the one to load."""


class DcpFolder:
    """A folder with checkpoints of torch.distributed.checkpoint, named `step-N`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[int]:
        """Return the steps of whole checkpoints."""
        return steps_on_disk(self._folder)

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Load one. Raises CheckpointException."""
        load_from_disk(self._folder, state, step)


def steps_on_disk(folder: Path) -> list[int]:
    """Return the steps of whole checkpoints, the newest first; torch writes `.metadata` last."""
    try:
        found = [
            int(match[1])
            for entry in folder.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (entry / ".metadata").is_file()
        ]
    except OSError:
        return []
    return sorted(found, reverse=True)


def oldest_wanted(disk: Disk | None, steps: Sequence[int]) -> int | None:
    """Return the step before which a checkpoint in memory is no use; `steps`: those on the disk, the newest first."""
    return steps[0] - int(getattr(disk, "lag", 0)) if steps else None


def common_steps(disk: Disk | None) -> list[int]:
    """Return the steps that all ranks see on the disk, the newest first. A collective of all ranks."""
    own = [] if disk is None else sorted(disk.steps(), reverse=True)[:1000]
    seen = [{row[0] for row in of_rank} for of_rank in gather([[step] for step in own], 1)]
    return sorted(set.intersection(*seen), reverse=True)


def load_from_disk(folder: Path, state: MutableMapping[str, Any], step: int) -> int:
    """Load on all ranks together. Raises CheckpointException when a rank cannot: its state may be half loaded.

    Raises ValueError for an optimizer that has no place for what was saved of it.
    """
    # It replaces what has no state_dict of its own.
    values = dict(state)
    path = folder / _name(folder, step)
    # torch loads what is there already, and passes over the state that a new optimizer has not made yet.
    lazy = LazyState(state)
    names, planner = _names(path), LoadPlanner()
    lazy.fit(names)
    try:
        load(values, checkpoint_id=path, planner=planner)
    except CheckpointException:
        lazy.drop()
        logger.exception("checkpoint on the disk cannot be read: step=%d folder=%s", step, folder)
        raise
    refuse_lost(state, [name for name in names if name not in planner.state_dict])
    state.update(values)
    logger.warning("restored from the disk: step=%d folder=%s", step, folder)
    return step


def _names(checkpoint: Path) -> Collection[str]:
    """Return the names in a checkpoint; none of one that cannot be read: `load` says so, on all ranks together."""
    try:
        return FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception:  # It is a pickle: anything may be raised.
        return ()


def _name(folder: Path, step: int) -> str:
    names = [
        entry.name for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)) and int(match[1]) == step
    ]
    return min(names)
