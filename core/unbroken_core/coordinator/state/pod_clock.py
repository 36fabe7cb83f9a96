"""The clock of all startup timeouts. It stands while the cluster runs too few pods for the job to train.

A pod may wait for a free node for hours, and for its images for many minutes: no script can hurry that, so that it must
not end a job. What a script does in a pod that runs counts.
"""

import math


class PodClock:
    """Readings are seconds without the time that the clock stood; `now_s` never goes back."""

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stands_since_s: float | None = None
        self.why = ""
        """Why it stands, for people; "" while it runs."""

    @property
    def is_standing(self) -> bool:
        """Whether no time counts now."""
        return self._stands_since_s is not None

    def stand(self, why: str, now_s: float) -> None:
        """Stop the clock, or let it go on: with ""."""
        self.why = why
        if why and self._stands_since_s is None:
            self._stands_since_s = now_s
        elif not why and self._stands_since_s is not None:
            self._stood_s += now_s - self._stands_since_s
            self._stands_since_s = None

    def read(self, now_s: float) -> float:
        """Return the reading."""
        return (now_s if self._stands_since_s is None else self._stands_since_s) - self._stood_s

    def due_s(self, reading: float, limit_s: float) -> float:
        """Return when `limit_s` will have counted since `reading`, a time like `now_s`; inf while the clock stands."""
        return math.inf if self.is_standing else reading + limit_s + self._stood_s
