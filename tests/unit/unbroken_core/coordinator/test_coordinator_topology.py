"""What the coordinator does about pods that do not fit the job's tree, and what it counts."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.events import Observed
from unbroken_core.protocol.messages import Observation, Plan, PodObservation, Respawn
from unbroken_core.protocol.settings import RungBudget
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase

from .test_coordinator import SETTINGS, Bench, ranks, sent

READY, RUNNING, GONE = WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.GONE
REFUSED = "ranksPerPod: want 2 workers in each pod of the job, got 4 in pod p1"


def test_a_pod_with_another_number_of_workers_is_named_until_it_is_gone_or_mended() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.join("p0")
    bench.join("p1", ranks_per_pod=4)
    status = bench.status()
    assert status.refused == (f"p1: {REFUSED}",)
    assert (status.reason, status.message) == (
        Reason.WAITING_FOR_PODS,
        f"1 of 2 pods are ready, 1 has joined; refused: p1: {REFUSED}",
    )
    revision = status.revision
    bench.join("p1", ranks_per_pod=4)
    assert bench.status().revision == revision, "it comes again every few seconds, which is no news"
    bench.step(Observed(Observation({"uid-p0": PodObservation("p0", "n", ())})))
    assert bench.status().refused == ()

    bench.join("p1", ranks_per_pod=4)
    assert bench.status().refused
    bench.join("p1")
    assert bench.status().refused == ()
    assert bench.status().phase is JobPhase.PLANNED


def test_a_refused_pod_does_not_disturb_a_job_that_runs() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    before = bench.status()
    bench.join("p3", ranks_per_pod=1)
    after = bench.status()
    assert (after.phase, after.iteration, after.pods) == (before.phase, before.iteration, before.pods)
    assert [line[:18] for line in after.refused] == ["p3: ranksPerPod: w"]


def test_a_whole_spare_that_is_broken_is_counted() -> None:
    rungs = tuple(RungBudget(rung) for rung in (Rung.IN_PROCESS, Rung.POD, Rung.WORLD))
    bench = Bench(replace(SETTINGS, replicas=1, spares=1, ranks_per_pod=4, min_ranks_per_pod=1, rungs=rungs))
    bench.run("p0", "p1")
    assert bench.status().broken_spares == 0
    bench.fault("p0", 3, Cause.PROCESS_SIGNAL, GONE)
    for local_rank in range(3):
        actions = bench.worker("p0", local_rank, READY)
    plans = sent(actions, Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0, 1, 2, None], "p1": [None, None, None, 3]}
    assert bench.status().broken_spares == 1
    bench.all_are(READY, 0, "p1")


def test_two_pods_on_one_host_are_two_places_of_one_domain() -> None:
    layers = (Layer("rack", "rack"), Layer("host", "host"))
    bench = Bench(replace(SETTINGS, replicas=2, spares=2, layers=layers))
    for pod, host in (("p0", "h1"), ("p1", "h2"), ("p2", "h1"), ("p3", "h2")):
        bench.join(pod, domains=("r1", host), node=host)
    held = {pod.pod: (pod.role, pod.ranks, pod.domains) for pod in bench.status().pods}
    assert held == {
        "p0": (Role.ACTIVE, (0, 1), ("r1", "h1")),
        "p2": (Role.ACTIVE, (2, 3), ("r1", "h1")),
        "p1": (Role.SPARE, (), ("r1", "h2")),
        "p3": (Role.SPARE, (), ("r1", "h2")),
    }
    bench.all_are(RUNNING, 0, "p0", "p2")
    bench.step(
        Observed(
            Observation(
                {
                    f"uid-{pod}": PodObservation(
                        pod, host, ("r1", host), gone=Cause.NODE_LOST if host == "h1" else None, is_ended=host == "h1"
                    )
                    for pod, host in (("p0", "h1"), ("p1", "h2"), ("p2", "h1"), ("p3", "h2"))
                }
            )
        )
    )
    taken = {pod.pod: pod.ranks for pod in bench.status().pods if pod.ranks}
    assert taken == {"p1": (0, 1), "p3": (2, 3)}, "a host is replaced by a host, its pods in order"


RACKS = {"p0": "r1", "p1": "r2", "p2": "r1", "p3": "r2", "p4": "r3"}


def observed(*pods: str, gone: str = "") -> Observed:
    """Return what the operator sees; p2 was made to be a spare."""
    return Observed(
        Observation(
            {
                f"uid-{pod}": PodObservation(
                    pod,
                    "n",
                    ("w", RACKS[pod]),
                    role=Role.SPARE if pod == "p2" else Role.ACTIVE,
                    gone=Cause.POD_LOST if pod == gone else None,
                )
                for pod in pods
            }
        )
    )


def kept_apart(**changes: Any) -> Bench:
    """Return a job that lost its pod in rack r2, while its spare is in r1, and no spare may leave its rack."""
    layers = (Layer("row", "row", replace_from=False), Layer("rack", "rack"))
    bench = Bench(replace(SETTINGS, layers=layers, **changes))
    bench.step(observed("p0", "p1", "p2"))
    bench.run("p0", "p1", "p2")
    bench.step(observed("p0", "p1", "p2", gone="p1"))
    bench.all_are(READY, 0, "p0")
    return bench


def test_spares_that_the_layers_keep_from_lost_ranks_let_the_job_wait_for_a_new_pod() -> None:
    bench = kept_apart()
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.INTERRUPTED, Reason.BELOW_MINIMUM)
    assert status.message == (
        "iteration 0: waits at most 600 s for pods: 2 of 2 are there (0 starting), at least 2 are wanted; the spares "
        "that are ready may not take the lost ranks (replaceFrom, minRanks and maxRanks in topology.layers): a pod in "
        "place of the lost one helps; next time a layer that allows more, or a smaller minReplicas"
    )


@pytest.mark.parametrize("pod", [pytest.param("p3", id="in its rack"), pytest.param("p4", id="in another rack")])
def test_the_pod_that_replaces_the_lost_one_ends_the_wait_wherever_it_stands(pod: str) -> None:
    bench = kept_apart()
    bench.step(observed("p0", "p1", "p2", pod, gone="p1"))
    bench.states[pod] = bench.workers(WorkerPhase.STARTING)
    bench.join(pod, domains=("w", RACKS[pod]))
    assert bench.status().phase is JobPhase.INTERRUPTED
    plans = sent(bench.all_are(READY, -1, pod), Plan)
    bench.tick(5.0)
    held = {seen.pod: seen.ranks for seen in bench.status().pods if seen.ranks}
    assert held == {"p0": (0, 1), pod: (2, 3)}, plans
    bench.all_are(RUNNING, 1, "p0", pod)
    assert bench.status().restarts_by_rung == {"pod": 1}


def test_a_job_whose_lost_pod_does_not_come_back_in_time_starts_everything_again() -> None:
    bench = kept_apart()
    actions = bench.live(601)
    assert sent(actions, Respawn), "the job rung"


def test_a_job_that_may_shrink_does_not_wait_for_a_spare_that_may_not_come() -> None:
    bench = kept_apart(min_replicas=1)
    assert {pod.pod: pod.ranks for pod in bench.status().pods if pod.ranks} == {"p0": (0, 1)}


RACK = Layer("rack", "rack", max_ranks=2, replace_from=True)
CROWDED = replace(SETTINGS, replicas=3, spares=0, min_replicas=1, ranks_per_pod=1, layers=(RACK,))


def crowded(**changes: Any) -> Bench:
    """Return a job whose rack r1 is full, and that has lost its pod in rack r2."""
    bench = Bench(replace(CROWDED, **changes))
    for pod, rack in (("p0", "r1"), ("p1", "r1"), ("p2", "r2")):
        bench.join(pod, domains=(rack,))
    bench.tick(5.0)
    bench.all_are(RUNNING, 0, "p0", "p1", "p2")
    del bench.sessions["p2"]
    bench.live(35.0)
    return bench


def where(pod: str, rack: str) -> Observed:
    return Observed(Observation({f"uid-{pod}": PodObservation(pod, "n", (rack,))}))


def test_a_pod_gets_no_rank_before_its_domain_is_known() -> None:
    bench = crowded()
    bench.join("p3")
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0], "p1": [1], "p3": [None]}
    bench.all_are(RUNNING, 1, "p0", "p1")
    bench.step(where("p3", "r2"))
    bench.fault("p0", 0, Cause.EXCEPTION)
    plans = sent(bench.all_are(READY, 1, "p0", "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0], "p1": [1], "p3": [2]}


def test_a_job_that_may_not_shrink_waits_for_the_domain_of_a_pod_that_has_just_come() -> None:
    bench = crowded(min_replicas=3)
    bench.all_are(READY, 0, "p0", "p1")
    bench.join("p3")
    assert (bench.status().phase, bench.status().reason) == (JobPhase.INTERRUPTED, Reason.BELOW_MINIMUM)
    plans = sent(bench.step(where("p3", "r3")), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0], "p1": [1], "p3": [2]}


def test_a_pod_whose_domain_nobody_tells_gets_a_rank_all_the_same() -> None:
    bench = crowded(min_replicas=3)
    bench.all_are(READY, 0, "p0", "p1")
    bench.join("p3")
    assert not sent(bench.live(4.0), Plan)
    assert ranks(sent(bench.live(2.0), Plan)["p3"]) == [2]
