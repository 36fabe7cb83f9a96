"""No second world: when all pods with ranks fall silent while a spare is heard, and what ends the wait."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_contact import running_plans
from tests.unit.unbroken_core.coordinator.test_coordinator import GONE, READY, RUNNING, SETTINGS, Bench, sent
from tests.unit.unbroken_core.coordinator.test_coordinator_growth import count_instructions

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported, Observed
from unbroken_core.protocol.messages import (
    Heartbeat,
    Interrupt,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, Role, Rung

FOUR = JobSettings("digits", replicas=2, spares=2, ranks_per_pod=2)
PODS = ("p0", "p1", "p2", "p3")
ISOLATION_S = FOUR.timeouts.isolation_limit_s


def isolated() -> Bench:
    """Return a job whose two active pods were given up for their silence, while both spares are heard."""
    bench = Bench(FOUR)
    bench.run(*PODS)
    del bench.sessions["p0"], bench.sessions["p1"]
    assert sent(bench.live(35), Plan) == {}
    assert (bench.status().phase, bench.status().reason) == (JobPhase.INTERRUPTED, Reason.WAITING_FOR_ISOLATION)
    return bench


def observation(ended: tuple[str, ...] = (), gone: tuple[str, ...] = (), is_accounted: bool = False) -> Observed:
    """Return what an operator sees of the four pods."""
    pods = {
        f"uid-{pod}": PodObservation(
            pod,
            f"node-{pod}",
            (),
            gone=Cause.NODE_LOST if pod in ("p0", "p1") else None,
            is_ended=pod in ended,
        )
        for pod in PODS
        if pod not in gone
    }
    return Observed(Observation(pods, is_accounted))


def planned(actions: list[Action]) -> set[str]:
    """Return the pods that were sent a plan."""
    return set(sent(actions, Plan))


def test_spares_begin_only_when_all_that_are_not_heard_must_have_left_by_themselves() -> None:
    bench = isolated()
    status = bench.status()
    assert status.message.startswith("pods p0, p1 of iteration 0 are not heard and may train on together: ")
    assert status.message.endswith("or when all must have stopped by themselves, at t125")
    # Heard last at 5 s: the last heartbeats were those with which they entered.
    actions = bench.live(ISOLATION_S + 5 - bench.now_s - 1)
    assert planned(actions) == set()
    assert planned(bench.live(1)) == {"p2", "p3"}
    bench.all_are(RUNNING, 1, "p2", "p3")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.replaced_by) == (Cause.HEARTBEAT_LOST, ("p2", "p3"))


def test_the_wait_does_not_change_the_status_again_and_again() -> None:
    bench = isolated()
    revision = bench.coordinator.revision
    bench.tick(20.0)
    assert bench.coordinator.revision == revision


@pytest.mark.parametrize(
    ("seen", "is_proof"),
    [
        pytest.param(observation(), False, id="lost nodes"),
        pytest.param(observation(gone=("p0", "p1")), False, id="deleted by force"),
        pytest.param(observation(ended=("p0",)), True, id="one has ended"),
        pytest.param(observation(gone=("p0",), is_accounted=True), True, id="one is gone, and was seen to end"),
    ],
)
def test_only_what_the_cluster_knows_for_certain_ends_the_wait(seen: Observed, is_proof: bool) -> None:
    bench = isolated()
    bench.step(observation())
    assert planned(bench.step(seen)) == ({"p2", "p3"} if is_proof else set())


def test_a_pod_that_is_heard_again_is_told_to_leave_and_ends_the_wait_when_it_has() -> None:
    bench = Bench(FOUR)
    bench.run(*PODS)
    plans = running_plans(bench, "p0", "p1")
    del bench.sessions["p0"], bench.sessions["p1"]
    bench.live(35)
    actions = bench.join("p0", term=1, plan=plans["p0"])
    assert (sent(actions, Interrupt)["p0"].iteration, planned(actions)) == (0, set())
    assert bench.status().message.startswith(
        "waits for p0 to leave the iteration before another world begins; otherwise begins it, at "
    )
    assert planned(bench.all_are(READY, 0, "p0")) == {"p0", "p2", "p3"}


def test_the_only_pod_of_a_world_that_is_to_leave_has_left_before_another_world_begins() -> None:
    bench = Bench(replace(FOUR, replicas=1, spares=1))
    bench.run("p0", "p1")
    assert planned(bench.report("p0", is_leaving=True)) == set()
    assert bench.status().message.startswith(
        "waits for p0 to leave the iteration before another world begins; otherwise begins it, at "
    )
    assert planned(bench.all_are(READY, 0, "p0")) == {"p0", "p1"}


def test_the_only_pod_of_a_world_has_left_before_the_one_of_the_job_rung_begins() -> None:
    bench = Bench(replace(FOUR, replicas=1, spares=1, rungs=(RungBudget(Rung.JOB),)))
    bench.run("p0", "p1")
    for gone in (Cause.POD_LEAVING, None):
        pods = {f"uid-{pod}": PodObservation(pod, "n", (), gone=gone if pod == "p0" else None) for pod in ("p0", "p1")}
        bench.step(Observed(Observation(pods)))
    bench.states["p1"] = bench.workers(READY, incarnation=1)
    assert planned(bench.report("p1")) == set()
    bench.states["p0"] = bench.workers(GONE, 0)
    assert "p1" in planned(bench.report("p0"))


def test_the_only_pod_of_a_world_that_is_lost_has_stopped_by_itself() -> None:
    bench = Bench(replace(FOUR, replicas=1, spares=1))
    bench.run("p0", "p1")
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    assert planned(bench.live(FOUR.timeouts.reconnect_s)) == {"p1"}


def test_the_only_pod_of_an_interrupted_world_has_its_time_to_stop_by_itself() -> None:
    bench = Bench(replace(FOUR, replicas=1, spares=1))
    bench.run("p0", "p1")
    bench.report("p0", is_leaving=True)
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    assert planned(bench.live(FOUR.timeouts.reconnect_s - 1)) == set()
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    assert planned(bench.live(1)) == {"p1"}


def test_a_pod_that_is_heard_again_and_does_not_leave_holds_nothing_up_for_ever() -> None:
    bench = Bench(FOUR)
    bench.run(*PODS)
    plans = running_plans(bench, "p0", "p1")
    del bench.sessions["p0"], bench.sessions["p1"]
    bench.live(35)
    bench.join("p0", term=1, plan=plans["p0"])
    assert planned(bench.live(FOUR.timeouts.barrier_s + 1)) == {"p0", "p2", "p3"}


def test_the_loss_of_one_of_two_active_pods_waits_for_nothing_more_than_before() -> None:
    bench = Bench(FOUR)
    bench.run(*PODS)
    del bench.sessions["p0"]
    bench.live(31)
    assert planned(bench.all_are(READY, 0, "p1")) == {"p1", "p2", "p3"}


def test_a_pod_that_said_that_its_workers_have_ended_is_proof_after_it_is_gone() -> None:
    bench = Bench(FOUR)
    bench.run(*PODS)
    bench.states["p0"] = bench.workers(GONE, 0)
    bench.report("p0", is_leaving=True)
    for pod in ("p0", "p1"):
        bench.step(AgentDisconnected(bench.sessions.pop(pod)))
    assert bench.status().reason is not Reason.WAITING_FOR_ISOLATION
    bench.live(6)
    assert bench.status().phase is JobPhase.PLANNED


def test_two_pods_that_leave_together_are_waited_for_until_one_has_left() -> None:
    bench = Bench(FOUR)
    bench.run(*PODS)
    actions = [*bench.report("p0", is_leaving=True), *bench.report("p1", is_leaving=True)]
    assert planned(actions) == set()
    assert planned(bench.all_are(READY, 0, "p1")) >= {"p2", "p3"}


def test_the_only_pod_of_a_world_is_replaced_as_fast_as_ever() -> None:
    bench = Bench(replace(SETTINGS, replicas=1))
    bench.run("p0", "p1")
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    assert planned(bench.live(6)) == {"p1"}


# -------------------------------------------------------------------------------------------- a new rendezvous


def restarted(iteration: int) -> Bench:
    """Return a new coordinator that knows that there was an iteration."""
    bench = Bench(FOUR)
    bench.coordinator = Coordinator(FOUR, 0.0, 2, iteration)
    return bench


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_new_rendezvous_takes_no_world_for_that_of_a_single_pod(minimum: int) -> None:
    """Two pods may each hold one of two ranks: where workers were lost, or where the script's code says so."""
    settings = replace(FOUR, replicas=1, spares=3, min_ranks_per_pod=minimum)
    bench = Bench(settings)
    bench.coordinator = Coordinator(settings, 0.0, 2, 0)
    bench.join("p2")
    bench.all_are(READY, -1, "p2")
    assert planned(bench.live(ISOLATION_S - bench.now_s - 1)) == set()
    assert planned(bench.live(2)) == {"p2"}


