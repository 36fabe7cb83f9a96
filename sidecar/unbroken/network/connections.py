"""The door of every server here: counts connections from accept on, and ends those that cost and do nothing.

    accept ──> TLS handshake, HANDSHAKE_S ──> head of a request, `stranger_s` and MAX_HEAD_BYTES ──token──> admitted
       └── too many: see `strangers` ──> closed                     └── closed, counted

Whoever does not read what it asked for is cut off at any time (STALL_S). All sockets of a server share one
`Connections`; servers of one process have one each, so that none can take what another needs.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.strangers import Strangers

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
STALL_S = 20.0
"""A peer that has not taken STALL_BYTES in this time, while more waits for it, is cut off."""
STALL_BYTES = 64 << 10
MAX_HEAD_BYTES = 16 << 10
"""Request line and headers of the first request; ours are below 1 KiB."""
MAX_SCRAPERS = 32
_SCRAPE_S = 10.0
_TOKEN_S = 15.0
"""A loaded rendezvous may take seconds to look at a token."""
_MOST_STRANGERS = 512
"""Beside one for each peer that is known to come."""
_RESERVED_DESCRIPTORS = 64
"""For files, pipes and sockets of the process itself."""
_ACCEPTS_AT_ONCE = 64
"""So many handshakes begin before those that have begun go on: with thousands at once, none would end in time."""
_PAUSE_S = 0.1
_KEEPALIVE_S = 75.0
_HEAD_END = b"\r\n\r\n"

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


@dataclass(frozen=True)
class ConnectionLimits:
    """What the connections of one server may cost."""

    max_strangers: int
    """Connections that have shown no token, those in their TLS handshake included."""
    max_connections: int
    stranger_s: float
    """Seconds for the head of the first request, and as long again for what is done with it."""
    max_head_bytes: int | None = MAX_HEAD_BYTES
    """None: what is served is not HTTP."""
    stall_s: float = STALL_S


def limits_of_api(num_peers: int) -> ConnectionLimits:
    """Return the limits of a port that wants a token and serves so many pods or hosts."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    most = max(descriptors - _RESERVED_DESCRIPTORS - MAX_SCRAPERS, descriptors // 2)
    return ConnectionLimits(min(_MOST_STRANGERS + num_peers, most // 2), most, _TOKEN_S)


LIMITS_OF_SCRAPES = ConnectionLimits(MAX_SCRAPERS, MAX_SCRAPERS, _SCRAPE_S)
"""Of a port without a token: each connection is for one answer, and all of them stay strangers."""


def http_runner(app: web.Application, shutdown_s: float) -> web.AppRunner:
    """Return what serves an application of ours, with limits on what it parses."""
    return web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=_KEEPALIVE_S,
        max_line_size=4096,
        max_field_size=4096,
        max_headers=64,
        lingering_time=2.0,
    )


class Connections:
    """All connections of one server. Runs in one event loop."""

    def __init__(self, limits: ConnectionLimits, refusals: Refusals) -> None:
        self._limits = limits
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._open: set[_Connection] = set()
        self._strangers: Strangers[_Connection] = Strangers(limits.max_strangers)
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def limits(self) -> ConnectionLimits:
        """What they may cost."""
        return self._limits

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that the peer of a connection has shown the token."""
        connection = None if transport is None else self._by_transport.get(transport)
        if connection is not None:
            self._strangers.remove(connection)
            connection.admit()

    def take(
        self, peer: socket.socket, address: str, make_protocol: ProtocolFactory, context: ssl.SSLContext | None
    ) -> None:
        """Serve a connection that was just accepted, or close it, or another one for it."""
        connection = _Connection(self, peer, address, make_protocol)
        loser = self._strangers.add(connection, address, self._loop.time())
        if loser is None and len(self._open) >= self._limits.max_connections:
            # Few strangers, many members: a stranger goes, at worst this one.
            loser = self._strangers.oldest() or connection
            self._strangers.remove(loser)
        if loser is not None:
            self.refuse(Refusal.TOO_MANY, loser.address, f"want {self._limits.max_strangers} without a token at most")
            loser.drop()
        if loser is not connection:
            self._open.add(connection)
            connection.start(context)

    def spare_a_descriptor(self) -> None:
        """Close one stranger: the process has no descriptor left."""
        oldest = self._strangers.oldest()
        if oldest is not None:
            self.refuse(Refusal.TOO_MANY, oldest.address, "no file descriptor is left")
            oldest.drop()

    def note_made(self, connection: "_Connection", transport: asyncio.BaseTransport) -> None:
        """Note that a connection has its transport; its TLS handshake is over."""
        self._by_transport[transport] = connection

    def forget(self, connection: "_Connection", transport: asyncio.BaseTransport | None) -> None:
        """Note that a connection has ended; harmless when repeated."""
        self._open.discard(connection)
        self._strangers.remove(connection)
        if transport is not None:
            self._by_transport.pop(transport, None)

    def refuse(self, reason: Refusal, address: str, detail: str) -> None:
        """Count and log."""
        self._refusals.note(reason, address, detail, self._loop.time())

    def drop_strangers(self) -> None:
        """End all connections without a token; nobody else would."""
        while (oldest := self._strangers.oldest()) is not None:
            oldest.drop()


class _Connection(asyncio.Protocol):
    """One connection: stands between the transport and the protocol that serves it."""

    def __init__(
        self, connections: Connections, peer: socket.socket, address: str, make_protocol: ProtocolFactory
    ) -> None:
        self.address = address
        self._connections = connections
        self._peer = peer
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._inner: Any = None
        self._transport: Any = None
        self._beginning: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends a stranger."""
        self._stall: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._head_bytes = 0
        self._tail = b""
        self._is_head_whole = connections.limits.max_head_bytes is None
        self._is_admitted = False

    def start(self, context: ssl.SSLContext | None) -> None:
        """Begin; the limits count from now on."""
        self._timer = self._loop.call_later(self._connections.limits.stranger_s, self._expire, False)
        self._beginning = self._loop.create_task(self._begin(context))
        self._beginning.add_done_callback(self._close_unused)

    def admit(self) -> None:
        """Lift the limits of strangers."""
        self._is_admitted = True
        self._cancel_timer()

    def drop(self) -> None:
        """End it at once, whatever it does."""
        self._end()
        if self._transport is not None:
            self._transport.abort()
        elif self._beginning is not None:
            self._beginning.cancel()
        else:
            self._peer.close()

    async def _begin(self, context: ssl.SSLContext | None) -> None:
        limit_s = None if context is None else HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: self, self._peer, ssl=context, ssl_handshake_timeout=limit_s
            )
        except (OSError, asyncio.CancelledError) as error:
            if context is not None and not isinstance(error, asyncio.CancelledError):
                is_silent = isinstance(error, ConnectionAbortedError)
                reason = Refusal.SILENT if is_silent else Refusal.MALFORMED
                self._connections.refuse(reason, self.address, f"TLS handshake: {str(error) or type(error).__name__}")
            self._end()

    def _close_unused(self, _beginning: "asyncio.Task[None]") -> None:
        if self._transport is None:
            self._peer.close()

    def _expire(self, is_last: bool) -> None:
        self._timer = None
        if self._is_head_whole and not is_last:
            # It has asked in time; this process is what may be slow.
            self._timer = self._loop.call_later(self._connections.limits.stranger_s, self._expire, True)
            return
        limit_s = self._connections.limits.stranger_s
        self._connections.refuse(Refusal.SILENT, self.address, f"want a request with a token within {limit_s:g} s")
        self.drop()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._cancel_timer()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._connections.forget(self, self._transport)

    # ------------------------------------------------------------------------------------------------------- protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.note_made(self, transport)
        self._inner = self._make_protocol()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_head_whole or self._is_head_short(data):
            self._inner.data_received(data)

    def _is_head_short(self, data: bytes) -> bool:
        seen = self._tail + data
        self._is_head_whole = self._is_admitted or _HEAD_END in seen
        self._tail = seen[-3:]
        self._head_bytes += len(data)
        limit = self._connections.limits.max_head_bytes
        if self._is_head_whole or limit is None or self._head_bytes <= limit:
            return True
        self._connections.refuse(Refusal.TOO_LARGE, self.address, f"head of a request: want {limit} bytes at most")
        self.drop()
        return False

    def eof_received(self) -> bool | None:
        return bool(self._inner.eof_received())

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        if self._stall is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._inner.resume_writing()

    def _watch_reader(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._stall = self._loop.call_later(self._connections.limits.stall_s, self._check_reader)

    def _check_reader(self) -> None:
        self._stall = None
        if self._transport.get_write_buffer_size() <= self._unsent_bytes - STALL_BYTES:
            self._watch_reader()
            return
        detail = f"does not read: want {STALL_BYTES} bytes taken in {self._connections.limits.stall_s:g} s"
        self._connections.refuse(Refusal.OVERFLOW, self.address, detail)
        self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._inner is not None:
            self._inner.connection_lost(exc)


class Acceptor:
    """Accepts on one listening socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: ProtocolFactory,
        context: ssl.SSLContext | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening; open connections stay. Harmless when repeated."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                peer, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            peer.setblocking(False)
            self._connections.take(peer, str(address[0]), self._make_protocol, self._context)

    def _rest(self, error: OSError) -> None:
        """No descriptor or no memory is left: make room, and look again in a moment."""
        logger.warning("connection not accepted: error=%s", error.strerror)
        self._connections.spare_a_descriptor()
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        with contextlib.suppress(ValueError):  # Closed meanwhile.
            self._loop.add_reader(self._listener.fileno(), self._accept)


class GuardedSite(web.BaseSite):
    """Serves the application of a runner on one listening socket, behind a `Connections`."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        connections: Connections,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self._listener = listener
        self._connections = connections
        self._acceptor: Acceptor | None = None

    @property
    def name(self) -> str:
        """Where it is served, for aiohttp's messages."""
        return f"{self._listener.getsockname()}"

    async def start(self) -> None:
        """Accept from now on."""
        await super().start()
        server = self._runner.server
        if server is None:
            raise RuntimeError("GuardedSite: want a runner that is set up, got none")
        self._acceptor = Acceptor(self._listener, self._connections, server, self._ssl_context)

    async def stop(self) -> None:
        """Accept no more, and end what has not shown a token."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._connections.drop_strangers()
        await super().stop()
