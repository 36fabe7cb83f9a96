"""Loopback addresses of one cluster: a block 127.N.0.0/16 that no other cluster on this machine uses.

    127.N.0.x        nodes; the first one's socket, held open, is the claim on the block
    127.N.1-127.x    pods, one after the other, so that an address is not used again soon
    127.N.128-254.x  services

127.96.0.0/16 is no block: the built-in API servers of this machine give its addresses to Services.

Linux binds all of 127.0.0.0/8 without any configuration; macOS does not.
"""

import itertools
import random
import socket
from collections.abc import Iterator

from unbroken_core.vocabulary.errors import UnbrokenError

KUBELET_PORTS = (10250, 20250, 30250)
BLOCKS = tuple(number for number in range(64, 255) if number != 96)


class AddressError(UnbrokenError):
    """No free block of loopback addresses."""


class AddressBlock:
    """The addresses of one cluster. Close it to give the block back."""

    def __init__(self) -> None:
        self._claim, self.number, self.port = _claim_block()
        self._pods = itertools.cycle(_addresses(self.number, 1, 127))
        self._services = itertools.cycle(_addresses(self.number, 128, 254))

    def close(self) -> None:
        """Give the block back."""
        self._claim.close()

    @property
    def claim(self) -> str:
        """The address that this process listens on to hold the block."""
        return f"127.{self.number}.0.1"

    def node(self, index: int) -> str:
        """Return the address of the n-th node, 0-based, at most 200."""
        return f"127.{self.number}.0.{index + 2}"

    def next_pod(self) -> str:
        """Return a pod address."""
        return next(self._pods)

    def next_service(self) -> str:
        """Return a service address."""
        return next(self._services)


def _addresses(number: int, first: int, last: int) -> Iterator[str]:
    return (f"127.{number}.{third}.{fourth}" for third in range(first, last + 1) for fourth in range(1, 255))


def _claim_block() -> tuple[socket.socket, int, int]:
    numbers = list(BLOCKS)
    random.shuffle(numbers)
    for port in KUBELET_PORTS:
        for number in numbers:
            claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                claim.bind((f"127.{number}.0.1", port))
                claim.listen(1)
            except OSError:
                claim.close()
                continue
            return claim, number, port
    raise AddressError(f"want a free block among 127.64.0.0 to 127.254.0.0 (port {KUBELET_PORTS[0]}), got none")