def test_a_pod_of_a_newer_world_that_comes_back_late_leaves_it_before_another_one_begins() -> None:
    settings = replace(FOUR, replicas=1, spares=1)
    bench = Bench(settings)
    bench.coordinator = Coordinator(settings, 0.0, 2, 1)
    parts = tuple(RankPlan(number, number, RankReason.FIRST) for number in (0, 1))
    older, newer = (Plan(1, iteration, Role.ACTIVE, 2, "10.0.0.1", 5000, parts) for iteration in (0, 1))
    bench.states = {"p0": bench.workers(READY, 0), "p1": bench.workers(RUNNING, 1)}
    pods = {f"uid-{pod}": PodObservation(pod, "n", ()) for pod in ("p0", "p1")}
    bench.step(Observed(Observation(pods, is_accounted=True)))
    assert planned(bench.join("p0", term=1, plan=older)) == set()
    assert planned(bench.join("p1", term=1, plan=newer)) == set()
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    assert planned(bench.all_are(READY, 1, "p1")) == {"p0", "p1"}


@pytest.mark.parametrize("iteration", [0, 1])
def test_who_hangs_in_an_older_iteration_is_in_no_world(iteration: int) -> None:
    """The plan of iteration 2 was cut, and reached nobody before the rendezvous was lost."""
    settings = replace(FOUR, replicas=1, spares=0, min_ranks_per_pod=1)
    bench = Bench(settings)
    bench.coordinator = Coordinator(settings, 0.0, 2, 2)
    plan = Plan(1, 1, Role.ACTIVE, 1, "", 0, (RankPlan(0, 0, RankReason.KEPT), RankPlan(1, None, RankReason.LOST)))
    bench.step(Observed(Observation({"uid-p0": PodObservation("p0", "n", ())}, is_accounted=True)))
    bench.states["p0"] = [bench.workers(READY, 1)[0], WorkerState(1, 0, RUNNING, iteration)]
    assert planned(bench.join("p0", term=1, plan=plan)) == ({"p0"} if iteration == 0 else set())


