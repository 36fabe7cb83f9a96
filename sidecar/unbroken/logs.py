"""How agent and rendezvous log: to standard error, one line an event, from the level on that the environment names."""

import logging
import sys
from collections.abc import Mapping

from unbroken_core.conventions.printable import PrintableFormatter
from unbroken_core.errors import InputError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def read_level(environment: Mapping[str, str]) -> str:
    """Return UNBROKEN_LOG_LEVEL, in capitals; INFO where it is not set. Raises InputError."""
    level = environment.get("UNBROKEN_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise InputError(f"UNBROKEN_LOG_LEVEL: want one of {', '.join(LEVELS)}, got {level!r}")
    return level


def start_log(name: str, level: str, *, with_time: bool) -> None:
    """Log as `name`; `with_time` unless something else timestamps the lines, as a kubelet does."""
    time = "%(asctime)s " if with_time else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(f"{time}%(levelname).1s {name}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
