"""The coordinator when it was itself out of touch: cut off from all pods, or overtaken by another coordinator."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.events import Action, AgentDisconnected, Close, Observed, Tick
from unbroken_core.protocol.messages import (
    Fault,
    Finish,
    Interrupt,
    Observation,
    Plan,
    PodObservation,
    Refused,
    Respawn,
)
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, Role, Rung

from .test_coordinator import GONE, READY, RUNNING, SETTINGS, Bench, ranks, sent


def running_plans(bench: Bench, *pods: str) -> dict[str, Plan]:
    """Return the plan that each pod of a running job holds, as its agent would tell it."""
    from unbroken_core.protocol.messages import RankPlan

    held = {pod.pod: pod.ranks for pod in bench.status().pods}
    plans = {}
    for pod in pods:
        numbers = held[pod] or (None, None)
        parts = tuple(RankPlan(local, rank, RankReason.FIRST) for local, rank in enumerate(numbers))
        role = Role.ACTIVE if held[pod] else Role.SPARE
        plans[pod] = Plan(1, bench.status().iteration, role, 4, "10.0.0.1", 5000, parts)
    return plans


def orders(actions: list[Action]) -> dict[str, dict[str, Any]]:
    """Return all that would disturb a running job."""
    return {kind.__name__: found for kind in (Interrupt, Plan, Respawn, Finish) if (found := sent(actions, kind))}


def test_a_rendezvous_that_was_cut_off_from_all_pods_takes_them_over_without_an_interruption() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    plans = running_plans(bench, "p0", "p1", "p2")
    old = list(bench.sessions.values())
    actions = bench.tick(300.0)
    assert orders(actions) == {}
    assert [Close(session) in actions for session in old] == [True] * 3
    assert bench.status().phase is JobPhase.FORMING
    assert "0 of 2 pods are ready" in bench.status().message
    for pod, plan in plans.items():
        assert orders(bench.join(pod, term=1, plan=plan)) == {}
    status = bench.status()
    assert (status.phase, status.iteration, status.recoveries) == (JobPhase.RUNNING, 0, ())
    assert sent(bench.fault("p0", 0, Cause.EXCEPTION), Interrupt)["p1"].iteration == 0


def test_what_a_rendezvous_slept_through_is_progress_where_its_pods_trained_on() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    plans = running_plans(bench, "p0", "p1", "p2")
    bench.now_s += 120.0  # stopped by SIGSTOP
    bench.step(Tick())
    assert bench.status().phase is JobPhase.FORMING
    for pod, plan in plans.items():
        bench.now_s += 1.0
        states = tuple(replace(state, step=20 if plan.role is Role.ACTIVE else -1) for state in bench.states[pod])
        bench.join(pod, term=1, plan=plan, workers=states, step_ago_s=2.0)
    assert bench.status().phase is JobPhase.RUNNING
    spent = bench.status().time
    assert spent is not None
    assert (spent.progress_s, spent.open_s) == (10.0 + 120.0 - 1.0, 4.0)
    # But for the second in which the spare had yet to come back.
    assert spent.held_rank_s == 133.0 * 6 - 1.0 * 2


def test_what_a_rendezvous_slept_through_is_no_progress_where_its_pods_left() -> None:
    """Seen before: without steps, two minutes in which nobody trained were progress."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    plans = running_plans(bench, "p0", "p1", "p2")
    bench.now_s += 10.0
    for pod in ("p0", "p1", "p2"):
        bench.report(pod)
    bench.now_s += 120.0
    bench.step(Tick())
    for pod, plan in plans.items():
        fault = Fault(Cause.HEARTBEAT_LOST, 0, "cut off from the rendezvous", 90.0) if pod != "p2" else None
        states = tuple(replace(state, fault=fault) for state in bench.workers(READY, 0 if pod != "p2" else -1))
        bench.join(pod, term=1, plan=plan, workers=states, entered_ago_s=130.0, over_ago_s=90.0)
    spent = bench.status().time
    assert spent is not None
    assert (spent.progress_s, spent.detect_s) == (40.0, 90.0)


def test_what_does_not_come_back_to_a_rendezvous_that_was_cut_off_is_lost() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    plans = running_plans(bench, "p0", "p1", "p2")
    bench.tick(60.0)
    bench.sessions.clear()
    bench.join("p1", term=1, plan=plans["p1"])
    bench.join("p2", term=1, plan=plans["p2"])
    assert sent(bench.live(31), Interrupt)["p1"].cause is Cause.POD_LOST
    assert {pod: ranks(plan) for pod, plan in sent(bench.all_are(READY, 0, "p1"), Plan).items()} == {
        "p2": [0, 1],
        "p1": [2, 3],
    }


