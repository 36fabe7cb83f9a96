"""Names a plug-in that keeps a worker from the next iteration, before its process is ended for that."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from unbroken.inprocess.interruption.stacks import describe_threads

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""A plug-in that runs longer is named, once in each call of it."""


@contextlib.contextmanager
def named_when_slow(name: str, iteration: int, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Log that a plug-in still runs, and where, once it has run for so long."""
    timer = threading.Timer(patience_s, _tell, (name, iteration, patience_s))
    timer.daemon = True
    timer.name = "unbroken-slow-plugin"
    # No more threads: it stays unnamed.
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(name: str, iteration: int, patience_s: float) -> None:
    text = (
        "%s has run for %g s after iteration %d: all ranks wait for this worker, whose process is ended once "
        "hard_timeout is over; it stands at\n%s"
    )
    logger.warning(text, name, patience_s, iteration, describe_threads())