@pytest.mark.parametrize("has_entered", [False, True])
def test_a_pod_that_holds_another_plan_of_the_same_number_gets_the_one_in_force(has_entered: bool) -> None:
    bench = Bench(replace(FOUR, replicas=1, spares=1))
    parts = tuple(RankPlan(number, number, RankReason.FIRST) for number in (0, 1))
    older, newer = (Plan(1, iteration, Role.ACTIVE, 2, "10.0.0.1", 5000, parts) for iteration in (0, 1))
    bench.states = {"p0": bench.workers(READY, 0), "p1": bench.workers(*((RUNNING, 1) if has_entered else (READY,)))}
    # A rendezvous without memory that hears the pods of an older plan first gives the newer one's number again.
    again = sent(bench.join("p0", term=1, plan=older), Plan)["p0"]
    assert (again.term, again.iteration) == (2, 1)
    bench.all_are(RUNNING, 1, "p0")
    told = bench.join("p1", term=1, plan=newer)
    assert set(sent(told, Interrupt)) == ({"p1"} if has_entered else set())
    plan = sent(told, Plan)["p1"]
    assert (plan.term, plan.iteration, plan.role) == (2, 1, Role.SPARE)
    bench.all_are(READY, 1 if has_entered else -1, "p1")
    assert (bench.status().phase, bench.status().spare_ranks) == (JobPhase.RUNNING, 2)


@pytest.mark.parametrize("order", ["p0 p1 p2", "p1 p0 p2", "p1 p2 p0"])
def test_of_two_plans_of_the_same_number_the_later_is_taken_over_and_the_other_is_left(order: str) -> None:
    bench = Bench(replace(FOUR, spares=1))
    parts = tuple(RankPlan(number, number, RankReason.FIRST) for number in (0, 1))
    others = tuple(RankPlan(number, number + 2, RankReason.FIRST) for number in (0, 1))
    held = {"p0": (1, parts), "p1": (2, parts), "p2": (2, others)}
    bench.states = {pod: bench.workers(RUNNING, 1) for pod in held}
    for pod in order.split():
        term, part = held[pod]
        told = bench.join(pod, term=2, plan=Plan(term, 1, Role.ACTIVE, 4, "10.0.0.1", 5000, part))
    assert set(sent(told, Interrupt)) == {"p0"}
    assert sent(told, Plan)["p0"].role is Role.SPARE
    assert (bench.status().phase, bench.status().iteration) == (JobPhase.RUNNING, 1)


