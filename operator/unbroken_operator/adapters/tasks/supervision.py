"""Tasks that must not end in silence: what they raise is logged by name, and they are begun again, ever more slowly."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

FIRST_S, MAX_S = 1.0, 60.0
STEADY_S = 120.0
"""After a task has run for so long, its failures are counted from one again."""


async def keep_running(
    name: str, work: Callable[[], Awaitable[None]], count: Callable[[], None] = lambda: None
) -> None:
    """Run `work` until it returns, or until this is cancelled; `count` is called at each failure."""
    clock, num_failures = asyncio.get_running_loop().time, 0
    while True:
        began_s = clock()
        try:
            await work()
        except Exception:
            num_failures = 1 if clock() - began_s >= STEADY_S else num_failures + 1
            pause_s = min(FIRST_S * 2.0 ** min(num_failures - 1, 10), MAX_S)
            logger.exception("task failed by a bug, beginning again task=%s in_s=%.0f", name, pause_s)
            count()
            await asyncio.sleep(pause_s)
        else:
            return
