"""Background tasks, none of which ends in silence: an exception is logged with what the task served, and acted upon."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

OnFailure = Callable[[str, BaseException], None]


class Tasks:
    """The tasks of one owner, in one event loop. `stop` ends them all."""

    def __init__(self, on_failure: OnFailure) -> None:
        """`on_failure` gets what the task was for and its exception: it ends the process, or goes on without it."""
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, what: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run in the background; `what` names it in the log."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self.adopt(what, task)
        return task

    def adopt(self, what: str, task: "asyncio.Task[Any] | None") -> None:
        """Take a task that somebody else has started; None is ignored."""
        if task is not None and task not in self._running:
            self._running.add(task)
            task.add_done_callback(lambda done: self._end(what, done))

    async def stop(self) -> None:
        """Cancel all and wait for their ends."""
        current = asyncio.current_task()
        running = [task for task in self._running if task is not current]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, what: str, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("task failed: what=%s error=%s: %s", what, type(error).__name__, error, exc_info=error)
            self._on_failure(what, error)
