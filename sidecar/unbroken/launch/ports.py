"""Ports that are held for worker processes until they listen on them themselves."""

import socket


class HeldPort:
    """A reserved port: bound but not listening, so that the worker's own store can still bind it.

    Both sides set SO_REUSEADDR; the kernel then refuses a second bind only while one of them listens.
    """

    def __init__(self) -> None:
        # The wildcard address: torch's store listens on all addresses, so the port must be free on each.
        self._socket = _wildcard()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, 0))
    except OSError:
        made.close()
        raise
    return made


def _wildcard() -> socket.socket:
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:  # A kernel without IPv6.
        return _bound(socket.AF_INET, "0.0.0.0")
