"""A worker that takes longer for each step than it needs, in the main thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from unbroken_core.pod.fault_orders import FaultOrder

LONGEST_S = 60.0
"""Of one step."""


@dataclass
class Slowness:
    """One order to be slow; it ends with its time or with the iteration."""

    order: FaultOrder
    iteration: int
    until_s: float
    step_began_s: float | None = None

    def holds(self, iteration: int, now_s: float) -> bool:
        """Return whether it still counts."""
        return iteration == self.iteration and now_s < self.until_s

    def extra_s(self, now_s: float) -> float:
        """Return for how long a step that ends now is to go on."""
        if self.order.milliseconds:
            return min(self.order.milliseconds / 1000.0, LONGEST_S)
        if self.step_began_s is None:
            return 0.0
        # Others wait for this rank, so that what it takes is what a step takes.
        return min((now_s - self.step_began_s) * (self.order.factor - 1.0), LONGEST_S)

    def step(self, work: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        """End a step."""
        extra_s = self.extra_s(clock())
        if extra_s > 0:
            work(extra_s)
        self.step_began_s = clock()
