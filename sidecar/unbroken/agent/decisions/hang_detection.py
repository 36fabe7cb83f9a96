"""Notes at each place whether its worker hangs, judging by the stamps that it writes. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from unbroken.agent.decisions.activity import note_stamps
from unbroken.agent.decisions.events import Ticked
from unbroken.agent.decisions.place import LocalPlace
from unbroken_core.pod.liveness import Evidence, ages, find_hangs
from unbroken_core.pod.stacks import where
from unbroken_core.pod.stamps import WorkerStamps
from unbroken_core.protocol.bounds import MAX_SECONDS
from unbroken_core.protocol.messages import Fault, Pace, WorkerState
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

_NS = 1_000_000_000
_ABSENT_AFTER_S = 60.0


def note_hangs(
    places: Sequence[LocalPlace],
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
    watched: dict[int, WorkerStamps] = {}
    for place, state, slot in zip(places, workers, seen.slots, strict=True):
        if not _is_of(slot, place):
            continue
        frames = seen.stacks.get(place.local_rank)
        # Until the worker begins the iteration that it was ordered to enter, its slot is about the one before.
        step = slot.step if slot.iteration >= state.iteration else -1
        if step != place.incarnation.step or frames is not None:
            stack = place.incarnation.stack if frames is None else frames
            place.incarnation = replace(place.incarnation, step=step, stack=stack)
        if (slot.iteration, slot.step) != place.made[:2]:
            place.made = slot.iteration, slot.step, slot.ping_ns
            # What is longer than the time between two looks, and was not there at the last one, came before the step.
            place.saved_ns = slot.checkpoint_ns
        place.checkpoint = slot.iteration, slot.checkpoint_ns
        if slot.num_windows and slot.iteration == state.iteration:
            place.pace = _pace(place, slot)
        if state.phase is WorkerPhase.RUNNING and slot.iteration == state.iteration:
            watched[place.local_rank] = slot
            note_stamps(place, slot, ages(slot, int(now_s * _NS)), timeouts.soft_s)
    for hang in find_hangs(watched, int(now_s * _NS), timeouts):
        place, state = places[hang.local_rank], workers[hang.local_rank]
        incarnation = place.incarnation
        if incarnation.found is None and state.fault is None:
            detail = hang.detail + where(incarnation.stack)
            is_certain = hang.evidence is Evidence.CERTAIN
            fault = Fault(
                Cause.SOFT_TIMEOUT,
                state.iteration,
                detail,
                hang.age_s,
                incarnation.stack,
                is_certain=is_certain,
                is_hang=True,
            )
            place.incarnation = replace(incarnation, found=fault)


def checkpoint_s(places: Sequence[LocalPlace], workers: Sequence[WorkerState]) -> float:
    """Return for how long the newest iteration of these workers has stood still for checkpoints, by the longest."""
    newest = max((state.iteration for state in workers), default=-1)
    found = [place.checkpoint[1] for place in places if place.checkpoint[0] == newest]
    return round(max(found, default=0) / _NS, 3)


def checkpoint_after_s(places: Sequence[LocalPlace], workers: Sequence[WorkerState]) -> float:
    """Return how much of `checkpoint_s` came after the newest step of the worker that stood still for so long."""
    newest = max((state.iteration for state in workers), default=-1)
    found = [
        (place.checkpoint[1], place.checkpoint[1] - place.saved_ns)
        for place in places
        if place.checkpoint[0] == place.made[0] == newest
    ]
    return round(max(max(found, default=(0, 0))[1], 0) / _NS, 3)


def step_ago_s(places: Sequence[LocalPlace], workers: Sequence[WorkerState], now_s: float) -> float:
    """Return the seconds since the highest step of these workers' newest iteration was first made; 0.0: not known."""
    newest = max((state.iteration for state in workers), default=-1)
    made = [place.made for place in places if place.made[0] == newest and place.made[1] >= 0]
    highest = max((step for _iteration, step, _ns in made), default=-1)
    stamps = [stamp_ns for _iteration, step, stamp_ns in made if step == highest]
    return min(round(max(now_s - min(stamps) / _NS, 0.0), 3), MAX_SECONDS) if stamps else 0.0


def attach_patience_s(timeouts: Timeouts) -> float:
    """Return how long a process may run before its missing library is reported."""
    return min(timeouts.startup_s / 2, _ABSENT_AFTER_S)


def note_absent(places: Sequence[LocalPlace], now_s: float, timeouts: Timeouts) -> None:
    """Note processes that run without calling the wrapper: a hint, not a fault of an iteration."""
    for place in places:
        is_silent = place.connection.report is None and not place.connection.is_open
        if place.present is None or not place.is_alive or not is_silent or place.incarnation.found is not None:
            continue
        since_s = place.incarnation.alive_since_s
        if since_s is None:
            since_s = now_s
            place.incarnation = replace(place.incarnation, alive_since_s=now_s)
        waited_s = now_s - since_s
        if waited_s >= attach_patience_s(timeouts):
            detail = f"has not attached for {waited_s:.0f} s: does it call unbroken.inprocess.Wrapper?"
            place.incarnation = replace(place.incarnation, found=Fault(Cause.SOFT_TIMEOUT, -1, detail, waited_s))


def _pace(place: LocalPlace, slot: WorkerStamps) -> Pace:
    busy_s, step_s = round(slot.busy_ns / _NS, 6), round(slot.step_ns / _NS, 6)
    return Pace(place.local_rank, slot.iteration, slot.num_windows - 1, busy_s, step_s)


def _is_of(slot: WorkerStamps, place: LocalPlace) -> bool:
    """Whether these stamps are from the process that is at the place now."""
    return place.present is not None and slot.incarnation == place.incarnation.number and slot.pid > 0
