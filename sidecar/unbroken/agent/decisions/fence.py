"""When a pod without contact to the rendezvous must leave its iteration by itself. Pure.

A pod whose peers train cannot go on without them: once its ranks are given away, the peers leave the iteration, and
its next collective fails or blocks. So it trains for as long as its peers do. But all of them may be cut off together,
while the rendezvous still hears their spares: after timeouts.isolation it gives all ranks away, and by then each pod
has left. One of them leaving is enough.

A pod that holds all ranks of the world needs no peers: it would train on beside the pod that got its ranks, and both
would save checkpoints. It leaves before the rendezvous, which may hear others, can have given it up.

A pod with a worker that failed, or made no progress for timeouts.soft, leaves as well: its iteration is over in any
case, and data that arrive once the link is back must not advance it one more step.

A refused connection counts as contact: the host answers, no rendezvous runs there, and none gives ranks away.

While the agent itself is down, each worker leaves after the same time, which its order to enter has told it, and
reports to the next agent for how long it was alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.protocol.messages import Fault, Plan, WorkerState
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)


def ping_interval_s(timeouts: Timeouts) -> float:
    """Return after how much silence the agent pings the rendezvous, which has half as long to answer."""
    return timeouts.heartbeat_s / 3


def patience_s(timeouts: Timeouts) -> float:
    """Return how long a pod that must not go on may still run after it noticed that contact is lost.

    It notices within half of timeouts.heartbeat, and the rendezvous heard it at most one heartbeat before: a tenth of
    timeouts.heartbeat remains to leave the function. A broken connection is seen at both ends at once: then a fifth of
    timeouts.reconnect remains.
    """
    return min(heartbeat_interval_s(timeouts), 0.8 * timeouts.reconnect_s)


def isolation_patience_s(timeouts: Timeouts) -> float:
    """Return how long a pod with peers may still run after it noticed that contact is lost.

    It notices within 0.7 of timeouts.heartbeat after the rendezvous heard it last, and its processes end within
    timeouts.terminationGrace: three tenths of timeouts.heartbeat remain to leave the function.
    """
    return timeouts.isolation_limit_s - timeouts.heartbeat_s - timeouts.termination_grace_s


def longest_retry_s(timeouts: Timeouts) -> float:
    """Return the longest pause between two attempts to connect: a refusal must be noticed before patience runs out."""
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
    """Return how long a pod without a fault may still run after it noticed that contact is lost."""
    return patience_s(timeouts) if holds_the_world(plan) else isolation_patience_s(timeouts)


def is_over(plan: Plan, workers: Sequence[WorkerState]) -> bool:
    """Return whether a worker of the pod has failed in this plan's iteration."""
    return any(worker.fault is not None and worker.fault.iteration == plan.iteration for worker in workers)


@dataclass
class Contact:
    """The pod's contact to the rendezvous: without it, others may decide about this pod unnoticed."""

    lost_since_s: float | None
    """None while there is contact."""
    fenced: Fault | None = None
    """Why the pod left an iteration by itself, the last time it did."""

    def note_contact(self) -> None:
        """The rendezvous has accepted this pod."""
        self.lost_since_s = None

    def note_lost(self, now_s: float) -> None:
        """The connection is closed or silent."""
        if self.lost_since_s is None:
            self.lost_since_s = now_s

    def note_away(self, since_s: float) -> None:
        """No agent was connected since then."""
        if self.lost_since_s is not None:
            self.lost_since_s = min(self.lost_since_s, since_s)

    def note_absent(self, now_s: float) -> None:
        """Nothing listens where the rendezvous should be."""
        if self.lost_since_s is not None:
            self.lost_since_s = now_s

    def fence(self, plan: Plan, workers: Sequence[WorkerState], now_s: float) -> Fault:
        """Note that the pod leaves this plan's iteration by itself, and return why."""
        lost_s = now_s - (now_s if self.lost_since_s is None else self.lost_since_s)
        detail = f"cut off from the rendezvous for {lost_s:.1f} s: left, since others may have its ranks by now"
        # A pod may stand still because of a fault elsewhere: that is weak evidence.
        is_weak = is_over(plan, workers) and not holds_the_world(plan)
        cause = Cause.SOFT_TIMEOUT if is_weak else Cause.HEARTBEAT_LOST
        self.fenced = Fault(cause, plan.iteration, detail, lost_s)
        return self.fenced


def explain(worker: WorkerState, fenced: Fault) -> WorkerState:
    """Return the worker with the fault for which it left the iteration, unless it has one of its own."""
    has_left = worker.phase is not WorkerPhase.GONE and worker.iteration == fenced.iteration
    return replace(worker, fault=fenced) if has_left and worker.fault is None else worker
