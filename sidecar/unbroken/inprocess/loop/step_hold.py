"""Waits after a step, so that ranks move when all workers have finished the same step.

An order says after which step to wait. From that step on, the next ping waits for another order: to go on to a later
step, or to save because all stand after the same step. The end of the iteration raises in the wait. A worker waits no
longer than the order says: without another order it goes on.
"""

import threading
import time
from collections.abc import Callable

from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken.standstill import standstill
from unbroken_core.protocol.messages import NO_STEP, Halt, Halted

POLL_S = 0.1
"""Pauses of a wait, so that signals and pending calls of the interpreter are served."""


class StepHold:
    """The wait of one worker. `obey` runs in the link's thread, all others in the main thread."""

    def __init__(self, progress: ProgressSlot, tell: Callable[[Halted], None]) -> None:
        """`tell` sends an answer to the agent; it is called from both threads."""
        self._progress = progress
        self._tell = tell
        self._iteration = -1
        self._order: Halt | None = None
        self._until_s = 0.0
        self._told_at_order = -1
        """The last step that the script had reported when the order came."""
        self._has_gone_back = False
        """Whether the script has restarted its count since: then the steps of an order mean nothing."""
        self._saves: list[Callable[[int], object]] = []
        self._saved: int | None = None
        self._is_waiting = False
        self._lock = threading.Lock()
        self._said: Halted | None = None
        self._news = threading.Event()

    def begin(self, iteration: int) -> None:
        """Begin an iteration, before it is reported."""
        self.end()
        self._order = self._said = self._saved = None
        self._has_gone_back = False
        self._iteration = iteration

    def end(self) -> None:
        """Drop what belongs to the function."""
        self._iteration = -1
        self._saves = []
        self._is_waiting = False

    def on_move(self, save: Callable[[int], object]) -> None:
        """Call this before a planned move, with the number of the step after which all workers stand."""
        self._saves.append(save)

    def obey(self, order: Halt) -> None:
        """Follow an order from the next ping on, and report this worker's step; a repeated order is ignored."""
        if order.iteration != self._iteration or order == self._order:
            return
        self._until_s = time.monotonic() + order.within_s
        self._order = order
        # In this order: a ping that does not see the order has noted its step before it is read here.
        self._progress.want_care()
        self._told_at_order = self._progress.step
        if not self._is_waiting:
            self._say(Halted(order.term, order.number, self._told_at_order))
        self._news.set()

    def wait(self, step: int | None, is_atomic: bool) -> None:
        """Wait after this step for as long as the newest order wants. Raises what a save raises, RankShouldRestart.

        Not in an atomic section, whose end the interruption waits for; the ping after it is early enough.
        """
        order = self._order
        if order is None or order.step == NO_STEP or self._is_waiting:
            return
        self._progress.want_care()
        if step is None or is_atomic:
            return
        self._has_gone_back = self._has_gone_back or step < self._told_at_order
        if not self._must_wait(order, step):
            return
        self._is_waiting = True
        try:
            with self._progress.unprotected():
                self._stand(step)
        finally:
            self._is_waiting = False
        # Also to an order that came this instant, when `obey` took this thread for a waiting one.
        order = self._order or order
        self._say(Halted(order.term, order.number, step), does_go_on=True)

    def _stand(self, step: int) -> None:
        while True:
            self._news.clear()
            order = self._order
            if order is None or not self._must_wait(order, step):
                return
            self._say(Halted(order.term, order.number, step, is_held=True))
            if order.is_common and order.step == step:
                self._save(step)
                self._say(Halted(order.term, order.number, step, is_held=True, is_done=True))
            self._news.wait(POLL_S)

    def _must_wait(self, order: Halt, step: int) -> bool:
        is_there = step >= order.step or self._has_gone_back
        return order.step != NO_STEP and is_there and time.monotonic() < self._until_s

    def _save(self, step: int) -> None:
        if self._saved == step:
            return
        with standstill.measured():
            for save in self._saves:
                save(step)
        self._saved = step

    def _say(self, answer: Halted, does_go_on: bool = False) -> None:
        """Send an answer, unless a newer one was sent: two threads do so."""
        with self._lock:
            said = self._said
            is_newer = said is None or (said.term, said.number) != (answer.term, answer.number)
            is_more = said is None or (answer.is_held, answer.is_done) > (said.is_held, said.is_done)
            if is_newer or is_more or (does_go_on and said != answer):
                self._said = answer
                self._tell(answer)
