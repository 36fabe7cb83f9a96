"""How long this process's main thread stands still for checkpoints, and until when it may save any.

Whoever saves measures it here, once.

Checkpoints in memory and the wrapper know nothing of each other. Standard library only: workers import it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Iteration:
    """One iteration of the training function, and how many checkpoints within each other it is in."""

    __slots__ = ("depth", "tell")

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell
        self.depth = 0


class Standstill:
    """The checkpoints of one process."""

    def __init__(self) -> None:
        self._iteration: _Iteration | None = None
        self.is_spoilt = False
        """Whether collectives of this iteration were aborted: what they have left in tensors is worth nothing."""

    def begin(self, tell: Callable[[int], None]) -> None:
        """Begin an iteration: `tell` is called with the nanoseconds of each checkpoint when it is over."""
        self._iteration = _Iteration(tell)
        self.is_spoilt = False

    def spoil(self) -> None:
        """Let nothing more be saved in this iteration: its collectives are about to be aborted."""
        self.is_spoilt = True

    def end(self) -> None:
        """End the iteration: nobody wants to know."""
        self._iteration = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a checkpoint for which training stands still; one within another counts once.

        What another thread saves meanwhile holds up nobody, and does not count.
        """
        iteration = self._iteration
        if iteration is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        began_ns = time.monotonic_ns()
        iteration.depth += 1
        try:
            yield
        finally:
            # After an interruption this may run late, when the next iteration has begun: that one has its own count.
            iteration.depth -= 1
            if iteration.depth == 0 and iteration is self._iteration:
                iteration.tell(time.monotonic_ns() - began_ns)


standstill = Standstill()
"""That of this process."""
