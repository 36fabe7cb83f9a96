"""Drops the last references to old groups and stores in the background: that is slow, 10 ms per peer with gloo."""

import threading
import time
from typing import Any

MAX_DESTROYING = 8
"""Most lists of old objects at once: beyond them the next restart waits for the oldest."""
DESTROY_TIMEOUT_S = 30.0


class DeferredDestroyer:
    """Destroys objects in background threads."""

    def __init__(self) -> None:
        self._destructions: list[_Destruction] = []

    def destroy(self, objects: list[Any], after_s: float = 0.0, wait_s: float = 0.0) -> bool:
        """Destroy these after a while; the caller keeps no reference. Waits for older ones if there are too many.

        Then waits for these for at most `wait_s`, and returns whether they are gone.
        """
        if not objects:
            return True
        self._destructions = [destruction for destruction in self._destructions if destruction.is_alive()]
        if len(self._destructions) >= MAX_DESTROYING:
            self._destructions[0].hurry()
            self._destructions[0].join(DESTROY_TIMEOUT_S)
        destruction = _Destruction(objects, after_s)
        destruction.start()
        self._destructions.append(destruction)
        destruction.join(wait_s)
        return not destruction.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until all are destroyed, at most so long, without further delay."""
        for destruction in self._destructions:
            destruction.hurry()
        deadline_s = time.monotonic() + timeout_s
        for destruction in self._destructions:
            destruction.join(max(deadline_s - time.monotonic(), 0.0))
        self._destructions = [destruction for destruction in self._destructions if destruction.is_alive()]


class _Destruction(threading.Thread):
    """One delayed destruction."""

    def __init__(self, objects: list[Any], after_s: float) -> None:
        super().__init__(name="unbroken-destroy", daemon=True)
        self._objects = objects
        self._after_s = after_s
        self._is_due = threading.Event()

    def hurry(self) -> None:
        """End the delay."""
        self._is_due.set()

    def run(self) -> None:
        if self._after_s > 0:
            self._is_due.wait(self._after_s)
        self._objects.clear()
