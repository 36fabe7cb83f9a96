"""A fault of a pod's own worker ends the iteration for the others in the pod at once. Pure.

The rendezvous interrupts an iteration at every fault of an active rank, and in one pod nobody needs to wait for its
word. It must still hear of the fault, and whose it was: a worker that has left is READY and speaks of it no more, so
the place keeps it until the rendezvous has said that the iteration is over.
"""

from collections.abc import Sequence

from unbroken.agent.decisions.orders import Standing
from unbroken.agent.decisions.place import Place
from unbroken_core.messages import Interrupt, WorkerState
from unbroken_core.reasons import WorkerPhase

_FAILED = (WorkerPhase.STOPPING, WorkerPhase.GONE)


def interrupt_early(standing: Standing, places: Sequence[Place], workers: Sequence[WorkerState], pod: str) -> None:
    """Take the iteration in force for interrupted when an active worker of this pod has failed in it.

    To be called only in contact with the rendezvous. One that took the job over may not know the fault's iteration for
    its own yet: there its word is waited for.
    """
    plan = standing.plan
    if plan is None or not standing.is_plan_in_force or plan.generation != standing.generation:
        return
    culprit: Interrupt | None = None
    for place, state in zip(places, workers, strict=True):
        fault, rank = state.fault, None if place.part is None else place.part.rank
        if rank is None or fault is None or fault.iteration != plan.iteration or state.phase not in _FAILED:
            continue
        place.unheard = fault
        culprit = culprit or Interrupt(standing.generation, plan.iteration, fault.cause, rank, pod, fault.detail)
    if culprit is not None:
        standing.interrupted, standing.interrupt = plan.iteration, culprit


def note_heard(places: Sequence[Place], iteration: int) -> None:
    """Forget the faults up to this iteration: the rendezvous has said that it is over."""
    for place in places:
        if place.unheard is not None and place.unheard.iteration <= iteration:
            place.unheard = None
