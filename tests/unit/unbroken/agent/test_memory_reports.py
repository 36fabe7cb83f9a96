"""What an agent tells of its pod's memory: with other news at once, alone after a while, and in each Hello."""

from dataclasses import replace
from itertools import pairwise

import pytest

from unbroken.agent.decisions.reporting import _HELD_GATHER_S, Reporter, held_pause_s
from unbroken_core.protocol.messages import Heartbeat, Report, WorkerState
from unbroken_core.vocabulary.checkpoints import Held, Holding
from unbroken_core.vocabulary.reasons import WorkerPhase

RUNNING = (WorkerState(0, 0, WorkerPhase.RUNNING, 1),)
READY = (WorkerState(0, 0, WorkerPhase.READY, 1),)
HELD = Held("aa", (Holding("uid", 1, 1, 10, 1, ((0, "1a", "d1"),)),))


def joined() -> Reporter:
    reporter = Reporter(0.0)
    reporter.connect()
    reporter.note_hello(RUNNING, 0.0)
    reporter.welcome(10.0)
    return reporter


def test_news_of_the_memory_wait_for_others_to_go_with_but_not_for_long() -> None:
    reporter = joined()
    reporter.held = HELD
    assert reporter.next_message(RUNNING, False, False, 1.0) is None
    assert min(reporter.deadlines_s) == 1.0 + _HELD_GATHER_S
    word = reporter.next_message(RUNNING, False, False, 1.0 + _HELD_GATHER_S)
    assert isinstance(word, Report)
    assert word.memory == HELD
    assert reporter.next_message(RUNNING, False, False, 2.0) is None
    assert isinstance(reporter.next_message(RUNNING, False, False, 12.0), Heartbeat)


def test_news_of_the_memory_come_at_once_after_a_pause_and_seldom_where_a_script_saves_many_times_a_second() -> None:
    reporter, pause_s = joined(), held_pause_s(1)
    told_s = []
    for milliseconds in range(1000, 2000):
        now_s = milliseconds / 1000
        reporter.held = replace(HELD, port=milliseconds)
        if reporter.next_message(RUNNING, False, False, now_s) is not None:
            told_s.append(now_s)
    assert told_s[0] == pytest.approx(1.0 + _HELD_GATHER_S)
    gaps = [later - earlier for earlier, later in pairwise(told_s)]
    assert gaps == pytest.approx([pause_s] * len(gaps), abs=0.002)
    assert len(told_s) >= 1 / pause_s - 2
    # Between two saves with a pause of their own nothing waits.
    assert reporter.next_message(RUNNING, False, False, 3.0) is not None
    reporter.held = HELD
    assert reporter.next_message(RUNNING, False, False, 4.0) is None
    assert min(reporter.deadlines_s) == 4.0 + _HELD_GATHER_S


def test_what_the_memory_holds_does_not_come_oftener_the_sooner_other_news_come() -> None:
    """A report for another reason has told it; the next one for the memory alone has its pause."""
    reporter = joined()
    reporter.held = HELD
    assert isinstance(reporter.next_message(READY, False, False, 1.0), Report)
    reporter.held = replace(HELD, port=1)
    assert reporter.next_message(READY, False, False, 1.0) is None
    assert min(reporter.deadlines_s) == 1.0 + held_pause_s(1)


@pytest.mark.parametrize("num_pods", [1, 4, 100, 101, 1000, 5000])
def test_pods_of_a_job_tell_of_their_memory_in_no_more_reports_than_a_rendezvous_takes(num_pods: int) -> None:
    assert 0.05 <= held_pause_s(num_pods) <= 0.5
    assert num_pods > 1000 or num_pods / held_pause_s(num_pods) <= 2000


def test_a_worker_that_is_ready_tells_what_was_saved_last_at_once() -> None:
    reporter = joined()
    reporter.held = HELD
    word = reporter.next_message(READY, False, False, 1.0)
    assert isinstance(word, Report)
    assert word.memory == HELD


def test_what_hello_has_told_is_not_told_again() -> None:
    reporter = joined()
    reporter.held = HELD
    reporter.connect()
    reporter.note_hello(RUNNING, 1.0)
    reporter.welcome(10.0)
    word = reporter.next_message(READY, False, False, 2.0)
    assert isinstance(word, Report)
    assert word.memory is None
