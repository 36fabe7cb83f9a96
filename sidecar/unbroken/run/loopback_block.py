"""Loopback addresses for the pods of one run: a block 127.0.N.0/24 that no other run on this machine uses. Linux only.

`unbroken local` claims larger blocks, outside 127.0.0.0/16, for nodes and services as well; neither imports the other.
"""

import random
import socket
import sys

from unbroken_core.vocabulary.errors import InputError


class LoopbackBlock:
    """A block that belongs to this process until `release`; the kernel frees it if the process is killed."""

    def __init__(self) -> None:
        """Take a block. Raises InputError when there is none."""
        if sys.platform != "linux":
            raise InputError(f"unbroken run: want Linux, where all of 127.0.0.0/8 is this machine, got {sys.platform}")
        self._claim, self._number = _claim_block()
        self._next = 2

    @property
    def rendezvous(self) -> str:
        """Address of the rendezvous."""
        return f"127.0.{self._number}.1"

    def next_pod(self) -> str:
        """Return an address that no pod had lately."""
        address = f"127.0.{self._number}.{self._next}"
        self._next = 2 if self._next == 254 else self._next + 1
        return address

    def release(self) -> None:
        """Give the block back."""
        self._claim.close()


def _claim_block() -> tuple[socket.socket, int]:
    numbers = list(range(1, 255))
    random.shuffle(numbers)
    for number in numbers:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # An abstract name: it vanishes with the process.
            claim.bind(f"\0unbroken-run-127.0.{number}")
        except OSError:
            claim.close()
            continue
        return claim, number
    raise InputError("unbroken run: want a free block of loopback addresses, got 254 runs on this machine")
