"""Time that passes only while everybody waits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        selector = cast(Any, self)._selector
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            self.now_s += timeout or 0.0
            return select(0)

        selector.select = jump

    def time(self) -> float:
        return self.now_s


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(scenario)
