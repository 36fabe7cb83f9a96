"""Tells the pod's keeper what is on the disk: for metrics and the status alone, so nobody waits for its answer."""

import contextlib
from pathlib import Path
from typing import Final

from unbroken.memory.background.epochs import MAX_REASON, Epoch
from unbroken.memory.client import KeeperClient, shortened
from unbroken.memory.disk import steps_on_disk
from unbroken_core.pod.memory_messages import MAX_REQUEST_BYTES, Measure, Measured, Written
from unbroken_core.vocabulary.checkpoints import OnDisk

_MAX_PROBLEM_BYTES: Final = MAX_REQUEST_BYTES - 512
"""The rest is for the numbers beside it."""


class DiskNews:
    """Of one process that writes. Without a keeper it says nothing."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the pod's, with its keeper's socket."""
        self._client = None if folder is None else KeeperClient(folder)

    def tell(self, on_disk: OnDisk, age_s: float) -> None:
        """Say what is on the disk, and since when."""
        if self._client is not None:
            self._client.tell(Written(on_disk, age_s))

    def failed(self) -> None:
        """Say that a part was not written, because of this rank."""
        if self._client is not None:
            self._client.tell(Measured(Measure.UNWRITTEN))

    def differs(self) -> None:
        """Say that a slot is not what was sealed."""
        if self._client is not None:
            self._client.tell(Measured(Measure.DIFFERS))


def on_disk(epoch: Epoch, every: int, num_given_up: int = 0, problem: str = "", at_most: int | None = None) -> OnDisk:
    """Look at the folder, and return what is told of it.

    `at_most`: steps after this one do not count. They are there, and the iteration did not go on from them: they cannot
    be read, or are given up.
    """
    newest = -1
    with contextlib.suppress(OSError):
        steps = steps_on_disk(epoch.folder)
        newest = max((step for step in steps if at_most is None or step <= at_most), default=-1)
    return OnDisk(
        epoch.term, epoch.iteration, every, newest, num_given_up, shortened(problem[:MAX_REASON], _MAX_PROBLEM_BYTES)
    )
