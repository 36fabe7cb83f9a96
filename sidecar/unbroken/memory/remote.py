"""Shards that other pods have: the own keeper fetches the blocks that are wanted, when they are first looked at."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from unbroken.memory.arena import WorkerSlots
from unbroken.memory.choosing import ReadableCheckpoint
from unbroken.memory.sources import Source, UnreadableError, blocks_of, open_source
from unbroken_core.pod.memory_messages import MAX_RUNS, Fetched, FetchShard, FoundSlot
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.vocabulary.checkpoints import Peer, Restore

logger = logging.getLogger(__name__)


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
    """One shard in the memory of another pod, of which blocks are fetched before they are compared."""

    arena: WorkerSlots | None = None
    wanted: FetchShard | None = None
    inode: int = 0
    num_bytes: int = 0
    """What was fetched."""
    problem: str = ""
    """Why its holder could not hand something out; "" while it could."""
    _here: set[int] = field(default_factory=set)

    def verify(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch all blocks that the ranges (start, length) touch, and compare them. Raises UnreadableError."""
        ranges = list(ranges)
        lacking = blocks_of(ranges) - self._here
        if lacking:
            self._fetch(lacking)
        super().verify(ranges)

    def _fetch(self, blocks: set[int]) -> None:
        if self.arena is None or self.wanted is None:
            raise UnreadableError(f"{self.path}: cannot be fetched")
        runs = _runs(blocks)
        try:
            for first in range(0, len(runs), MAX_RUNS):
                answer = fetched(self.arena, self.wanted, tuple(runs[first : first + MAX_RUNS]))
                self.num_bytes += answer.num_bytes
                if answer.inode != self.inode:
                    raise UnreadableError(f"{self.path}: the keeper was started again meanwhile")
        except UnreadableError as error:
            self.problem = str(error)
            raise
        self._here |= blocks


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
        if before is not None and before.problem and before.wanted is not None:
            self._away[before.wanted.peer] = before.problem
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
            if holder.peer in self._away:
                problems.append(self._away[holder.peer])
                continue
            try:
                return self._ask(candidate, holder)
            except UnreadableError as error:
                problems.append(str(error))
                self._away[holder.peer] = str(error)
        raise UnreadableError(f"shard of rank {rank}: {'; '.join(problems) or 'nobody has it'}"[:1000])

    def _ask(self, candidate: ReadableCheckpoint, holder: Holder) -> RemoteSource:
        if self._arena is None:
            raise UnreadableError("this process has no keeper")
        moment = candidate.moment
        wanted = FetchShard(
            holder.peer, holder.rank, candidate.world_size, moment.term, moment.iteration, moment.step,
            restored_in=self._iteration,
        )  # fmt: skip
        answer = fetched(self._arena, wanted, ())
        found = open_source(_checked(answer.slot, wanted))
        source = RemoteSource(
            found.path, found.head, found.content, found.checksums, found.mapped,
            arena=self._arena, wanted=wanted, inode=answer.inode, num_bytes=answer.num_bytes,
        )  # fmt: skip
        head = found.head
        source._here |= blocks_of([(0, head.layout_bytes), (head.objects_offset, head.objects_bytes)])
        return source


def fetched(arena: WorkerSlots, wanted: FetchShard, runs: tuple[tuple[int, int], ...]) -> Fetched:
    """Have the keeper fetch blocks. Raises UnreadableError."""
    answer = arena.fetch(wanted, runs)
    if isinstance(answer, Fetched):
        return answer
    raise UnreadableError("no keeper answers" if answer is None else answer.reason)


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
