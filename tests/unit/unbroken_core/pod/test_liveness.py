"""Who hangs, by the stamps."""

import pytest

from unbroken_core.pod.liveness import Evidence, find_hangs, next_check_s, possible_delay_s, reconnect_grace_s
from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, FLAG_PING_ARMED, FLAG_PROTECTION_OFF, WorkerStamps
from unbroken_core.protocol.settings import Timeouts

TIMEOUTS = Timeouts(soft_s=10.0, hard_s=14.0)
NOW_S = 1000.0
IN = FLAG_IN_FUNCTION
ARMED = FLAG_IN_FUNCTION | FLAG_PING_ARMED


def slot(alive_s: float, main_s: float, ping_s: float = 0.0, flags: int = IN) -> WorkerStamps:
    def ns(age_s: float) -> int:
        return int((NOW_S - age_s) * 1e9)

    return WorkerStamps(1, 3, ns(alive_s), ns(main_s), ns(ping_s), 5, flags, 2)


def hangs(*slots: WorkerStamps) -> list[tuple[int, Evidence]]:
    found = find_hangs(dict(enumerate(slots)), int(NOW_S * 1e9), TIMEOUTS)
    return [(hang.local_rank, hang.evidence) for hang in found]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        pytest.param(slot(0, 0), None, id="fresh"),
        pytest.param(slot(11, 11), Evidence.CERTAIN, id="process stopped, or GIL held"),
        pytest.param(slot(0, 10.5), None, id="blocked, but possible evidence is reported later"),
        pytest.param(slot(0, 11), Evidence.POSSIBLE, id="blocked outside of Python"),
        pytest.param(slot(0, 0, 11, ARMED), Evidence.CERTAIN, id="runs Python, makes no steps"),
        pytest.param(slot(0, 11, 11, ARMED), Evidence.POSSIBLE, id="no steps because it is blocked"),
        pytest.param(slot(0, 0, 11), None, id="ping not armed"),
        pytest.param(slot(99, 99, flags=0), None, id="outside of the function"),
        pytest.param(slot(99, 99, flags=IN | FLAG_PROTECTION_OFF), None, id="protection switched off"),
        pytest.param(WorkerStamps(1, 3, 0, 0, 0, 0, IN, 0), None, id="never stamped"),
        pytest.param(slot(-5, -5), None, id="stamps of the future"),
    ],
)
def test_evidence_of_a_worker(worker: WorkerStamps, expected: Evidence | None) -> None:
    assert hangs(worker) == ([] if expected is None else [(0, expected)])


def test_who_waits_for_one_that_surely_hangs_is_not_reported() -> None:
    assert hangs(slot(0, 12), slot(12, 12), slot(0, 13)) == [(1, Evidence.CERTAIN)]


def test_possible_evidence_comes_later_than_certain_evidence_of_other_pods() -> None:
    assert possible_delay_s(TIMEOUTS) == 1.0
    assert possible_delay_s(Timeouts()) == 2.0


def test_the_next_check_is_due_when_the_first_worker_could_be_stale() -> None:
    now_ns = int(NOW_S * 1e9)
    assert next_check_s([slot(0, 4), slot(0, 1)], now_ns, TIMEOUTS) == pytest.approx(6.0)
    assert next_check_s([slot(0, 10.25)], now_ns, TIMEOUTS) == pytest.approx(0.75)
    assert next_check_s([], now_ns, TIMEOUTS) == 10.0


def test_an_interruption_shortens_the_grace_of_an_agent_that_is_away() -> None:
    assert (reconnect_grace_s(Timeouts(), False), reconnect_grace_s(Timeouts(), True)) == (5.0, 1.0)
    assert reconnect_grace_s(Timeouts(reconnect_s=0.5), True) == 0.5
