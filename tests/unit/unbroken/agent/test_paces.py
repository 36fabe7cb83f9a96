"""How busy workers were, from their stamps to the rendezvous."""

from dataclasses import replace

import pytest

from unbroken.agent.decisions.events import Ticked
from unbroken.agent.decisions.hang_detection import note_hangs
from unbroken.agent.decisions.orders import _entry
from unbroken.agent.decisions.place import LocalPlace
from unbroken.agent.decisions.reporting import Reporter
from unbroken_core.pod.pod_messages import ProcessState
from unbroken_core.pod.stamps import WorkerStamps
from unbroken_core.protocol.messages import Heartbeat, Pace, Plan, RankPlan, Report, WorkerState
from unbroken_core.protocol.settings import JobSettings, StragglerMode, Timeouts
from unbroken_core.vocabulary.reasons import RankReason, Role, WorkerPhase

WORKER = WorkerState(0, 0, WorkerPhase.RUNNING, 3)
STAMPS = WorkerStamps(7, 3, 0, 0, 0, 5, 0, 0, num_windows=2, busy_ns=1_500_000_000, step_ns=2_000_000_000)
PACE = Pace(0, 3, 1, 1.5, 2.0)


@pytest.mark.parametrize(
    ("stamps", "pace"),
    [
        pytest.param(STAMPS, PACE, id="a window has ended"),
        pytest.param(replace(STAMPS, num_windows=0), None, id="none has"),
        pytest.param(replace(STAMPS, iteration=2), None, id="of another iteration"),
        pytest.param(replace(STAMPS, incarnation=1), None, id="of another process"),
    ],
)
def test_the_last_window_of_the_present_iteration_is_noted(stamps: WorkerStamps, pace: Pace | None) -> None:
    place = LocalPlace(0)
    place.process = ProcessState(0, 0, 7)
    note_hangs([place], [WORKER], Ticked((stamps,), {}), 1.0, Timeouts())
    assert place.pace == pace


def test_a_window_goes_once_with_the_next_word_and_is_no_news_by_itself() -> None:
    reporter = Reporter(0.0)
    reporter.connect()
    reporter.note_hello((WORKER,), 0.0)
    reporter.welcome(5.0)
    reporter.paces = (PACE,)
    assert reporter.next_message((WORKER,), False, False, 1.0) is None
    first = reporter.next_message((WORKER,), False, False, 5.0)
    second = reporter.next_message((WORKER,), False, False, 10.0)
    assert isinstance(first, Heartbeat)
    assert isinstance(second, Heartbeat)
    assert (first.paces, second.paces) == ((PACE,), ())
    reporter.paces = (replace(PACE, window=2),)
    news = reporter.next_message((replace(WORKER, has_progress=True),), False, False, 11.0)
    assert isinstance(news, Report)
    assert news.paces == (replace(PACE, window=2),)


@pytest.mark.parametrize(
    ("mode", "rank", "heartbeat_s", "window_s"),
    [
        (StragglerMode.OFF, 0, 30.0, 0.0),
        (StragglerMode.REPORT, 0, 30.0, 30.0),
        (StragglerMode.REPORT, 0, 90.0, 45.0),
        (StragglerMode.MOVE, None, 30.0, 0.0),
    ],
)
def test_only_ranks_measure_and_only_where_the_job_wants_it(
    mode: StragglerMode, rank: int | None, heartbeat_s: float, window_s: float
) -> None:
    part = RankPlan(0, rank, RankReason.KEPT)
    plan = Plan(1, 0, Role.ACTIVE, 4, "127.0.0.9", 600, (part,))
    settings = JobSettings(
        "digits", stragglers=mode, straggler_window_s=30.0, timeouts=Timeouts(heartbeat_s=heartbeat_s)
    )
    assert _entry(plan, part, settings).window_s == window_s
