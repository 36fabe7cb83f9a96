"""Connections between the keepers of two pods: TLS 1.3, both sides show a certificate, blocking sockets.

A frame is its length and a JSON object; content goes as it is. Whoever is silent for STALL_S in the middle of something
is cut off.
"""

import math
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unbroken.keeper.tls_stream import TlsStream
from unbroken.network.pod_names import pod_of
from unbroken_core.pod.replica_messages import MAX_FRAME_BYTES
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import InputError, WireError

HANDSHAKE_S = 5.0
STALL_S = 20.0
CHUNK_BYTES = 1 << 20
PATIENCE_S = 60.0
LEAST_BYTES_PER_S = 20e6
"""A fetch that takes longer than both together is given up on both sides: no restore waits without an end, and no
reader keeps a worker from saving into the slot that it reads."""
PAUSE_S = 5.0
"""So long a pause lasts at most: the other side ends a connection on which nothing moves for STALL_S."""
_PART_BYTES = 1 << 18
"""What is moved at most once a pause has begun."""
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Identity:
    """How this pod shows who it is, and whom it believes. All in PEM."""

    key: str
    certificate: str
    authority: str

    def server_context(self) -> ssl.SSLContext:
        """Return the context for connections of others. Raises InputError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Nobody resumes: tickets would be bytes that a peer which only sends never reads.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context for connections to others. Raises InputError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Certificates name a pod, and no host; which pod it must be is compared once it is known.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self.authority)
            with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
                context.load_cert_chain(certificate, key)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise InputError(
                f"certificate of this pod: want a certificate, its key and authority in PEM: {error}"
            ) from error
        return context


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Give a text a name that OpenSSL can open; it lies in this process' memory alone."""
    descriptor = os.memfd_create("unbroken", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class LinkError(Exception):
    """The connection cannot be used any more; the message says why."""


class Link:
    """One connection. Used by one thread."""

    def __init__(self, stream: TlsStream, pod_uid: str) -> None:
        self._stream = stream
        self.pod_uid = pod_uid
        """Of the other side, as its certificate says."""
        self._first = b""
        self.until_s = math.inf
        """On the monotonic clock: who sends too slowly is cut off then, even if it is never silent."""

    def close(self) -> None:
        """End it without waiting for the other side."""
        self._stream.close()

    def wait_for_frame(self, is_over: Callable[[], bool], look_s: float = 1.0) -> bool:
        """Wait until the other side says something; return False once it is over, or has closed. Raises LinkError."""
        self._stream.settimeout(look_s)
        first = bytearray(1)
        try:
            while not is_over():
                try:
                    # The first byte of a length; the rest of the frame has STALL_S.
                    count = self._stream.receive_into(memoryview(first), look_s)
                except TimeoutError:
                    continue
                self._first = bytes(first[:count])
                return count > 0
        except OSError as error:
            raise LinkError(f"connection broke: {error}") from error
        finally:
            self._stream.settimeout(STALL_S)
        return False

    def send(self, message: object) -> None:
        """Send a frame. Raises LinkError."""
        data = wire.encode(message).encode()
        self.send_content(_LENGTH.pack(len(data)) + data)

    def send_content(self, content: "bytes | memoryview") -> None:
        """Send bytes as they are. Raises LinkError."""
        try:
            self._stream.send(content)
        except OSError as error:
            raise LinkError(f"cannot send: {error}") from error

    def receive(self, expected: Any) -> Any:
        """Return the next frame, one of the messages of a union. Raises LinkError, also for what is none."""
        head = bytearray(_LENGTH.size)
        first, self._first = self._first, b""
        head[: len(first)] = first
        self.receive_into(memoryview(head)[len(first) :])
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise LinkError(f"frame: want at most {MAX_FRAME_BYTES} bytes, got {length}")
        data = bytearray(length)
        self.receive_into(memoryview(data))
        try:
            return wire.decode(bytes(data), expected)
        except WireError as error:
            raise LinkError(f"frame: {error}"[:500]) from error

    def receive_into(self, view: memoryview) -> None:
        """Fill the view. Raises LinkError."""
        try:
            if self._stream.receive_into(view, STALL_S, self.until_s) < len(view):
                raise LinkError("the other side has closed the connection")
        except TimeoutError as error:
            if time.monotonic() >= self.until_s:
                raise LinkError("the other side takes too long") from error
            raise LinkError(f"cannot receive: {error}") from error
        except OSError as error:
            raise LinkError(f"cannot receive: {error}") from error


def connect(address: tuple[str, int], context: ssl.SSLContext, pod_uid: str) -> Link:
    """Return a connection to the keeper of this pod. Raises LinkError."""
    try:
        plain = socket.create_connection(address, timeout=HANDSHAKE_S)
    except (OSError, UnicodeError) as error:
        # UnicodeError: what another pod calls its host can be no name.
        raise LinkError(f"cannot connect: {error}") from error
    link = _secured(plain, context, is_server=False)
    if link.pod_uid != pod_uid:
        link.close()
        raise LinkError(f"want the keeper of pod {pod_uid}, got that of {link.pod_uid[:200]!r}")
    return link


def accept(plain: socket.socket, context: ssl.SSLContext) -> Link:
    """Return a connection of another keeper. Raises LinkError."""
    return _secured(plain, context, is_server=True)


def _secured(plain: socket.socket, context: ssl.SSLContext, is_server: bool) -> Link:
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = TlsStream(plain, context, is_server=is_server)
        stream.handshake(HANDSHAKE_S)
        stream.settimeout(STALL_S)
        pod_uid = pod_of(stream.certificate)
    except (OSError, ValueError) as error:
        plain.close()
        raise LinkError(f"no handshake: {error}") from error
    if not pod_uid:
        stream.close()
        raise LinkError("the certificate names no pod")
    return Link(stream, pod_uid)


class Pause:
    """While all ranks restart no copy moves: they wait for each other, and one that waits for a processor delays all.

    It ends once a worker of a later iteration has restored, and in any case soon. Used by all threads of a keeper.
    """

    def __init__(self, limit_s: float = PAUSE_S) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._over = -1
        """The newest iteration that is known to be over."""
        self._until_s = -math.inf
        self._lost: frozenset[str] = frozenset()

    def begin(self, iteration: int) -> None:
        """This iteration is over. What is said again changes nothing."""
        with self._changed:
            if iteration > self._over:
                self._over, self._until_s = iteration, time.monotonic() + self._limit_s
                self._changed.notify_all()

    def end(self, iteration: int) -> None:
        """A worker has restored in this iteration."""
        with self._changed:
            if iteration > self._over:
                # Also if the agent has not said yet that the one before is over: it would be too late.
                self._over, self._until_s = iteration - 1, -math.inf
                self._changed.notify_all()

    def lose(self, pod_uids: Iterable[str]) -> None:
        """These pods are lost, and no others of those from which workers restore."""
        with self._changed:
            self._lost = frozenset(pod_uids)
            self._changed.notify_all()

    def wait_for_end_of(self, iteration: int, limit_s: float, pod_uid: str = "") -> str:
        """Return why nobody has to wait for a pod in this iteration: at once if there is a reason, else "" later."""
        with self._changed:
            self._changed.wait_for(lambda: self._over >= iteration or pod_uid in self._lost, limit_s)
            if pod_uid in self._lost:
                return "its pod is lost"
            return f"iteration {iteration} is over" if self._over >= iteration else ""

    def wait(self) -> None:
        """Return once it is over."""
        # Without the lock first: this is asked for each part of a copy.
        while (left_s := self._until_s - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait(left_s)


def parts_of(chunk: memoryview) -> Iterator[memoryview]:
    """Yield the same bytes in parts, between which to pause. Each is released before the next one is taken."""
    for start in range(0, len(chunk), _PART_BYTES):
        with chunk[start : start + _PART_BYTES] as part:
            yield part
