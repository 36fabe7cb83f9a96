"""What each worker of the pod did when its iteration was ended because somebody made no progress. Pure.

    MAIN stands for a quarter of soft ──Look──> worker ──main_thread──> kept, true while MAIN stands
    any stamp stands for 0.8 soft     ──DumpStack──> launcher           the frames, also of who holds the GIL
    Interrupt (soft-timeout)          the stamps of the last tick say who was blocked, frozen or running:
        frozen                        from the frames
        blocked since the Look        from the Look: an abort on another rank may have woken it since
        else                          ──Leave──> worker ──main_thread──> from that answer

So a rank that waited is told by what it did while it waited, not by how it took the end of the others.
"""

from collections.abc import Sequence
from dataclasses import replace

from unbroken.agent.decisions.place import LocalPlace, Looked, Stamps
from unbroken_core.pod.activities import Reading, place_of, read
from unbroken_core.pod.liveness import Ages
from unbroken_core.pod.pod_messages import MainThread
from unbroken_core.pod.stacks import bounded
from unbroken_core.pod.stamps import WorkerStamps
from unbroken_core.protocol.bounds import MAX_PLACE
from unbroken_core.protocol.messages import Activity, Interrupt
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, Doing

_NEARLY = 0.8
"""Share of the soft timeout after which a worker's stack is requested, so that it is there when the fault is."""
_BLOCKED = 0.25
"""Share of the soft timeout for which MAIN stands where the main thread is taken to be blocked outside of Python."""
_RUNNING = 0.1
"""The same within which it surely runs Python code."""
_FROZEN = 0.5
"""The same of ALIVE, where no thread of the process runs."""
_WAITS = (Doing.COLLECTIVE, Doing.WAITING)


def note_stamps(place: LocalPlace, slot: WorkerStamps, worker: Ages, soft_s: float) -> None:
    """Note the stamps of a worker in its function, and whether to look where it stands."""
    place.stamps = Stamps(slot.iteration, slot.main_ns, worker)
    incarnation = place.incarnation
    is_late, is_blocked = worker.oldest_s >= _NEARLY * soft_s, _is_blocked(worker, soft_s)
    if not is_late and incarnation.stack_wanted >= 0:
        # It moved on; should it stop again, it will stand elsewhere.
        place.incarnation = incarnation = replace(incarnation, stack_wanted=-1, stack_asked=-1, stack=())
    if is_late and incarnation.stack_wanted != slot.iteration:
        place.incarnation = incarnation = replace(incarnation, stack_wanted=slot.iteration)
    has_moved = place.looked is not None and place.looked.main_ns != slot.main_ns
    if (has_moved or not is_blocked) and incarnation.look_wanted >= 0:
        place.looked = None
        place.incarnation = incarnation = replace(incarnation, look_wanted=-1, look_asked=-1)
    if is_blocked and incarnation.look_wanted != slot.iteration:
        place.incarnation = replace(incarnation, look_wanted=slot.iteration)


def note_activities(places: Sequence[LocalPlace], interrupt: Interrupt, settings: JobSettings) -> None:
    """Note what each worker did in an iteration that is over because of a hang, as far as that is known already."""
    if interrupt.cause is not Cause.SOFT_TIMEOUT:
        return
    soft_s = settings.timeouts.soft_s
    for place in places:
        stamps, looked = place.stamps, place.looked
        if stamps is None or stamps.iteration != interrupt.iteration:
            continue
        alive_s = stamps.ages.alive_s
        is_blocked = _is_blocked(stamps.ages, soft_s)
        if alive_s is not None and alive_s >= _FROZEN * soft_s:
            _note(place, stamps, _read_frozen(place), MainThread(stamps.iteration, place.incarnation.stack))
        elif _is_true(looked, stamps) and looked is not None and looked.thread is not None:
            _note(place, stamps, read(looked.thread, is_blocked), looked.thread)
        elif settings.is_in_process and place.connection.is_open:
            place.asked = stamps
        else:
            # Its process is ended without a word.
            thread = MainThread(stamps.iteration, place.incarnation.stack)
            _note(place, stamps, _read_unasked(thread, stamps.ages, soft_s), thread)


def note_answer(place: LocalPlace, soft_s: float) -> None:
    """Note where a worker says that its main thread stands."""
    thread = None if place.connection.report is None else place.connection.report.main_thread
    stamps, looked, asked = place.stamps, place.looked, place.asked
    if thread is None or stamps is None or thread.iteration != stamps.iteration:
        return
    if not thread.is_leaving:
        if looked is not None and looked.thread is None:
            place.looked = replace(looked, thread=thread)
        return
    if asked is None or asked.iteration != thread.iteration:
        return
    place.asked = None
    is_blocked = _is_blocked(asked.ages, soft_s)
    reading = read(thread, is_blocked)
    waited = looked is not None and looked.thread is not None and read(looked.thread, True).doing in _WAITS
    if reading.doing not in _WAITS and (thread.is_raising or waited):
        # It may have been woken by the end of the others.
        reading = Reading(Doing.UNKNOWN, reading.what)
    _note(place, asked, reading, thread)


def _is_blocked(worker: Ages, soft_s: float) -> bool:
    return worker.main_s is not None and worker.main_s >= _BLOCKED * soft_s


def _is_true(looked: Looked | None, stamps: Stamps) -> bool:
    """Return whether the main thread has not moved since it was looked at."""
    return looked is not None and looked.main_ns == stamps.main_ns


def _read_frozen(place: LocalPlace) -> Reading:
    """Return what a worker does of which no thread runs: its own library cannot answer."""
    stack = place.incarnation.stack
    if place.incarnation.is_ending:
        return Reading(Doing.FROZEN, "its main thread has ended")
    reading = read(MainThread(0, stack), True)
    return reading if reading.doing in _WAITS else Reading(Doing.FROZEN, place_of(stack))


def _read_unasked(thread: MainThread, worker: Ages, soft_s: float) -> Reading:
    """Return what a worker does that is not asked: nobody saw its frames while it ran Python code."""
    if thread.stack or worker.main_s is None:
        return read(thread, _is_blocked(worker, soft_s))
    return Reading(Doing.OWN_CODE if worker.main_s < _RUNNING * soft_s else Doing.UNKNOWN)


def _note(place: LocalPlace, stamps: Stamps, reading: Reading, thread: MainThread) -> None:
    worker = stamps.ages
    activity = Activity(
        iteration=stamps.iteration,
        doing=reading.doing,
        what=reading.what[:MAX_PLACE],
        idle_s=worker.oldest_s,
        ping_s=-1.0 if worker.ping_s is None else worker.ping_s,
        sequence=thread.sequence,
        num_groups=thread.num_groups,
        stack=() if reading.doing in _WAITS else bounded(thread.stack),
        groups=thread.groups,
    )
    place.incarnation = replace(place.incarnation, activity=activity)