def test_a_first_start_does_not_wait() -> None:
    bench = restarted(-1)
    assert planned([action for pod in PODS for action in bench.join(pod)]) == set(PODS)


def test_a_new_rendezvous_that_hears_only_pods_of_later_waits_from_its_own_start() -> None:
    bench = restarted(3)
    for pod in ("n0", "n1", "n2", "n3"):
        bench.join(pod)
    status = bench.status()
    assert status.reason is Reason.WAITING_FOR_ISOLATION
    assert status.message.startswith("the pods of an earlier iteration are not heard and may train on together: ")
    assert planned(bench.live(ISOLATION_S - 1)) == set()
    assert len(planned(bench.live(1))) == 4
    assert bench.status().iteration == 4


def test_a_new_rendezvous_does_not_wait_for_pods_whose_end_the_operator_has_seen() -> None:
    bench = restarted(3)
    pods = {f"uid-n{i}": PodObservation(f"n{i}", "n", ()) for i in range(4)}
    bench.step(Observed(Observation(pods, True)))
    for pod in ("n0", "n1", "n2"):
        bench.join(pod)
    bench.tick(5.0)
    # n3 runs and is not heard: who knows what it does.
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    assert len(planned(bench.join("n3"))) == 4


def test_a_new_rendezvous_that_hears_only_the_spares_of_a_plan_waits_from_its_own_start() -> None:
    before = Bench(FOUR)
    before.run(*PODS)
    plans = running_plans(before, "p2", "p3")
    bench = restarted(0)
    for pod in ("p2", "p3"):
        bench.join(pod, term=1, plan=plans[pod])
    assert planned(bench.live(ISOLATION_S - 1)) == set()
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    assert planned(bench.live(1)) == {"p2", "p3"}


def test_pods_that_have_left_an_older_iteration_are_no_proof_of_the_end_of_a_newer_one() -> None:
    before = Bench(FOUR)
    before.run(*PODS)
    plans = running_plans(before, "p0", "p1")
    bench = restarted(1)
    for pod in ("p0", "p1"):
        bench.states[pod] = bench.workers(READY, 0)
        bench.join(pod, term=1, plan=plans[pod])
    assert planned(bench.live(ISOLATION_S - 1)) == set()
    assert planned(bench.live(1)) == {"p0", "p1"}


def test_a_world_that_is_taken_over_whole_is_the_newest() -> None:
    before = Bench(FOUR)
    before.run(*PODS)
    plans = running_plans(before, "p0", "p1")
    bench = restarted(1)
    for pod in ("p0", "p1"):
        bench.states[pod] = bench.workers(RUNNING, 0)
        bench.join(pod, term=1, plan=plans[pod])
    assert bench.status().phase is JobPhase.RUNNING
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0")
    assert planned(bench.all_are(READY, 0, "p1")) == {"p0", "p1"}


def test_the_isolation_time_grows_with_the_timeouts_that_it_must_exceed() -> None:
    assert Timeouts().isolation_limit_s == 120.0
    assert Timeouts(heartbeat_s=600.0).isolation_limit_s == 1210.0
    assert Timeouts(isolation_s=40.0).isolation_limit_s == 40.0


def test_while_a_large_world_is_waited_for_a_heartbeat_costs_as_much_as_beside_a_small_one() -> None:
    costs = {num_pods: _cost_of_a_heartbeat(num_pods) for num_pods in (4, 64)}
    assert costs[64] < 1.2 * costs[4]


def _cost_of_a_heartbeat(num_pods: int) -> int:
    bench = Bench(replace(FOUR, replicas=num_pods, spares=1, min_replicas=1))
    pods = [f"p{number}" for number in range(num_pods)]
    bench.run(*pods, "spare")
    for pod in pods:
        del bench.sessions[pod]
    bench.live(35)
    assert bench.status().reason is Reason.WAITING_FOR_ISOLATION
    beats = [AgentReported(bench.sessions["spare"], Heartbeat(bench.seq + number)) for number in (1, 2)]
    bench.step(beats[0])
    return count_instructions(lambda: bench.step(beats[1]))
