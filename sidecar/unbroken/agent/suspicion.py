"""Which workers of a pod hang, by the stamps that they write: notes it at their places. Pure."""

from collections.abc import Sequence

from unbroken.agent.place import Place
from unbroken_core.liveness import find_hangs
from unbroken_core.messages import Fault, WorkerState
from unbroken_core.reasons import Cause, WorkerPhase
from unbroken_core.settings import Timeouts
from unbroken_core.stamps import Slot

_NS = 1_000_000_000


def note_hangs(
    places: Sequence[Place], workers: Sequence[WorkerState], slots: Sequence[Slot], now_s: float, timeouts: Timeouts
) -> None:
    """Note steps, and SOFT_TIMEOUT at each place whose running worker is overdue and has no fault yet.

    `slots` in local order; `now_s` is CLOCK_MONOTONIC of this host, as the stamps are.
    """
    watched: dict[int, Slot] = {}
    for place, state, slot in zip(places, workers, slots, strict=True):
        if not _is_of(slot, place):
            continue
        place.step = slot.step
        if state.phase is WorkerPhase.RUNNING and slot.iteration == state.iteration:
            watched[place.local_rank] = slot
    for hang in find_hangs(watched, int(now_s * _NS), timeouts):
        place, state = places[hang.local_rank], workers[hang.local_rank]
        if place.found is None and state.fault is None:
            place.found = Fault(Cause.SOFT_TIMEOUT, state.iteration, hang.detail, hang.age_s)


def _is_of(slot: Slot, place: Place) -> bool:
    """Whether the stamps are those of the process that is at the place now."""
    return place.present is not None and slot.incarnation == place.wanted and slot.pid > 0
