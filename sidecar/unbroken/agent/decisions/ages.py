"""How old things are that a new rendezvous was not there to see: on this pod's clock, as seen by this agent. Pure."""

from collections.abc import Sequence

from unbroken.agent.decisions.instructions import Instructions
from unbroken_core.protocol.messages import WorkerState
from unbroken_core.vocabulary.reasons import WorkerPhase


class IterationAges:
    """Since when workers of this pod are in the newest plan's iteration, and since when it is over.

    An agent that was restarted counts from its own start: it never says more than it knows.
    """

    def __init__(self) -> None:
        self._iteration = -1
        self._entered_s: float | None = None
        self._over_s: float | None = None

    def note(self, instructions: Instructions, workers: Sequence[WorkerState], now_s: float) -> None:
        """Note what is so now for the first time."""
        plan = instructions.plan
        if plan is None:
            return
        if plan.iteration != self._iteration:
            self._iteration, self._entered_s, self._over_s = plan.iteration, None, None
        states = [worker for worker in workers if worker.iteration == plan.iteration]
        if self._entered_s is None and any(worker.phase is WorkerPhase.RUNNING for worker in states):
            self._entered_s = now_s
        has_fault = any(worker.fault is not None and worker.fault.iteration == plan.iteration for worker in workers)
        if self._over_s is None and (has_fault or not instructions.is_plan_in_force):
            self._over_s = now_s

    def entered_ago_s(self, now_s: float) -> float:
        """Return the seconds since workers entered; 0: not known."""
        return 0.0 if self._entered_s is None else max(now_s - self._entered_s, 0.0)

    def over_ago_s(self, now_s: float) -> float:
        """Return the seconds since it is over; 0: it is not."""
        return 0.0 if self._over_s is None else max(now_s - self._over_s, 0.0)
