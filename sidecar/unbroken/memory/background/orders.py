"""What a worker hands to the process that writes: one datagram, with the slot and its names.

The slot's descriptor has a shared lock: nobody overwrites the slot before all its descriptors are closed.
"""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from unbroken_core.vocabulary.errors import WireError

MAX_ORDER_BYTES: Final = 32 << 10
TAKEN: Final = b"taken"
"""The answer: this rank's part is on the disk, or given up. The slot is free before."""


@dataclass(frozen=True)
class WriteOrder:
    """Write this rank's part of a checkpoint."""

    folder: str
    job: str
    """Digest of the job's uid, hexadecimal."""
    term: int
    iteration: int
    nonce: int
    step: int
    rank: int
    world_size: int
    path: str
    """Of the slot."""
    serial: int
    keep: int
    """Whole checkpoints that stay."""
    every: int
    """At most so many steps lie between two orders."""
    loaded: int | None = None
    """The step that all ranks went back to, -1 for none; None: not known."""
    given_up: str = ""
    """Why this rank has nothing to write of the step. No descriptors come with it, and nothing is answered."""


def send(connection: socket.socket, order: WriteOrder, descriptors: Sequence[int]) -> None:
    """Send it without waiting, with descriptors of the slot and of a file with its names. Raises OSError."""
    content = json.dumps(asdict(order)).encode()
    if descriptors:
        socket.send_fds(connection, [content], list(descriptors), socket.MSG_DONTWAIT)
    else:
        connection.send(content, socket.MSG_DONTWAIT)


def receive(connection: socket.socket) -> tuple[WriteOrder, list[int]] | None:
    """Return what comes next, with its descriptors; None at the end. Raises WireError, OSError."""
    content, descriptors, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 2)
    if not content:
        return None
    try:
        order = WriteOrder(**json.loads(content))
        wanted = 0 if order.given_up else 2
        if len(descriptors) != wanted:
            raise ValueError(f"want {wanted} descriptors, got {len(descriptors)}")
        return order, list(descriptors)
    except (TypeError, ValueError) as error:
        raise WireError(f"order: {error}"[:500]) from error
