"""A fault of one worker ends the iteration at once for the others in its pod. Pure.

The rendezvous interrupts an iteration at every fault of an active rank, so the pod need not wait for it. The
rendezvous must still learn of the fault and its rank: a worker that has left is READY and no longer reports it, so the
place keeps the fault until the rendezvous has ended the iteration.
"""

from collections.abc import Sequence
from dataclasses import replace

from unbroken.agent.decisions.instructions import Instructions
from unbroken.agent.decisions.place import LocalPlace
from unbroken_core.protocol.messages import Interrupt, WorkerState
from unbroken_core.vocabulary.reasons import WorkerPhase

_FAILED = (WorkerPhase.STOPPING, WorkerPhase.GONE)


def interrupt_early(
    instructions: Instructions, places: Sequence[LocalPlace], workers: Sequence[WorkerState], pod: str
) -> None:
    """Count the current iteration as interrupted if an active worker of this pod has failed in it.

    Call it only in contact with the rendezvous. A rendezvous that took over may not have adopted the fault's iteration
    yet: then its message is awaited.
    """
    plan = instructions.plan
    if plan is None or not instructions.is_plan_in_force or plan.term != instructions.term:
        return
    culprit: Interrupt | None = None
    for place, state in zip(places, workers, strict=True):
        part = place.incarnation.part
        fault, rank = state.fault, None if part is None else part.rank
        if rank is None or fault is None or fault.iteration != plan.iteration or state.phase not in _FAILED:
            continue
        place.incarnation = replace(place.incarnation, unconfirmed=fault)
        culprit = culprit or Interrupt(instructions.term, plan.iteration, fault.cause, rank, pod, fault.detail)
    if culprit is not None:
        instructions.interrupted, instructions.interrupt = plan.iteration, culprit


def confirm_faults(places: Sequence[LocalPlace], iteration: int) -> None:
    """Forget the faults up to this iteration, which the rendezvous has ended."""
    for place in places:
        fault = place.incarnation.unconfirmed
        if fault is not None and fault.iteration <= iteration:
            place.incarnation = replace(place.incarnation, unconfirmed=None)
