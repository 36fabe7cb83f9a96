"""How long this process's main thread stands still for checkpoints: whoever saves measures it here, once.

Checkpoints in memory and the wrapper know nothing of each other. Standard library only: workers import it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Standstill:
    """The checkpoints of one process."""

    def __init__(self) -> None:
        self._tell: Callable[[int], None] | None = None
        self._depth = 0

    def begin(self, tell: Callable[[int], None]) -> None:
        """Begin an iteration: `tell` is called with the nanoseconds of each checkpoint when it is over."""
        # An interruption may have struck between any two lines below.
        self._tell, self._depth = tell, 0

    def end(self) -> None:
        """End the iteration: nobody wants to know."""
        self._tell = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a checkpoint for which training stands still; one within another counts once.

        What another thread saves meanwhile holds up nobody, and does not count.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        began_ns = time.monotonic_ns()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._tell is not None:
                self._tell(time.monotonic_ns() - began_ns)


standstill = Standstill()
"""That of this process."""
