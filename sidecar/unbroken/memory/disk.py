"""Ordinary checkpoints in a folder, to fall back to: those of torch.distributed.checkpoint, or of a framework."""

import io
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from zipfile import ZipFile

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as TorchLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from unbroken.memory.agreement import gather
from unbroken.memory.new_state.lazy_state import LazyState, refuse_lost
from unbroken.memory.new_state.nested import LoadPlanner

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-([0-9]{1,18})")
_ZIP_BEGINS = b"PK\x03\x04"
_READ_BYTES = 1 << 20
_MAX_LAG = 1 << 60
_FOREIGN = 2
"""In place of whether a step is given up."""
_MAX_LOST = 1000
"""Names that a rank looks for on the others; with more it has a part of the model, as in a pipeline."""


class Disk(Protocol):
    """Checkpoints on a disk in a format of their own.

    They count where they are newer than those in memory. One whose checkpoints lack something may have an attribute
    `lag`, of which the least of all ranks counts: then they count where they are newer by more than so many steps.
    """

    def steps(self) -> list[int]:
        """Return the steps of whole checkpoints that this rank sees. Raises OSError where it cannot look."""

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Load one on all ranks together, or remember that it is the one to load."""


class DcpFolder:
    """A folder with checkpoints of torch.distributed.checkpoint, named `step-N`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[int]:
        """Return the steps of whole checkpoints. Raises OSError where they cannot be listed."""
        found = _steps(self._folder)
        whole = sorted((step for step, is_whole in found if is_whole), reverse=True)
        for step in sorted(step for step, is_whole in found if not is_whole and step > max(whole, default=-1))[-3:]:
            logger.warning("checkpoint on the disk not used: step=%d: it has no .metadata, which is written last", step)
        return whole

    def path(self, step: int) -> Path:
        """Return where one lies that was written in the background."""
        return self._folder / f"step-{step}"

    def load(self, state: MutableMapping[str, Any], step: int) -> None:
        """Load one. Raises CheckpointException."""
        load_from_disk(self._folder, state, step)


class _Part(io.RawIOBase):
    """A part of a file, as a file for reading."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has places."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read what comes next."""
        self._file.seek(self._start + self._at)
        content = self._file.read(max(min(len(buffer), self._length - self._at), 0))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _CheckingReader(FileSystemReader):
    """Compares what is read with the checksums that torch.save has put beside it: torch itself passes over them."""

    def read_data(self, plan: LoadPlan, planner: TorchLoadPlanner) -> Future[None]:
        """Read each part once it is known to be what was written. Raises BadZipFile."""
        for item in plan.items:
            self._check(item)
            super().read_data(replace(plan, items=[item]), planner)
        return super().read_data(replace(plan, items=[]), planner)

    def _check(self, item: ReadItem) -> None:
        about = self.storage_data[item.storage_index]
        with (Path(self.path) / about.relative_path).open("rb") as file:
            part = _Part(file, about.offset, about.length)
            if part.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
                return  # Of another format, or torch says what is wrong.
            with ZipFile(part) as archive:
                for member in archive.infolist():
                    # 0 where torch was told to compute none.
                    with archive.open(member) as stream:
                        while member.CRC and stream.read(_READ_BYTES):
                            pass


def steps_on_disk(folder: Path) -> list[int]:
    """Return the steps of whole checkpoints, the newest first; torch writes `.metadata` last.

    Raises OSError where they cannot be listed: they may be there all the same.
    """
    return sorted((step for step, is_whole in _steps(folder) if is_whole), reverse=True)


def _steps(folder: Path) -> list[tuple[int, bool]]:
    """Return each step, and whether it is whole. Raises OSError."""
    try:
        found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(step, (entry / ".metadata").is_file()) for step, entry in found]


