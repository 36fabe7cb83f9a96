"""Asks a pod that has a checkpoint for some blocks of it, or all; each is compared with its digest."""

import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

from unbroken.keeper.copies import NotKeptError
from unbroken.keeper.copy_server import Target, checked_head, receive_content
from unbroken.keeper.peer_link import Link
from unbroken_core.pod.block_parts import Pieces, block_size, gaps_of, ranges_of
from unbroken_core.pod.memory_slots import BLOCK_BYTES, Head, Moment
from unbroken_core.pod.replica_messages import Fetch, Missing, Sending, ToReader
from unbroken_core.vocabulary.checkpoints import MAX_RANGES


class MissingError(Exception):
    """The other pod cannot hand it out, or what it sent is not what was sealed; the message says why."""


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
            problem = receive_content(self._link, target, blocks)
            if problem:
                raise MissingError(problem)

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
                    raise MissingError(str(error)) from error
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
