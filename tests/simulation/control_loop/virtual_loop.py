"""An event loop of asyncio in virtual time: the operator's own coroutines run in it, as they do in production.

    world's timers ──a timer of this loop is due──> ready ──drain──> the tasks go on, until all of them wait

A process of the operator has one. While it is paused, nothing of it runs and its clock goes on, as when the kernel or
the hypervisor gives it no time; when it ends, its tasks are cancelled, and what they ask for then reaches nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_NUM_ENDINGS = 20
"""So often the tasks of a process that ends are cancelled: some wait for others in their end."""


_Loop: Any = asyncio.AbstractEventLoop
"""Its many methods for input and output are left out."""


class VirtualLoop(_Loop):  # type: ignore[misc] # else each method that is left out is missed
    """What asyncio's tasks, time-outs and events need of a loop, and nothing of input and output."""

    def __init__(self, clock: Callable[[], float], wake_at: Callable[[float], None]) -> None:
        """`clock` returns virtual seconds; `wake_at` makes the world call `run_due` at that time."""
        self._clock = clock
        self._wake_at = wake_at
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._woken_at = float("inf")
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.is_paused = False
        self.is_over = False
        self.errors: list[str] = []
        """What no task has caught."""

    # ----------------------------------------------------------------------------------------------- asyncio's part

    def time(self) -> float:
        return self._clock()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.is_over

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock() + max(delay, 0.0), callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        self._plan_wake()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio tells of it; a cancelled timer is left out when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_over:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    # ------------------------------------------------------------------------------------------------ the world's part

    def run_due(self) -> None:
        """Let everything go on that is due by now, until all wait again."""
        # Also where the clock is an ulp before it, since the world adds up delays: then it is to be woken again.
        self._woken_at = float("inf")
        if self.is_paused or self.is_over:
            return
        while self._timers and self._timers[0][0] <= self._clock():
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)
        self.drain()
        self._plan_wake()

    def drain(self) -> None:
        """Run what is ready, and what becomes ready by that."""
        if not self._ready or self.is_paused:
            return
        with self.running():
            self._drain()

    def _drain(self) -> None:
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let this be the loop that runs."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def pause(self) -> None:
        """Give it no time."""
        self.is_paused = True

    def go_on(self) -> None:
        """Give it time again: all that was due meanwhile is due now."""
        self.is_paused = False
        self.run_due()

    def end(self) -> None:
        """End the process."""
        if self.is_over:
            return
        self.is_over, self.is_paused = True, False
        with self.running():
            for _number in range(_NUM_ENDINGS):
                for task in list(self._tasks):
                    task.cancel()
                self._drain()
                if not self._tasks:
                    break
        self._timers.clear()
        self._ready.clear()

    def _plan_wake(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._timers and self._timers[0][0] < self._woken_at and not self.is_over:
            self._woken_at = self._timers[0][0]
            self._wake_at(self._woken_at)
