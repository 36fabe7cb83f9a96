"""`python -m unbroken.rounds`: a rendezvous that only serves rounds for torchrun."""

import argparse
import asyncio
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from unbroken.daemon import leave_starter
from unbroken.logs import LEVELS, start_log
from unbroken.network.addresses import listen_at, split_address
from unbroken.network.certificate import ServerCertificate
from unbroken.network.connections import Connections, GuardedSite, http_runner, limits_of_api
from unbroken.network.exposition import serve_exposition_on
from unbroken.network.refusals import Refusals
from unbroken.network.token import FixedToken, TokenFile, Verifier
from unbroken.network.token_guard import TokenGuard
from unbroken.rounds.restored_state import KnownRounds, KnownRoundsFile, read_known_rounds
from unbroken.rounds.server import Rounds
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

FIRST_S = 60.0
"""With --until-idle: how long to wait for the first node."""
LINGER_S = 20.0
"""With --until-idle: how long to go on without nodes. Longer than a run that has ended refuses late nodes."""
_MANY_NODES = 4096
"""Nodes that may come at once; nobody says here how many there are."""
_SHUTDOWN_S = 1.0
_CHECK_S = 0.5
_MAX_STDIN = 1 << 16


async def serve(
    options: argparse.Namespace, verifier: Verifier, listener: socket.socket, metrics: socket.socket | None
) -> None:
    """Serve until SIGTERM or SIGINT, or with --until-idle until no node was connected for a while."""
    refusals = Refusals()
    file = None if options.state is None else KnownRoundsFile(options.state)
    past: KnownRounds = {} if file is None else file.read()
    past |= read_known_rounds(options.known, "--known") if options.known else {}
    connections = Connections(limits_of_api(_MANY_NODES), refusals)
    token_guard = TokenGuard(verifier, refusals, connections)
    rounds = Rounds(refusals, past, None if file is None else file.write, token_guard.held)
    app = web.Application(middlewares=[token_guard.guard])
    app.cleanup_ctx.append(token_guard.sweeping)
    app.add_routes(rounds.routes())
    runner = http_runner(app, _SHUTDOWN_S)
    await runner.setup()
    context = None
    if options.certificate is not None:
        context = ServerCertificate(options.certificate, options.key).context
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    exposition = None
    try:
        await GuardedSite(runner, listener, connections, context).start()
        if metrics is not None:
            # prometheus_client takes 80 ms to import: only after nodes can meet, and only if metrics are wanted, which
            # torchrun's handler does not.
            from unbroken.rounds.metrics import make_metrics  # noqa: PLC0415 - 80 ms, once nodes can meet

            exposition = await serve_exposition_on(metrics, make_metrics(rounds, refusals), refusals)
        logger.info("rounds served: listen=%s:%d", *listener.getsockname()[:2])
        await _until_over(rounds, signalled, options.until_idle)
    finally:
        rounds.close()
        await runner.cleanup()
        if exposition is not None:
            await exposition.cleanup()


async def _until_over(rounds: Rounds, signalled: asyncio.Event, until_idle: bool) -> None:
    loop = asyncio.get_running_loop()
    idle_until_s = loop.time() + FIRST_S
    while not signalled.is_set():
        try:
            await asyncio.wait_for(signalled.wait(), _CHECK_S if until_idle else None)
        except asyncio.TimeoutError:
            if rounds.num_nodes:
                idle_until_s = loop.time() + LINGER_S
            elif loop.time() >= idle_until_s:
                logger.info("no nodes any more")
                return


def _options(arguments: list[str] | None) -> argparse.Namespace:
    description = "A rendezvous for torchrun's nodes: it serves rounds, and nothing else."
    parser = argparse.ArgumentParser(prog="python -m unbroken.rounds", description=description)
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="name or address of this host, and port; unless it is loopback, all addresses are listened on",
    )
    parser.add_argument(
        "--token-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="file with the token that every node shows; -: standard input",
    )
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="PEM file; serve TLS 1.3")
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM file with the certificate's key")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="file that outlives this process: what rounds there have been"
    )
    parser.add_argument("--known", metavar="JSON", help='the same as text: {"RUN": [ROUND, NODES]}')
    parser.add_argument("--metrics-listen", metavar="HOST:PORT", help="serve /metrics and /healthz here, without token")
    parser.add_argument("--until-idle", action="store_true", help="end when no node has been there for a while")
    parser.add_argument(
        "--log-file", metavar="FILE", help="go on in the background once it listens, and log to this file"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="INFO", help="default: INFO")
    options = parser.parse_args(arguments)
    if (options.certificate is None) is not (options.key is None):
        parser.error("--certificate, --key: want both or none")
    return options


def _read_token(path: Path) -> Verifier:
    """Raises InputError."""
    return FixedToken(sys.stdin.read(_MAX_STDIN)) if str(path) == "-" else TokenFile(path.absolute())


def _listen(option: str, text: str) -> socket.socket:
    """Raises InputError."""
    listener = listen_at(option, *split_address(option, text))
    listener.setblocking(False)
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Return 0 at the end, 2 for bad input, with the reason on standard error."""
    options = _options(arguments)
    try:
        verifier = _read_token(options.token_file)
        if options.certificate is not None:
            options.certificate, options.key = options.certificate.absolute(), options.key.absolute()
            ServerCertificate(options.certificate, options.key)
        metrics = _listen("--metrics-listen", options.metrics_listen) if options.metrics_listen else None
        listener = _listen("--listen", options.listen)
        if options.known:
            read_known_rounds(options.known, "--known")
        options.state = None if options.state is None else options.state.absolute()
        if options.log_file is not None:
            leave_starter(str(Path(options.log_file).absolute()))
    except InputError as error:
        print(printable(f"unbroken.rounds: {error}"), file=sys.stderr)
        return 2
    start_log("unbroken.rounds", options.log_level, with_time=True)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(options, verifier, listener, metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
