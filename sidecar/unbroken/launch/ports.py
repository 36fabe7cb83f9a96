"""Ports that are held for worker processes until they listen on them themselves."""

import socket


class HeldPort:
    """A reserved port: bound but not listening, so that the worker's own store can still bind it.

    Both sides set SO_REUSEADDR; the kernel then refuses a second bind only while one of them listens.
    """

    def __init__(self) -> None:
        # The wildcard address: torch's store listens on all addresses, so the port must be free on each.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("0.0.0.0", 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()
