"""What an agent says that cannot be in this job is refused, and changes nothing."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.events import Close, Observed
from unbroken_core.protocol.bounds import MAX_CLAIMED
from unbroken_core.protocol.messages import (
    Fault,
    Interrupt,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    Refused,
    Welcome,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Role

from .test_coordinator import READY, RUNNING, SETTINGS, Bench, ranks, sent

PLAN = Plan(
    1, 3, Role.ACTIVE, 4, "10.0.0.1", 5000, (RankPlan(0, 0, RankReason.FIRST), RankPlan(1, 1, RankReason.FIRST))
)


def parts(*numbers: tuple[int, int | None]) -> tuple[RankPlan, ...]:
    return tuple(RankPlan(local_rank, rank, RankReason.FIRST) for local_rank, rank in numbers)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"term": MAX_CLAIMED + 1}, f"term: want 0 to {MAX_CLAIMED}, got {MAX_CLAIMED + 1}", id="term"),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, term=2)}, "plan.term: want 0 to 1, got 2", id="plan of a later term"
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, iteration=MAX_CLAIMED + 1)},
            f"plan.iteration: want 0 to {MAX_CLAIMED}, got {MAX_CLAIMED + 1}",
            id="iteration",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, world_size=1_000_000)},
            "plan.world_size: want 0 to 1024, got 1000000",
            id="world of a million ranks",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, ranks=parts((0, 4)))},
            "plan.ranks[0].rank: want 0 to 3, got 4",
            id="rank beyond its world",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, world_size=0, ranks=parts((0, 0)))},
            "plan.ranks[0].rank: want none, got 0",
            id="rank of no world",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, ranks=parts((2, 0)))},
            "plan.ranks[0].local_rank: want 0 to 1, got 2",
            id="part of a worker that no pod has",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, ranks=parts((0, 0), (1, 0)))},
            "plan.ranks: want each rank once, got [0, 0]",
            id="one rank for two workers",
        ),
        pytest.param(
            {"term": 1, "plan": replace(PLAN, ranks=parts((0, 0), (0, 1)))},
            "plan.ranks: want each local_rank once, got [0, 0]",
            id="two ranks for one worker",
        ),
    ],
)
def test_a_hello_that_cannot_be_is_refused_with_the_reason_and_changes_nothing(
    changes: dict[str, Any], why: str
) -> None:
    bench = Bench()
    before = bench.coordinator.past
    actions = bench.join("p0", **changes)
    assert sent(actions, Refused) == {"p0": Refused(why)}
    assert [action for action in actions if isinstance(action, Close)] == [Close("p0#1")]
    assert bench.status().refused == (f"p0: {why}",)
    assert bench.coordinator.past == before
    for pod in ("p0", "p1"):
        bench.join(pod)
    assert [ranks(plan) for plan in sent(bench.tick(5.0), Plan).values()] == [[0, 1], [2, 3]]
    assert bench.status().refused == ()


def test_a_worker_that_says_an_impossible_iteration_is_refused_at_its_hello() -> None:
    bench = Bench()
    states = bench.workers(READY)
    states[1] = replace(states[1], iteration=MAX_CLAIMED + 1)
    why = f"workers[1].iteration: want -1 to {MAX_CLAIMED}, got {MAX_CLAIMED + 1}"
    assert sent(bench.join("p0", workers=tuple(states)), Refused) == {"p0": Refused(why)}
    twice = (states[0], states[0])
    why = "workers: want each local_rank once, got [0, 0]"
    assert sent(bench.join("p0", workers=twice), Refused) == {"p0": Refused(why)}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"iteration": 1}, "Report.workers[0].iteration: want -1 to 0, got 1", id="never given out"),
        pytest.param({"local_rank": 2}, "Report.workers[0].local_rank: want 0 to 1, got 2", id="no such worker"),
        pytest.param(
            {"fault": Fault(Cause.EXCEPTION, 7)}, "Report.workers[0].fault.iteration: want -1 to 0, got 7", id="fault"
        ),
    ],
)
def test_a_report_that_cannot_be_closes_its_connection_and_costs_nobody_else_anything(
    changes: dict[str, Any], why: str
) -> None:
    bench = Bench()
    bench.run("p0", "p1")
    before = bench.status()
    sound = bench.states["p0"][0]
    bench.states["p0"][0] = replace(sound, **changes)
    assert bench.report("p0") == [Close(bench.sessions["p0"], why)]
    assert bench.status() == before
    # The agent comes back at once with all that it knows, and the training was never disturbed.
    bench.states["p0"][0] = sound
    held = Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, parts((0, 0), (1, 1)))
    actions = bench.join("p0", term=1, plan=held)
    assert list(sent(actions, Welcome)) == ["p0"]
    assert sent(actions, Interrupt) == {}
    assert bench.status().phase is JobPhase.RUNNING


def test_what_a_lost_coordinator_gave_out_is_believed() -> None:
    """Its successor may have no memory: then only the agents know which numbers are used up."""
    bench = Bench()
    plan = replace(PLAN, term=5, iteration=900)
    bench.states["p0"] = bench.workers(RUNNING, 900)
    assert list(sent(bench.join("p0", term=5, plan=plan), Welcome)) == ["p0"]
    assert bench.coordinator.past == (6, 900)
    # A worker that attaches later is in the same iteration: given out by the one before.
    assert [action for action in bench.report("p0") if isinstance(action, Close)] == []


def test_a_pod_that_claims_the_highest_number_leaves_room_for_the_next() -> None:
    bench = Bench()
    for pod, numbers in {"p0": ((0, 0), (1, 1)), "p1": ((0, 2), (1, 3))}.items():
        bench.states[pod] = bench.workers(RUNNING, MAX_CLAIMED)
        bench.join(pod, term=1, plan=replace(PLAN, iteration=MAX_CLAIMED, ranks=parts(*numbers)))
    assert (bench.status().phase, bench.status().iteration) == (JobPhase.RUNNING, MAX_CLAIMED)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, MAX_CLAIMED, "p0", "p1")
    iteration = bench.status().iteration
    assert iteration == MAX_CLAIMED + 1
    bench.all_are(RUNNING, iteration, "p0", "p1")
    assert bench.status().phase is JobPhase.RUNNING
    again = Plan(2, iteration, Role.ACTIVE, 4, "10.0.0.1", 5000, parts((0, 0), (1, 1)))
    assert list(sent(bench.join("p0", term=2, plan=again), Welcome)) == ["p0"]


def test_a_job_that_was_made_eight_times_smaller_takes_its_world_over() -> None:
    settings = JobSettings("digits", replicas=256, ranks_per_pod=2)
    bench = Bench(settings)
    plan = replace(PLAN, world_size=8 * 512)
    assert list(sent(bench.join("p0", term=1, plan=plan), Welcome)) == ["p0"]
    why = f"plan.world_size: want 0 to {8 * 512}, got {8 * 512 + 1}"
    refused = sent(bench.join("p1", term=1, plan=replace(plan, world_size=8 * 512 + 1)), Refused)
    assert refused == {"p1": Refused(why)}


def test_pods_that_nobody_named_cannot_fill_the_table() -> None:
    bench = Bench()
    most = 8 * 3 + 64
    for number in range(most):
        assert sent(bench.join(f"p{number}"), Refused) == {}
    refused = sent(bench.join("late"), Refused)["late"].reason
    assert (
        refused == f"pod_uid: want at most {most} pods, those aside that the operator has named; 'uid-late' is one more"
    )
    # One that is in comes back, and one that the operator sees is let in.
    assert sent(bench.join("p0"), Refused) == {}
    bench.step(Observed(Observation({"uid-late": PodObservation("late", "node-late", ())})))
    assert sent(bench.join("late"), Refused) == {}


def test_pods_that_come_and_go_are_forgotten() -> None:
    bench = Bench()
    for number in range(600):
        bench.join(f"p{number}")
        bench.step(Observed(Observation({})))
        bench.step(Observed(Observation({f"uid-p{number}": PodObservation(f"p{number}", "n", ())})))
        bench.step(Observed(Observation({})))
        bench.sessions.clear()
    assert sent(bench.join("new"), Refused) == {}
    assert len(bench.coordinator._job.welcomed) <= 2 * (8 * 3 + 64) + 1
    assert len(bench.coordinator._job.members.by_uid) <= 2


def seen(*names: str) -> Observed:
    """Return what the operator says of these pods."""
    return Observed(Observation({f"uid-{name}": PodObservation(name, "n", ()) for name in names}))


def test_nobody_joins_any_more_as_a_pod_that_was_deleted() -> None:
    """Before, who had kept the token of such a pod could come back as it, and be given ranks."""
    bench = Bench(replace(SETTINGS, spares=1))
    bench.step(seen("p0", "p1", "p2"))
    bench.run("p0", "p1", "p2")
    bench.step(seen("p0", "p1"))
    actions = bench.join("p2")
    assert sent(actions, Refused) == {"p2": Refused("pod: p2 does not exist any more")}
    assert [action for action in actions if isinstance(action, Close)] == [Close(bench.sessions["p2"])]
    actions = bench.join("p2", pod_uid="another")
    assert list(sent(actions, Refused)) == ["p2"], "the token is the name's, whatever uid is claimed"
    assert (bench.status().refused, bench.status().phase) == ((), JobPhase.RUNNING)
    assert sorted(pod.pod for pod in bench.status().pods) == ["p0", "p1"]


def test_a_pod_that_the_operator_has_not_named_yet_or_names_again_is_let_in() -> None:
    """It may be away for hours, and pods that run go on; one whose label comes back was never gone."""
    bench = Bench(replace(SETTINGS, spares=2))
    assert list(sent(bench.join("early"), Welcome)) == ["early"]
    bench.step(seen("p0", "p1"))
    for pod in ("p0", "new"):
        assert list(sent(bench.join(pod), Welcome)) == [pod]
    bench.step(seen("p0"))
    assert list(sent(bench.join("p1"), Refused)) == ["p1"]
    bench.step(seen("p0", "p1"))
    assert list(sent(bench.join("p1"), Welcome)) == ["p1"]
    assert list(sent(bench.join("early"), Welcome)) == ["early"]


@pytest.mark.parametrize("is_accounted", [True, False])
def test_a_new_coordinator_knows_whom_it_never_saw_by_the_ordinals(is_accounted: bool) -> None:
    """Before, who had kept the token of a deleted pod only had to wait until the rendezvous was started anew."""
    job = SETTINGS.job
    bench = Bench(replace(SETTINGS, spares=1))
    there = {f"uid-{number}": PodObservation(f"{job}-{number}", "n", ()) for number in (1, 3)}
    bench.step(Observed(Observation(there, is_accounted)))
    for pod in (f"{job}-0", f"{job}-2"):
        found = sent(bench.join(pod, pod_uid=f"kept-{pod}"), Refused)
        assert found == ({pod: Refused(f"pod: {pod} does not exist any more")} if is_accounted else {})
    for pod, uid in ((f"{job}-1", "uid-1"), (f"{job}-4", "new"), (f"{job}-x", "odd"), ("other-0", "foreign")):
        assert list(sent(bench.join(pod, pod_uid=uid), Welcome)) == [pod], "named, or perhaps not named yet"


def test_a_pod_whose_word_ends_the_world_before_is_heard_though_it_was_deleted() -> None:
    """Its node was cut off and it may train on there: it is told to leave, and nobody begins before that."""
    bench = Bench()
    bench.step(seen("p0", "p1"))
    bench.run("p0", "p1")
    bench.step(seen("p2", "p3"))
    assert not bench.coordinator._job.previous.is_over
    bench.states["p0"] = bench.workers(RUNNING, 0)
    held = Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, parts((0, 0), (1, 1)))
    actions = bench.join("p0", term=1, plan=held)
    assert list(sent(actions, Welcome)) == ["p0"]
    assert list(sent(actions, Interrupt)) == ["p0"]


def test_names_of_pods_that_are_gone_are_bounded() -> None:
    bench = Bench()
    for first in range(0, 30_000, 10_000):
        bench.step(seen(*(f"p{first + number}" for number in range(10_000))))
    bench.step(seen("last"))
    gone = bench.coordinator._job.gone
    assert (len(gone), next(iter(gone)), next(reversed(gone))) == (20_000, "p10000", "p29999")


def test_a_pod_does_not_take_the_uid_of_another_that_has_yet_to_come() -> None:
    bench = Bench()
    bench.step(seen("p0", "p1"))
    why = "pod_uid: uid-p1 belongs to pod p1, got pod p0"
    assert sent(bench.join("p0", pod_uid="uid-p1"), Refused) == {"p0": Refused(why)}
    assert list(sent(bench.join("p1"), Welcome)) == ["p1"]


def test_who_took_another_pods_uid_before_the_operator_spoke_loses_it_then() -> None:
    """Before, it kept the other one's place for ever, and the other one was refused."""
    bench = Bench()
    assert list(sent(bench.join("p0", pod_uid="uid-p1"), Welcome)) == ["p0"]
    why = "pod_uid: uid-p1 belongs to pod p0, got pod p1"
    assert sent(bench.join("p1"), Refused) == {"p1": Refused(why)}
    false = bench.sessions["p0"]
    assert Close(false) in bench.step(seen("p0", "p1"))
    assert list(sent(bench.join("p1"), Welcome)) == ["p1"]
    assert list(sent(bench.join("p0", pod_uid="uid-p1"), Refused)) == ["p0"]
    assert [pod.pod for pod in bench.status().pods] == ["p1"]


def test_a_pod_counts_once_whatever_uids_it_says() -> None:
    """Before, whoever had one pod's token filled the job with pods that nobody runs, and they were given ranks."""
    bench = Bench()
    for number in range(300):
        assert list(sent(bench.join("p0", pod_uid=f"other-{number}"), Welcome)) == ["p0"]
    assert [pod.pod for pod in bench.status().pods] == ["p0"]
    assert list(sent(bench.join("p1"), Welcome)) == ["p1"]
    bench.step(seen("p0", "p1"))
    why = "pod_uid: want that of pod p0 which the operator names, got 'another'"
    assert sent(bench.join("p0", pod_uid="another"), Refused) == {"p0": Refused(why)}
    assert list(sent(bench.join("p0"), Welcome)) == ["p0"]
    assert list(sent(bench.join("p1"), Welcome)) == ["p1"]
