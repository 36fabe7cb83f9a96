"""A small HTTP server of the operator's own. Whoever reaches its port may not starve it, nor the rest of the operator.

accepted ──too many of one address──> closed; too many in all ──> the address that has most loses its oldest
    └──> TLS handshake, 5 s ──> one request, one answer, closed; 20 s for all of it
"""

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

BACKLOG = 128
MAX_HEADERS, MAX_HEADER_BYTES = 64, 8190
LINGER_S = 1.0
"""So long a client that was answered before it had sent its whole body may go on sending: else it sees no answer."""
LOG_S = 60.0
"""Between two lines about connections that were closed for the same reason."""
_ANY = "::"
_ACCEPT_PAUSE_S = 0.5
SMALL_BYTES, NUM_SMALL = 512, 64
"""So many pieces of a request may be small: API servers, probes and scrapers send one or two."""
_LENGTH_REQUIRED = b"HTTP/1.1 411 Length Required\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int


@dataclass(frozen=True)
class ListenLimits:
    """What strangers may take of one port."""

    connections: int = 256
    """At once, those in their TLS handshake included."""
    of_one_address: int = 64
    handshake_s: float = 5.0
    connection_s: float = 20.0
    """From its acceptance to the end of the answer."""


class RefusedBecause(str, Enum):
    """Why a connection was closed without, or before the end of, an answer."""

    TOO_MANY = "too-many"
    HANDSHAKE = "handshake"
    SLOW = "slow"
    IN_PIECES = "in-pieces"
    """A body in chunks, or a request of many small pieces: each costs the loop a look."""


RefusalObserver = Callable[[str], None]
"""Told why a connection was closed."""
DEFAULT_LIMITS = ListenLimits()


class Rarely:
    """Decides whether something that strangers cause is worth a line in the log: one of a kind a minute."""

    def __init__(self) -> None:
        self._told_at_s: dict[str, float] = {}

    def may_tell(self, kind: str, now_s: float) -> bool:
        """Return whether to tell it now; `kind` is one of a few words of ours."""
        if now_s - self._told_at_s.get(kind, now_s - LOG_S) < LOG_S:
            return False
        self._told_at_s[kind] = now_s
        return True


