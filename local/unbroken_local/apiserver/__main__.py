"""`python -m unbroken_local.apiserver`: serve until SIGTERM or SIGINT."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.apiserver.server import ApiServer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m unbroken_local.apiserver", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="ADDRESS:PORT", help="port 0 takes a free one")
    parser.add_argument("--kubeconfig", type=Path, required=True, metavar="FILE", help="where to write the kubeconfig")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="keep the objects in this file between two runs")
    parser.add_argument("--history", type=int, default=4096, metavar="N", help="changes kept per resource for watches")
    parser.add_argument("--plain", action="store_true", help="HTTP instead of HTTPS (kubectl sends no token over it)")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    address, _, port = arguments.listen.rpartition(":")
    if not address or not port.isdigit():
        raise InputError(f"--listen: want ADDRESS:PORT, got {arguments.listen!r}")
    server = ApiServer(history_limit=arguments.history, snapshot_file=arguments.snapshot, tls=not arguments.plain)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start(address, int(port))
    server.write_kubeconfig(arguments.kubeconfig)
    print(arguments.kubeconfig.resolve(), flush=True)
    await stop.wait()
    await server.stop()


def main() -> int:
    """Run the server; exit code 2 for arguments that cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_serve(_arguments()))
    except (InputError, OSError) as problem:
        print(f"apiserver: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
