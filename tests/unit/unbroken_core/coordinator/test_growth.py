"""A job that shrank takes in what is ready, after a step that all ranks have finished (restart.growBackSeconds)."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported, Observed
from unbroken_core.protocol.messages import NO_STEP, Halt, Interrupt, Observation, Plan, PodObservation, Report
from unbroken_core.protocol.settings import HealthMode, JobSettings, RungBudget, Timeouts
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import Finding, Health, Verdict
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Rung

from .test_coordinator import READY, RUNNING, SETTINGS, Bench, ranks, sent
from .test_moves import MovingBench, order_of

GROWING = replace(SETTINGS, spares=0, min_replicas=1, grow_back_s=60.0)


class ShrunkBench(MovingBench):
    """Of two active pods one was lost; the other goes on, and pods may come."""

    def __init__(self, settings: JobSettings = GROWING, can_halt: bool = True) -> None:
        Bench.__init__(self, settings)
        self.can_halt = can_halt
        self.run("p0", "p1")
        self.step(AgentDisconnected(self.sessions.pop("p1")))
        assert sent(self.tick(settings.timeouts.reconnect_s), Interrupt)["p0"].cause is Cause.POD_LOST
        assert ranks(sent(self.all_are(READY, 0, "p0"), Plan)["p0"]) == [0, 1]
        self.all_are(RUNNING, 1, "p0")
        assert self.status().phase is JobPhase.RUNNING

    def grow(self) -> list[Action]:
        """Let a pod come, and the time pass until it is asked for."""
        self.join("p3")
        return self.live(61)

    def stand(self, order: Halt, **more: Any) -> list[Action]:
        return self.answer("p0", order, 7, 7, is_held=True, **more)


def test_shrunk_job_grows_after_a_common_step_once_pods_were_ready_for_long_enough() -> None:
    bench = ShrunkBench()
    assert bench.join("p3") != []
    assert sent(bench.live(59), Halt) == {}
    first = order_of(bench.live(2))
    common = order_of(bench.stand(first))
    assert (common.step, common.is_common) == (7, True)
    over = sent(bench.stand(common, is_done=True), Interrupt)
    assert (over["p0"].cause, over["p0"].detail) == (Cause.CAPACITY_RETURNED, "moves after step 7")
    plans = sent(bench.all_are(READY, 1, "p0"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0, 1], "p3": [2, 3]}
    bench.all_are(RUNNING, 2, "p0", "p3")
    last = bench.status().recoveries[-1]
    assert (last.cause, last.rung, last.pod, last.rank) == (Cause.CAPACITY_RETURNED, Rung.POD, "", None)


def test_growth_costs_no_budget_and_needs_none() -> None:
    """A job that has used up its rungs may still grow; a rung that is not listed stays forbidden."""
    spent = replace(GROWING, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD), RungBudget(Rung.WORLD, 1)))
    bench = ShrunkBench(spent)
    bench.stand(order_of(bench.stand(order_of(bench.grow()))), is_done=True)
    assert ranks(sent(bench.all_are(READY, 1, "p0"), Plan)["p3"]) == [2, 3]
    forbidden = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD, 0), RungBudget(Rung.WORLD))
    assert sent(ShrunkBench(replace(GROWING, rungs=forbidden)).grow(), Halt) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"grow_back_s": 0.0}, "growBackSeconds: want more than 0 seconds, got 0", id="no time"),
        pytest.param(
            {"rungs": (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD))}, "want in-process and pod", id="no rung"
        ),
        pytest.param({"timeouts": Timeouts(drain_s=0.0)}, "want timeouts.drainSeconds above 0", id="no common step"),
    ],
)
def test_growth_that_is_impossible_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GROWING, **changes)


@pytest.mark.parametrize(
    ("settings", "can_halt"),
    [
        pytest.param(replace(GROWING, grow_back_s=None), True, id="not asked for"),
        pytest.param(GROWING, False, id="agents of an older version"),
    ],
)
def test_nobody_is_disturbed_where_the_job_may_not_or_cannot_grow(settings: JobSettings, can_halt: bool) -> None:
    bench = ShrunkBench(settings, can_halt)
    actions = bench.grow()
    assert sent(actions, Halt) == sent(actions, Interrupt) == {}


def test_pod_that_goes_again_lets_everybody_go_on() -> None:
    bench = ShrunkBench()
    order_of(bench.grow())
    actions = bench.step(AgentDisconnected(bench.sessions.pop("p3")))
    assert (order_of(actions).step, sent(actions, Interrupt)) == (NO_STEP, {})
    assert bench.status().message == "iteration 1 runs with 2 ranks, 2 fewer than wanted"


def test_growth_that_finds_no_common_step_waits_for_the_next_recovery() -> None:
    """It is worth no lost step, other than a pod that must go."""
    bench = ShrunkBench()
    order_of(bench.grow())
    actions = bench.live(31)
    assert (order_of(actions).step, sent(actions, Interrupt)) == (NO_STEP, {})
    assert "those join in the next recovery: not all ranks stood after the same step" in bench.status().message
    assert sent(bench.live(200), Halt) == {}
    assert bench.fault("p0", 0, Cause.EXCEPTION)
    assert ranks(sent(bench.all_are(READY, 1, "p0"), Plan)["p3"]) == [2, 3]


def test_script_that_tells_no_steps_is_left_alone() -> None:
    bench = ShrunkBench()
    first = order_of(bench.grow())
    actions = bench.answer("p0", first, -1, -1)
    assert sent(actions, Interrupt) == {}
    assert "not all ranks tell their steps" in bench.status().message


def test_job_grows_once_its_first_step_is_done_however_long_that_takes() -> None:
    bench = ShrunkBench()
    bench.answer("p0", order_of(bench.grow()), -1, -1)
    assert "or once steps are reported" in bench.status().message
    assert sent(bench.live(60), Halt) == {}  # As long as the iteration had run then.
    again = order_of(bench.live(62))
    assert sent(bench.answer("p0", again, -1, -1), Interrupt) == {}
    assert sent(bench.live(180), Halt) == {}
    third = order_of(bench.live(70))
    common = order_of(bench.stand(third))
    assert sent(bench.stand(common, is_done=True), Interrupt)["p0"].cause is Cause.CAPACITY_RETURNED


def test_fault_during_the_wait_is_the_one_that_is_told_and_brings_the_pod_in() -> None:
    bench = ShrunkBench()
    order_of(bench.grow())
    bench.fault("p0", 1, Cause.EXCEPTION)
    assert ranks(sent(bench.all_are(READY, 1, "p0"), Plan)["p3"]) == [2, 3]
    bench.all_are(RUNNING, 2, "p0", "p3")
    assert bench.status().recoveries[-1].cause is Cause.EXCEPTION


def test_pod_that_leaves_during_the_wait_joins_the_move() -> None:
    bench = ShrunkBench()
    first = order_of(bench.grow())
    bench.report("p0", is_leaving=True)
    over = bench.stand(order_of(bench.stand(first)), is_done=True)
    assert sent(over, Interrupt)["p0"].cause is Cause.POD_LEAVING
    assert ranks(sent(bench.all_are(READY, 1, "p0"), Plan)["p3"]) == [0, 1]


def test_job_does_not_grow_by_a_pod_whose_domain_is_not_known_yet() -> None:
    layers = (Layer("rack", "rack", replace_from=True),)
    bench = ShrunkBench(replace(GROWING, layers=layers, grow_back_s=0.5))
    bench.join("p3")
    assert not sent(bench.live(2), Halt)
    bench.step(Observed(Observation({"uid-p3": PodObservation("p3", "n", ("r1",))})))
    assert order_of(bench.live(1)).step == 0


def test_job_does_not_grow_by_a_pod_that_its_plan_would_leave_out() -> None:
    """Before, it was interrupted in vain after each time of growBackSeconds, for ever."""
    bench = ShrunkBench(replace(GROWING, health=HealthMode.ACT))
    worn = Finding("gpu", "GPU-b", Verdict.DEGRADED, "throttled")
    bench.join("p3", health=Health((worn,)))
    assert not sent(bench.live(200), Halt)
    report = Report(bench.seq + 1, tuple(bench.states["p3"]), health=Health((replace(worn, verdict=Verdict.OK),)))
    bench.seq += 1
    found = bench.step(AgentReported(bench.sessions["p3"], report))
    assert order_of([*found, *bench.live(61)]).step == 0


def test_a_job_that_was_to_grow_in_vain_is_left_alone_for_a_while() -> None:
    """Whatever the reason: a job that is led to a step again and again makes no progress."""
    bench = ShrunkBench()
    common = order_of(bench.stand(order_of(bench.grow())))
    bench.stand(common, is_done=True)
    bench.step(AgentDisconnected(bench.sessions.pop("p3")))
    assert ranks(sent(bench.all_are(READY, 1, "p0"), Plan)["p0"]) == [0, 1]
    bench.all_are(RUNNING, 2, "p0")
    bench.join("p4")
    assert not sent(bench.live(590), Halt)
    assert order_of(bench.live(80)).step == 0
