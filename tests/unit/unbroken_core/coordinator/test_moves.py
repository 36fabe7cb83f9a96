"""Planned moves wait for a step that all ranks have finished."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentJoined, Observed
from unbroken_core.coordinator.state.phases import Running
from unbroken_core.protocol.messages import (
    NO_STEP,
    Halt,
    Halted,
    Interrupt,
    Observation,
    Plan,
    PodObservation,
)
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Rung

from .test_coordinator import COMPLETED, READY, SETTINGS, Bench, ranks, sent

ACTIVE = ("p0", "p1")


class MovingBench(Bench):
    """Two active pods and a spare; workers tell steps and answer orders as they are told to."""

    def __init__(self, settings: JobSettings = SETTINGS, can_halt: bool = True) -> None:
        super().__init__(settings)
        self.can_halt = can_halt
        self.run("p0", "p1", "p2")

    def join(self, pod: str, **changes: Any) -> list[Action]:
        self.num_sessions += 1
        session = self.sessions[pod] = f"{pod}#{self.num_sessions}"
        return self.step(AgentJoined(session, self.hello(pod, **changes), self.can_halt))

    def answer(self, pod: str, order: Halt, *steps: int, is_held: bool = False, is_done: bool = False) -> list[Action]:
        """Let the workers of a pod say where they are."""
        self.states[pod] = [
            replace(state, halted=Halted(order.term, order.number, step, is_held, is_done))
            for state, step in zip(self.states[pod], steps, strict=True)
        ]
        return self.report(pod)

    def observe(self, gone: Cause | None, pod: str = "p0") -> list[Action]:
        pods = {
            f"uid-{name}": PodObservation(name, f"node-{name}", (), gone=gone if name == pod else None)
            for name in self.sessions
        }
        return self.step(Observed(Observation(pods)))


def order_of(actions: list[Action]) -> Halt:
    orders = set(sent(actions, Halt).values())
    assert len(orders) == 1
    order = orders.pop()
    assert isinstance(order, Halt)
    return order


def take_over(bench: MovingBench, gone: Cause | None) -> list[Action]:
    """Let a new rendezvous take the job over."""
    plans = {uid[4:]: member.plan for uid, member in bench.coordinator._job.members.by_uid.items()}
    bench.coordinator = Coordinator(SETTINGS, bench.now_s, 2, 0)
    bench.observe(gone)
    return [action for pod in plans for action in bench.join(pod, plan=plans[pod], term=1)]


def test_planned_move_waits_until_all_ranks_stand_after_one_step_and_have_saved() -> None:
    """Nobody is interrupted before; then the spare takes the ranks."""
    bench = MovingBench()
    asked = bench.report("p0", is_leaving=True)
    assert sorted(sent(asked, Halt)) == ["p0", "p1"]
    first = order_of(asked)
    assert (first.step, first.is_common, first.iteration) == (0, False, 0)
    assert bench.answer("p0", first, 7, 7, is_held=True) == []
    # One rank had passed step 7 when it was asked: all can reach the step after it.
    named = order_of(bench.answer("p1", first, 8, 7))
    assert (named.step, named.is_common) == (9, False)
    bench.answer("p0", named, 9, 9, is_held=True)
    common = order_of(bench.answer("p1", named, 9, 9, is_held=True))
    assert (common.step, common.is_common) == (9, True)
    assert bench.status().phase is JobPhase.RUNNING
    bench.answer("p0", common, 9, 9, is_held=True, is_done=True)
    over = bench.answer("p1", common, 9, 9, is_held=True, is_done=True)
    assert sent(over, Interrupt)["p1"].cause is Cause.POD_LEAVING
    assert sent(over, Interrupt)["p1"].detail == "moves after step 9"
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert (ranks(plans["p2"]), ranks(plans["p0"])) == ([0, 1], [None, None])


def test_rank_that_returns_once_it_has_answered_lets_all_go_on_at_once() -> None:
    """Nobody can stand after a step with it; the others are not kept waiting until the next message."""
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 5, 6)
    released = order_of(bench.worker("p0", 0, COMPLETED))
    assert released.step == NO_STEP
    assert bench.answer("p1", first, 6, 6) == []


def test_ranks_that_all_stand_at_the_first_question_are_asked_to_save_at_once() -> None:
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 5, 5, is_held=True)
    common = order_of(bench.answer("p1", first, 5, 5, is_held=True))
    assert (common.step, common.is_common) == (5, True)


def test_rank_that_skips_the_step_raises_it_for_all() -> None:
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 10, 10, is_held=True)
    named = order_of(bench.answer("p1", first, 10, 10))
    assert named.step == 11
    bench.answer("p0", named, 20, 20, is_held=True)
    raised = order_of(bench.answer("p1", named, 20, 30, is_held=True))
    assert (raised.step, raised.is_common) == (30, False)


@pytest.mark.parametrize(
    ("settings", "can_halt"),
    [
        pytest.param(SETTINGS, False, id="agents of an older version"),
        pytest.param(replace(SETTINGS, timeouts=Timeouts(drain_s=0.0)), True, id="no time for it"),
        pytest.param(replace(SETTINGS, rungs=(RungBudget(Rung.PROCESS), RungBudget(Rung.POD))), True, id="processes"),
    ],
)
def test_move_interrupts_at_once_where_nobody_can_wait(settings: JobSettings, can_halt: bool) -> None:
    bench = MovingBench(settings, can_halt)
    actions = bench.report("p0", is_leaving=True)
    assert sent(actions, Interrupt)["p1"].cause is Cause.POD_LEAVING
    assert not sent(actions, Halt)


def test_script_that_tells_no_steps_is_interrupted_at_once() -> None:
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, -1, -1)
    assert sent(bench.answer("p1", first, -1, -1), Interrupt)


def test_script_of_which_one_rank_tells_steps_is_interrupted_once_the_others_had_their_time() -> None:
    bench = MovingBench()
    bench.live(31.0)
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 40, -1)
    assert "tell their steps" in sent(bench.answer("p1", first, -1, -1), Interrupt)["p1"].detail


def test_wait_for_a_common_step_ends_with_the_drain_time() -> None:
    """A rank that numbers its steps otherwise never gets there."""
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 5, 5, is_held=True)
    bench.answer("p1", first, 6, 6)
    assert not sent(bench.live(29.0), Interrupt)
    assert "timeouts.drainSeconds" in sent(bench.live(2.0), Interrupt)["p1"].detail


def test_fault_during_the_wait_is_handled_at_once() -> None:
    bench = MovingBench()
    bench.report("p0", is_leaving=True)
    actions = bench.fault("p1", 0, Cause.EXCEPTION)
    assert sent(actions, Interrupt)["p0"].cause is Cause.EXCEPTION
    assert bench.status().phase is JobPhase.INTERRUPTED
    assert not sent(bench.tick(60.0), Halt)


def test_second_pod_that_leaves_joins_the_move_that_is_under_way() -> None:
    bench = MovingBench(replace(SETTINGS, spares=2))
    bench.join("p3")
    first = order_of(bench.report("p0", is_leaving=True))
    assert not sent(bench.report("p1", is_leaving=True), Halt)
    bench.answer("p0", first, 5, 5, is_held=True)
    common = order_of(bench.answer("p1", first, 5, 5, is_held=True))
    bench.answer("p0", common, 5, 5, is_held=True, is_done=True)
    assert sent(bench.answer("p1", common, 5, 5, is_held=True, is_done=True), Interrupt)
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert [ranks(plans[pod]) for pod in ("p0", "p1", "p2", "p3")] == [[None, None], [None, None], [0, 1], [2, 3]]
    assert bench.status().recoveries[-1].num_faults == 2


def test_pod_that_need_not_leave_any_more_lets_everybody_go_on() -> None:
    """A node that is uncordoned in time costs nothing."""
    bench = MovingBench()
    first = order_of(bench.observe(Cause.POD_LEAVING))
    bench.answer("p0", first, 5, 5, is_held=True)
    released = order_of(bench.observe(None))
    assert released.step == NO_STEP
    assert bench.status().message == "iteration 0 runs with 4 ranks"
    assert not sent(bench.live(60.0), Interrupt)
    # Another move in the same iteration asks anew: former answers say nothing.
    again = order_of(bench.observe(Cause.POD_LEAVING))
    assert again.number > released.number
    assert bench.report("p1") == []


def test_pod_that_is_gone_during_the_wait_is_a_fault() -> None:
    bench = MovingBench()
    bench.observe(Cause.POD_LEAVING)
    assert sent(bench.observe(Cause.NODE_LOST), Interrupt)["p1"].cause is Cause.NODE_LOST


def test_ranks_that_complete_before_the_step_let_the_job_complete() -> None:
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 99, 99, is_held=True)
    released = order_of(bench.worker("p1", 0, COMPLETED))
    assert released.step == NO_STEP
    for pod in ACTIVE:
        for local_rank in range(2):
            bench.worker(pod, local_rank, COMPLETED)
    assert bench.status().phase is JobPhase.ENDING


def test_agent_that_comes_back_during_the_wait_hears_the_order_again() -> None:
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    bench.tick(2.0)
    plan = bench.coordinator._job.members.by_uid["uid-p1"].plan
    again = order_of(bench.join("p1", plan=plan, term=1))
    assert (again.number, again.step) == (first.number, first.step)
    assert again.within_s == pytest.approx(first.within_s - 2.0)
    bench.answer("p0", first, 5, 5, is_held=True)
    assert order_of(bench.answer("p1", first, 5, 5, is_held=True)).is_common


def test_new_rendezvous_begins_the_move_again_where_it_takes_a_job_over() -> None:
    """Nothing is lost: workers that stood already answer the new order from where they are."""
    bench = MovingBench()
    first = order_of(bench.report("p0", is_leaving=True))
    bench.answer("p0", first, 5, 5, is_held=True)
    actions = take_over(bench, Cause.POD_LEAVING)
    again = order_of(actions)
    assert bench.status().phase is JobPhase.RUNNING
    assert (again.term, again.step) == (2, 0)
    assert not sent(actions, Interrupt)


def test_new_rendezvous_lets_ranks_go_on_that_stand_for_a_move_which_is_none_any_more() -> None:
    """Seen before: they stood until timeouts.drainSeconds were over, in a job that was said to run."""
    bench = MovingBench()
    first = order_of(bench.observe(Cause.POD_LEAVING))
    bench.answer("p0", first, 5, 5, is_held=True)
    released = order_of(take_over(bench, None))
    assert (released.term, released.step) == (2, NO_STEP)
    assert bench.status().phase is JobPhase.RUNNING
    # One that was in a step stands later, as its agent has the old order: it is let go then. Who has said so already
    # is told the same once more, which its agent ignores.
    late = sent(bench.answer("p1", first, 6, 6, is_held=True), Halt)
    assert late == {"p1": released}
    # What comes later is no answer to the order of the next move.
    again = order_of(bench.observe(Cause.POD_LEAVING))
    assert again.number > released.number


def test_agent_that_missed_the_end_of_a_move_hears_it_when_it_comes_back() -> None:
    bench = MovingBench()
    first = order_of(bench.observe(Cause.POD_LEAVING))
    bench.answer("p1", first, 5, 5, is_held=True)
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    released = order_of(bench.observe(None))
    plan = bench.coordinator._job.members.by_uid["uid-p1"].plan
    assert sent(bench.join("p1", plan=plan, term=1), Halt) == {"p1": released}


def test_adopted_job_of_older_agents_gives_the_leaving_pods_ranks_away_at_once() -> None:
    bench = MovingBench(can_halt=False)
    actions = take_over(bench, Cause.POD_LEAVING)
    assert sent(actions, Interrupt)["p1"].cause is Cause.POD_LEAVING


def test_spares_that_leave_interrupt_nobody() -> None:
    bench = MovingBench()
    actions = bench.report("p2", is_leaving=True)
    assert not sent(actions, Interrupt)
    assert not sent(actions, Halt)


def test_many_pods_are_looked_at_once_an_order_and_not_once_a_report() -> None:
    settings = JobSettings("digits", replicas=64, spares=1, ranks_per_pod=1)
    bench = MovingBench.__new__(MovingBench)
    Bench.__init__(bench, settings)
    bench.can_halt = True
    pods = [f"p{number}" for number in range(65)]
    bench.run(*pods)
    first = order_of(bench.report("p0", is_leaving=True))
    phase = bench.coordinator._job.phase
    assert isinstance(phase, Running)
    move = phase.move
    assert move is not None
    for number, pod in enumerate(pods[:63]):
        assert bench.answer(pod, first, 5, is_held=True) == []
        assert len(move.pending) == 63 - number
    assert order_of(bench.answer("p63", first, 5, is_held=True)).is_common
