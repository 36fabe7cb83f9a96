"""Slots of other times and other workers, opened for reading; each byte is compared with its digest first."""

import contextlib
import ctypes
import fcntl
import io
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unbroken.keeper.digests import read_digests
from unbroken.memory.checksums import wrong_blocks
from unbroken.memory.layout import Entry, Layout, read_layout
from unbroken.memory.new_state.places import Places, read_places
from unbroken.memory.place import num_processors
from unbroken.memory.shard import PATHS, TENSOR_PATHS
from unbroken_core.pod.memory_messages import FoundSlot
from unbroken_core.pod.memory_slots import (
    BLOCK_BYTES,
    CONTENT_OFFSET,
    Head,
    SlotState,
    digests_name,
    read_head,
)
from unbroken_core.vocabulary.errors import WireError

_MAX_THREADS = 4
"""So many read as fast as memory is."""

_LARGE_BYTES = 16 << 20
"""To unmap less takes about as long as to start a thread."""


class UnreadableError(Exception):
    """A slot cannot be read, or is not what was sealed; the message says which and why."""


class NoDigestsError(UnreadableError):
    """The keeper has not digested a slot yet, or refuses it."""


class DiffersError(UnreadableError):
    """What is in memory is not what was sealed."""


@dataclass
class Source:
    """One shard in memory."""

    path: str
    head: Head
    content: torch.Tensor
    """All of it, as bytes."""
    checksums: list[int]
    mapped: mmap.mmap | None
    """None: the mapping is somebody else's."""
    release: Callable[[], object] = lambda: None
    """Let others write the slot again."""
    max_threads: int = _MAX_THREADS
    """How many compare it at most, where this worker has processors that torch leaves to it."""
    _verified: set[int] = field(default_factory=set)
    _layout: Layout | None = None
    _objects: dict[str, Any] | None = None
    _paths: dict[str, Any] = field(default_factory=dict)
    _tensor_paths: str = ""
    _places: Places | None = None

    @property
    def layout(self) -> Layout:
        """Where what lies. Raises UnreadableError."""
        if self._layout is None:
            self.verify([(0, self.head.layout_bytes)])
            try:
                self._layout = read_layout(bytes(self._bytes(0, self.head.layout_bytes)), self.head.objects_offset)
            except WireError as error:
                raise UnreadableError(f"{self.path}: {error}") from error
            if self._layout.digest != self.head.layout_digest:
                raise UnreadableError(f"{self.path}: its layout is not the one that its head names")
        return self._layout

    @property
    def objects(self) -> dict[str, Any]:
        """All that is not a tensor, read without running code of it. Raises UnreadableError."""
        if self._objects is None:
            start, length = self.head.objects_offset, self.head.objects_bytes
            self.verify([(start, length)])
            try:
                found = torch.load(io.BytesIO(bytes(self._bytes(start, length))), weights_only=True)
            except Exception as error:
                raise UnreadableError(f"{self.path}: its objects cannot be read: {error!r}"[:500]) from error
            if not isinstance(found, dict):
                raise UnreadableError(f"{self.path}: want a dictionary of objects, got {type(found).__name__}")
            paths = found.pop(PATHS, {})
            self._paths = paths if isinstance(paths, dict) else {}
            tensor_paths = found.pop(TENSOR_PATHS, "")
            self._tensor_paths = tensor_paths if isinstance(tensor_paths, str) else ""
            self._objects = found
        return self._objects

    @property
    def paths(self) -> dict[str, Any]:
        """Where objects lie in the dictionaries of a state, by name. Raises UnreadableError."""
        return self._paths if self.objects is not None else {}

    @property
    def places(self) -> Places:
        """Where all that lies in the dictionaries of a state. Raises UnreadableError."""
        if self._places is None:
            try:
                # Keys of objects may be of other kinds than those of tensors.
                paths = {str(name): (path[0], *path[1:]) for name, path in self.paths.items()}
                if wrong := [name for name, path in paths.items() if not isinstance(path[0], str)]:
                    raise ValueError(f"no place of {wrong[0]}: {paths[wrong[0]]!r}"[:500])
                tensors, alike = json.loads(self._tensor_paths or "[{}, []]")
                self._places = replace(read_places([{}, tensors, alike]), objects=paths)
            except (IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise UnreadableError(f"{self.path}: where its parts lie cannot be read: {error}"[:500]) from error
        return self._places

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return a tensor in the slot itself: for copying out of it only."""
        return self.content[entry.start : entry.start + entry.num_bytes].view(entry.dtype).view(entry.sizes)

    def verify(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Compare all blocks that the ranges (start, length) touch with their digests. Raises UnreadableError."""
        self._compare(blocks_of(ranges))

    def _compare(self, wanted: set[int]) -> None:
        """Compare whole blocks with their digests. Raises UnreadableError."""
        blocks = wanted - self._verified
        num_threads = min(self.max_threads, num_processors() // torch.get_num_threads())
        wrong = wrong_blocks(self.content, blocks, self.checksums, num_threads)
        if wrong:
            raise DiffersError(f"{self.path}: {len(wrong)} of {len(blocks)} blocks differ from what was sealed")
        self._verified |= wanted

    def is_sealed(self) -> bool:
        """Whether the slot is still what was opened, and not void by now. Only where the mapping is shared."""
        if self.mapped is None:
            return False
        head = read_head(self.mapped[:CONTENT_OFFSET], len(self.mapped))
        return head is not None and head.state is SlotState.SEALED and head.serial == self.head.serial

    def close(self) -> None:
        """Let go of the mapping: it ends with the last tensor in it, which a thread that compares may still read.

        Not closed: torch does not keep it from being unmapped, and whoever reads on would end the process.
        """
        gone = [self.content, self.mapped]
        del self.content
        self.mapped = None
        _let_go(gone)
        self.release()

    def _bytes(self, start: int, length: int) -> Any:
        return (ctypes.c_char * length).from_address(self.content.data_ptr() + start)


def _let_go(gone: list[Any]) -> None:
    """Drop a tensor and what it lies in, the last references: large mappings in a thread, for which no rank waits.

    To unmap takes a twentieth of a restore from another pod.
    """
    mapped = gone[-1]
    if mapped is not None and len(mapped) >= _LARGE_BYTES:
        del mapped
        # RuntimeError: the limit on processes of the pod.
        with contextlib.suppress(RuntimeError):
            # No daemon: one that is within torch when the interpreter ends would abort the process.
            threading.Thread(target=gone.clear, name="unbroken-unmap", daemon=False).start()
            return
    gone.clear()


def blocks_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Return the blocks that ranges (start, length) of the content touch."""
    return {
        block
        for start, length in ranges
        if length
        for block in range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1)
    }


def open_source(found: FoundSlot, mapped: torch.Tensor | None = None) -> Source:
    """Map a slot that the keeper has found, unless this process has: `mapped` are all of its bytes then.

    Raises UnreadableError when it is another one by now.
    """
    path = Path(found.path)
    if mapped is not None:
        first = (ctypes.c_char * CONTENT_OFFSET).from_address(mapped.data_ptr())
        head, checksums = _checked(found, read_head(bytes(first), mapped.numel()))
        return Source(str(path), head, _content(mapped, head), checksums, None)
    own, lock = _map(path)
    try:
        head, checksums = _checked(found, read_head(own[:CONTENT_OFFSET], len(own)))
    except UnreadableError:
        os.close(lock)
        raise
    source = Source(str(path), head, _content(torch.frombuffer(own, dtype=torch.uint8), head), checksums, own)
    # Also when nobody closes it: a slot that stays locked would not be written any more.
    source.release = weakref.finalize(source, _unlock, lock)
    return source


def adopt_source(path: Path, descriptor: int, serial: int) -> Source:
    """Map a slot of another process by a descriptor, which stays open. Raises UnreadableError."""
    try:
        # Shared, so that it is seen when the keeper voids it.
        mapped = mmap.mmap(descriptor, 0)
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path}: cannot be mapped: {error}") from error
    head = read_head(mapped[:CONTENT_OFFSET], len(mapped))
    if head is None or head.state is not SlotState.SEALED or head.serial != serial:
        raise UnreadableError(f"{path}: is void, or was overwritten")
    content = _content(torch.frombuffer(mapped, dtype=torch.uint8), head)
    # Nobody waits for it: all other processors are the training's.
    return Source(str(path), head, content, _checksums(path, head), mapped, max_threads=1)


def _unlock(descriptor: int) -> None:
    # Who was forked meanwhile has the same lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _map(path: Path) -> tuple[mmap.mmap, int]:
    """Return a mapping, and the descriptor of a file that nobody writes anew before it is closed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Copy-on-write: torch wants memory that may be written, and nothing here may change the slot.
            mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path}: cannot be mapped: {error}") from error
    return mapped, descriptor


def _checked(found: FoundSlot, head: Head | None) -> tuple[Head, list[int]]:
    path = Path(found.path)
    is_same = head is not None and head.state is SlotState.SEALED and head.serial == found.serial
    if head is None or not is_same or head.moment.order != (found.iteration, found.term, found.step):
        raise UnreadableError(f"{path}: was overwritten since the keeper found it")
    return head, _checksums(path, head)


def _checksums(path: Path, head: Head) -> list[int]:
    digests = read_digests(path.with_name(digests_name(path.name)), head)
    if digests is None or digests.problem:
        raise NoDigestsError(f"{path}: has no digests")
    return digests.checksums


def _content(mapped: torch.Tensor, head: Head) -> torch.Tensor:
    return mapped[CONTENT_OFFSET : CONTENT_OFFSET + head.content_bytes]
