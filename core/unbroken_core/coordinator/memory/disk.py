"""Which step is whole on the disk, as the pods with rank 0 report it: for people, nothing is decided by it.

It stays known when the pod goes: the disk does not go with it.
"""

from collections.abc import Mapping

from unbroken_core.vocabulary.checkpoints import OnDisk


class DiskWord:
    """The last word on the disk."""

    def __init__(self) -> None:
        self.known: OnDisk | None = None

    def receive(self, uid: str, told: OnDisk, last_iteration: int, seats: Mapping[int, str]) -> bool:
        """Take what a pod says; return whether it may be so. `seats`: uid by rank, as far as they are known."""
        if not 0 <= told.iteration <= last_iteration or seats.get(0, uid) != uid:
            return False
        if self.known is None or _epoch(told) >= _epoch(self.known):
            self.known = told
        return True


def _epoch(told: OnDisk) -> tuple[int, int]:
    return told.iteration, told.term
