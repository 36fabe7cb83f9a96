"""`python -m unbroken.rendezvous.standby`: a rendezvous that is ready and leads nobody until the operator says so.

    started ──POST /v1/lead──> leads: from here on what `python -m unbroken.rendezvous` does, with what the message says

There is no coordinator before that, so no timeout of the job counts. A container that has led leads again when it is
restarted: a file beside that of the term says so.
"""

import asyncio
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from unbroken.network.connections import Connections, http_runner, limits_of_api
from unbroken.network.exposition import serve_exposition
from unbroken.network.refusals import Refusals
from unbroken.network.token_guard import TokenGuard
from unbroken.rendezvous.__main__ import listen_on, make_verifier, run, serve
from unbroken.rendezvous.config import RendezvousConfig, read_config
from unbroken_core.conventions.tokens import Kind
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 1.0
_MAX_BYTES = 4 << 20
_MARK = "leads"


async def wait_to_lead(config: RendezvousConfig) -> RendezvousConfig | None:
    """Return the settings to lead with, once the operator has said so; None after SIGTERM or SIGINT.

    Raises InputError when it cannot start.
    """
    mark = None if config.folder is None else config.folder / _MARK
    if mark is not None and mark.exists():
        return config
    called: asyncio.Future[Earlier] = asyncio.get_running_loop().create_future()
    refusals = Refusals()
    connections = Connections(limits_of_api(1), refusals)
    guard = TokenGuard(make_verifier(config), refusals, connections, lambda _request: (Kind.OPERATOR,))

    async def lead(request: web.Request) -> web.Response:
        try:
            earlier = wire.decode(await request.read(), Earlier)
        except WireError as error:
            return web.Response(status=400, text=f"{error}\n")
        if not called.done():
            _note(mark)
            called.set_result(earlier)
        return web.Response(status=204)

    async def stand_by(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="this rendezvous stands by, another one leads the job\n")

    app = web.Application(client_max_size=_MAX_BYTES, middlewares=[guard.guard])
    app.cleanup_ctx.append(guard.sweeping)
    app.add_routes([web.post("/v1/lead", lead), web.route("*", "/{path:.*}", stand_by)])
    runner = http_runner(app, _SHUTDOWN_S)
    await runner.setup()
    exposition = None
    try:
        await listen_on(runner, connections, *config.listen, config.certificate)
        if config.metrics_listen is not None:
            exposition = await serve_exposition(*config.metrics_listen, _no_metrics, refusals)
        logger.info("rendezvous stands by: job=%s listen=%s:%d", config.settings.job, *config.listen)
        stopped = asyncio.create_task(_until_signalled(), name="signals")
        await asyncio.wait((called, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
    finally:
        await runner.cleanup()
        if exposition is not None:
            await exposition.cleanup()
    return replace(config, earlier=called.result()) if called.done() else None


def _note(mark: Path | None) -> None:
    if mark is not None:
        try:
            mark.touch()
        except OSError as error:
            logger.warning("leading is not kept over a restart: file=%s error=%s", mark, error)


async def _no_metrics() -> bytes:
    return b""


async def _until_signalled() -> None:
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signalled.set)
    try:
        await signalled.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _run() -> None:
    config = await wait_to_lead(read_config())
    if config is not None:
        await serve(config)


def main() -> int:
    """Stand by, then run the rendezvous; return 0 after a signal, 2 for bad input."""
    return run(_run)


if __name__ == "__main__":
    sys.exit(main())
