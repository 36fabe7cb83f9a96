"""A new coordinator was not there when the world was lost: times and culprit are what agents and operator know."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import GONE, READY, RUNNING, STARTING, STOPPING, Bench

from unbroken_core.coordinator.events import Observed, Send
from unbroken_core.protocol.messages import (
    EarlierRun,
    Fault,
    GonePod,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    WorkerState,
)
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Phase, RankReason, Role, WorkerPhase

RANKS: dict[str, tuple[int | None, int | None]] = {"p0": (0, 1), "p1": (2, 3), "p2": (None, None)}


def plan_of(pod: str) -> Plan:
    parts = tuple(RankPlan(local, rank, RankReason.FIRST) for local, rank in enumerate(RANKS[pod]))
    role = Role.SPARE if pod == "p2" else Role.ACTIVE
    return Plan(1, 0, role, 4, "10.0.0.1", 5000, parts)


def successor(
    states: Mapping[str, list[WorkerState]], entered_ago_s: Mapping[str, float], over_ago_s: Mapping[str, float]
) -> Bench:
    """Return a coordinator, 300 s old, to which these pods have come with their plan."""
    bench = Bench()
    bench.tick(300.0)
    for pod in states:
        bench.states[pod] = list(states[pod])
        ages = {"entered_ago_s": entered_ago_s.get(pod, 0.0), "over_ago_s": over_ago_s.get(pod, 0.0)}
        bench.join(pod, term=1, plan=plan_of(pod), **ages)
    return bench


def killed_rank(age_s: float) -> dict[str, list[WorkerState]]:
    """Return what the pods say when rank 1 was killed so long ago, and the others have raised."""
    bench = Bench()
    killed = Fault(Cause.PROCESS_SIGNAL, 0, "killed by signal 9", detect_s=age_s)
    reset = Fault(Cause.EXCEPTION, 0, "connection reset by peer", detect_s=age_s)
    raised = [replace(state, fault=reset) for state in bench.workers(STOPPING, 0)]
    return {"p0": [raised[0], WorkerState(1, 0, GONE, 0, fault=killed)], "p1": raised, "p2": bench.workers(READY)}


AGES = {"p0": 1000.0, "p1": 1000.0}


def finish(bench: Bench, *pods: str) -> None:
    """Let the recovery that is under way end."""
    for pod in pods:
        bench.states[pod] = bench.workers(READY, 0)
        bench.report(pod)
    bench.tick(1.0)
    iteration = bench.status().iteration
    active = [pod.pod for pod in bench.status().pods if pod.ranks]
    bench.all_are(RUNNING, iteration, *active)
    assert bench.status().phase is JobPhase.RUNNING


def test_a_recovery_counts_from_the_loss_that_no_rendezvous_saw() -> None:
    bench = successor(killed_rank(197.0), AGES, {"p0": 197.0, "p1": 197.0})
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.rank) == (Cause.PROCESS_SIGNAL, "p0", 1)
    assert recovery.started_at == "t103"
    finish(bench, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert recovery.phase_s[Phase.DETECT.value] == pytest.approx(197.0)
    assert sum(recovery.phase_s.values()) == pytest.approx(float(recovery.ended_at[1:]) - 103.0)
    # 803 s of training, 197 s and the rest of the recovery lost.
    status = bench.status()
    assert status.ettr == pytest.approx(803.0 / 1000.0, abs=0.01)
    assert bench.coordinator.progress.lost_rank_s(bench.now_s) >= 197.0 * 4


def test_a_world_that_an_earlier_rendezvous_interrupted_was_lost_then() -> None:
    left = Bench().workers(READY, 0)
    bench = successor({"p0": left, "p1": left, "p2": Bench().workers(READY)}, AGES, {"p0": 50.0, "p1": 49.5})
    assert bench.status().recoveries[0].started_at == "t250"


def test_an_iteration_that_still_runs_is_no_loss_and_counts_as_progress_from_its_beginning() -> None:
    runs = Bench().workers(RUNNING, 0)
    bench = successor({"p0": runs, "p1": runs, "p2": Bench().workers(READY)}, AGES, {})
    status = bench.status()
    assert (status.phase, status.recoveries, status.ettr) == (JobPhase.RUNNING, (), 1.0)
    assert status.ran_for_s == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("entered", "started_at"),
    [
        pytest.param({"p0": 20.0, "p1": 20.0}, "t280", id="older than the iteration is by the word of its pods"),
        pytest.param({"p0": 9e8, "p1": 20.0}, "t280", id="of two pods the younger iteration counts"),
        pytest.param({}, "t270", id="agents of an earlier release do not say how old it is"),
    ],
)
def test_no_age_that_a_pod_claims_is_older_than_what_half_of_the_pods_were_in(
    entered: dict[str, float], started_at: str
) -> None:
    bench = successor(killed_rank(8e8), entered, {"p0": 8e8})
    assert bench.status().recoveries[0].started_at == started_at
    finish(bench, "p0", "p1")
    assert 0.0 <= (bench.status().ettr or 0.0) <= 1.0


def one_pod_is_gone() -> Bench:
    bench = successor({"p1": Bench().workers(RUNNING, 0)}, {"p1": 1000.0}, {})
    bench.states["p2"] = bench.workers(READY)
    bench.join("p2", term=1, plan=plan_of("p2"))
    return bench


def seen(*gone: GonePod, earlier: EarlierRun | None = None) -> Observed:
    pods = {"uid-p1": PodObservation("p1", "node-p1", ()), "uid-p2": PodObservation("p2", "node-p2", ())}
    return Observed(Observation(pods, gone=gone, earlier=earlier))


@pytest.mark.parametrize("is_late", [False, True], ids=["before the job is taken over", "after it"])
def test_a_pod_that_went_while_no_rendezvous_was_there_is_named_by_the_operator(is_late: bool) -> None:
    bench = one_pod_is_gone()
    gone = GonePod("p0", "node-p0", (0, 1), ago_s=120.0)
    if not is_late:
        bench.step(seen(gone))
    bench.live(31)
    if is_late:
        assert bench.status().recoveries[0].pod == ""
        bench.step(seen(gone))
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.node) == (Cause.POD_LOST, "p0", "node-p0")
    assert recovery.started_at == ("t300" if is_late else "t180")


def test_a_pod_that_the_operator_says_to_have_gone_and_whose_ranks_are_there_is_not_blamed() -> None:
    bench = one_pod_is_gone()
    bench.step(seen(GonePod("p9", "node-p9", (2, 3), ago_s=1e9)))
    bench.live(31)
    assert bench.status().recoveries[0].pod == ""
    assert bench.status().recoveries[0].started_at != "t0"


def test_the_share_of_progress_goes_on_from_what_the_operator_heard_last() -> None:
    bench = successor(killed_rank(197.0), AGES, {"p0": 197.0, "p1": 197.0})
    # Heard 210 s ago, 13 s before the loss: half of 1,000 s had been progress.
    bench.step(seen(earlier=EarlierRun(ago_s=210.0, gained_s=500.0, ran_for_s=1000.0)))
    assert bench.status().ettr == pytest.approx((500.0 + 13.0) / 1210.0)
    assert (bench.status().gained_s, bench.status().ran_for_s) == pytest.approx((513.0, 1210.0))
    bench.step(seen(earlier=EarlierRun(ago_s=1.0, gained_s=1e9, ran_for_s=1e9)))
    assert bench.status().ettr == pytest.approx((500.0 + 13.0) / 1210.0), "told once"


@pytest.mark.parametrize("ago_s", [0.0, 1e9])
@pytest.mark.parametrize("gained_s", [0.0, 1e9])
@pytest.mark.parametrize("ran_for_s", [0.0, 1e9])
def test_no_earlier_run_makes_a_share_that_cannot_be(ago_s: float, gained_s: float, ran_for_s: float) -> None:
    bench = successor(killed_rank(197.0), AGES, {"p0": 197.0})
    bench.step(seen(earlier=EarlierRun(ago_s, gained_s, ran_for_s)))
    status = bench.status()
    assert status.ettr is not None
    assert 0.0 <= status.ettr <= 1.0
    assert 0.0 <= status.gained_s <= (status.ran_for_s or 0.0)


def drained(others: Mapping[str, PodObservation], *, is_accounted: bool = True) -> Bench:
    """Return a coordinator to which the spare has come; a drain took both active pods, and the one before it."""
    bench = successor({"p2": Bench().workers(READY)}, {}, {})
    pods = {"uid-p2": PodObservation("p2", "node-p2", ()), **others}
    gone = (GonePod("p0", "node-p0", (0, 1), ago_s=9.0), GonePod("p1", "node-p1", (2, 3), ago_s=7.0))
    bench.step(Observed(Observation(pods, is_accounted=is_accounted, gone=gone)))
    return bench


def test_nobody_waits_for_pods_that_the_operator_saw_end_and_the_loss_counts_from_then() -> None:
    fresh = PodObservation("p3", "", (), is_waiting=True)
    over = PodObservation("p1", "node-p1", (), gone=Cause.POD_LOST, is_ended=True)
    for others in ({}, {"uid-p3": fresh, "uid-p1": over}):
        first = drained(others).status().recoveries[0]
        assert (first.cause, first.pod, first.started_at) == (Cause.POD_LOST, "p0", "t291")


@pytest.mark.parametrize(
    "bench",
    [
        pytest.param(lambda: drained({}, is_accounted=False), id="one that is not named may train on"),
        pytest.param(
            lambda: drained({"uid-p1": PodObservation("p1", "node-p1", (), gone=Cause.POD_LEAVING)}),
            id="one that is ending may come back and move in peace",
        ),
        pytest.param(lambda: drained({"uid-p1": PodObservation("p1", "node-p1", ())}), id="one runs"),
    ],
)
def test_who_may_still_come_is_waited_for(bench: Callable[[], Bench]) -> None:
    made = bench()
    assert "have come back" in made.status().message
    assert made.status().recoveries == ()
    made.live(31)
    recovery = made.status().recoveries[0]
    assert recovery.started_at == "t291", "the operator saw the first of them go then"


def test_a_world_of_which_nobody_knows_anything_was_lost_before_the_wait_for_it() -> None:
    bench = successor({"p2": Bench().workers(READY)}, {}, {})
    bench.live(31)
    assert bench.status().recoveries[0].started_at == "t300"


def cut_and_lost() -> dict[str, Plan]:
    """Return the plans of iteration 1 by pod: rank 2 was killed, and the rendezvous lost right after its plans."""
    return cut(Bench())


def cut(bench: Bench) -> dict[str, Plan]:
    """Kill rank 2, and return the plans of iteration 1 by pod."""
    for pod in ("p0", "p1", "p2"):
        bench.join(pod)
    bench.tick(bench.settings.timeouts.last_call_s)
    bench.all_are(RUNNING, 0, "p0", "p1")
    bench.tick(5.0)
    bench.worker("p1", 0, GONE, Fault(Cause.PROCESS_SIGNAL, 0, "killed by signal 9", detect_s=0.5))
    actions = bench.all_are(READY, 0, "p0")
    found = [(action.session, action.message) for action in actions if isinstance(action, Send)]
    plans = {session.partition("#")[0]: message for session, message in found if isinstance(message, Plan)}
    assert {plan.iteration for plan in plans.values()} == {1}
    assert bench.status().phase is JobPhase.PLANNED
    return plans


def counting(bench: Bench, counted: tuple[int, int] | None) -> None:
    pods = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", ()) for pod in RANKS}
    bench.step(Observed(Observation(pods, is_accounted=True, counted=counted)))


def after(plans: Mapping[str, Plan], phase: WorkerPhase, counted: tuple[int, int] | None) -> Bench:
    """Return the next rendezvous, when the pods have come; `counted`: what the operator says before."""
    bench = Bench()
    bench.tick(300.0)
    counting(bench, counted)
    for pod, plan in plans.items():
        is_active = plan.ranks[0].rank is not None
        bench.states[pod] = bench.workers(phase if is_active else STARTING, 1 if phase is RUNNING else 0)
        bench.join(pod, term=plan.term, plan=plan, entered_ago_s=4.0 if phase is RUNNING and is_active else 0.0)
    return bench


@pytest.mark.parametrize("is_told_first", [True, False], ids=["told before they come", "told when it runs"])
def test_a_recovery_counts_whose_rendezvous_was_lost_right_after_its_plan(is_told_first: bool) -> None:
    bench = after(cut_and_lost(), RUNNING, (0, 0) if is_told_first else None)
    assert bench.status().phase is JobPhase.RUNNING
    assert bool(bench.status().recoveries) is is_told_first
    for _time in range(2):
        counting(bench, (0, 0))
    status = bench.status()
    (recovery,) = status.recoveries
    assert (recovery.cause, recovery.pod, recovery.rank) == (Cause.PROCESS_SIGNAL, "p1", 2)
    assert (recovery.iteration_before, recovery.iteration_after, bool(recovery.ended_at)) == (0, 1, True)
    assert (recovery.detail, recovery.phase_s[Phase.DETECT.value]) == ("killed by signal 9", 0.5)
    assert status.restarts_by_cause == {"process-signal": 1}
    assert sum(status.restarts_by_rung.values()) == 1


@pytest.mark.parametrize("is_told_first", [True, False], ids=["told before they come", "told when it runs"])
def test_a_recovery_that_ends_in_a_later_iteration_counts_once(is_told_first: bool) -> None:
    bench = after(cut_and_lost(), READY, (0, 0) if is_told_first else None)
    assert bench.status().phase is JobPhase.PLANNED
    bench.all_are(RUNNING, 2, *(pod.pod for pod in bench.status().pods if pod.ranks))
    counting(bench, (0, 0))
    status = bench.status()
    assert (status.phase, sum(status.restarts_by_cause.values())) == (JobPhase.RUNNING, 1)
    if is_told_first:
        assert status.restarts_by_cause == {"process-signal": 1}


@pytest.mark.parametrize(
    ("counted", "is_forged"),
    [
        pytest.param((1, 1), False, id="its rendezvous has counted it"),
        pytest.param((1, 7), False, id="and later ones"),
        pytest.param(None, False, id="an operator of an earlier release does not say"),
        pytest.param((0, 0), True, id="half of the pods alone tell of it"),
    ],
)
def test_no_recovery_counts_twice_or_by_the_word_of_one_pod(counted: tuple[int, int] | None, is_forged: bool) -> None:
    plans = cut_and_lost()
    if is_forged:
        plans["p0"] = replace(plans["p0"], repair=None)
    bench = after(plans, RUNNING, counted)
    counting(bench, counted)
    status = bench.status()
    assert (status.phase, status.recoveries, status.restarts_by_rung) == (JobPhase.RUNNING, (), {})


def test_a_rendezvous_that_stood_counts_no_recovery_of_its_own_again() -> None:
    bench = Bench()
    plans = cut(bench)
    active = [pod for pod, plan in plans.items() if plan.ranks[0].rank is not None]
    bench.all_are(RUNNING, 1, *active)
    counting(bench, (0, 0))
    (before,) = bench.status().recoveries
    bench.tick(60.0)
    assert bench.status().phase is JobPhase.FORMING
    for pod, plan in plans.items():
        bench.join(pod, term=1, plan=plan, entered_ago_s=60.0 if pod in active else 0.0)
    counting(bench, (0, 0))
    status = bench.status()
    assert (status.phase, status.term, status.iteration) == (JobPhase.RUNNING, 1, 1)
    assert (status.recoveries, status.restarts_by_cause) == ((before,), {"process-signal": 1})
