"""What the kernel is told of a connection's peer."""

import socket
from typing import Any

import pytest

from unbroken.network.socket_options import give_up_silent_peer


class OneSocket:
    """Stands for a transport."""

    def __init__(self, peer: socket.socket | None) -> None:
        self._peer = peer

    def get_extra_info(self, name: str, _default: Any = None, /) -> Any:
        """Return the socket."""
        assert name == "socket"
        return self._peer


@pytest.mark.parametrize("probe", [True, False])
def test_peer_that_acknowledges_nothing_is_given_up_in_seconds(probe: bool) -> None:
    with socket.socket() as peer:
        give_up_silent_peer(OneSocket(peer), probe=probe)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        asked_s = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert (asked_s < 10) is probe


def test_connection_that_has_ended_is_left_alone() -> None:
    with socket.socket() as closed:
        pass
    give_up_silent_peer(OneSocket(closed), probe=True)
    give_up_silent_peer(OneSocket(None), probe=True)
