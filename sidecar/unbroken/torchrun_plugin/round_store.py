"""The store of one round: a TCPStore on the node of rank 0, in torchrun's process, new for each round.

A new one, because keys of a round that was cut off would mislead the next: torch's process groups find each other by
keys whose names do not tell rounds apart.
"""

import contextlib
import logging
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # torch does not export them by name

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0


@dataclass(frozen=True)
class RoundStore:
    """A store that this node serves or is connected to."""

    round: int
    store: Store
    address: str
    port: int


def open_store(number: int, address: str, timeout_s: float) -> RoundStore:
    """Open the store of a round on this node, which the others reach at `address`. Raises OSError, RuntimeError."""
    listener = _listen(address)
    try:
        port = listener.getsockname()[1]
        store = TCPStore(
            host_name=address,
            port=port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.fileno(),
        )
    except BaseException:
        listener.close()
        raise
    # From here on the socket belongs to the store.
    listener.detach()
    return RoundStore(number, store, address, port)


def connect_store(number: int, address: str, port: int, timeout_s: float) -> RoundStore | None:
    """Connect to the store of a round; None if it cannot be reached now."""
    # torch would try until its timeout, and could not be stopped when the node is lost.
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
        store = TCPStore(
            host_name=address, port=port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (OSError, RuntimeError, UnicodeError) as error:
        logger.debug("store not reached: address=%s port=%d error=%s", address, port, error)
        return None
    return RoundStore(number, store, address, port)


def _listen(address: str) -> socket.socket:
    """Listen at the address that the others use, or on all addresses if that one is not local."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError):
        return socket.create_server((address, 0), family=family, backlog=4096)
    is_dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual, backlog=4096
    )
