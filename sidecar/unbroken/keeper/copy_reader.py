"""Asks a pod that has a checkpoint for some blocks of it, or all; each is compared with its digest."""

from collections.abc import Sequence

from unbroken.keeper.copies import NotKeptError
from unbroken.keeper.copy_server import Target, checked_head, receive_content
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
            raise MissingError(f"offers another checkpoint than step {moment.step} of rank {rank}")

    def fetch(self, target: Target, runs: Sequence[range]) -> None:
        """Put blocks into their places. Raises MissingError, LinkError, OSError."""
        for blocks in runs:
            if self._ask(blocks.start, len(blocks)) != (self.head, self.checksums):
                raise MissingError("has another checkpoint by now")
            problem = receive_content(self._link, target, blocks)
            if problem:
                raise MissingError(problem)

    def _ask(self, first_block: int, num_blocks: int) -> tuple[Head, tuple[int, ...]]:
        self._link.send(Fetch(*self._wanted, first_block, num_blocks))
        answer = self._link.receive(ToReader)
        if isinstance(answer, Missing):
            raise MissingError(answer.reason[:1000])
        try:
            return checked_head(answer.head, answer.checksums), answer.checksums
        except NotKeptError as error:
            raise MissingError(str(error)) from error
