"""What an agent says that its workers did, once their iteration has ended for a hang."""

from dataclasses import replace

import pytest

from unbroken.agent.decisions.activity import note_activities, note_answer, note_stamps
from unbroken.agent.decisions.place import LocalPlace, Looked, WorkerConnection
from unbroken_core.pod.liveness import ages
from unbroken_core.pod.pod_messages import MainThread, WorkerReport
from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, FLAG_PING_ARMED, WorkerStamps
from unbroken_core.protocol.messages import Activity, GroupState, Interrupt
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.vocabulary.reasons import Cause, Doing, Rung, WorkerPhase

SETTINGS = JobSettings("digits", replicas=2, ranks_per_pod=1, timeouts=Timeouts(soft_s=10.0, hard_s=20.0))
PROCESS = replace(SETTINGS, rungs=(RungBudget(Rung.PROCESS, None, 3600.0),))
NOW_NS = 10**12
INTERRUPT = Interrupt(1, 0, Cause.SOFT_TIMEOUT, None, "", "no progress")
SLEEPS = MainThread(0, ("/me/train.py:41 in load",), "sleep", False, sequence=7, num_groups=1)
WAITS = MainThread(0, ("/me/train.py:60 in step", "/x/torch/distributed/distributed_c10d.py:9 in all_reduce"))
OWN = ("own-code", "train.py:41 load")
COLLECTIVE = ("collective", "all_reduce")


def place(alive_s: float = 0.0, main_s: float = 0.0, ping_s: float = 9.9) -> LocalPlace:
    """Return a place whose page was just read."""
    found = LocalPlace(0)
    found.connection = WorkerConnection(is_open=True)
    alive_ns, main_ns, ping_ns = (NOW_NS - int(age_s * 1e9) for age_s in (alive_s, main_s, ping_s))
    slot = WorkerStamps(50, 0, alive_ns, main_ns, ping_ns, 3, FLAG_IN_FUNCTION | FLAG_PING_ARMED, 0)
    note_stamps(found, slot, ages(slot, NOW_NS), 10.0)
    return found


def looked_at(found: LocalPlace, thread: MainThread, has_moved: bool = False) -> LocalPlace:
    """Let its worker answer a Look."""
    assert found.stamps is not None
    found.looked = Looked(found.stamps.main_ns - int(has_moved))
    found.connection = replace(found.connection, report=WorkerReport(WorkerPhase.RUNNING, 0, main_thread=thread))
    note_answer(found, 10.0)
    return found


def leave(found: LocalPlace, thread: MainThread) -> None:
    """Let its worker answer a Leave."""
    report = WorkerReport(WorkerPhase.RUNNING, 0, main_thread=replace(thread, is_leaving=True))
    found.connection = replace(found.connection, report=report)
    note_answer(found, 10.0)


def said(found: LocalPlace) -> tuple[str, str] | None:
    activity = found.incarnation.activity
    return None if activity is None else (activity.doing.value, activity.what)


def test_worker_that_is_blocked_is_told_by_what_it_did_before_the_end_of_the_others_woke_it() -> None:
    found = looked_at(place(main_s=9.0), WAITS)
    note_activities([found], INTERRUPT, SETTINGS)
    assert said(found) == COLLECTIVE
    leave(found, SLEEPS)
    assert said(found) == COLLECTIVE


def test_groups_are_told_as_they_were_while_the_worker_was_blocked() -> None:
    pending = GroupState("0", "0-3", 9, 9, "all_reduce Float[2]")
    found = looked_at(place(main_s=9.0), replace(WAITS, num_groups=1, groups=(pending,)))
    note_activities([found], INTERRUPT, SETTINGS)
    # Its collective has failed meanwhile.
    leave(found, replace(WAITS, num_groups=1, groups=(replace(pending, pending=-1, what=""),)))
    activity = found.incarnation.activity
    assert activity is not None
    assert (activity.num_groups, activity.groups) == (1, (pending,))


def test_worker_that_runs_is_told_by_its_answer_to_leave() -> None:
    found = place(main_s=0.1)
    note_activities([found], INTERRUPT, SETTINGS)
    assert said(found) is None
    leave(found, SLEEPS)
    assert found.incarnation.activity == Activity(0, Doing.OWN_CODE, OWN[1], 9.9, 9.9, 7, 1, SLEEPS.stack)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(WAITS, SLEEPS, id="it waited before"),
        pytest.param(None, replace(SLEEPS, is_raising=True), id="it handles an exception"),
    ],
)
def test_worker_that_may_have_been_woken_by_the_end_of_others_is_not_told(
    before: MainThread | None, now: MainThread
) -> None:
    found = place(main_s=3.0)
    if before is not None:
        looked_at(found, before, has_moved=True)
    note_activities([found], INTERRUPT, SETTINGS)
    leave(found, now)
    assert said(found) == ("unknown", OWN[1])


@pytest.mark.parametrize(
    ("stack", "doing"),
    [
        pytest.param((), ("frozen", ""), id="stopped"),
        pytest.param(SLEEPS.stack, ("frozen", OWN[1]), id="its main thread holds the GIL"),
        pytest.param(WAITS.stack, COLLECTIVE, id="in a collective that holds the GIL"),
    ],
)
def test_worker_of_which_no_thread_runs_is_told_at_once(stack: tuple[str, ...], doing: tuple[str, str]) -> None:
    found = place(alive_s=9.0, main_s=9.0)
    found.incarnation = replace(found.incarnation, stack=stack)
    note_activities([found], INTERRUPT, SETTINGS)
    assert said(found) == doing


@pytest.mark.parametrize(
    ("main_s", "stack", "doing"),
    [
        pytest.param(9.0, WAITS.stack, COLLECTIVE, id="it waits"),
        pytest.param(9.0, SLEEPS.stack, ("unknown", OWN[1]), id="it is blocked in nobody knows what"),
        pytest.param(0.1, (), ("own-code", ""), id="it runs Python code"),
        pytest.param(2.0, (), ("unknown", ""), id="it may run Python code"),
    ],
)
def test_worker_whose_process_is_ended_is_told_by_what_is_known(
    main_s: float, stack: tuple[str, ...], doing: tuple[str, str]
) -> None:
    found = place(main_s=main_s)
    found.incarnation = replace(found.incarnation, stack=stack)
    note_activities([found], INTERRUPT, PROCESS)
    assert said(found) == doing


def test_worker_whose_main_thread_has_ended_is_told_as_that() -> None:
    found = place(alive_s=9.0, main_s=9.0)
    found.incarnation = replace(found.incarnation, is_ending=True)
    note_activities([found], INTERRUPT, SETTINGS)
    assert said(found) == ("frozen", "its main thread has ended")


def test_nobody_is_told_of_for_other_causes_or_other_iterations() -> None:
    found = looked_at(place(main_s=9.0), WAITS)
    note_activities([found], replace(INTERRUPT, cause=Cause.EXCEPTION), SETTINGS)
    note_activities([found], replace(INTERRUPT, iteration=1), SETTINGS)
    assert said(found) is None


def test_worker_that_moves_on_is_looked_at_again_when_it_stops_again() -> None:
    found = place(main_s=9.0)
    assert (found.incarnation.look_wanted, found.incarnation.stack_wanted) == (0, 0)
    slot = WorkerStamps(50, 0, NOW_NS, NOW_NS, NOW_NS, 4, FLAG_IN_FUNCTION | FLAG_PING_ARMED, 0)
    note_stamps(found, slot, ages(slot, NOW_NS), 10.0)
    assert (found.incarnation.look_wanted, found.incarnation.stack_wanted) == (-1, -1)
    assert found.looked is None
