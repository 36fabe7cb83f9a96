"""Copies of other pods' checkpoints, in slots like those of the own workers.

    <root>/<pod uid>/copies/<digest of the owner's uid>-<local rank>-<0|1>.slot
                            <digest of the owner's uid>.owner     the uid itself

Two slots a shard: while one is filled, the other holds the newest whole copy. A copy appears whole: its blocks were
compared with the digests that its owner's keeper took, before the head says SEALED.
"""

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unbroken.keeper.arena import COPIES, MAX_COPY_SLOTS, Arena
from unbroken.keeper.digests import Digests, open_slot, read_digests, read_slot_head, write_digests
from unbroken_core.pod.memory_slots import (
    BLOCK_BYTES,
    CONTENT_OFFSET,
    NUM_SLOTS,
    Head,
    SlotState,
    digests_name,
    pack_head,
    slot_name,
)
from unbroken_core.vocabulary.checkpoints import Load

try:
    # Intel's ISA-L takes a third of zlib's time for the same CRC-32.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

logger = logging.getLogger(__name__)

_OWNER = ".owner"
_MAX_UID_BYTES = 2048
_NO_ORDER = (-1, -1, -1)


class NotKeptError(Exception):
    """A copy is not wanted, or was not made; the message says why."""

    is_soon = False
    """Whether it may well be taken a moment later."""


class NotYetError(NotKeptError):
    """A copy may be taken a moment later."""

    is_soon = True


def checksum(content: bytes | memoryview) -> int:
    """Return the CRC-32, as fast as this image computes it."""
    return int(crc32(content))


def compare(block: int, content: bytes | memoryview, checksums: Sequence[int]) -> None:
    """Compare a block with its digest. Raises NotKeptError."""
    if checksum(content) != checksums[block]:
        raise NotKeptError(f"block {block} differs from what its owner digested")


class Receiving:
    """One copy in the making: its slot is locked until it is sealed or closed."""

    def __init__(self, path: Path, head: Head, checksums: Sequence[int]) -> None:
        """Take the slot. Raises NotKeptError when somebody reads it, OSError."""
        self._path = path
        self._head = head
        self._checksums = checksums
        self._descriptor = open_slot(path, os.O_RDWR)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotKeptError("the older copy is being read") from None
            self._write_head(SlotState.WRITING)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def content_bytes(self) -> int:
        """How much content there is."""
        return self._head.content_bytes

    def write(self, block: int, content: bytes | memoryview) -> None:
        """Write one block once it was compared with its digest. Raises NotKeptError, OSError."""
        compare(block, content, self._checksums)
        self._write(content, CONTENT_OFFSET + block * BLOCK_BYTES)

    def seal(self) -> None:
        """Declare the copy whole. Raises OSError."""
        target = self._path.with_name(digests_name(self._path.name))
        write_digests(target, Digests(self._head.serial, "", list(self._checksums)))
        self._write_head(SlotState.SEALED)

    def close(self) -> None:
        """Let others have the slot: whole, or WRITING for good."""
        os.close(self._descriptor)

    def _write_head(self, state: SlotState) -> None:
        packed = pack_head(replace(self._head, state=state))
        # One copy after the other: whoever is killed leaves one whole.
        self._write(packed, 0)
        self._write(packed, len(packed))

    def _write(self, content: bytes | memoryview, offset: int) -> None:
        with memoryview(content) as left:
            done = 0
            while done < len(left):
                done += os.pwrite(self._descriptor, left[done:], offset + done)


