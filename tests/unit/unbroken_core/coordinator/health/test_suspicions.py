"""A suspicion for which ranks are about to move, while something else ends the iteration, or no common step comes."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import READY, RUNNING, ranks, sent
from tests.unit.unbroken_core.coordinator.test_moves import order_of

from unbroken_core.coordinator.events import AgentDisconnected
from unbroken_core.protocol.messages import NO_STEP, Activity, Fault, Halt, Interrupt, Plan
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.recovery.health import BREAKER_S
from unbroken_core.vocabulary.findings import Finding
from unbroken_core.vocabulary.reasons import Cause, Doing, JobPhase, Rung

from .test_health import ACT, DOWN, LOST, WatchedBench

LIMITS = Timeouts()


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


def halted(*findings: Finding) -> tuple[WatchedBench, Halt]:
    """Return a job in which p0 is to leave, p1 stands after a step, and p0 does not come to it."""
    bench = WatchedBench(ACT)
    order = order_of(bench.find("p0", *findings))
    bench.answer("p1", order, 5, 5, is_held=True)
    return bench, order_of(bench.answer("p0", order, 5, 5))


def test_ranks_that_find_no_common_step_stay_for_a_suspicion_until_a_hang_would_be_found() -> None:
    bench, order = halted(DOWN)
    assert order.step == 6
    assert not bench.live(LIMITS.drain_s - 1.0)
    released = bench.live(2.0)
    assert [halt.step for halt in sent(released, Halt).values()] == [NO_STEP, NO_STEP]
    status = bench.status()
    assert (status.phase, status.recoveries) == (JobPhase.RUNNING, ())
    assert "those of p0 stay for now: not all ranks stood after the same step within 30 s" in status.message
    bench.fault("p1", 0, Cause.SOFT_TIMEOUT)
    bench.all_are(READY, 0, "p0", "p1")
    again = bench.all_are(RUNNING, 1, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.rung) == (Cause.SOFT_TIMEOUT, Rung.IN_PROCESS)
    assert sorted(sent(again, Halt)) == ["p0", "p1"], "another iteration begins anew"


@pytest.mark.parametrize("free_s", [20.0, 70.0])
def test_a_rank_that_did_not_come_to_the_common_step_is_named_although_others_stood_there(free_s: float) -> None:
    """They have waited in a collective only since they went on, for less than half of the soft timeout."""
    bench, _order = halted(DOWN)
    bench.live(LIMITS.drain_s + free_s)
    waits = Activity(0, Doing.COLLECTIVE, "all_reduce", 18.0, 18.0, 40, 1)
    loads = Activity(0, Doing.OWN_CODE, "train.py:41 load", 60.0, 60.0, 39, 1)
    bench.worker("p0", 0, RUNNING, Fault(Cause.SOFT_TIMEOUT, 0, "no progress", 60.0, is_hang=True))
    for pod, local_rank in (("p0", 1), ("p1", 0), ("p1", 1)):
        bench.worker(pod, local_rank, RUNNING, activity=waits)
    bench.worker("p0", 0, RUNNING, activity=loads)
    (recovery,) = bench.status().recoveries
    assert recovery.rank == (0 if free_s < LIMITS.soft_s / 2 else None)


def test_a_suspicion_moves_ranks_at_once_where_twice_no_common_step_was_found() -> None:
    """All steps are longer than the time for them, or ranks count them otherwise."""
    bench, _order = halted(DOWN)
    bench.live(LIMITS.drain_s + 1.0)
    assert not sent(bench.live(LIMITS.hard_s - 2.0), Halt)
    second = order_of(bench.live(2.0))
    bench.answer("p1", second, 6, 6, is_held=True)
    bench.answer("p0", second, 6, 6)
    interrupt = sent(bench.live(LIMITS.drain_s + 1.0), Interrupt)["p1"]
    assert (interrupt.cause, interrupt.pod) == (Cause.DEVICE_FAULT, "p0")
    assert "timeouts.drainSeconds" in interrupt.detail


@pytest.mark.parametrize("pod", ["p0", "p1"])
def test_a_suspicion_that_comes_after_another_one_is_over_waits_as_well(pod: str) -> None:
    """Seen before: only the first one of an iteration did, however long ago it was; all others cost a checkpoint."""
    bench, _order = halted(DOWN)
    bench.live(LIMITS.drain_s + 1.0)
    bench.find("p0")
    bench.live(BREAKER_S)
    other = "p1" if pod == "p0" else "p0"
    order = order_of(bench.find(pod, DOWN))
    bench.answer(other, order, 50, 50, is_held=True)
    bench.answer(pod, order, 50, 50)
    assert [halt.step for halt in sent(bench.live(LIMITS.drain_s + 1.0), Halt).values()] == [NO_STEP, NO_STEP]
    assert f"those of {pod} stay for now" in bench.status().message
    assert bench.status().recoveries == ()


def test_what_is_fatal_does_not_wait_for_another_try() -> None:
    bench, _order = halted(LOST)
    assert sent(bench.live(LIMITS.drain_s + 1.0), Interrupt)["p1"].pod == "p0"


def test_a_suspicion_found_while_a_job_counts_no_steps_waits_as_well() -> None:
    """Its first step may be a long one: that compiles."""
    bench = WatchedBench(ACT)
    order = order_of(bench.find("p0", DOWN))
    bench.answer("p0", order, -1, -1)
    assert order_of(bench.answer("p1", order, -1, -1)).step == NO_STEP
    assert "those of p0 stay for now: not all ranks tell their steps" in bench.status().message


def test_a_pod_that_leaves_takes_no_suspect_one_with_it_where_no_common_step_is_found() -> None:
    bench, _order = halted(DOWN)
    bench.report("p1", is_leaving=True)
    assert sent(bench.live(LIMITS.drain_s + 1.0), Interrupt)["p0"].cause is Cause.POD_LEAVING
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p2")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.replaced_by) == (Cause.POD_LEAVING, "p1", ("p2",))


def test_ranks_leave_a_suspect_pod_and_one_that_is_deleted_after_the_same_step() -> None:
    bench = WatchedBench(replace(ACT, spares=2))
    bench.join("p3")
    bench.report("p3")
    asked = bench.report("p1", is_leaving=True)
    bench.find("p0", DOWN)
    bench.move(asked)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p0"]
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p2", "p3")
    (recovery,) = bench.status().recoveries
    assert sorted(recovery.replaced_by) == ["p2", "p3"]


@pytest.mark.parametrize("is_planned", [False, True], ids=["before the plan", "after it"])
@pytest.mark.parametrize("finding", [DOWN, LOST], ids=["suspect", "fatal"])
def test_a_pod_that_is_only_suspected_has_its_ranks_again_where_who_took_them_is_lost(
    finding: Finding, is_planned: bool
) -> None:
    """Seen before: a job with a sound pod in readiness waited for another one, and failed without it."""
    bench = WatchedBench(ACT)
    bench.move(bench.find("p0", finding))
    if is_planned:
        bench.all_are(READY, 0, "p0", "p1")
    bench.step(AgentDisconnected(bench.sessions.pop("p2")))
    bench.live(6.0)
    plans = sent(bench.all_are(READY, int(is_planned), "p0", "p1"), Plan)
    held = {pod: ranks(plan) for pod, plan in plans.items()}
    assert held == ({"p0": [0, 1], "p1": [2, 3]} if finding is DOWN else {})
    if finding is not DOWN:
        return
    bench.all_are(RUNNING, 1 + is_planned, "p0", "p1")
    assert bench.status().phase is JobPhase.RUNNING
    again = bench.join("p3")
    assert sorted(sent(again, Halt)) == ["p0", "p1"], "they move once somebody can take them"
