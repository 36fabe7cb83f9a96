"""How long a step of the job takes, by those that were reported last. Pure."""

from collections import deque

RECENT = 15
"""Reports of which the median counts: one slow stretch says nothing, and a world of another size is soon seen."""


class StepPace:
    """Of the job as it is: a restart changes it little, another number of ranks more."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float, steps: int) -> None:
        """So many steps, one or more, took this long together; what took no time was told too late to count."""
        if seconds > 0.0:
            self._recent.append(seconds / steps)

    @property
    def step_s(self) -> float | None:
        """Seconds of one step; None before any was measured."""
        return sorted(self._recent)[len(self._recent) // 2] if self._recent else None
