"""What is left of a process, and of a connection, when the next one takes its place."""

from dataclasses import replace

from unbroken.agent.decisions.place import Incarnation, LauncherOrders, LocalPlace, WorkerConnection
from unbroken_core.pod.pod_messages import Enter, ProcessState, WorkerReport
from unbroken_core.protocol.messages import Fault, RankPlan
from unbroken_core.vocabulary.reasons import Cause, RankReason, WorkerPhase

TRAINS = WorkerReport(WorkerPhase.RUNNING, 3, checks=(("Calm", True),))


def used_place() -> LocalPlace:
    """Return a place whose worker has run, hung and been ordered about."""
    place = LocalPlace(1, process=ProcessState(1, 0, 50), orders=LauncherOrders(0, 0, 0), entered=3)
    place.attach(stack_signal=34)
    place.receive(TRAINS)
    place.connection = replace(place.connection, entered=3, left=3, lost_since_s=7.0, is_released=True)
    place.incarnation = Incarnation(
        number=0,
        part=RankPlan(1, 1, RankReason.FIRST),
        entry=Enter(1, 3, 1, 2, "127.0.0.9", 600),
        is_passed_over=True,
        must_be_ready_by_s=9.0,
        found=Fault(Cause.HARD_TIMEOUT, 3),
        unconfirmed=Fault(Cause.EXCEPTION, 3),
        step=17,
        stack_wanted=3,
        stack_asked=3,
        stack=("train.py:1 in main",),
        is_ending=True,
        alive_since_s=1.0,
    )
    return place


def test_next_process_inherits_nothing_that_belonged_to_the_one_before() -> None:
    place = used_place()
    kept = (place.process, place.orders, place.entered, place.checks)
    place.advance(1)
    assert place.incarnation == Incarnation(1)
    assert place.connection == WorkerConnection()
    assert (place.process, place.orders, place.entered, place.checks) == kept


def test_next_connection_has_seen_nothing_and_the_process_keeps_what_it_said() -> None:
    place = used_place()
    before = place.incarnation
    place.attach(stack_signal=35)
    assert place.connection == WorkerConnection(is_open=True, stack_signal=35)
    assert place.incarnation == replace(before, earlier_report=TRAINS, alive_since_s=None)
    assert place.report == TRAINS
    place.attach()
    assert place.report == TRAINS, "it has said nothing on the second connection"


def test_connection_that_closes_keeps_what_has_passed_on_it() -> None:
    place = used_place()
    before = place.connection
    place.detach()
    assert place.connection == replace(before, is_open=False)
