"""What an agent tells of when the newest step was made."""

from dataclasses import replace

import pytest
from tests.unit.unbroken.agent.test_checkpoint_time import NOW_S, places, running

from unbroken.agent.decisions.events import Ticked
from unbroken.agent.decisions.hang_detection import note_hangs, step_ago_s
from unbroken.agent.decisions.place import LocalPlace
from unbroken.agent.decisions.reporting import Reporter
from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, WorkerStamps
from unbroken_core.protocol.messages import Heartbeat, Report, WorkerState
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import WorkerPhase

_NS = 10**9


def look(found: list[LocalPlace], workers: list[WorkerState], *seen: tuple[int, int, float]) -> float:
    """Read a page with (iteration, step, seconds since the last ping) in each slot; return what is told."""
    now_ns = int(NOW_S * _NS)
    slots = tuple(
        WorkerStamps(50 + rank, iteration, now_ns, now_ns, now_ns - int(age_s * _NS), step, FLAG_IN_FUNCTION, 0)
        for rank, (iteration, step, age_s) in enumerate(seen)
    )
    note_hangs(found, workers, Ticked(slots), NOW_S, Timeouts())
    return step_ago_s(found, workers, NOW_S)


@pytest.mark.parametrize(
    ("seen", "ago_s"),
    [
        pytest.param(((3, 7, 2.5), (3, 7, 1.0)), 2.5, id="the first of those that made it"),
        pytest.param(((3, 6, 9.0), (3, 7, 1.0)), 1.0, id="the highest step"),
        pytest.param(((2, 99, 9.0), (3, 7, 1.0)), 1.0, id="of the newest iteration"),
        pytest.param(((3, -1, 9.0), (3, -1, 1.0)), 0.0, id="none was made"),
        pytest.param(((3, 7, -5.0), (3, 7, -5.0)), 0.0, id="a stamp of the future"),
        pytest.param(((3, 7, 2e9), (3, 7, 1.0)), 1e9, id="a stamp that cannot be"),
    ],
)
def test_the_age_of_a_step_is_that_of_the_ping_that_told_it(
    seen: tuple[tuple[int, int, float], ...], ago_s: float
) -> None:
    assert look(places(2), [running(0, 3), running(1, 3)], *seen) == ago_s


def test_a_ping_without_a_step_makes_no_step_younger() -> None:
    found, workers = places(1), [running(0, 3)]
    assert look(found, workers, (3, 7, 2.0)) == 2.0
    assert look(found, workers, (3, 7, 0.5)) == 2.0


def test_a_step_of_the_iteration_before_is_not_told_in_the_next_one() -> None:
    """A worker that was ordered to enter shows its last step until it begins."""
    found = places(1)
    look(found, [running(0, 3)], (3, 7, 2.0))
    assert found[0].incarnation.step == 7
    assert look(found, [running(0, 4)], (3, 7, 2.0)) == 0.0
    assert found[0].incarnation.step == -1
    look(found, [running(0, 4)], (4, 8, 2.0))
    assert found[0].incarnation.step == 8


def test_a_heartbeat_tells_no_step_of_a_worker_that_stayed_behind() -> None:
    reporter, workers = Reporter(0.0), (replace(running(0, 1), step=700), replace(running(1, 2), step=7))
    reporter.connect()
    reporter.note_hello(workers, 0.0)
    reporter.welcome(10.0)
    assert reporter.next_message(workers, False, False, 10.0) == Heartbeat(1, 7)


def test_it_is_told_with_heartbeats_and_reports_and_is_no_news_by_itself() -> None:
    reporter, workers = Reporter(0.0), (replace(running(0, 1), step=7),)
    reporter.connect()
    reporter.note_hello(workers, 0.0)
    reporter.welcome(10.0)
    reporter.step_ago_s = 4.5
    assert reporter.next_message(workers, False, False, 1.0) is None
    assert reporter.next_message(workers, False, False, 10.0) == Heartbeat(1, 7, step_ago_s=4.5)
    word = reporter.next_message((replace(workers[0], phase=WorkerPhase.COMPLETED),), False, False, 11.0)
    assert isinstance(word, Report)
    assert word.step_ago_s == 4.5
