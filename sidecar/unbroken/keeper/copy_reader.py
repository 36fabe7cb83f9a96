"""Fetches a checkpoint, or some blocks of it, from a pod that has it.

What is fetched is compared with its digests before the slot says that it is whole.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from unbroken.keeper.copies import NotKeptError, Receiving
from unbroken.keeper.copy_server import checked_head, receive_content
from unbroken.keeper.peer_link import Link
from unbroken_core.pod.memory_slots import Head, Moment
from unbroken_core.pod.replica_messages import Fetch, Missing, ToReader


class MissingError(Exception):
    """The other pod cannot hand it out, or what it sent is not what was sealed; the message says why."""


class Fetching:
    """One checkpoint of another pod. Used by one thread."""

    def __init__(self, link: Link, rank: int, world_size: int, moment: Moment) -> None:
        """Ask for its head and digests. Raises MissingError, LinkError."""
        self._link = link
        self._wanted = (rank, world_size, moment.term, moment.iteration, moment.step)
        self.head, self.checksums = self._ask(0, 0)
        if (self.head.rank, self.head.world_size, self.head.moment) != (rank, world_size, moment):
            raise MissingError(f"pod {link.pod_uid[:200]} offers another checkpoint than step {moment.step} of {rank}")

    def fetch(self, path: Path, ranges: Sequence[range] | None = None) -> int:
        """Put blocks, all by default, into a slot that has room; return their number.

        Raises MissingError, LinkError, OSError. The slot says that it is whole only when all blocks are right.
        """
        wanted = [range(len(self.checksums))] if ranges is None else ranges
        try:
            receiving = Receiving(path, self.head, self.checksums)
        except NotKeptError as error:
            raise MissingError(f"{path.name}: {error}") from error
        with closing(receiving):
            for blocks in wanted:
                if not blocks:
                    continue
                if self._ask(blocks.start, len(blocks)) != (self.head, self.checksums):
                    raise MissingError(f"pod {self._link.pod_uid[:200]} has another checkpoint by now")
                problem = receive_content(self._link, receiving, blocks)
                if problem:
                    raise MissingError(f"from pod {self._link.pod_uid[:200]}: {problem}")
            receiving.seal()
        return sum(len(blocks) for blocks in wanted)

    def _ask(self, first_block: int, num_blocks: int) -> tuple[Head, tuple[int, ...]]:
        self._link.send(Fetch(*self._wanted, first_block, num_blocks))
        answer = self._link.receive(ToReader)
        if isinstance(answer, Missing):
            raise MissingError(f"pod {self._link.pod_uid[:200]}: {answer.reason}"[:2000])
        try:
            return checked_head(answer.head, answer.checksums), answer.checksums
        except NotKeptError as error:
            raise MissingError(f"pod {self._link.pod_uid[:200]}: {error}") from error