class Copies:
    """The copies that this pod keeps. Used by all threads of a keeper."""

    def __init__(self, arena: Arena, max_ranks_per_pod: int, on_given_up: Callable[[], None] = lambda: None) -> None:
        """Make the folder. Raises OSError. `on_given_up`: called when a copy was removed to make room."""
        self._arena = arena
        self._on_given_up = on_given_up
        self._max_ranks = max_ranks_per_pod
        self._folder = arena.open_copies()
        self._guard = threading.Lock()
        self._owners: frozenset[str] = frozenset()
        self._pinned: frozenset[tuple[int, int, int]] = frozenset()
        self._is_told = False
        """Whether it is known whose copies are to be kept, and which steps."""
        self._drop_nameless()
        arena.give_way = self.give_way

    def keep_for(self, owners: Iterable[str]) -> None:
        """Take copies of these pods from now on, by uid. What others have left here stays."""
        with self._guard:
            self._owners, self._is_told = frozenset(owners), True

    def pin(self, pinned: Iterable[tuple[int, int, int]]) -> None:
        """Overwrite no copy of these steps from now on, by (iteration, term, step)."""
        with self._guard:
            self._pinned = frozenset(pinned)

    def give_way(self) -> bool:
        """Remove one copy of which nobody is in need, to make room; return False where there is none."""
        with self._guard:
            return self._give_way()

    def _give_way(self) -> bool:
        """Remove a copy of a pod for which this one keeps none any more, the oldest first.

        Where a pod was lost, its copies stay until a newer step is protected: beside those of its successor there would
        be no room for them, and nothing would ever be protected again. Of use is what nobody overwrites, and where
        there is no such step, the newest copy of each of its workers.
        """
        for slot in sorted(self._left(), key=lambda one: one.order):
            path = self._arena.reached(slot.path)
            try:
                with _alone_with(path):
                    path.unlink()
                path.with_name(digests_name(path.name)).unlink(missing_ok=True)
            except OSError:
                continue  # It is being read, or received still.
            if not any(_is_of(one, slot.mark) for one in self._arena.copy_slots()):
                self._remove(slot.mark)
            logger.info("copy given up, to make room: slot=%s order=%s", slot.path, slot.order)
            self._on_given_up()
            return True
        return False

    def _left(self) -> list["_LeftCopy"]:
        """Return the copies that may go."""
        if not self._is_told:
            return []
        found: list[_LeftCopy] = []
        for mark, owner in owners_of(self._arena).items():
            if owner not in self._owners:
                of_owner = [_LeftCopy.of(self._arena, path) for path in self._arena.copy_slots() if _is_of(path, mark)]
                newest = {one.place: one for one in sorted(of_owner, key=lambda one: one.order)}
                found += [
                    one
                    for one in of_owner
                    if one.order not in self._pinned
                    and (self._pinned or one is not newest[one.place] or one.order == _NO_ORDER)
                ]
        return found

    def drop(self, owner: str) -> None:
        """Remove all copies of a pod's checkpoints: others are protected elsewhere, or void."""
        with self._guard:
            self._remove(_mark(owner))

    def _remove(self, mark: str) -> None:
        for name in self._arena.names_in(COPIES):
            # The name of its owner last: whoever is killed here removes the rest later.
            if name.startswith(f"{mark}-"):
                self._arena.reached(self._folder / name).unlink(missing_ok=True)
        self._arena.reached(self._folder / f"{mark}{_OWNER}").unlink(missing_ok=True)

    def _drop_nameless(self) -> None:
        """Remove copies of which nobody can say whose they are."""
        named = owners_of(self._arena)
        for mark in {name.partition("-")[0] for name in self._arena.names_in(COPIES) if "-" in name} - set(named):
            self._remove(mark)

    def begin(
        self,
        owner: str,
        local_rank: int,
        head: Head,
        checksums: Sequence[int],
        began_with: Load | None = None,
    ) -> Receiving | None:
        """Return where to put the content of a checkpoint; None when it is here. Raises NotKeptError, OSError.

        `began_with` is what its iteration went back to: later ones of the same owner do not count any more.
        """
        with self._guard:
            if owner not in self._owners:
                raise NotKeptError("this pod is not to keep your copies")
            if not 0 <= local_rank < self._max_ranks:
                raise NotKeptError(f"local_rank: want 0 to {self._max_ranks - 1}, got {local_rank}")
            if head.state is not SlotState.SEALED or head.job != self._arena.job:
                raise NotKeptError("head: want a sealed checkpoint of this job")
            slots = [self._arena.reached(path) for path in self._slots(owner, local_rank)]
            heads = {path: read_slot_head(path) for path in slots}
            sealed = [
                (found.moment.order, path)
                for path, found in heads.items()
                if found is not None
                and found.state is SlotState.SEALED
                and not (began_with is not None and began_with.voids(*found.moment.order))
                and _is_digested(path, found)
            ]
            if any(_is_same(path, heads[path], head, checksums) for _order, path in sealed):
                return None
            path = self._place(head, heads, sealed)
            self._name(owner)
            target, num_bytes = self._folder / path.name, CONTENT_OFFSET + head.content_bytes
            problem = self._arena.allocate_copy(target, num_bytes)
            while problem and self._give_way():
                problem = self._arena.allocate_copy(target, num_bytes)
            if problem:
                raise NotKeptError(f"no room: {problem}")
            return Receiving(path, head, checksums)

    def _place(
        self, head: Head, heads: Mapping[Path, Head | None], sealed: Sequence[tuple[tuple[int, int, int], Path]]
    ) -> Path:
        """Return which slot a copy goes into: not that of the newest one, nor of one that is pinned.

        Raises NotKeptError.
        """
        pinned = {path for order, path in sealed if order in self._pinned}
        newest = max(sealed, default=None)
        if newest is not None and newest[0] >= head.moment.order and head.moment.order not in self._pinned:
            raise NotKeptError(f"step {newest[0][2]} of iteration {newest[0][0]} is here, and not older")
        free = [path for path in heads if path not in pinned]
        if not free:
            raise NotYetError("the copies that are here are needed until another step is protected")
        # With one pinned there is no choice: that one is of use, whatever becomes of the other.
        return next((path for path in free if newest is None or path != newest[1]), free[0])

    def _name(self, owner: str) -> None:
        """Write down whose copies these are. Raises OSError."""
        path = self._arena.reached(self._folder / f"{_mark(owner)}{_OWNER}")
        if _read_owner(path) == owner:
            return
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, owner.encode(errors="replace"))
        finally:
            os.close(descriptor)

    def _slots(self, owner: str, local_rank: int) -> list[Path]:
        return [self._folder / f"{_mark(owner)}-{slot_name(local_rank, index)}" for index in range(NUM_SLOTS)]


