"""Shards that other pods have: the own keeper fetches what is wanted of them, when it is first looked at."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from unbroken.memory.arena import WorkerSlots
from unbroken.memory.checksums import checksum
from unbroken.memory.choosing import ReadableCheckpoint
from unbroken.memory.sources import DiffersError, Source, UnreadableError, blocks_of, open_source
from unbroken_core.pod.block_parts import Pieces, block_size, checksum_of_parts, gaps_of, is_in, pieces_of, ranges_of
from unbroken_core.pod.memory_messages import MAX_RUNS, Fetched, FetchShard, FoundSlot
from unbroken_core.pod.memory_slots import BLOCK_BYTES, Moment
from unbroken_core.vocabulary.checkpoints import Peer, Restore

logger = logging.getLogger(__name__)

_LEAST_GAP = 4096
"""What lies between two ranges and is smaller comes with them: a page has been touched already."""


class RefusedError(UnreadableError):
    """Its holder has not this checkpoint, or not as it was sealed; it may have others."""


@dataclass(frozen=True)
class Holder:
    """A pod that has a shard, and of which rank it is there: of data parallel ranks all shards are the same."""

    peer: Peer
    rank: int


class Holders:
    """Who has what, as the plan says."""

    def __init__(self, restore: Restore | None) -> None:
        self._runs: dict[ReadableCheckpoint, tuple[tuple[int, int, int, str], ...]] = {}
        self._peers: dict[str, Peer] = {}
        if restore is not None:
            self._peers = {one.uid: one for one in restore.peers}
            for one in restore.candidates:
                moment = Moment(one.term, one.iteration, one.step)
                self._runs[ReadableCheckpoint(moment, one.world_size, one.is_given_up)] = one.fetches

    def of(self, candidate: ReadableCheckpoint, rank: int) -> list[Holder]:
        """Return who has this rank's shard, in the order in which to ask."""
        return [
            Holder(self._peers[uid], kept + rank - first)
            for first, number, kept, uid in self._runs.get(candidate, ())
            if first <= rank < first + number and uid in self._peers
        ]

    def ranks(self, candidate: ReadableCheckpoint, near: float) -> list[int]:
        """Return the ranks whose shards others have, those around `near` first: of a part of the whole between 0 and 1.

        Parts of tensors lie in the order of ranks, so a rank of a smaller world reads those around its own place.
        """
        found = {
            rank
            for first, number, _kept, _uid in self._runs.get(candidate, ())
            for rank in range(first, min(first + number, candidate.world_size))
        }
        return sorted(found, key=lambda rank: abs((rank + 0.5) / candidate.world_size - near))


