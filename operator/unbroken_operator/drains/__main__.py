"""`python -m unbroken_operator.drains`: serves NVSentinel's DrainRequests until SIGTERM or SIGINT."""

import argparse
import asyncio
import contextlib
import math
import signal
import sys
from collections.abc import Sequence

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters import logs
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.tasks.supervision import keep_running
from unbroken_operator.config import kubeconfig_of
from unbroken_operator.drains.looking import Drains

MAX_PATIENCE_S = 86400.0
MAX_EVERY_S = 300.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unbroken_operator.drains",
        description="Drains nodes for NVSentinel: ranks leave first, then pods are evicted.",
    )
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--namespace", metavar="NS", help="where DrainRequests are, such as nvsentinel")
    scope.add_argument("--all-namespaces", action="store_true", help="serve those of all namespaces")
    parser.add_argument("--kubeconfig", help="file with the cluster's address, as of the operator")
    parser.add_argument(
        "--patience-seconds",
        type=float,
        default=600.0,
        help="a pod with ranks is evicted so long after the request if they have not left it (default: %(default)g)",
    )
    parser.add_argument("--every-seconds", type=float, default=5.0, help="time between looks (default: %(default)g)")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _bounded(option: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise InputError(f"{option}: must be from {least:g} to {most:g}, is {value:g}")
    return value


async def _run(kubeconfig: str | None, namespace: str | None, patience_s: float, every_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kube = await Kube.connect(kubeconfig)
    drains = Drains(kube, namespace, patience_s)
    work = asyncio.create_task(keep_running("drains", lambda: drains.run(every_s)))
    try:
        await stop.wait()
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await kube.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    logs.configure(options.log_format == "json", options.log_level.upper())
    try:
        patience_s = _bounded("--patience-seconds", options.patience_seconds, 0.0, MAX_PATIENCE_S)
        every_s = _bounded("--every-seconds", options.every_seconds, 0.1, MAX_EVERY_S)
        asyncio.run(_run(kubeconfig_of(options.kubeconfig), options.namespace, patience_s, every_s))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
