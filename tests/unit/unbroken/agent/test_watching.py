"""What an agent makes of its pod's watch: what was fatal stays, what was well does not; told at once, but no flood."""

from dataclasses import replace

import pytest
from tests.unit.unbroken.agent.test_member import Pod, plan

from unbroken.agent.decisions.events import (
    Action,
    LauncherAttached,
    LauncherLost,
    PairsReported,
    PreflightReported,
    SendToLauncher,
    SendToRendezvous,
    WatchLost,
    WatchReported,
)
from unbroken.agent.decisions.reporting import _HEALTH_GATHER_S, Reporter
from unbroken.agent.decisions.watching import ENDED, SILENT_S, Watching
from unbroken_core.pod.pod_messages import EndPairs
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Heartbeat, Hello, PairOrder, PairState, Report, WorkerState
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import MAX_FINDINGS, PREFLIGHT, STARTING, Finding, Health, Verdict, bounded
from unbroken_core.vocabulary.reasons import Role, WorkerPhase

RUNNING = (WorkerState(0, 0, WorkerPhase.RUNNING, 1),)
OK = Finding("clock", "node", Verdict.OK)
LOST = Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79")
DOWN = Finding("ports", "mlx5_0/1", Verdict.SUSPECT, "link-down")


def test_what_a_watch_found_fatal_outlives_it_and_what_was_well_does_not() -> None:
    watching = Watching()
    assert watching.note(WatchLost()) is None
    assert watching.note(WatchReported(Health((LOST, DOWN, OK)))) == Health((LOST, DOWN, OK))
    assert watching.note(WatchLost()) == Health((LOST, DOWN, ENDED))
    assert watching.note(WatchReported(Health((OK,)))) == Health((LOST, OK))


def test_a_watch_may_take_back_what_it_said_itself() -> None:
    watching = Watching()
    watching.note(WatchReported(Health((LOST,))))
    assert watching.note(WatchReported(Health((OK,)))) == Health((OK,))


def test_a_watch_that_ends_before_it_has_said_anything_is_known_to_have_ended() -> None:
    watching = Watching()
    assert watching.note(WatchReported(Health((STARTING,))), 5.0) is None
    assert watching.note(WatchLost(), 6.0) == Health((ENDED,))
    assert watching.note(WatchReported(Health((STARTING,))), 7.0) == Health((ENDED,))
    assert not watching.look(7.0)
    assert watching.note(WatchReported(Health((OK,))), 8.0) == Health((OK,))


def test_a_watch_that_goes_on_saying_nothing_is_told_of_and_one_that_speaks_is_not() -> None:
    watching = Watching()
    watching.note(WatchReported(Health((STARTING,))), 5.0)
    assert not watching.look(4.9 + SILENT_S)
    assert watching.look(5.0 + SILENT_S)
    assert watching.health == Health((STARTING,))
    assert not watching.look(6.0 + SILENT_S)
    watching.note(WatchReported(Health((LOST,))), 90.0)
    assert not watching.look(91.0 + SILENT_S)
    assert watching.health == Health((LOST,))


def test_a_new_watch_that_says_nothing_takes_back_nothing_of_what_the_last_one_found() -> None:
    watching = Watching()
    watching.note(WatchReported(Health((LOST, DOWN, OK))))
    watching.note(WatchLost())
    watching.note(WatchReported(Health((STARTING,))), 5.0)
    assert not watching.look(6.0 + SILENT_S)
    assert watching.health == Health((LOST, DOWN, ENDED))


def joined(health: Health | None = None) -> Reporter:
    reporter = Reporter(0.0)
    reporter.health = health
    reporter.connect()
    reporter.note_hello(RUNNING, 0.0)
    reporter.welcome(10.0)
    return reporter


def test_a_finding_is_told_at_once_and_only_once() -> None:
    reporter = joined(Health((OK,)))
    reporter.health = Health((OK, LOST))
    word = reporter.next_message(RUNNING, False, False, 1.0)
    assert isinstance(word, Report)
    assert word.health == Health((OK, LOST))
    assert reporter.next_message(RUNNING, False, False, 2.0) is None
    assert isinstance(reporter.next_message(RUNNING, False, False, 11.5), Heartbeat)


def test_findings_that_change_all_the_time_are_few_reports() -> None:
    reporter = joined()
    num_reports = 0
    for number in range(1000):
        reporter.health = Health((replace(DOWN, entity=f"mlx5_{number}/1"),))
        num_reports += reporter.next_message(RUNNING, False, False, number * 0.001) is not None
    assert num_reports <= 1 + int(1.0 / _HEALTH_GATHER_S)
    assert min(reporter.deadlines_s) <= 1.0 + _HEALTH_GATHER_S


def test_other_words_for_the_same_are_no_news() -> None:
    reporter = joined(Health((replace(DOWN, message="one"),)))
    reporter.health = Health((replace(DOWN, message="two"),))
    assert reporter.next_message(RUNNING, False, False, 1.0) is None


