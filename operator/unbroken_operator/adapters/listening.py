"""A small HTTP server of the operator's own."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from unbroken_core.errors import InputError


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int


@contextlib.asynccontextmanager
async def listening(
    application: web.Application, address: Address, context: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve while the context lasts. Raises InputError when it cannot listen."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address.host, address.port, ssl_context=context).start()
        except OSError as error:
            raise InputError(f"cannot listen on {address.host}:{address.port}: {error}") from error
        yield
    finally:
        await runner.cleanup()
