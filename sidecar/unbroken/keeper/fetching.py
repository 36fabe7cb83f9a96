"""Fetches what workers of this pod restore from other pods: parts of a checkpoint, into a sparse file that they map.

    <root>/<pod uid>/fetched/<digest of what it is>.slot

The file has its head and all digests from the beginning, and no blocks: a worker compares each block that it reads with
its digest, so that what is not there, or differs, is an error for it, as in any other slot. Of blocks of which only
pieces are here it is told the CRC-32 of the gaps, too.
"""

import contextlib
import hashlib
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.keeper.arena import FETCHED, Arena
from unbroken.keeper.copies import NotKeptError, checksum, compare
from unbroken.keeper.copy_reader import Fetching, MissingError, SpoiltError
from unbroken.keeper.digests import Digests, open_slot, write_digests
from unbroken.keeper.peer_link import LEAST_BYTES_PER_S, PATIENCE_S, Link, LinkError, Pause, connect
from unbroken_core.pod.block_parts import Part, Pieces, block_size, checksum_of_parts, is_in, joined, pieces_of
from unbroken_core.pod.memory_messages import Fetched, FetchShard, FoundSlot, NotFetched
from unbroken_core.pod.memory_slots import (
    BLOCK_BYTES,
    CONTENT_OFFSET,
    Head,
    Moment,
    digests_name,
    pack_head,
)

_RESTART_S = 5.0
_RETRY_S = 0.1
_REMOVAL_S = 10.0
"""A fetch that has no room waits so long for what is being given back."""
_MOST_PIECES = 8
"""A block of which more pieces are wanted is fetched whole."""
_PAGE_BYTES = 4096


@dataclass
class _Lacking:
    """What is to be fetched."""

    blocks: set[int]
    pieces: dict[int, Pieces]

    @property
    def num_bytes(self) -> int:
        """Of content, at most."""
        return len(self.blocks) * BLOCK_BYTES + sum(
            last - first for found in self.pieces.values() for first, last in found
        )

    @property
    def growth(self) -> int:
        """By how much the file grows, at most: a piece may begin and end within a page."""
        return self.num_bytes + 2 * _PAGE_BYTES * sum(map(len, self.pieces.values()))