class _LeftCopy(NamedTuple):
    """A slot of a pod for which no copies are kept any more."""

    path: Path
    order: tuple[int, int, int]
    """Of what it holds; _NO_ORDER: nothing that is whole."""

    @property
    def place(self) -> str:
        """The same of both slots of one worker."""
        return self.path.name.rpartition("-")[0]

    @property
    def mark(self) -> str:
        """Says whose it is."""
        return self.path.name.partition("-")[0]

    @classmethod
    def of(cls, arena: Arena, path: Path) -> "_LeftCopy":
        """Look at a slot."""
        head = read_slot_head(arena.reached(path))
        is_whole = head is not None and head.state is SlotState.SEALED and head.job == arena.job
        return cls(path, head.moment.order if head is not None and is_whole else _NO_ORDER)


def _is_of(path: Path, mark: str) -> bool:
    return path.name.startswith(f"{mark}-")


@contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """Keep others from a slot meanwhile. Raises OSError where one reads or writes it."""
    descriptor = open_slot(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def owners_of(arena: Arena) -> dict[str, str]:
    """Return the uid of each pod of which there are copies, by the first part of their names."""
    names = [name for name in arena.names_in(COPIES) if name.endswith(_OWNER)][:MAX_COPY_SLOTS]
    found = {name.removesuffix(_OWNER): _read_owner(arena.reached(arena.folder / COPIES / name)) for name in names}
    return {mark: owner for mark, owner in found.items() if owner and _mark(owner) == mark}


def _read_owner(path: Path) -> str:
    """Return the uid in a file; "" for none."""
    try:
        descriptor = open_slot(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MAX_UID_BYTES).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _mark(owner: str) -> str:
    return hashlib.sha256(owner.encode(errors="replace")).hexdigest()[:16]


def _is_same(path: Path, present: Head | None, head: Head, checksums: Sequence[int]) -> bool:
    """Return whether a slot holds this very checkpoint: its owner may have forgotten that it is kept."""
    found = None if present is None else read_digests(path.with_name(digests_name(path.name)), present)
    return present == head and found is not None and found.checksums == list(checksums)


def _is_digested(path: Path, head: Head) -> bool:
    found = read_digests(path.with_name(digests_name(path.name)), head)
    return found is not None and not found.problem
