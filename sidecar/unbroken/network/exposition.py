"""`/healthz` and `/metrics`, on a port of their own and without a token: all may ask, at a bounded cost."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from unbroken.network.addresses import listen
from unbroken.network.connections import LIMITS_OF_SCRAPES, Connections, GuardedSite, http_runner
from unbroken.network.refusals import Refusals
from unbroken_core.conventions.printable import printable_lines
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 1.0
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
_MIN_AGE_S = 0.1
_COST_RATIO = 0.05
"""Share of the time that scrapes may take, however many ask."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Scrapes:
    """The text of `/metrics`: written once for all who ask at about the same time, however many."""

    def __init__(self, write: Callable[[], Awaitable[bytes]]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._body = b""
        self._next_s = 0.0

    async def text(self) -> bytes:
        """Return the newest text; one that is a moment old if another would cost too much."""
        async with self._lock:
            started_s = self._loop.time()
            if not self._body or started_s >= self._next_s:
                # Labels may be names that a job has given.
                self._body = printable_lines((await self._write()).decode()).encode()
                ended_s = self._loop.time()
                self._next_s = ended_s + max(_MIN_AGE_S, (ended_s - started_s) / _COST_RATIO)
            return self._body


async def serve_exposition(
    host: str, port: int, write: Callable[[], Awaitable[bytes]], refusals: Refusals
) -> web.AppRunner:
    """Serve until the returned runner is cleaned up; `write` returns the text of `/metrics`. Raises InputError."""
    try:
        listener = listen(host, port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"UNBROKEN_METRICS_LISTEN: cannot listen on {host}:{port}: {why}") from error
    return await serve_exposition_on(listener, write, refusals)


async def serve_exposition_when_possible(
    host: str, port: int, write: Callable[[], Awaitable[bytes]], refusals: Refusals
) -> None:
    """Serve until cancelled. While another process has the port, say so once and retry at growing intervals."""
    retry_s = _FIRST_RETRY_S
    while True:
        try:
            runner = await serve_exposition(host, port, write, refusals)
            break
        except InputError as error:
            if retry_s == _FIRST_RETRY_S:
                logger.warning("metrics are not served until this is possible, all else goes on: %s", error)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _LAST_RETRY_S)
    if retry_s != _FIRST_RETRY_S:
        logger.info("metrics are served now: listen=%s:%d", host, port)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await runner.cleanup()


async def serve_exposition_on(
    listener: socket.socket, write: Callable[[], Awaitable[bytes]], refusals: Refusals
) -> web.AppRunner:
    """Do the same on a listening socket."""
    scrapes = Scrapes(write)

    async def health(_: web.Request) -> web.Response:
        return _last(web.Response(text="ok\n"))

    async def metrics(_: web.Request) -> web.Response:
        return _last(web.Response(body=await scrapes.text(), headers={"Content-Type": _CONTENT_TYPE}))

    app = web.Application()
    app.add_routes([web.get("/healthz", health), web.get("/metrics", metrics)])
    runner = http_runner(app, _SHUTDOWN_S)
    await runner.setup()
    await GuardedSite(runner, listener, Connections(LIMITS_OF_SCRAPES, refusals)).start()
    return runner


def _last(response: web.Response) -> web.Response:
    """A connection is for one answer: so the limit of a stranger's time holds for slow readers as well."""
    response.force_close()
    return response
