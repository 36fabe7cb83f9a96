"""A job waits for its cluster as long as it takes, and for its script as long as `timeouts.startup` says."""

import math
from dataclasses import replace
from typing import Any

from tests.unit.unbroken_core.coordinator.test_coordinator import SETTINGS, STARTING, Bench, sent

from unbroken_core.coordinator.events import AgentDisconnected, Observed
from unbroken_core.coordinator.state.places import MAX_BACK_OFF_S, MAX_START_ATTEMPTS
from unbroken_core.coordinator.state.pod_clock import PodClock
from unbroken_core.protocol.messages import Fault, Finish, Observation, Plan, PodObservation
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, WorkerPhase

LONG_S = 2_000.0


def observe(bench: Bench, running: tuple[str, ...], waiting: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> None:
    pods = {f"uid-{pod}": PodObservation(pod, "n", ()) for pod in running}
    pods |= {f"uid-{pod}": PodObservation(pod, "", (), is_waiting=True) for pod in waiting}
    pods |= {f"uid-{pod}": PodObservation(pod, "n", (), gone=Cause.NODE_LOST) for pod in lost}
    bench.step(Observed(Observation(pods)))


def test_the_clock_stands_and_goes_on_where_it_stood() -> None:
    clock = PodClock()
    began = clock.read(10.0)
    clock.stand("0 of 2 pods run", 15.0)
    clock.stand("0 of 2 pods run", 16.0)
    assert (clock.is_standing, clock.due_s(began, 60.0)) == (True, math.inf)
    assert clock.read(5_000.0) == clock.read(15.0)
    clock.stand("", 1_015.0)
    clock.stand("", 1_020.0)
    assert clock.due_s(began, 60.0) == 1_070.0
    assert clock.read(1_020.0) == began + 10.0


def test_a_job_whose_pods_wait_for_nodes_waits_with_them_and_starts_when_they_run() -> None:
    bench = Bench()
    bench.join("p0")
    observe(bench, ("p0",), waiting=("p1", "p2"))
    bench.live(LONG_S)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FORMING, Reason.WAITING_FOR_PODS)
    assert "not joined: p1, p2; 1 of 2 pods run, at least 2 are wanted" in status.message
    assert "timeouts.startupSeconds does not count" in status.message
    observe(bench, ("p0", "p1"), waiting=("p2",))
    bench.join("p1")
    assert set(sent(bench.tick(5.0), Plan)) == {"p0", "p1"}


def test_the_startup_timeout_counts_from_when_enough_pods_run() -> None:
    bench = Bench()
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    observe(bench, ("p0",), waiting=("p1", "p2"))
    bench.live(LONG_S)
    observe(bench, ("p0", "p1"), waiting=("p2",))
    assert not sent(bench.live(599), Finish)
    (finish,) = sent(bench.live(2), Finish).values()
    assert (finish.outcome, finish.reason) == (JobPhase.FAILED, Reason.STARTUP_TIMEOUT)


def test_time_that_a_script_has_used_is_not_given_back_when_a_pod_is_lost_and_waits_again() -> None:
    bench = Bench()
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    observe(bench, ("p0", "p1"))
    bench.live(400)
    observe(bench, ("p0",), waiting=("p2",), lost=("p1",))
    assert not sent(bench.live(LONG_S), Finish)
    observe(bench, ("p0", "p2"), lost=("p1",))
    assert not sent(bench.live(198), Finish)
    assert sent(bench.live(3), Finish)


def test_a_job_with_enough_pods_does_not_wait_for_a_spare_that_has_no_node() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=1))
    bench.join("p0")
    observe(bench, ("p0",), waiting=("p1", "p2"))
    (plan,) = sent(bench.live(601), Plan).values()
    assert plan.world_size == 2


def failing(**changes: Any) -> Bench:
    """Return a job of which one pod runs, and cannot start its processes."""
    bench = Bench(replace(SETTINGS, **{"replicas": 1, "ranks_per_pod": 1, **changes}))
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    observe(bench, ("p0",), waiting=("p1",))
    for incarnation in range(MAX_START_ATTEMPTS):
        bench.worker("p0", 0, WorkerPhase.GONE, Fault(Cause.PROCESS_EXIT, -1, "exited with code 3"))
        bench.live(MAX_BACK_OFF_S)
        bench.worker("p0", 0, STARTING, incarnation=incarnation + 1)
    return bench


