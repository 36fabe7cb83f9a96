"""The agent sleeps until its next deadline: one that has passed, with nothing to send, would be a busy loop."""

import random
from dataclasses import replace

import pytest

from unbroken.agent.decisions.reporting import _GATHER_S, _HELD_GATHER_S, Reporter
from unbroken_core.protocol.messages import Heartbeat, Report, WorkerState
from unbroken_core.vocabulary.checkpoints import Held, Holding
from unbroken_core.vocabulary.findings import Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import WorkerPhase

READY = (WorkerState(0, 0, WorkerPhase.READY, 1), WorkerState(1, 0, WorkerPhase.READY, 1))
ENTERED = tuple(replace(worker, phase=WorkerPhase.RUNNING, iteration=2) for worker in READY)
HELD = Held("aa", (Holding("uid", 1, 1, 10, 1, ((0, "1a", "d1"),)),))


def joined(interval_s: float) -> Reporter:
    reporter = Reporter(0.0)
    reporter.connect()
    reporter.note_hello(READY, 0.0)
    reporter.welcome(interval_s)
    return reporter


def test_news_of_the_memory_that_came_first_wait_with_workers_that_enter() -> None:
    reporter = joined(10.0)
    reporter.held = HELD
    assert reporter.next_message(READY, False, False, 1.0) is None
    assert min(reporter.deadlines_s) == 1.0 + _HELD_GATHER_S
    assert reporter.next_message(ENTERED, False, False, 1.005) is None
    assert min(reporter.deadlines_s) == 1.005 + _GATHER_S
    word = reporter.next_message(ENTERED, False, False, 1.005 + _GATHER_S)
    assert isinstance(word, Report)
    assert (word.workers, word.memory) == (ENTERED, HELD)


def test_a_heartbeat_that_is_due_waits_with_workers_that_enter() -> None:
    reporter = joined(1.0)
    assert reporter.next_message(ENTERED, False, False, 0.99) is None
    assert reporter.next_message(ENTERED, False, False, 1.0) is None
    assert reporter.deadlines_s == [0.99 + _GATHER_S]
    assert isinstance(reporter.next_message(ENTERED, False, False, 0.99 + _GATHER_S), Report)
    assert isinstance(reporter.next_message(ENTERED, False, False, 2.1), Heartbeat)


@pytest.mark.parametrize("seed", range(20))
def test_whenever_nothing_is_to_be_sent_no_deadline_has_passed(seed: int) -> None:
    source = random.Random(seed)
    reporter, workers, now_s, num_silent = joined(0.3), READY, 0.0, 0
    for number in range(2000):
        now_s += source.choice((0.0, 0.001, 0.004, 0.02))
        match source.randrange(12):
            case 0:
                reporter.held = replace(HELD, port=number)
            case 1:
                verdict = source.choice((Verdict.OK, Verdict.DEGRADED))
                reporter.health = Health((Finding("check", "device", verdict, code=f"code-{number}"),))
            case 2:
                rank, phase = source.randrange(2), source.choice((WorkerPhase.READY, WorkerPhase.RUNNING))
                moved = replace(workers[rank], phase=phase, iteration=workers[rank].iteration + 1)
                workers = (moved, workers[1]) if rank == 0 else (workers[0], moved)
            case 3:
                workers = (replace(workers[0], step=number), replace(workers[1], step=number))
        is_waited_for = source.random() < 0.5
        if reporter.next_message(workers, False, is_waited_for, now_s) is None:
            num_silent += 1
            assert min(reporter.deadlines_s) > now_s
    assert 0 < num_silent < 2000
