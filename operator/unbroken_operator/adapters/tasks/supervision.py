"""Tasks that must not end in silence: what they raise is logged by name, and they are begun again, ever more slowly."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

FIRST_S, MAX_S = 1.0, 60.0
STEADY_S = 120.0
"""After a task has run for so long, its failures are counted from one again."""
AGAIN_S = 0.5
"""Between two attempts to cancel a task."""


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


async def end_all(tasks: Iterable["asyncio.Task[Any]"], again_s: float = AGAIN_S) -> None:
    """Cancel tasks until each has ended, however it ended.

    Once is not enough: `asyncio.wait_for` of Python 3.11 loses a cancellation that comes together with what it waits
    for, and a job that is woken all the time would go on for ever.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
