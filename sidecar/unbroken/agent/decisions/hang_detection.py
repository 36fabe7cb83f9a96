"""Which workers of a pod hang, by the stamps that they write: notes it at their places. Pure."""

from collections.abc import Sequence

from unbroken.agent.decisions.events import Ticked
from unbroken.agent.decisions.place import Place
from unbroken_core.messages import Fault, WorkerState
from unbroken_core.pod.liveness import ages, find_hangs
from unbroken_core.pod.stacks import where
from unbroken_core.pod.stamps import Slot
from unbroken_core.reasons import Cause, WorkerPhase
from unbroken_core.settings import Timeouts

_NS = 1_000_000_000
_ABSENT_AFTER_S = 60.0
_NEARLY = 0.8
"""Part of the soft timeout after which a worker is asked for its stack: it is there when the worker is named."""


def note_hangs(
    places: Sequence[Place],
    workers: Sequence[WorkerState],
    seen: Ticked,
    now_s: float,
    timeouts: Timeouts,
) -> None:
    """Note steps, and SOFT_TIMEOUT at each place whose running worker is overdue and has no fault yet.

    `now_s` is CLOCK_MONOTONIC of this host, as the stamps are.
    """
    if seen.slots is None:
        return
    watched: dict[int, Slot] = {}
    for place, state, slot in zip(places, workers, seen.slots, strict=True):
        if not _is_of(slot, place):
            continue
        place.step = slot.step
        place.stack = seen.stacks.get(place.local_rank, place.stack)
        if state.phase is WorkerPhase.RUNNING and slot.iteration == state.iteration:
            watched[place.local_rank] = slot
            if ages(slot, int(now_s * _NS)).oldest_s >= _NEARLY * timeouts.soft_s:
                place.stack_wanted = state.iteration
    for hang in find_hangs(watched, int(now_s * _NS), timeouts):
        place, state = places[hang.local_rank], workers[hang.local_rank]
        if place.found is None and state.fault is None:
            detail = hang.detail + where(place.stack)
            place.found = Fault(Cause.SOFT_TIMEOUT, state.iteration, detail, hang.age_s, place.stack)


def attach_patience_s(timeouts: Timeouts) -> float:
    """Return how long a process may run before it is remarked that its library has not attached."""
    return min(timeouts.startup_s / 2, _ABSENT_AFTER_S)


def note_absent(places: Sequence[Place], now_s: float, timeouts: Timeouts) -> None:
    """Remark on processes that run and have not called the wrapper: no fault of an iteration, but a hint."""
    for place in places:
        is_absent = place.present is not None and place.is_alive and place.worker is None and not place.is_attached
        if not is_absent or place.found is not None:
            continue
        if place.alive_since_s is None:
            place.alive_since_s = now_s
        waited_s = now_s - place.alive_since_s
        if waited_s >= attach_patience_s(timeouts):
            detail = f"has not attached for {waited_s:.0f} s: does it call unbroken.inprocess.Wrapper?"
            place.found = Fault(Cause.SOFT_TIMEOUT, -1, detail, waited_s)


def _is_of(slot: Slot, place: Place) -> bool:
    """Whether the stamps are those of the process that is at the place now."""
    return place.present is not None and slot.incarnation == place.wanted and slot.pid > 0
