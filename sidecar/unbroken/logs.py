"""How agent and rendezvous log: to standard error, one line an event, from the level on that the environment names."""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType

from unbroken_core.conventions.printable import PrintableFormatter
from unbroken_core.vocabulary.errors import InputError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def read_level(environment: Mapping[str, str]) -> str:
    """Return UNBROKEN_LOG_LEVEL, in capitals; INFO where it is not set. Raises InputError."""
    level = environment.get("UNBROKEN_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise InputError(f"UNBROKEN_LOG_LEVEL: want one of {', '.join(LEVELS)}, got {level!r}")
    return level


def start_log(name: str, level: str, *, with_time: bool, pod: str = "") -> None:
    """Log as `name`; `with_time` unless something else timestamps the lines, as a kubelet does.

    `pod`: whose process this is, where others' lines may go to the same stream.
    """
    time = "%(asctime)s " if with_time else ""
    if pod:
        name = f"{name} of {pod.replace('%', '%%')}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(f"{time}%(levelname).1s {name}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter would print it, with whatever characters are in it."""
    logging.critical("process ended by %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error, name = arguments.exc_value, "?" if arguments.thread is None else arguments.thread.name
    logging.error("thread failed: name=%s error=%s", name, arguments.exc_type.__name__, exc_info=error)
