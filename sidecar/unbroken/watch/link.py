"""The watch's connection to its agent: it sends the whole of what is known, again at each connection."""

import os
import socket
from pathlib import Path

from unbroken_core.pod.pod_messages import Attach
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL
from unbroken_core.vocabulary.findings import Health

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
_SEND_S = 5.0


class WatchLink:
    """One Unix stream socket, connected or about to be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.socket: socket.socket | None = None
        self._retry_s = _FIRST_RETRY_S
        self.retry_at_s = 0.0
        """When to connect, while there is no connection."""

    def connect(self, now_s: float) -> bool:
        """Try to connect, if it is time; return whether there is a new connection."""
        if self.socket is not None or now_s < self.retry_at_s:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SEND_S)
        try:
            connection.connect(str(self._path))
            connection.sendall(wire.encode(Attach(PROTOCOL, "watch", os.getpid())).encode() + b"\n")
        except OSError:
            connection.close()
            self._wait(now_s)
            return False
        self.socket, self._retry_s = connection, _FIRST_RETRY_S
        return True

    def send(self, health: Health, now_s: float) -> bool:
        """Send what is known; return whether it was taken."""
        if self.socket is None:
            return False
        try:
            self.socket.sendall(wire.encode(health).encode() + b"\n")
        except OSError:
            self._close(now_s)
            return False
        return True

    def receive(self, now_s: float) -> None:
        """Note the end of the connection: the agent says nothing else."""
        if self.socket is None:
            return
        try:
            data = self.socket.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._close(now_s)

    def _close(self, now_s: float) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        self.retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
