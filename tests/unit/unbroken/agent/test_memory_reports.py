"""What an agent tells of its pod's memory: with other news at once, alone after a while, and in each Hello."""

from unbroken.agent.decisions.reporting import _HELD_GATHER_S, Reporter
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