@dataclass(frozen=True)
class SeenSteps:
    """What all ranks see on the disk."""

    steps: list[int]
    """In the order in which they are to be tried: the newest first, those given up last."""
    given_up: frozenset[int]
    problem: str
    """Why a newer one, or each, is of no use: a rank does not see it, or cannot look; "" where none is."""

    lag: int = 0
    """See Disk."""

    @property
    def oldest(self) -> int | None:
        """The step before which one in memory is no use, as the disk is tried now; None: any one is of use."""
        return self.steps[0] - self.lag if self.steps and self.steps[0] not in self.given_up else None


def common_steps(
    disk: Disk | None, given_up: Collection[int] = (), is_foreign: Callable[[int], bool] = lambda step: False
) -> SeenSteps:
    """Return the steps that all ranks see on the disk. A collective of all ranks.

    `given_up`: after which the training has failed again and again, as this rank was told. `is_foreign`: whether this
    rank knows a step as that of another job, with which this one shares its folder by mistake.
    """
    own: list[int] = []
    problem = ""
    try:
        own = [] if disk is None else sorted(disk.steps(), reverse=True)[:1000]
    except OSError as error:
        problem = f"checkpoints on the disk cannot be listed: {error}"
    lag = max(min(int(getattr(disk, "lag", 0)), _MAX_LAG), 0)
    marks = {step: _FOREIGN if is_foreign(step) else int(step in given_up) for step in own}
    rows = gather([[int(not problem), lag], *([step, mark] for step, mark in marks.items())], 2)
    seen = [{step for step, _ in of_rank[1:]} for of_rank in rows]
    common = set.intersection(*seen)
    newest = max(set().union(*seen), default=-1)
    blind = [rank for rank, ((can_look, _), *_) in enumerate(rows) if not can_look]
    if blind and not problem:
        problem = f"checkpoints on the disk cannot be listed by rank {blind[0]}"
    if not problem and newest > max(common, default=-1):
        lacking = [rank for rank, steps in enumerate(seen) if newest not in steps]
        problem = f"step {newest} is on the disk, and rank {lacking[0]} does not see it: all ranks need the same folder"
    foreign = {step for of_rank in rows for step, mark in of_rank[1:] if mark == _FOREIGN} & common
    if foreign and not problem:
        problem = f"step {max(foreign)} is of another job, which has begun in this folder since this one did"
    common -= foreign
    if problem:
        logger.warning("checkpoint on the disk not used: %s", problem)
    avoided = frozenset(step for of_rank in rows for step, mark in of_rank[1:] if mark) & common
    for step in sorted(avoided):
        logger.warning("checkpoint on the disk not used: step=%d: the training failed after it again and again", step)
    steps = sorted(common, key=lambda step: (step not in avoided, step), reverse=True)
    return SeenSteps(steps, avoided, problem, min(lag for (_, lag), *_ in rows))


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
        load(values, storage_reader=_CheckingReader(path), planner=planner)
    except CheckpointException:
        lazy.drop()
        logger.exception("checkpoint on the disk cannot be read: step=%d folder=%s", step, folder)
        raise
    unclaimed = [name for name in names if name not in planner.state_dict]
    lost = _lost_everywhere(state, unclaimed)
    refuse_lost(state, unclaimed)
    state.update(values)
    logger.warning("restored from the disk: step=%d folder=%s", step, folder)
    if lost:
        logger.warning(
            "not restored from the disk, since the state has no place for it: step=%d names=%d: %s; let a new state "
            "have the keys that it has when it is saved, or keep them in a list or a text",
            *(step, len(lost), ", ".join(lost[:10])[:1000]),
        )
    return step


def _lost_everywhere(state: Mapping[str, Any], unclaimed: Collection[str]) -> Sequence[str]:
    """Return which of these no rank has a place for, within what the state has. A collective of all ranks.

    What belongs to a part of the state that this rank has not may be another rank's.
    """
    roots = tuple(f"{name}." for name in state)
    own = {zlib.crc32(name.encode()): name for name in unclaimed if name.startswith(roots)}
    rows = gather([[number] for number in own] if len(own) <= _MAX_LOST else [], 1)
    everywhere = set.intersection(*({number for (number,) in row} for row in rows))
    return sorted(name for number, name in own.items() if number in everywhere)


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
