"""`/healthz` and `/metrics`, on a port of their own and without a token."""

import socket
from collections.abc import Callable

from aiohttp import web

from unbroken_core.errors import InputError


async def serve_exposition(host: str, port: int, render: Callable[[], bytes]) -> web.AppRunner:
    """Serve until the returned runner is cleaned up; `render` returns the text of `/metrics`. Raises InputError."""
    runner = await _runner(render)
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
    except OSError as error:
        await runner.cleanup()
        raise InputError(f"UNBROKEN_METRICS_LISTEN: cannot listen on {host}:{port}: {error.strerror}") from error
    return runner


async def serve_exposition_on(listener: socket.socket, render: Callable[[], bytes]) -> web.AppRunner:
    """Do the same on a listening socket."""
    runner = await _runner(render)
    await web.SockSite(runner, listener).start()
    return runner


async def _runner(render: Callable[[], bytes]) -> web.AppRunner:
    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/healthz", health), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    return runner
