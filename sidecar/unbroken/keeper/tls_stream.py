"""TLS over a blocking socket, by way of memory: a system call moves many records.

`ssl.SSLSocket` makes three system calls for each record of 16 KiB: one to send it, two to receive its head and its
body. That is a quarter of what a copy costs both sides.
"""

import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

_BATCH_BYTES = 1 << 18
"""What a system call moves at most. Records of a batch are still in the processor's cache when they are decrypted."""


class TlsStream:
    """One connection. Used by one thread."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._plain = plain
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._unsent, server_side=is_server)
        self._buffer = memoryview(bytearray(_BATCH_BYTES))

    @property
    def certificate(self) -> Any:
        """What the other side has shown, as `ssl.SSLSocket.getpeercert()` returns it."""
        return self._tls.getpeercert()

    def settimeout(self, timeout_s: float) -> None:
        """Let no system call wait longer from now on."""
        self._plain.settimeout(timeout_s)

    def handshake(self, limit_s: float) -> None:
        """Agree on keys and certificates. Raises OSError, TimeoutError after `limit_s`."""
        until_s = time.monotonic() + limit_s
        while True:
            self.settimeout(max(until_s - time.monotonic(), 0.001))
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError:
                # The other side is told why, if it listens.
                with contextlib.suppress(OSError):
                    self._flush()
                raise
            else:
                self._flush()
                return
            if not self._fill(until_s):
                raise ConnectionResetError("the other side has closed the connection")

    def send(self, content: "bytes | memoryview") -> None:
        """Send all of it. Raises OSError."""
        with memoryview(content) as whole:
            for start in range(0, len(whole), _BATCH_BYTES):
                with whole[start : start + _BATCH_BYTES] as batch:
                    self._tls.write(batch)
                self._flush()

    def receive_into(self, view: memoryview, stall_s: float, until_s: float = math.inf) -> int:
        """Fill the view; return how many bytes came, fewer only if the other side has closed.

        Raises OSError, TimeoutError at `until_s` of the monotonic clock, or when nothing has come for `stall_s`: bytes
        that complete no record are nothing.
        """
        # Its type knows of no buffers.
        read: Callable[[int, memoryview], Any] = self._tls.read
        done, size, before, stalls_s = 0, len(view), -1, math.inf
        while done < size:
            try:
                # A record at most, of 16 KiB: this line is run for each.
                done += read(size - done, view[done:])
            except ssl.SSLWantReadError:
                if done > before:
                    before, stalls_s = done, time.monotonic() + stall_s
                # It may have an answer to new keys.
                self._flush()
                if not self._fill(min(stalls_s, until_s)):
                    break
            except ssl.SSLZeroReturnError:
                break
        return done

    def close(self) -> None:
        """End it without waiting for the other side."""
        self._plain.close()

    def _flush(self) -> None:
        if self._unsent.pending:
            self._plain.sendall(self._unsent.read())

    def _fill(self, until_s: float) -> bool:
        """Receive part of a record, or several; False once the other side has closed."""
        if time.monotonic() >= until_s:
            raise TimeoutError("timed out")
        count = self._plain.recv_into(self._buffer)
        self._received.write(self._buffer[:count])
        return count > 0