@pytest.mark.parametrize(
    "finding",
    [
        pytest.param(replace(DOWN, check="x" * 41), id="check"),
        pytest.param(replace(DOWN, check="a\nb"), id="line in a check"),
        pytest.param(replace(DOWN, entity="x" * 129), id="entity"),
        pytest.param(replace(DOWN, code="two words"), id="code"),
        pytest.param(replace(DOWN, action="x" * 101), id="action"),
        pytest.param(replace(DOWN, message="x" * 301), id="message"),
        pytest.param(replace(DOWN, seen=4), id="seen"),
    ],
)
def test_a_finding_beyond_its_bounds_is_refused(finding: Finding) -> None:
    with pytest.raises(WireError, match="findings"):
        wire.decode(wire.encode(Health((DOWN, finding))), Health)


def test_more_findings_than_a_pod_may_have_are_refused_and_never_made() -> None:
    many = tuple(replace(DOWN, entity=str(number)) for number in range(1000))
    with pytest.raises(WireError, match="at most 64"):
        wire.decode(wire.encode(Health(many)), Health)
    health = bounded((*many, LOST))
    assert (health.findings[0], len(health.findings), health.num_dropped) == (LOST, MAX_FINDINGS, 937)
    assert wire.decode(wire.encode(health), Health) == health


def test_what_a_preflight_has_found_stays_whatever_the_watch_does() -> None:
    wrong = Finding(PREFLIGHT[2], "cuda:0", Verdict.FATAL)
    watching = Watching()
    assert watching.note(PreflightReported(Health((wrong,)))) == Health((wrong,))
    assert watching.note(WatchReported(Health((OK,)))) == Health((wrong, OK))
    assert watching.note(WatchLost()) == Health((wrong, ENDED))
    assert watching.note(PreflightReported(Health(()))) == Health((ENDED,))


def test_neither_speaks_for_the_other() -> None:
    wrong = Finding(PREFLIGHT[2], "cuda:0", Verdict.FATAL)
    watching = Watching()
    assert watching.note(WatchReported(Health((wrong, OK)))) == Health((OK,))
    assert watching.note(PreflightReported(Health((LOST, wrong)))) == Health((wrong, OK))


SAID = PairState(700, gpus=8)


def orders(actions: list[Action]) -> list[PairOrder | EndPairs]:
    """Return what the launcher is told of tests with other pods."""
    messages = (action.message for action in actions if isinstance(action, SendToLauncher))
    return [message for message in messages if isinstance(message, (PairOrder, EndPairs))]


def order(number: int, term: int = 1) -> PairOrder:
    return PairOrder(term, number, 0, "127.0.0.9", 700, 0, 15.0)


def told(actions: list[Action]) -> list[PairState]:
    """Return what the rendezvous is told of them."""
    messages = (action.message for action in actions if isinstance(action, SendToRendezvous))
    return [each.pairs for each in messages if isinstance(each, (Hello, Report)) and each.pairs is not None]


def spare() -> Pod:
    """A pod without ranks, which tests with others."""
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.step(PairsReported(SAID))
    pod.after(1.0)
    return pod


def test_a_pod_says_that_it_tests_with_others_and_where_it_is_met() -> None:
    pod = Pod()
    pod.join()
    (said,) = told([*pod.step(LauncherAttached(), PairsReported(replace(SAID, host="evil"))), *pod.after(1.0)])
    assert said == replace(SAID, host="127.0.0.9")
    assert told(pod.after(1.0)) == []
    (again,) = told(pod.join())
    assert again == said


def test_an_order_is_passed_on_once_and_its_answer_told() -> None:
    pod = spare()
    assert orders(pod.hear(order(1))) == [order(1)]
    assert orders([*pod.hear(order(1)), *pod.hear(order(1, 0)), *pod.after(1.0)]) == []
    pod.step(PairsReported(replace(SAID, term=1, number=1, has_passed=True)))
    assert pod.member.reporter.pairs == PairState(700, "127.0.0.9", 8, 1, 1, True)


def test_an_answer_to_what_was_not_ordered_is_not_told() -> None:
    pod = spare()
    pod.hear(order(2))
    for term, number in ((1, 1), (1, 3), (2, 2)):
        pod.step(PairsReported(replace(SAID, term=term, number=number, has_passed=False, why="a lie")))
        assert pod.member.reporter.pairs == replace(SAID, host="127.0.0.9")


def test_a_pod_with_ranks_tests_no_more() -> None:
    pod = spare()
    assert orders([*pod.hear(plan(0)), *pod.after(1.0)]) == [EndPairs()]
    assert orders([*pod.hear(order(1)), *pod.after(1.0)]) == []
    assert orders([*pod.step(LauncherAttached()), *pod.after(1.0)]) == [EndPairs()]


def test_a_spare_in_a_plan_still_does() -> None:
    pod = spare()
    assert orders(pod.hear(plan(0, role=Role.SPARE))) == []
    assert orders(pod.hear(order(1))) == [order(1)]


def test_a_pod_whose_launcher_is_gone_does_not() -> None:
    pod = spare()
    pod.step(LauncherLost())
    assert pod.member.reporter.pairs == PairState(0, "127.0.0.9", 8)


def test_a_pod_that_says_nothing_of_tests_is_told_nothing() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    assert orders([*pod.hear(order(1)), *pod.hear(plan(0))]) == []


def test_a_launcher_that_floods_with_states_costs_few_reports() -> None:
    reporter = joined()
    num_reports = 0
    for number in range(1000):
        reporter.pairs = replace(SAID, gpus=number)
        num_reports += reporter.next_message(RUNNING, False, False, number * 0.001) is not None
    assert num_reports <= 1.0 / _HEALTH_GATHER_S + 1