@dataclass
class RemoteSource(Source):
    """One shard in the memory of another pod, of which what is wanted is fetched before it is compared."""

    arena: WorkerSlots | None = None
    wanted: FetchShard | None = None
    inode: int = 0
    num_bytes: int = 0
    """What was fetched."""
    problem: UnreadableError | None = None
    """Why its holder could not hand something out; None while it could."""
    takes_ranges: bool = False
    """Whether the keeper fetches ranges of bytes; one of an earlier release fetches blocks."""
    _here: set[int] = field(default_factory=set)
    _parts: dict[int, tuple[Pieces, tuple[int, ...]]] = field(default_factory=dict)
    """Blocks of which only pieces are here, with the CRC-32 of their gaps."""
    _verified_parts: dict[int, Pieces] = field(default_factory=dict)

    def verify(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch what the ranges (start, length) touch, and compare it. Raises UnreadableError."""
        ranges = list(ranges)
        lacking = blocks_of(ranges) - self._here
        if lacking and self.takes_ranges:
            self._fetch_ranges(ranges)
        elif lacking:
            self._fetch_blocks(lacking)
        touched = blocks_of(ranges)
        self._compare(touched & self._here)
        if touched - self._here:
            for block, wanted in pieces_of(ranges, self.head.content_bytes).items():
                if block not in self._here:
                    self._compare_part(block, wanted)

    def _fetch_blocks(self, blocks: set[int]) -> None:
        runs = _runs(blocks)
        for first in range(0, len(runs), MAX_RUNS):
            self._fetch(blocks=tuple(runs[first : first + MAX_RUNS]))
        self._here |= blocks

    def _fetch_ranges(self, ranges: list[tuple[int, int]]) -> None:
        size = self.head.content_bytes
        if any(start + length > size for start, length in ranges):
            raise UnreadableError(f"{self.path}: has {size} bytes, and a part behind them is wanted")
        pieces = pieces_of(ranges, size, _LEAST_GAP)
        lacking = {block: wanted for block, wanted in pieces.items() if not self._has(block, wanted)}
        wanted = ranges_of(lacking)
        for first in range(0, len(wanted), MAX_RUNS):
            answer = self._fetch(ranges=tuple(wanted[first : first + MAX_RUNS]))
            self._parts.update({block: (found, gaps) for block, found, gaps in answer.parts})
            whole = blocks_of(wanted[first : first + MAX_RUNS]) - {block for block, _found, _gaps in answer.parts}
            self._here |= whole
            for block in whole:
                self._parts.pop(block, None)

    def _has(self, block: int, wanted: Pieces) -> bool:
        return block in self._here or (block in self._parts and is_in(wanted, self._parts[block][0]))

    def _fetch(self, blocks: tuple[tuple[int, int], ...] = (), ranges: tuple[tuple[int, int], ...] = ()) -> Fetched:
        if self.arena is None or self.wanted is None:
            raise UnreadableError(f"{self.path}: cannot be fetched")
        try:
            answer = fetched(self.arena, replace(self.wanted, blocks=blocks, ranges=ranges))
            if answer.inode != self.inode:
                raise UnreadableError(f"{self.path}: the keeper was started again meanwhile")
        except UnreadableError as error:
            self.problem = error.with_traceback(None)
            raise
        self.num_bytes += answer.num_bytes
        return answer

    def _compare_part(self, block: int, wanted: Pieces) -> None:
        """Compare pieces of a block with its digest, given those of the gaps between. Raises UnreadableError."""
        pieces, gaps = self._parts.get(block, ((), ()))
        if not is_in(wanted, pieces):
            raise UnreadableError(f"{self.path}: the keeper has not fetched all of block {block}")
        if self._verified_parts.get(block) == pieces:
            return
        size, start = block_size(block, self.head.content_bytes), block * BLOCK_BYTES
        is_possible = size and block < len(self.checksums) and len(gaps) == len(gaps_of(pieces, size))
        if not is_possible or self.checksums[block] != checksum_of_parts(
            pieces, gaps, size, lambda first, last: checksum(self.content[start + first : start + last])
        ):
            raise DiffersError(f"{self.path}: block {block} differs from what was sealed")
        self._verified_parts[block] = pieces


class Remote:
    """All that one restore has from other pods."""

    def __init__(self, arena: WorkerSlots | None, holders: Holders, iteration: int) -> None:
        """`iteration`: the present one."""
        self._arena = arena
        self._iteration = iteration
        self._holders = holders
        self._sources: dict[tuple[ReadableCheckpoint, int], RemoteSource] = {}
        self._away: dict[Peer, str] = {}
        """Who could not be asked, and why: nobody waits for the same pod twice."""
        self._refused: dict[tuple[ReadableCheckpoint, int, Peer], str] = {}
        """What was asked of somebody who could not hand it out, and why."""

    @property
    def num_bytes(self) -> int:
        """What was fetched."""
        return sum(one.num_bytes for one in self._sources.values())

    def num_holders(self, candidate: ReadableCheckpoint, rank: int) -> int:
        """Return how many others have it, as the plan says."""
        return len(self._holders.of(candidate, rank))

    def has_any(self, candidate: ReadableCheckpoint) -> bool:
        """Return whether others have any shard of it."""
        return bool(self._holders.ranks(candidate, 0.0))

    def ranks(self, candidate: ReadableCheckpoint, near: float) -> list[int]:
        """Return the ranks whose shards others have, the most likely ones first."""
        return self._holders.ranks(candidate, near)

    def open(self, candidate: ReadableCheckpoint, rank: int) -> RemoteSource:
        """Return a shard. Raises UnreadableError when none of those who have it can hand it out."""
        place = (candidate, rank)
        before = self._sources.get(place)
        if before is not None and before.problem is not None and before.wanted is not None:
            self._note(*place, before.wanted.peer, before.problem)
            self._sources.pop(place).close()
        if place not in self._sources:
            self._sources[place] = self._open(candidate, rank)
        return self._sources[place]

    def close(self) -> None:
        """Unmap all."""
        for one in self._sources.values():
            one.close()
        self._sources.clear()

    def _open(self, candidate: ReadableCheckpoint, rank: int) -> RemoteSource:
        problems = []
        for holder in self._holders.of(candidate, rank):
            known = self._away.get(holder.peer) or self._refused.get((candidate, rank, holder.peer))
            if known:
                problems.append(known)
                continue
            try:
                return self._ask(candidate, holder)
            except UnreadableError as error:
                problems.append(str(error))
                self._note(candidate, rank, holder.peer, error)
        raise UnreadableError(f"shard of rank {rank}: {'; '.join(problems) or 'nobody has it'}"[:1000])

    def _note(self, candidate: ReadableCheckpoint, rank: int, peer: Peer, error: UnreadableError) -> None:
        if isinstance(error, RefusedError):
            self._refused[candidate, rank, peer] = str(error)
        else:
            self._away[peer] = str(error)

    def _ask(self, candidate: ReadableCheckpoint, holder: Holder) -> RemoteSource:
        if self._arena is None:
            raise UnreadableError("this process has no keeper")
        moment = candidate.moment
        wanted = FetchShard(
            holder.peer, holder.rank, candidate.world_size, moment.term, moment.iteration, moment.step,
            restored_in=self._iteration,
        )  # fmt: skip
        answer = fetched(self._arena, wanted)
        found = open_source(_checked(answer.slot, wanted))
        source = RemoteSource(
            found.path, found.head, found.content, found.checksums, found.mapped,
            arena=self._arena, wanted=wanted, inode=answer.inode, num_bytes=answer.num_bytes,
            takes_ranges=answer.takes_ranges,
        )  # fmt: skip
        head = found.head
        source._here |= blocks_of([(0, head.layout_bytes), (head.objects_offset, head.objects_bytes)])
        return source


def fetched(arena: WorkerSlots, wanted: FetchShard) -> Fetched:
    """Have the keeper fetch a part of a shard. Raises UnreadableError; RefusedError where another may be fetched."""
    answer = arena.fetch(wanted)
    if isinstance(answer, Fetched):
        return answer
    if answer is None:
        raise UnreadableError("no keeper answers")
    raise (RefusedError if answer.has_answered else UnreadableError)(answer.reason)


def _checked(slot: FoundSlot, wanted: FetchShard) -> FoundSlot:
    found = (slot.term, slot.iteration, slot.step, slot.rank, slot.world_size)
    if found != (wanted.term, wanted.iteration, wanted.step, wanted.rank, wanted.world_size):
        raise UnreadableError(f"{slot.path}: is another checkpoint than was asked for")
    return slot


def _runs(blocks: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found
