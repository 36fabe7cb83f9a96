"""The launcher's connection to its agent: it never blocks, reconnects by itself, and always sends the whole state."""

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from unbroken_core.pod.pod_messages import Attach, Lines, Processes, ToLauncher
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, PairState
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import Health

_FIRST_RETRY_S = 0.01
_LAST_RETRY_S = 0.5
_MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 64 << 10


class LauncherLink:
    """One Unix stream socket, connected or about to be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._unread = b""
        self._unsent = b""
        self._retry_s = _FIRST_RETRY_S
        self.retry_at_s: float | None = 0.0
        """When to connect; None while connected."""
        self.was_connected = False
        self.complaint = ""
        """Why this side closed the last connection; "" if it did not."""

    @property
    def socket(self) -> socket.socket | None:
        """The connected socket, to select on."""
        return self._socket

    @property
    def has_unsent(self) -> bool:
        """Whether to wait until the socket can be written."""
        return bool(self._unsent)

    def connect(self, words: Sequence[Processes | Health | PairState], now_s: float) -> bool:
        """Try to connect and to send everything; return whether it worked."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            self.retry_at_s = now_s + self._retry_s
            self._retry_s = min(self._retry_s * 1.5, _LAST_RETRY_S)
            return False
        self._socket, self.retry_at_s, self._retry_s = connection, None, _FIRST_RETRY_S
        self._unread, self._unsent, self.was_connected = b"", b"", True
        self._send(wire.encode(Attach(PROTOCOL, "launcher", os.getpid())))
        for word in words:
            self._send(wire.encode(word))
        return True

    def send(self, state: Processes | Lines | Health | PairState) -> None:
        """Send the state, what was printed or what was found; without a connection it is sent on the next one."""
        if self._socket is not None:
            self._send(wire.encode(state))

    def _send(self, line: str) -> None:
        self._unsent += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes."""
        if self._socket is None or not self._unsent:
            return
        try:
            written = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            # `receive` sees the end of the connection, after the agent's last orders.
            written = len(self._unsent)
        self._unsent = self._unsent[written:]

    def receive(self, now_s: float) -> Iterator[ToLauncher]:
        """Yield the agent's orders; the first line that is no order closes the connection."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._give_up("", now_s)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            try:
                yield wire.decode(line, ToLauncher)
            except WireError as error:
                self._give_up(f"refused an order of the agent: {error}", now_s)
                return
        if len(self._unread) > _MAX_LINE_BYTES:
            self._give_up(f"refused an order of the agent: want at most {_MAX_LINE_BYTES} bytes a line", now_s)

    def _give_up(self, complaint: str, now_s: float) -> None:
        self.complaint = complaint
        self.close()
        self.retry_at_s = now_s + (_LAST_RETRY_S if complaint else self._retry_s)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
