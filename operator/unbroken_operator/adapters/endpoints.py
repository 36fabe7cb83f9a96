"""/metrics, /healthz and /readyz."""

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from unbroken_operator.adapters.listening import Address, RefusalObserver, listening


@contextlib.asynccontextmanager
async def serving(
    address: Address | None,
    registry: CollectorRegistry,
    is_ready: Callable[[], bool],
    has_metrics: bool,
    on_refused: RefusalObserver = lambda _: None,
) -> AsyncIterator[int]:
    """Serve while the context lasts; yield the port, 0 and nothing served without an address. Raises InputError."""
    if address is None:
        yield 0
        return

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readiness(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(text="lists are not read yet\n", status=503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes([web.get("/healthz", health), web.get("/readyz", readiness)])
    if has_metrics:
        application.add_routes([web.get("/metrics", metrics)])
    async with listening(application, address, on_refused=on_refused) as port:
        yield port
