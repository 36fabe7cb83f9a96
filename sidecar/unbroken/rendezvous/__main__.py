"""`python -m unbroken.rendezvous`: the service of a job."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from unbroken.logs import read_level, start_log
from unbroken.network.addresses import listen
from unbroken.network.certificate import ServerCertificate
from unbroken.network.connections import Connections, GuardedSite, http_runner, limits_of_api
from unbroken.network.exposition import serve_exposition
from unbroken.network.refusals import Refusals
from unbroken.network.token import JobKeyFile, TokenFile, Verifier
from unbroken.rendezvous.config import RendezvousConfig, loopback_beside, read_config
from unbroken.rendezvous.restored_state import TermFile, uses_on_clock
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import Service
from unbroken_core.conventions.printable import printable
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0


async def serve(config: RendezvousConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises InputError when it cannot start."""
    loop = asyncio.get_running_loop()
    refusals = Refusals()
    verifier = make_verifier(config)
    coordinator = _coordinator(config, loop.time())
    service = Service(coordinator, refusals)
    if config.folder is not None:
        file = TermFile(config.folder)
        file.write(*coordinator.past)
        service.on_change(lambda: file.write(*coordinator.past))
    num_pods = config.settings.replicas + config.settings.spares
    connections = Connections(limits_of_api(num_pods), refusals)
    server = Server(service, verifier, refusals, connections)
    runner = http_runner(server.application(), _SHUTDOWN_S)
    await runner.setup()
    exposition = None
    try:
        await listen_on(runner, connections, *config.listen, config.certificate)
        if config.metrics_listen is not None:
            from unbroken.rendezvous.metrics import make_metrics  # noqa: PLC0415 - after the API is up

            write = make_metrics(service, coordinator, refusals)
            exposition = await serve_exposition(*config.metrics_listen, write, refusals)
        logger.info("rendezvous started: job=%s listen=%s:%d", config.settings.job, *config.listen)
        await _until_signalled(loop, service)
    finally:
        service.close()
        await runner.cleanup()
        if exposition is not None:
            await exposition.cleanup()


def make_verifier(config: RendezvousConfig) -> Verifier:
    """Return who decides about tokens. Raises InputError."""
    if config.job_key_file is not None:
        return JobKeyFile(config.job_key_file, config.settings.uid)
    if config.token_file is None:
        raise InputError("UNBROKEN_JOB_KEY_FILE: want the file with the job's key in the environment, got nothing")
    # The job was begun by an earlier release: its Secret has one token for all.
    return TokenFile(config.token_file)


def _coordinator(config: RendezvousConfig, now_s: float) -> Coordinator:
    earlier = config.earlier
    term, iteration = TermFile(config.folder).read() if config.folder is not None else (0, -1)
    uses = uses_on_clock(earlier, now_s)
    used, highest_iteration = max(earlier.term, term), max(earlier.iteration, iteration)
    return Coordinator(config.settings, now_s, used + 1, highest_iteration, uses)


async def listen_on(
    runner: web.AppRunner, connections: Connections, host: str, port: int, certificate: tuple[Path, Path] | None
) -> None:
    """Serve the API on this address, and on loopback if that is another one. Raises InputError."""
    context = None if certificate is None else ServerCertificate(*certificate).context

    async def serve_on(listener: socket.socket) -> None:
        await GuardedSite(runner, listener, connections, context).start()

    try:
        await serve_on(listen(host, port))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"UNBROKEN_LISTEN: cannot listen on {host}:{port}: {why}") from error
    near = loopback_beside(host)
    if near is None:
        return
    try:
        await serve_on(listen(near, port))
    except OSError as error:
        # The pod may share its host's network with another rendezvous.
        logger.warning("not reachable by kubectl port-forward: cannot listen on %s:%d: %s", near, port, error.strerror)


async def _until_signalled(loop: asyncio.AbstractEventLoop, service: Service) -> None:
    """Wait for SIGTERM or SIGINT. Raises the coordinator's error if it fails before."""
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    waiter = asyncio.create_task(signalled.wait())
    await asyncio.wait((waiter, service.failure), return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if service.failure.done():
        service.failure.result()


def raise_descriptor_limit() -> None:
    """Let this process serve thousands of pods, which need a descriptor each and many long-lived objects."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # With Python's thresholds the garbage collector took two fifths of the time of a plan.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def main() -> int:
    """Run the rendezvous; return 0 after SIGTERM or SIGINT, 2 for bad input."""
    return run(lambda: serve(read_config()))


def run(process: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run what makes this process a rendezvous; return 0 when it has ended, 2 for bad input."""
    try:
        start_log("unbroken.rendezvous", read_level(os.environ), with_time=False)
        raise_descriptor_limit()
        asyncio.run(process())
    except InputError as error:
        print(printable(f"unbroken.rendezvous: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
