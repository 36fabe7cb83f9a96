"""How long the kernel waits for a peer that does not answer; its default is a quarter of an hour."""

import contextlib
import socket
from typing import Any, Protocol

_SILENT_PEER_MS = 10_000
_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""Seconds, seconds and number: 11 s."""


class Transport(Protocol):
    """A transport of asyncio, or a connection of aiohttp."""

    def get_extra_info(self, name: str, default: Any = None, /) -> Any:
        """Return what is known by this name."""


def give_up_silent_peer(transport: Transport, *, probe: bool) -> None:
    """Let the kernel give up a peer that does not acknowledge; with `probe`, also while nothing is sent to it.

    Heartbeats see the rest: a peer that acknowledges and does nothing else.
    """
    peer: socket.socket | None = transport.get_extra_info("socket")
    if peer is None:
        return
    options = [("TCP_USER_TIMEOUT", _SILENT_PEER_MS), *(_PROBES if probe else ())]
    # Some systems take no options for a connection that has ended, and some do not know them all.
    with contextlib.suppress(OSError):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in options:
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
