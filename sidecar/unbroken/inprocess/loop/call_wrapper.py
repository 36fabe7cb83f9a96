"""What a wrapped function may ask of its call."""

import contextlib
from collections.abc import Callable, Iterator

from unbroken.inprocess.interruption.gate import Gate
from unbroken.inprocess.interruption.interrupter import InterruptibleCall
from unbroken.inprocess.loop.step_hold import StepHold
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken.inprocess.state import FrozenState
from unbroken.standstill import standstill


class CallWrapper:
    """What the wrapped function may ask for: annotate a parameter with this class.

    Belongs to one call, and to the main thread of the process that made it; in a forked child it does nothing.
    """

    def __init__(
        self,
        call: InterruptibleCall,
        gate: Gate,
        progress: ProgressSlot,
        step_hold: StepHold,
        *,
        on_first_ping: Callable[[], None],
        at_step: Callable[[], None] | None = None,
    ) -> None:
        """`on_first_ping` is called at the first ping of each iteration, `at_step` at those that were asked to."""
        self._call = call
        self._gate = gate
        self._progress = progress
        self._step_hold = step_hold
        self._on_first_ping = on_first_ping
        self._at_step = at_step

    @property
    def iteration(self) -> int:
        """Number of this run of the function, from 0; -1 before the first."""
        return self._call.iteration

    @property
    def state(self) -> FrozenState:
        """The present state of this worker."""
        return self._call.state

    def ping(self, step: int | None = None, *, busy_s: float | None = None) -> None:
        """Report progress. From the first ping in an iteration on, silence counts as a hang.

        `step` is the number of the finished step; the job shows the highest. Before a planned move of ranks it waits
        until all have finished the same step, and raises RankShouldRestart. `busy_s`: for how many seconds since the
        last ping this rank did not wait for others, where the script knows better than the job (spec.health.stragglers
        in docs/health.md).
        """
        if busy_s is not None:
            self._progress.tell_busy(busy_s)
        if self._progress.ping(step):
            if self._progress.arm():
                self._on_first_ping()
            self._step_hold.wait(step, is_atomic=self._gate.num_atomic > 0)
            if self._at_step is not None:
                self._at_step()

    def on_move(self, save: Callable[[int], object]) -> None:
        """Call `save(step)` before a planned move of ranks in this iteration: a checkpoint there loses no step.

        It runs inside `ping(step=)`, on all ranks after the same step, with the process groups intact; after it `ping`
        raises RankShouldRestart. Its exceptions are faults. Without time (timeouts.drain) it is not called.
        """
        self._step_hold.on_move(save)

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function is not interrupted; it may be nested.

        An interruption waits for its end; once one has begun, entering raises RankShouldRestart.
        """
        return self._gate.atomic()

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a checkpoint that training waits for: its time counts as `checkpoint`, not as progress.

        `unbroken.memory` does so by itself. It neither keeps interruptions out nor holds off timeouts.
        """
        return standstill.measured()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Hold off soft and hard timeout on this worker, for a long step without pings."""
        self._progress.set_protection(is_on=False)
        try:
            yield
        finally:
            self._progress.set_protection(is_on=True)
