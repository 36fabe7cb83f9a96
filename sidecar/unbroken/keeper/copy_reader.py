"""Asks a pod that has a checkpoint for some blocks of it, or all; each is compared with its digest.

    this thread  receive, decrypt   0 1 2 3 ...        a few blocks of memory go round between both
    a second one compare, write       0 1 2 3 ...

A restore writes into fresh memory, which takes longer than to decrypt; and no rank trains meanwhile.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Protocol

from unbroken.keeper.copies import NotKeptError
from unbroken.keeper.copy_server import Target, checked_head, receive_content
from unbroken.keeper.peer_link import Link, parts_of
from unbroken_core.pod.block_parts import Pieces, block_size, gaps_of, ranges_of
from unbroken_core.pod.memory_slots import BLOCK_BYTES, Head, Moment
from unbroken_core.pod.replica_messages import Fetch, Missing, Sending, ToReader
from unbroken_core.vocabulary.checkpoints import MAX_RANGES

_NUM_BUFFERS = 4
"""Blocks that are received and not yet written, at most."""


class MissingError(Exception):
    """The other pod cannot hand it out, or what it sent is not what was sealed; the message says why."""


class SpoiltError(MissingError):
    """What it sent differs from its digests."""


class PieceTarget(Target, Protocol):
    """What takes pieces of blocks as well."""

    def write_pieces(self, block: int, pieces: Pieces, content: memoryview, gaps: Sequence[int]) -> None:
        """Write pieces of one block once they were compared with its digest. Raises NotKeptError, OSError.

        `content`: as large as the block. `gaps`: CRC-32 of what is between the pieces.
        """
        ...


class Fetching:
    """One checkpoint of another pod. Used by one thread."""

    def __init__(self, link: Link, rank: int, world_size: int, moment: Moment) -> None:
        """Ask for its head and digests. Raises MissingError, LinkError."""
        self._link = link
        self._wanted = (rank, world_size, moment.term, moment.iteration, moment.step)
        self.head, self.checksums = _checked(self._ask(Fetch(*self._wanted)))
        if (self.head.rank, self.head.world_size, self.head.moment) != (rank, world_size, moment):
            raise MissingError(f"offers another checkpoint than step {moment.step} of rank {rank}")

    def fetch(self, target: Target, runs: Sequence[range]) -> None:
        """Put blocks into their places. Raises MissingError, LinkError, OSError."""
        for blocks in runs:
            self._compare(self._ask(Fetch(*self._wanted, blocks.start, len(blocks))))
            problem = _receive(self._link, target, blocks)
            if problem:
                # The caller closes the connection: what else comes is of no use.
                raise SpoiltError(problem)

    def fetch_pieces(self, target: PieceTarget, pieces: Mapping[int, Pieces]) -> bool:
        """Put pieces of blocks into their places. Raises MissingError, LinkError, OSError.

        False: the other side is of a release that has whole blocks only, and nothing was fetched.
        """
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for batch in _batches(pieces):
            answer = self._ask(Fetch(*self._wanted, ranges=tuple(ranges_of(batch))))
            self._compare(answer)
            if not answer.has_ranges:
                return False
            for block, found in batch.items():
                view = buffer[: block_size(block, target.content_bytes)]
                for first, last in found:
                    self._link.receive_into(view[first:last])
                gaps = self._receive_gaps(len(gaps_of(found, len(view))))
                try:
                    target.write_pieces(block, found, view, gaps)
                except NotKeptError as error:
                    # The caller closes the connection: what else comes is of no use.
                    raise SpoiltError(str(error)) from error
        return True

    def _receive_gaps(self, number: int) -> tuple[int, ...]:
        packed = bytearray(4 * number)
        self._link.receive_into(memoryview(packed))
        return struct.unpack(f">{number}I", packed)

    def _compare(self, answer: Sending) -> None:
        if _checked(answer) != (self.head, self.checksums):
            raise MissingError("has another checkpoint by now")

    def _ask(self, wanted: Fetch) -> Sending:
        self._link.send(wanted)
        answer: Sending | Missing = self._link.receive(ToReader)
        if isinstance(answer, Missing):
            raise MissingError(answer.reason[:1000])
        return answer


class _WritingBehind:
    """A thread that compares and writes blocks while the next ones are received."""

    def __init__(self, target: Target, num_buffers: int) -> None:
        """Raises RuntimeError: no thread can be started."""
        self._target = target
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        self._error: BaseException | None = None
        for _ in range(num_buffers):
            self._free.put(memoryview(bytearray(BLOCK_BYTES)))
        self._thread = threading.Thread(target=self._run, name="writes", daemon=True)
        self._thread.start()

    def receive(self, link: Link, blocks: range) -> str:
        """Receive blocks; return what is wrong with one of them, "" when all are written. Raises LinkError, OSError."""
        try:
            for block in blocks:
                buffer = self._free.get()
                if self._error is not None:
                    break
                for part in parts_of(buffer[: block_size(block, self._target.content_bytes)]):
                    link.receive_into(part)
                self._full.put((block, buffer))
        finally:
            # Also if nothing comes any more: nobody else may write once this has returned.
            self._full.put(None)
            self._thread.join()
        if isinstance(self._error, NotKeptError):
            return str(self._error)
        if self._error is not None:
            raise self._error
        return ""

    def _run(self) -> None:
        while (one := self._full.get()) is not None:
            block, buffer = one
            try:
                if self._error is None:
                    self._target.write(block, buffer[: block_size(block, self._target.content_bytes)])
            except BaseException as error:
                self._error = error
            self._free.put(buffer)


def _receive(link: Link, target: Target, blocks: range) -> str:
    """Receive blocks; return what is wrong with them, "" when all is well. Raises LinkError, OSError."""
    if len(blocks) == 1:
        return receive_content(link, target, blocks)
    try:
        behind = _WritingBehind(target, min(len(blocks), _NUM_BUFFERS))
    except RuntimeError:
        # The limit on processes of the pod, which its trainer may have used up.
        return receive_content(link, target, blocks)
    return behind.receive(link, blocks)


def _checked(answer: Sending) -> tuple[Head, tuple[int, ...]]:
    try:
        return checked_head(answer.head, answer.checksums), answer.checksums
    except NotKeptError as error:
        raise MissingError(str(error)) from error


def _batches(pieces: Mapping[int, Pieces]) -> list[dict[int, Pieces]]:
    """Return the same in parts that one Fetch may ask for: blocks in order, all pieces of a block in one."""
    found: list[dict[int, Pieces]] = []
    number = MAX_RANGES
    for block, of_block in sorted(pieces.items()):
        number += len(of_block)
        if number > MAX_RANGES:
            found.append({})
            number = len(of_block)
        found[-1][block] = of_block
    return found