def test_a_job_whose_pods_were_all_lost_at_once_has_been_started_again() -> None:
    """3.45"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.tick(60.0)
    bench.sessions.clear()
    for pod in ("n0", "n1", "n2"):
        bench.join(pod)
    # Nobody knows what became of the old ones, until the operator does.
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    bench.step(Observed(Observation({f"uid-n{i}": PodObservation(f"n{i}", "n", ()) for i in range(3)}, True)))
    assert bench.status().iteration == 1
    bench.all_are(RUNNING, 1, "n0", "n1")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.rung, recovery.ended_at != "") == (Cause.HEARTBEAT_LOST, Rung.JOB, True)
    assert (recovery.iteration_before, recovery.iteration_after, recovery.world_size_before) == (0, 1, 4)
    assert recovery.detail == "no pod was heard for 30 s: waits for them to come back"


def test_pods_that_are_silent_while_another_is_heard_are_lost() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    del bench.sessions["p0"], bench.sessions["p1"]
    actions = bench.live(31)
    assert sent(actions, Interrupt)["p2"].cause is Cause.HEARTBEAT_LOST
    assert bench.status().phase is JobPhase.INTERRUPTED


def test_a_recovery_goes_on_after_the_rendezvous_was_cut_off_in_the_middle_of_it() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    plans = running_plans(bench, "p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.tick(60.0)
    assert bench.status().phase is JobPhase.FORMING
    for pod in ("p0", "p1"):
        bench.states[pod] = bench.workers(READY, 0)
    actions = [action for pod, plan in plans.items() for action in bench.join(pod, term=1, plan=plan)]
    assert {pod: plan.iteration for pod, plan in sent(actions, Plan).items()} == {"p0": 1, "p1": 1, "p2": 1}
    bench.all_are(RUNNING, 1, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.ended_at != "") == (Cause.EXCEPTION, "p0", True)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_coordinator_that_was_overtaken_takes_over_anew_instead_of_giving_orders(is_interrupted: bool) -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    parts = {pod: plan.ranks for pod, plan in running_plans(bench, "p0", "p1", "p2").items()}
    if is_interrupted:
        for pod in ("p0", "p1", "p2"):
            bench.step(AgentDisconnected(bench.sessions[pod]))
        bench.tick(6.0)
        assert bench.status().phase is JobPhase.INTERRUPTED
    # Another rendezvous has led the job on to iteration 3 meanwhile.
    for pod, held in parts.items():
        role = Role.ACTIVE if pod != "p2" else Role.SPARE
        bench.states[pod] = bench.workers(RUNNING if pod != "p2" else READY, 3 if pod != "p2" else -1)
        actions = bench.join(pod, term=2, plan=Plan(2, 3, role, 4, "10.0.0.1", 5000, held))
        assert orders(actions) == {}
        assert sent(actions, Refused) == {}
    status = bench.status()
    assert (status.phase, status.iteration, status.term) == (JobPhase.RUNNING, 3, 3)


def test_a_pod_that_was_cut_off_comes_back_without_losing_its_processes() -> None:
    """No spare: the job waits for the pod, and for it to leave the iteration that it is still in."""
    bench = Bench(SETTINGS.__class__("digits", replicas=2, ranks_per_pod=2))
    bench.run("p0", "p1")
    plan = running_plans(bench, "p0", "p1")["p1"]
    bench.sessions.pop("p1")
    bench.live(31)
    bench.all_are(READY, 0, "p0")
    actions = bench.join("p1", term=1, plan=plan)
    assert sent(actions, Interrupt)["p1"].iteration == 0
    assert sent(actions, Respawn) == {}
    actions = bench.all_are(READY, 0, "p1")
    assert {pod: plan.iteration for pod, plan in sent(actions, Plan).items()} == {"p0": 1, "p1": 1}
    bench.all_are(RUNNING, 1, "p0", "p1")
    assert [recovery.rung for recovery in bench.status().recoveries] == [Rung.IN_PROCESS]
    assert all(state.incarnation == 0 for states in bench.states.values() for state in states)
    assert GONE not in {state.phase for states in bench.states.values() for state in states}