def test_a_pod_that_cannot_start_its_processes_does_not_stand_for_one_that_waits_for_a_node() -> None:
    bench = failing(spares=1)
    assert not sent(bench.live(700), Finish)
    assert "1 of 1 pod runs, 1 of them cannot start its processes, at least 1 is wanted" in bench.status().message
    observe(bench, ("p0", "p1"))
    bench.join("p1")
    assert sent(bench.live(6), Plan)


def test_a_job_whose_only_pod_cannot_start_its_processes_waits_for_nobody() -> None:
    bench = failing(spares=0)
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.FAILED_BEFORE_READY)


def test_time_counts_where_pods_that_cannot_start_leave_too_few_for_the_divisor() -> None:
    bench = failing(spares=0, replicas=2, min_replicas=1, divisible_by=2)
    observe(bench, ("p0", "p1"))
    bench.join("p1")
    assert sent(bench.live(601), Finish)["p1"].reason is Reason.STARTUP_TIMEOUT


def test_time_stands_where_a_pod_without_one_of_its_ranks_is_too_little_for_the_divisor_until_another_runs() -> None:
    job = {"replicas": 2, "spares": 0, "ranks_per_pod": 2, "min_replicas": 1, "min_ranks_per_pod": 1, "divisible_by": 2}
    bench = failing(**job)
    bench.worker("p0", 1, WorkerPhase.READY)
    assert not sent(bench.live(LONG_S), Finish)
    message = bench.status().message
    assert "1 of 2 pods run, 1 of their processes cannot start, at least 1 with 2 ranks is wanted" in message
    observe(bench, ("p0", "p1"))
    plans = sent(bench.join("p1"), Plan)
    assert {plan.world_size for plan in plans.values()} == {2}


def test_time_counts_where_all_pods_run_without_enough_ranks_for_the_divisor() -> None:
    job = {"replicas": 2, "spares": 0, "ranks_per_pod": 2, "min_replicas": 1, "min_ranks_per_pod": 1, "divisible_by": 4}
    bench = failing(**job)
    bench.worker("p0", 1, WorkerPhase.READY)
    observe(bench, ("p0", "p1"))
    bench.join("p1")
    assert sent(bench.live(601), Finish)["p1"].reason is Reason.STARTUP_TIMEOUT


def test_without_an_operator_the_startup_timeout_counts_from_the_start() -> None:
    bench = Bench()
    bench.join("p0")
    assert sent(bench.live(601), Finish)["p0"].reason is Reason.STARTUP_TIMEOUT


def test_a_job_below_its_minimum_waits_for_the_cluster_to_bring_a_node_back() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    observe(bench, ("p0", "p1"))
    observe(bench, ("p0",), waiting=("p2",), lost=("p1",))
    bench.all_are(bench.states["p0"][0].phase.READY, 0, "p0")
    assert not sent(bench.live(LONG_S), Finish)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.INTERRUPTED, Reason.BELOW_MINIMUM)
    assert "waits for pods: " in status.message
    assert "1 of 2 pods run, at least 2 are wanted" in status.message
    observe(bench, ("p0", "p2"))
    plans = sent(bench.join("p2"), Plan)
    assert set(plans) == {"p0", "p2"}


def test_a_new_pod_that_runs_and_does_not_come_up_ends_a_job_below_its_minimum() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    observe(bench, ("p0", "p1"))
    observe(bench, ("p0",), waiting=("p2",), lost=("p1",))
    bench.all_are(bench.states["p0"][0].phase.READY, 0, "p0")
    bench.live(LONG_S)
    observe(bench, ("p0", "p2"))
    (finish,) = sent(bench.live(602), Finish).values()
    assert finish.outcome is JobPhase.FAILED


def test_the_clock_goes_on_when_the_pod_that_cannot_start_is_lost() -> None:
    bench = Bench(replace(SETTINGS, replicas=1, ranks_per_pod=1, max_faults_per_rank=0))
    bench.run("p0", "p1")
    observe(bench, ("p0", "p1"))
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(WorkerPhase.RUNNING, 1, "p1")
    bench.step(AgentDisconnected(bench.sessions.pop("p1")))
    observe(bench, ("p0",))
    bench.live(10.0)
    assert "1 of 1 pod runs, 1 of them cannot start its processes" in bench.status().message
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.tick(5.0)
    assert "waits at most 600 s for pods: 0 of 1 is there" in bench.status().message
    assert bench.coordinator.next_deadline_s() is not None, "nobody is left whose word could wake the job"
    bench.tick(600.0)
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.BELOW_MINIMUM)
