"""Names a plug-in that keeps a worker from what comes next, before its process is ended for that."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from unbroken.inprocess.interruption.stacks import describe_threads

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""A plug-in that runs longer is named, once in each call of it."""

OTHERS_WAIT = "all ranks wait for this worker, whose process is ended once hard_timeout is over"
POLICY_WAITS = "all ranks wait for its answer, and this worker's process is ended if it does not come"
AT_END = "this worker's part of the job is over, and its process waits for that"


@contextlib.contextmanager
def named_when_slow(
    name: str, iteration: int, patience_s: float = PATIENCE_S, outcome: str = OTHERS_WAIT
) -> Iterator[None]:
    """Log that a plug-in still runs, where, and what follows from it, once it has run for so long."""
    timer = threading.Timer(patience_s, _tell, (name, iteration, patience_s, outcome))
    timer.daemon = True
    timer.name = "unbroken-slow-plugin"
    # No more threads: it stays unnamed.
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(name: str, iteration: int, patience_s: float, outcome: str) -> None:
    text = "%s has run for %g s after iteration %d: %s; it stands at\n%s"
    logger.warning(text, name, patience_s, iteration, outcome, describe_threads())
