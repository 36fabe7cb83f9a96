"""A suspicion for which ranks are about to move, while something else ends the iteration."""

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import READY, RUNNING, sent

from unbroken_core.protocol.messages import Halt
from unbroken_core.vocabulary.findings import Finding
from unbroken_core.vocabulary.reasons import Cause, Rung

from .test_health import ACT, DOWN, LOST, WatchedBench


@pytest.mark.parametrize("cause", [Cause.EXCEPTION, Cause.SOFT_TIMEOUT, Cause.PROCESS_EXIT])
@pytest.mark.parametrize("pod", ["p0", "p1"])
def test_a_suspicion_explains_no_fault_that_comes_before_its_ranks_have_moved(cause: Cause, pod: str) -> None:
    """A rank that hangs while a link of another pod is suspect: that pod is not the culprit."""
    bench = WatchedBench(ACT)
    assert sorted(sent(bench.find("p0", DOWN), Halt)) == ["p0", "p1"]
    bench.fault(pod, 0, cause)
    bench.all_are(READY, 0, "p0", "p1")
    actions = bench.all_are(RUNNING, 1, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.rung) == (cause, Rung.IN_PROCESS)
    assert sorted(sent(actions, Halt)) == ["p0", "p1"], "once all train again it is judged anew"


@pytest.mark.parametrize("finding", [LOST, DOWN], ids=["fatal", "suspect"])
def test_what_is_fatal_explains_it_and_a_move_that_ends_is_the_suspicions_own(finding: Finding) -> None:
    bench = WatchedBench(ACT)
    found = bench.find("p0", finding)
    if finding is LOST:
        bench.fault("p1", 0, Cause.EXCEPTION)
    else:
        bench.move(found)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.replaced_by) == (Cause.DEVICE_FAULT, "p0", ("p2",))


def test_a_job_that_is_interrupted_all_the_time_is_not_halted_for_a_suspicion_without_end() -> None:
    bench = WatchedBench(ACT)
    bench.find("p0", DOWN)
    num_halts = 0
    for iteration in range(8):
        bench.fault(("p0", "p1")[iteration % 2], 0, Cause.EXCEPTION)
        bench.all_are(READY, iteration, "p0", "p1")
        num_halts += bool(sent(bench.all_are(RUNNING, iteration + 1, "p0", "p1"), Halt))
    assert num_halts == 3
    health = bench.status().health
    assert health is not None
    assert health.held == "ranks were to leave a pod 4 times within 5 min, and did not: no more for now"
