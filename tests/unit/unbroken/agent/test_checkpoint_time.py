"""What an agent tells of the checkpoints that its workers stood still for."""

from dataclasses import replace

from unbroken.agent.decisions.events import Ticked
from unbroken.agent.decisions.hang_detection import checkpoint_after_s, checkpoint_s, note_hangs
from unbroken.agent.decisions.place import LocalPlace
from unbroken.agent.decisions.reporting import Reporter
from unbroken_core.pod.pod_messages import ProcessState
from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, WorkerStamps
from unbroken_core.protocol.messages import Heartbeat, Report, WorkerState
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import WorkerPhase

NOW_S = 1000.0
_NS = 10**9


def places(num: int) -> list[LocalPlace]:
    """Return places whose processes run."""
    found = [LocalPlace(rank) for rank in range(num)]
    for place in found:
        place.process = ProcessState(place.local_rank, 0, pid=50 + place.local_rank)
    return found


def running(rank: int, iteration: int) -> WorkerState:
    """Return a worker in its function."""
    return WorkerState(rank, 0, WorkerPhase.RUNNING, iteration)


def look(found: list[LocalPlace], workers: list[WorkerState], *seen: tuple[int, float]) -> float:
    """Read a page with (iteration, seconds) in each slot; return what is told."""
    now_ns = int(NOW_S * _NS)
    slots = tuple(
        WorkerStamps(50 + rank, iteration, now_ns, now_ns, 0, 1, FLAG_IN_FUNCTION, 0, int(seconds * _NS))
        for rank, (iteration, seconds) in enumerate(seen)
    )
    note_hangs(found, workers, Ticked(slots), NOW_S, Timeouts())
    return checkpoint_s(found, workers)


def test_the_worker_that_stood_longest_counts() -> None:
    found, workers = places(2), [running(0, 3), running(1, 3)]
    assert look(found, workers, (3, 0.0), (3, 0.0)) == 0.0
    assert look(found, workers, (3, 1.2344), (3, 2.0004)) == 2.0


def test_what_was_in_another_iteration_does_not_count() -> None:
    found = places(2)
    assert look(found, [running(0, 3), running(1, 3)], (3, 40.0), (3, 2.0)) == 40.0
    # One has entered the next iteration; what the other says is of the last one.
    assert look(found, [running(0, 3), running(1, 4)], (3, 40.0), (4, 0.0)) == 0.0
    # Both were ordered in, and one has not begun.
    assert look(found, [running(0, 4), running(1, 4)], (3, 40.0), (4, 0.5)) == 0.5


def _look_at_step(found: list[LocalPlace], step: int, seconds: float, iteration: int = 3) -> tuple[float, float]:
    now_ns = int(NOW_S * _NS)
    slot = WorkerStamps(50, iteration, now_ns, now_ns, now_ns, step, FLAG_IN_FUNCTION, 0, int(seconds * _NS))
    workers = [running(0, iteration)]
    note_hangs(found, workers, Ticked((slot,)), NOW_S, Timeouts())
    return checkpoint_s(found, workers), checkpoint_after_s(found, workers)


def test_what_came_after_the_newest_step_is_told_apart() -> None:
    found = places(1)
    assert _look_at_step(found, -1, 0.0) == (0.0, 0.0)
    assert _look_at_step(found, -1, 2.0) == (2.0, 2.0), "before the first step"
    assert _look_at_step(found, 7, 2.0) == (2.0, 0.0)
    assert _look_at_step(found, 7, 5.0) == (5.0, 3.0)
    assert _look_at_step(found, 8, 9.0) == (9.0, 0.0), "it was not there at the last look, and nor was the step"
    assert _look_at_step(found, 8, 10.0) == (10.0, 1.0)
    assert _look_at_step(found, -1, 0.0, iteration=4) == (0.0, 0.0)


def test_it_is_told_with_heartbeats_and_reports_and_is_no_news_by_itself() -> None:
    reporter, workers = Reporter(0.0), (running(0, 1),)
    reporter.connect()
    reporter.note_hello(workers, 0.0)
    reporter.welcome(10.0)
    reporter.checkpoint_s, reporter.checkpoint_after_s = 4.5, 1.5
    assert reporter.next_message(workers, False, False, 1.0) is None
    assert reporter.next_message(workers, False, False, 10.0) == Heartbeat(1, -1, 4.5, checkpoint_after_s=1.5)
    completed = (replace(workers[0], phase=WorkerPhase.COMPLETED),)
    word = reporter.next_message(completed, False, False, 11.0)
    assert isinstance(word, Report)
    assert (word.checkpoint_s, word.checkpoint_after_s) == (4.5, 1.5)