@contextlib.asynccontextmanager
async def listening(
    application: web.Application,
    address: Address,
    context: ssl.SSLContext | None = None,
    *,
    limits: ListenLimits = DEFAULT_LIMITS,
    on_refused: RefusalObserver = lambda _: None,
) -> AsyncIterator[int]:
    """Serve while the context lasts; yield the port. Raises InputError when it cannot listen."""
    application.on_response_prepare.append(_close_after)
    application.middlewares.append(_without_chunks(on_refused))
    runner = web.AppRunner(
        application,
        access_log=None,
        shutdown_timeout=1.0,
        lingering_time=LINGER_S,
        max_headers=MAX_HEADERS,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        # A body of some bytes may unpack to gigabytes, and none of our clients packs one.
        auto_decompress=False,
    )
    await runner.setup()
    try:
        sockets = await _bind(address)
        door = _Door(cast(web.Server, runner.server), context, limits, f"{address.host}:{address.port}", on_refused)
        tasks = [asyncio.create_task(door.accept(one), name=f"accept {address.port}") for one in sockets]
        try:
            yield sockets[0].getsockname()[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in sockets:
                one.close()
            await door.close()
    finally:
        await runner.cleanup()


async def _close_after(_: web.Request, response: web.StreamResponse) -> None:
    response.force_close()


def _without_chunks(on_refused: RefusalObserver) -> Middleware:
    """Return what answers chunked requests: in chunks of a byte each, 1 MB keeps the loop busy for seconds."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "Transfer-Encoding" in request.headers:
            on_refused(RefusedBecause.IN_PIECES.value)
            if request.transport is not None:
                # At once: after an answer of its own the server would read on.
                request.transport.write(_LENGTH_REQUIRED)
                request.transport.close()
            raise web.HTTPLengthRequired
        return await handler(request)

    return check


async def _bind(address: Address) -> list[socket.socket]:
    """Return sockets that listen. Raises InputError.

    `::` means all addresses of both families; on a machine without IPv6 those of IPv4.
    """
    sockets: list[socket.socket] = []
    if address.host == _ANY:
        address = address if _has_ipv6() else Address("0.0.0.0", address.port)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, where in dict.fromkeys((item[0], item[4]) for item in found):
            is_dual = address.host == _ANY
            sockets.append(socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=is_dual))
            sockets[-1].setblocking(False)
    except OSError as error:
        for one in sockets:
            one.close()
        raise InputError(f"cannot listen on {address.host}:{address.port}: {error}") from error
    return sockets


def _has_ipv6() -> bool:
    """Whether the kernel lets a socket have all addresses of both families."""
    if not socket.has_dualstack_ipv6():
        return False
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
        try:
            tried.bind((_ANY, 0))
        except OSError:
            return False
    return True


class _Door:
    """Lets connections in, and ends them in time."""

    def __init__(
        self,
        server: web.Server,
        context: ssl.SSLContext | None,
        limits: ListenLimits,
        where: str,
        on_refused: RefusalObserver,
    ) -> None:
        self._server = server
        self._context = context
        self._limits = limits
        self._where = where
        self._on_refused = on_refused
        self._open: dict[str, dict[asyncio.Task[None], None]] = {}
        """The connections of each address, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._rarely = Rarely()

    async def accept(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:
                # The peer has gone already, or there are no descriptors left.
                if error.errno in _EXHAUSTED:
                    logger.warning("cannot accept listen=%s error=%s", self._where, error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            host = str(peer[0]).removeprefix("::ffff:")
            num_there = len(self._open.get(host, ()))
            if num_there >= self._limits.of_one_address:
                connection.close()
                self._refuse(RefusedBecause.TOO_MANY, host, f"{num_there} are open from there")
                continue
            if len(self._tasks) >= self._limits.connections:
                self._make_room()
            task = asyncio.create_task(self._serve(connection, host), name=f"connection {self._where}")
            self._open.setdefault(host, {})[task] = None
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._forget, host))

    def _make_room(self) -> None:
        """End the oldest connection of the address that has most: probes and the API server come from few."""
        host, theirs = max(self._open.items(), key=lambda item: len(item[1]))
        oldest = next(iter(theirs))
        oldest.cancel()
        # It counts no more, though it takes a moment to end.
        self._forget(host, oldest)
        self._refuse(RefusedBecause.TOO_MANY, host, f"{len(self._tasks) + 1} are open, {len(theirs) + 1} from there")

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, host: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        theirs = self._open.get(host, {})
        theirs.pop(task, None)
        if not theirs:
            self._open.pop(host, None)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        protocol = _Watched(self._server(), loop)

        def factory() -> _Watched:
            return protocol

        is_in = False
        try:
            async with asyncio.timeout(limits.connection_s):
                secured: dict[str, Any] = {}
                if self._context is not None:
                    secured = {"ssl_handshake_timeout": limits.handshake_s, "ssl_shutdown_timeout": LINGER_S}
                await loop.connect_accepted_socket(factory, connection, ssl=self._context, **secured)
                is_in = True
                await protocol.ended
                if protocol.num_small > NUM_SMALL:
                    seen = f"more than {NUM_SMALL} pieces below {SMALL_BYTES} bytes"
                    self._refuse(RefusedBecause.IN_PIECES, host, seen)
        except TimeoutError:
            because = RefusedBecause.SLOW if is_in else RefusedBecause.HANDSHAKE
            self._refuse(because, host, f"not done after {limits.connection_s:g} s")
        except OSError as error:
            self._refuse(RefusedBecause.HANDSHAKE, host, f"{type(error).__name__}: {error}"[:200])
        finally:
            protocol.abort()
            connection.close()

    def _refuse(self, because: RefusedBecause, host: str, seen: str) -> None:
        self._on_refused(because.value)
        if self._rarely.may_tell(because.value, time.monotonic()):
            logger.info(
                "closed connection listen=%s peer=%s because=%s seen=%s", self._where, host, because.value, seen
            )


class _Watched(asyncio.Protocol):
    """A connection whose end can be waited for."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self.num_small = 0

    def abort(self) -> None:
        """Drop the connection, if it still stands."""
        if self._transport is not None:
            cast(asyncio.Transport, self._transport).abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.num_small += len(data) < SMALL_BYTES
        if self.num_small > NUM_SMALL:
            self.abort()
            return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return cast(bool | None, self._inner.eof_received())

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
