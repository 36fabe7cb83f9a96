"""When a pod that has no contact to the rendezvous must leave its iteration by itself. Pure.

A pod whose peers train cannot go on without them: when its ranks are given away, the peers leave the iteration, and
the next collective ends or blocks. So it trains for as long as its peers do. But all of them may be cut off together,
from a rendezvous that hears their spares: after timeouts.isolation that one gives all ranks away, so by then a pod has
left. It is enough that one of them does. A pod that holds all ranks of the world needs nobody: it would go on beside
the pod that got its ranks, and both would save. It leaves before the rendezvous, which may hear others, can have given
it up. A pod with a worker that failed, or stands still for timeouts.soft, leaves too: its iteration is over in any
case, and data that arrive when the link is back must not move it one more step. A refused connection is contact
enough: the host answers, no rendezvous runs there, and none gives ranks away.

Nobody obeys this while the agent itself is away: then each worker leaves after the same time, which it was told when it
entered, and tells the next agent for how long it was alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken_core.messages import Fault, Plan, WorkerState
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.reasons import Cause, WorkerPhase
from unbroken_core.settings import Timeouts

_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)


def ping_interval_s(timeouts: Timeouts) -> float:
    """Return after how much silence the rendezvous is asked for a sign of life; it has half as long to give one."""
    return timeouts.heartbeat_s / 3


def patience_s(timeouts: Timeouts) -> float:
    """Return how long a pod that must not go on does so after it noticed that the contact is lost.

    It notices within half of timeouts.heartbeat, and the rendezvous has heard it at most one heartbeat before: this
    leaves a tenth of timeouts.heartbeat to leave the function. A connection that breaks is seen at both ends at once:
    then a fifth of timeouts.reconnect is left.
    """
    return min(heartbeat_interval_s(timeouts), 0.8 * timeouts.reconnect_s)


def isolation_patience_s(timeouts: Timeouts) -> float:
    """Return how long a pod with peers goes on after it noticed that the contact is lost.

    It notices within 0.7 of timeouts.heartbeat after the rendezvous has heard it last, and its processes end within
    timeouts.terminationGrace: this leaves three tenths of timeouts.heartbeat to leave the function.
    """
    return timeouts.isolation_limit_s - timeouts.heartbeat_s - timeouts.termination_grace_s


def longest_retry_s(timeouts: Timeouts) -> float:
    """Return the longest pause between two attempts to connect: a refusal must be seen before the patience is over."""
    return min(2.0, patience_s(timeouts) / 3)


def holds_the_world(plan: Plan) -> bool:
    """Return whether all active ranks are in this pod."""
    num_held = sum(part.rank is not None for part in plan.ranks)
    return num_held > 0 and num_held == plan.world_size


def longest_absence_s(plan: Plan, workers: Sequence[WorkerState], timeouts: Timeouts) -> float | None:
    """Return how long a pod without contact may stay in this plan's iteration; None when it is not in it."""
    if not any(worker.iteration == plan.iteration and worker.phase in _INSIDE for worker in workers):
        return None
    return patience_s(timeouts) if is_over(plan, workers) else lonely_patience_s(plan, timeouts)


def lonely_patience_s(plan: Plan, timeouts: Timeouts) -> float:
    """Return how long a pod in which nothing is wrong goes on after it noticed that the contact is lost."""
    return patience_s(timeouts) if holds_the_world(plan) else isolation_patience_s(timeouts)


def is_over(plan: Plan, workers: Sequence[WorkerState]) -> bool:
    """Return whether a worker of the pod has failed in this plan's iteration."""
    return any(worker.fault is not None and worker.fault.iteration == plan.iteration for worker in workers)


@dataclass
class Contact:
    """Whether somebody may decide about this pod without its knowledge."""

    lost_since_s: float | None
    """None while the rendezvous is heard."""
    fenced: Fault | None = None
    """Why the pod has left the last iteration that it left by itself."""

    def note_heard(self) -> None:
        """The rendezvous has accepted this pod."""
        self.lost_since_s = None

    def note_lost(self, now_s: float) -> None:
        """The connection is closed or has gone mute."""
        if self.lost_since_s is None:
            self.lost_since_s = now_s

    def note_away(self, since_s: float) -> None:
        """Nobody was there to hear the rendezvous since then."""
        if self.lost_since_s is not None:
            self.lost_since_s = min(self.lost_since_s, since_s)

    def note_absent(self, now_s: float) -> None:
        """Nobody listens where the rendezvous should be."""
        if self.lost_since_s is not None:
            self.lost_since_s = now_s

    def fence(self, plan: Plan, workers: Sequence[WorkerState], now_s: float) -> Fault:
        """Note that the pod leaves this plan's iteration by itself, and return why."""
        lost_s = now_s - (now_s if self.lost_since_s is None else self.lost_since_s)
        detail = f"cut off from the rendezvous for {lost_s:.1f} s: left, since others may have its ranks by now"
        # A pod that stood still may stand for the fault of another: it is no strong evidence.
        is_weak = is_over(plan, workers) and not holds_the_world(plan)
        cause = Cause.SOFT_TIMEOUT if is_weak else Cause.HEARTBEAT_LOST
        self.fenced = Fault(cause, plan.iteration, detail, lost_s)
        return self.fenced


def explain(worker: WorkerState, fenced: Fault) -> WorkerState:
    """Return the worker with the reason for which it left the iteration, if nothing else is wrong with it."""
    has_left = worker.phase is not WorkerPhase.GONE and worker.iteration == fenced.iteration
    return replace(worker, fault=fenced) if has_left and worker.fault is None else worker
