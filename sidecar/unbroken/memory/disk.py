"""Ordinary checkpoints in a folder, to fall back to: those of torch.distributed.checkpoint, or of a framework."""

import io
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable
from zipfile import ZipFile

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as TorchLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from unbroken.memory.agreement import all_true, gather
from unbroken.memory.new_state.lazy_state import LazyState, makes_places, no_place, refuse_lost
from unbroken.memory.new_state.nested import LoadPlanner, UnlikeStateError, real_path, with_places, without
from unbroken.memory.new_state.places import PLACES, CheckpointPlaces, Places, of_checkpoint
from unbroken.memory.shard import is_stateful, state_dicts

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-([0-9]{1,18})")
_ZIP_BEGINS = b"PK\x03\x04"
_READ_BYTES = 1 << 20
_MAX_LAG = 1 << 60
_FOREIGN = 2
"""In place of whether a step is given up."""
_MAX_LOST = 1000
"""Names that a rank looks for on the others; with more it has a part of the model, as in a pipeline."""


@runtime_checkable
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

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder

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

    Raises ValueError for an optimizer, or a part with places in the checkpoint, that cannot take what was saved of it.
    """
    path = folder / _name(folder, step)
    # torch loads what is there already, and passes over the state that a new optimizer has not made yet.
    lazy = LazyState(state)
    metadata, planner = _metadata(path), LoadPlanner()
    names = () if metadata is None else metadata.state_dict_metadata
    lazy.fit(names)
    values, places = _fill(state, path, metadata)
    try:
        load(values, storage_reader=_CheckingReader(path), planner=planner)
    except CheckpointException as error:
        lazy.drop()
        logger.warning("checkpoint on the disk cannot be read: step=%d folder=%s: %s", step, folder, in_short(error))
        logger.debug("where it cannot be read", exc_info=True)
        raise
    unclaimed = [name for name in names if name not in planner.state_dict]
    lost = _lost_everywhere(state, unclaimed)
    refuse_lost(state, unclaimed)
    # What some ranks alone had, as random numbers by rank, a smaller world has no place for.
    if within := [name for name in lost if name not in places.of_some and _root(name, state) in places.roots]:
        raise no_place(within, step, is_model=False)
    # torch replaces what has no state_dict of its own.
    state.update({name: one for name, one in values.items() if not isinstance(one, _Filled)})
    logger.warning("restored from the disk: step=%d folder=%s", step, folder)
    if lost:
        logger.warning(
            "not restored from the disk, since the state has no place for it: step=%d names=%d: %s; let a new state "
            "have the keys that it has when it is saved, or keep them in a list or a text",
            *(step, len(lost), ", ".join(lost[:10])[:1000]),
        )
    return step


def in_short(error: CheckpointException) -> str:
    """Return which rank could not read a checkpoint, and why, in one line."""
    first = min(error.failures.items(), key=lambda item: item[0], default=None)
    if first is None:
        return "another rank cannot read it"
    rank, (cause, _frames) = first
    words = " ".join(str(cause)[:1000].split())
    return f"rank {rank}: {words if isinstance(cause, UnlikeStateError) else f'{type(cause).__name__}: {words}'}"


class _Filled:
    """A part of a state with places for what it lacks: torch shall not ask it again for its dictionaries."""

    def __init__(self, part: Any, values: Any) -> None:
        self._part, self._values = part, values

    def state_dict(self) -> Any:
        """Return its dictionaries."""
        return self._values

    def load_state_dict(self, values: Any) -> None:
        """Hand them on."""
        self._part.load_state_dict(values)


def _fill(state: Mapping[str, Any], path: Path, metadata: Metadata | None) -> tuple[dict[str, Any], CheckpointPlaces]:
    """Return the state with places for all that was saved, and what is known of these. A collective of all ranks.

    That is nothing but where the checkpoint was written in the background.
    """
    nothing = CheckpointPlaces(Places(), (), ())
    content = b"" if metadata is None else _read_or_none(path / PLACES)
    rows = gather([[len(content), zlib.crc32(content)]], 2)
    if metadata is None or not content or any(row != rows[0] for row in rows):
        return dict(state), nothing
    rank, world_size = (
        (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    )
    try:
        found = of_checkpoint(content, rank, world_size)
    except ValueError as error:
        logger.warning("%s: %s; what a new state has no keys for is not restored", path / PLACES, error)
        return dict(state), nothing
    filled = sorted(name for name in found.roots if name in state and not makes_places(state[name]))
    values = state_dicts({name: state[name] for name in filled})
    places, planner = found.own.within(filled), LoadPlanner()
    lacking = places.lacking(values)
    flat: dict[str, Any] = {}
    if not all_true(all(group < 0 for _, _, group in lacking.tensors.values())):
        # On all ranks, in one order: they may wait for each other in it.
        others = state_dicts({name: state[name] for name in sorted(state.keys() - set(filled))})
        planner.set_up_planner({**others, **values}, metadata)
        flat = planner.state_dict
    values = with_places(values, lacking.make(flat, metadata))
    planner.set_up_planner(values, metadata)
    if gone := places.gone(planner.mappings, metadata.state_dict_metadata):
        values = without(values, [tuple(real_path(values, one)) for one in gone], places.objects.values())
    parts = {name: _Filled(state[name], one) if is_stateful(state[name]) else one for name, one in values.items()}
    return {**state, **parts}, replace(found, roots=filled)


def _root(name: str, state: Mapping[str, Any]) -> str:
    """Return the part of a state to which a name belongs."""
    return max((one for one in state if name.startswith(f"{one}.")), key=len, default="")


def _read_or_none(path: Path) -> bytes:
    """Return what is in a file; nothing of one that cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _lost_everywhere(state: Mapping[str, Any], unclaimed: Collection[str]) -> Sequence[str]:
    """Return which of these no rank has a place for, within what the state has. A collective of all ranks.

    What belongs to a part of the state that this rank has not may be another rank's.
    """
    roots = tuple(f"{name}." for name in state)
    own = {zlib.crc32(name.encode()): name for name in unclaimed if name.startswith(roots)}
    rows = gather([[number] for number in own] if len(own) <= _MAX_LOST else [], 1)
    everywhere = set.intersection(*({number for (number,) in row} for row in rows))
    return sorted(name for number, name in own.items() if number in everywhere)


def _metadata(checkpoint: Path) -> Metadata | None:
    """Return what is in a checkpoint; None of one that cannot be read: `load` says so, on all ranks together."""
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except Exception:  # It is a pickle: anything may be raised.
        return None


def _name(folder: Path, step: int) -> str:
    names = [
        entry.name for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)) and int(match[1]) == step
    ]
    return min(names)