@dataclass
class PartialShard:
    """One checkpoint of which some blocks are here, and pieces of others."""

    path: Path
    head: Head
    checksums: tuple[int, ...]
    files: tuple[tuple[int, int], ...] = ()
    """Device and inode of the file and of its digests."""
    blocks: set[int] = field(default_factory=set)
    pieces: dict[int, tuple[Pieces, tuple[int, ...]]] = field(default_factory=dict)
    """With the CRC-32 of the gaps, by block."""
    _descriptor: int = -1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Write with one descriptor meanwhile. Raises OSError."""
        self._descriptor = open_slot(self.path, os.O_WRONLY)
        try:
            yield
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_there(self) -> bool:
        """Return whether both files are still what was made: a trainer may have removed them, or put others there."""
        return bool(self.files) and files_of(self.path) == self.files

    @property
    def content_bytes(self) -> int:
        """How much content there is in all."""
        return self.head.content_bytes

    def write(self, block: int, content: bytes | memoryview) -> None:
        """Write one block once it was compared with its digest. Raises NotKeptError, OSError."""
        compare(block, content, self.checksums)
        self._write(block, [(0, len(content))], content)
        self.blocks.add(block)
        self.pieces.pop(block, None)

    def write_pieces(self, block: int, pieces: Pieces, content: memoryview, gaps: Sequence[int]) -> None:
        """Write pieces of one block once it was compared with its digest. Raises NotKeptError, OSError."""
        found = checksum_of_parts(pieces, gaps, len(content), lambda first, last: checksum(content[first:last]))
        if found != self.checksums[block]:
            raise NotKeptError(f"block {block} differs from what its owner digested")
        self._write(block, pieces, content)
        self.pieces[block] = (pieces, tuple(gaps))

    def lacking(self, ranges: Iterable[tuple[int, int]]) -> _Lacking:
        """Return what of these ranges is not here yet."""
        found = _Lacking(set(), {})
        for block, wanted in pieces_of(ranges, self.content_bytes).items():
            here, _gaps = self.pieces.get(block, ((), ()))
            if block in self.blocks or is_in(wanted, here):
                continue
            # All at once: what is compared is the block.
            pieces = joined(wanted, here)
            if len(pieces) > _MOST_PIECES or pieces == ((0, block_size(block, self.content_bytes)),):
                found.blocks.add(block)
            else:
                found.pieces[block] = pieces
        return found

    def parts(self, ranges: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
        """Return the blocks that these ranges touch of which only pieces are here."""
        touched = pieces_of(ranges, self.content_bytes)
        return tuple((block, *self.pieces[block]) for block in touched if block in self.pieces)

    def _write(self, block: int, pieces: Iterable[tuple[int, int]], content: bytes | memoryview) -> None:
        start = CONTENT_OFFSET + block * BLOCK_BYTES
        with memoryview(content) as whole:
            for first, last in pieces:
                done = first
                while done < last:
                    done += os.pwrite(self._descriptor, whole[done:last], start + done)


def files_of(path: Path) -> tuple[tuple[int, int], ...]:
    """Return what identifies the file of a checkpoint and that of its digests; nothing unless both are there."""
    try:
        found = [one.lstat() for one in (path, path.with_name(digests_name(path.name)))]
    except OSError:
        return ()
    return tuple((one.st_dev, one.st_ino) for one in found)


@dataclass
class _NamedLock:
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0
    """Who has it, or waits for it."""


class Fetcher:
    """Used by all threads of a keeper."""

    def __init__(self, arena: Arena, pause: Pause | None = None, on_spoilt: Callable[[], None] = lambda: None) -> None:
        """`pause`: what knows which iterations are over. `on_spoilt`: called where a block differs from its digest."""
        self._arena = arena
        self._on_spoilt = on_spoilt
        self._pause = Pause() if pause is None else pause
        self._guard = threading.Lock()
        self._locks: dict[str, _NamedLock] = {}
        """By name, while somebody has one or waits for it: one worker fetches into a file at a time."""
        self._parts: dict[str, PartialShard] = {}
        self._is_open = False
        self._num_gone = 0
        self._cleared_s = -math.inf
        """On the monotonic clock: when memory was given back last."""
        self._removals: set[threading.Event] = set()
        """Set once what was put aside is gone."""

    def fetch(self, wanted: FetchShard, context: ssl.SSLContext | None) -> Fetched | NotFetched:
        """Have blocks of a checkpoint here. Every wait has an end."""
        if context is None:
            return NotFetched("this pod has no certificate yet, with which it could ask others")
        name = _name_of(wanted)
        with self._alone_with(name):
            try:
                return self._fetch(name, wanted, context)
            except (MissingError, LinkError, OSError) as error:
                if isinstance(error, SpoiltError):
                    self._on_spoilt()
                return NotFetched(f"pod {wanted.peer.uid}: {error}"[:1000], isinstance(error, MissingError))

    @contextlib.contextmanager
    def _alone_with(self, name: str) -> Iterator[None]:
        """Keep others from this file. What a worker may ask for has no end, so nothing stays of what nobody uses."""
        with self._guard:
            one = self._locks.setdefault(name, _NamedLock())
            one.num_users += 1
        try:
            with one.lock:
                yield
        finally:
            with self._guard:
                one.num_users -= 1
                if not one.num_users and self._locks.get(name) is one:
                    del self._locks[name]

    def clear(self) -> None:
        """Give the memory back, all ranks have restored: who still has a file mapped keeps it until then.

        In a thread, under other names: ranks wait for this, and to free the pages of a file takes a tenth of the time
        in which it was fetched.
        """
        is_removed = threading.Event()
        with self._guard:
            names, self._parts, self._locks = list(self._parts), {}, {}
            if not names:
                return
            self._cleared_s = time.monotonic()
            self._removals.add(is_removed)
        gone: list[Path] = []
        try:
            for name in names:
                gone.append(self._put_aside(self._arena.reached(self._arena.folder / FETCHED / name)))
        finally:
            try:
                threading.Thread(target=self._remove, args=(gone, is_removed), name="gone", daemon=True).start()
            except RuntimeError:
                # The limit on processes of the pod, which its trainer may have used up.
                self._remove(gone, is_removed)

    def _remove(self, paths: Sequence[Path], is_removed: threading.Event) -> None:
        try:
            _remove(paths)
        finally:
            with self._guard:
                self._removals.discard(is_removed)
            is_removed.set()

    def _await_removals(self) -> None:
        """Wait until what is being given back is gone, but not for long."""
        with self._guard:
            removals = list(self._removals)
        until_s = time.monotonic() + _REMOVAL_S
        for is_removed in removals:
            is_removed.wait(max(until_s - time.monotonic(), 0.0))

    @contextlib.contextmanager
    def _making(self, path: Path, growth: int) -> Iterator[str]:
        """As `Arena.making`, but what is about to be gone does not stand in the way."""
        with self._arena.making(path, growth) as problem:
            if not problem:
                yield problem
                return
        # Asked again even if nothing is removed any more: it may have ended since.
        self._await_removals()
        until_s = self._cleared_s + _REMOVAL_S
        while True:
            with self._arena.making(path, growth) as problem:
                if not problem or time.monotonic() >= until_s or self._arena.is_over_limit(growth):
                    yield problem
                    return
            # Pages of what is removed are free once all workers have unmapped it, for which they do not wait either.
            time.sleep(_RETRY_S)

    def _put_aside(self, path: Path) -> Path:
        """Return a file's new name, under which nobody looks for it, and which counts as memory that is used."""
        path.with_name(digests_name(path.name)).unlink(missing_ok=True)
        with self._guard:
            self._num_gone += 1
            aside = path.with_name(f"gone-{self._num_gone}.slot")
        try:
            path.rename(aside)
        except OSError:
            # It is gone, or something else has the name.
            path.unlink(missing_ok=True)
        return aside

    def _fetch(self, name: str, wanted: FetchShard, context: ssl.SSLContext) -> Fetched | NotFetched:
        moment = Moment(wanted.term, wanted.iteration, wanted.step)
        with closing(self._reach(wanted, context)) as link:
            link.until_s = time.monotonic() + PATIENCE_S
            fetching = Fetching(link, wanted.rank, wanted.world_size, moment)
            part = self._part(name, fetching)
            if wanted.ranges:
                lacking = part.lacking(wanted.ranges)
            else:
                lacking = _Lacking(_blocks(wanted, part) - part.blocks, {})
            num_bytes = lacking.num_bytes
            link.until_s += num_bytes / LEAST_BYTES_PER_S
            problem = self._fill(name, part, fetching, link, lacking)
            if not problem and (left := part.lacking(wanted.ranges)).num_bytes:
                # Its holder is of a release that has whole blocks only.
                left = _Lacking(left.blocks | left.pieces.keys(), {})
                num_bytes += left.num_bytes
                problem = self._fill(name, part, fetching, link, left)
            if problem:
                return NotFetched(f"no room for what is fetched from other pods: {problem}")
        status = part.path.stat()
        return Fetched(
            FoundSlot(
                str(self._arena.folder / FETCHED / name), part.head.serial, moment.term, moment.iteration, moment.step,
                part.head.rank, part.head.world_size, part.head.layout_digest.hex(),
            ),
            status.st_ino,
            num_bytes,
            takes_ranges=True,
            parts=part.parts(wanted.ranges),
        )  # fmt: skip

    def _fill(self, name: str, part: PartialShard, fetching: Fetching, link: Link, lacking: _Lacking) -> str:
        """Fetch what is lacking; return why there is no room for it, "" if there is."""
        asked_s = time.monotonic()
        with self._making(self._arena.folder / FETCHED / name, lacking.growth + CONTENT_OFFSET) as problem:
            link.until_s += time.monotonic() - asked_s
            if not problem:
                with part.opened():
                    fetching.fetch(part, _runs(lacking.blocks))
                    fetching.fetch_pieces(part, lacking.pieces)
        return problem

    def _reach(self, wanted: FetchShard, context: ssl.SSLContext) -> Link:
        """Return a connection; a keeper that was just killed is started again within a moment. Raises LinkError."""
        peer, until_s = wanted.peer, time.monotonic() + _RESTART_S
        while True:
            try:
                return connect((peer.host, peer.port), context, peer.uid)
            except LinkError as error:
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() > until_s:
                    raise
                if wanted.restored_in < 0:
                    time.sleep(_RETRY_S)
                elif why := self._pause.wait_for_end_of(wanted.restored_in, _RETRY_S, peer.uid):
                    # It has left, or a pod with ranks has: then the next plan says who has what, and waits for this.
                    raise LinkError(f"{error}; {why}") from error

    def _part(self, name: str, fetching: Fetching) -> PartialShard:
        """Return the file for what is offered, made anew unless it holds blocks of the very same. Raises OSError."""
        part = self._parts.get(name)
        is_same = part is not None and (part.head, part.checksums) == (fetching.head, fetching.checksums)
        if part is not None and is_same and part.is_there():
            return part
        with self._guard:
            if not self._is_open:
                self._arena.open_fetched()
                self._is_open = True
        path = self._arena.reached(self._arena.folder / FETCHED / name)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, self._arena.file_mode)
            os.ftruncate(descriptor, CONTENT_OFFSET + fetching.head.content_bytes)
            write_digests(
                path.with_name(digests_name(name)), Digests(fetching.head.serial, "", list(fetching.checksums))
            )
            os.pwrite(descriptor, pack_head(fetching.head) * 2, 0)
        finally:
            os.close(descriptor)
        part = self._parts[name] = PartialShard(path, fetching.head, fetching.checksums, files_of(path))
        return part


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _name_of(wanted: FetchShard) -> str:
    """Return the name of the file: the same for the same checkpoint, whoever has it."""
    what = (wanted.term, wanted.iteration, wanted.step, wanted.rank, wanted.world_size)
    return f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.slot"


def _blocks(wanted: FetchShard, part: PartialShard) -> set[int]:
    """Return the blocks that a worker wants: if it names none, those that say which it needs, layout and objects."""
    last = len(part.checksums)
    if wanted.blocks:
        return {block for first, number in wanted.blocks for block in range(first, min(first + number, last))}
    head = part.head
    ranges = ((0, head.layout_bytes), (head.objects_offset, head.objects_bytes))
    return {
        block
        for start, length in ranges
        if length
        for block in range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1)
    }


def _runs(blocks: set[int]) -> Sequence[range]:
    found: list[range] = []
    for block in sorted(blocks):
        if found and found[-1].stop == block:
            found[-1] = range(found[-1].start, block + 1)
        else:
            found.append(range(block, block + 1))
    return found
