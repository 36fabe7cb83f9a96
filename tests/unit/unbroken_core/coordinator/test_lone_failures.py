"""A pod that alone fails again and again loses its ranks to others, where there are others."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.events import Action, AgentDisconnected
from unbroken_core.protocol.messages import Fault, Halt, Interrupt, Plan
from unbroken_core.protocol.settings import JobSettings, RungBudget
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung

from .test_coordinator import READY, RUNNING, SETTINGS, STOPPING, Bench, ranks, sent
from .test_growth import GROWING, ShrunkBench
from .test_moves import order_of

NONE = [None, None]


class FailingBench(Bench):
    """p0 and p1 have ranks, all others wait."""

    def __init__(self, settings: JobSettings = SETTINGS, *spares: str) -> None:
        super().__init__(settings)
        self.run("p0", "p1", *spares)

    @property
    def active(self) -> list[str]:
        return [pod.pod for pod in self.status().pods if pod.ranks]

    def fail(self, *pods: str, words: str = "", cause: Cause = Cause.EXCEPTION, step: int = -1) -> list[Action]:
        """Let one worker of each of these pods fail, in this order, and all leave."""
        iteration, active = self.status().iteration, self.active
        for pod in pods:
            self.worker(pod, 0, STOPPING, Fault(cause, iteration, words or f"no GPU at {pod}"), step=step)
        return self.renew(self.all_are(READY, iteration, *active))

    def go_on(self) -> None:
        """All enter."""
        self.all_are(RUNNING, self.status().iteration, *self.active)

    def fail_often(self, times: int, *pods: str, **how: Any) -> list[Action]:
        for _ in range(times - 1):
            self.fail(*pods, **how)
            self.go_on()
        return self.fail(*pods, **how)


def test_third_failure_in_a_row_of_one_pod_moves_its_ranks_to_a_spare() -> None:
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(2, "p0")
    assert bench.active == ["p0", "p1"]
    bench.go_on()
    plans = sent(bench.fail("p0"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items() if ranks(plan) != NONE} == {"p1": [2, 3], "p2": [0, 1]}
    bench.go_on()
    status = bench.status()
    assert (status.recoveries[-1].rung, status.recoveries[-1].replaced_by) == (Rung.POD, ("p2",))
    assert status.message == (
        "iteration 3 runs with 4 ranks; p0 failed alone, again and again, and is the last choice for ranks: "
        "exception of rank 0 of p0 (no GPU at p0)"
    )


def test_failures_on_the_way_in_count_as_well() -> None:
    """All within one recovery: the other pod never gets as far as running."""
    bench = FailingBench(SETTINGS, "p2")
    bench.fail("p0")
    bench.fail("p0")
    bench.fail("p0")
    assert bench.active == ["p1", "p2"]


def test_what_ended_a_plan_is_not_forgotten_for_a_stronger_fault_of_a_later_one() -> None:
    """All within one recovery: p0 has failed twice, p1 once."""
    bench = FailingBench(SETTINGS, "p2")
    bench.fail("p1")
    bench.fail("p0", cause=Cause.PROCESS_EXIT)
    bench.fail("p0", cause=Cause.PROCESS_EXIT)
    assert bench.active == ["p0", "p1"]
    bench.fail("p0", cause=Cause.PROCESS_EXIT)
    assert bench.active == ["p1", "p2"]


def test_who_only_says_first_that_another_one_failed_keeps_its_ranks() -> None:
    """On the way in as well the strongest fault tells, not the first one."""
    bench = FailingBench(SETTINGS, "p2")
    for _plan in range(3):
        iteration = bench.status().iteration
        bench.worker("p1", 0, STOPPING, Fault(Cause.EXCEPTION, iteration, "connection closed by p0"))
        bench.fail("p0", cause=Cause.PROCESS_EXIT)
    assert bench.active == ["p1", "p2"]


def test_who_was_set_aside_gets_ranks_again_where_nobody_else_is_left() -> None:
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(3, "p0")
    bench.go_on()
    bench.step(AgentDisconnected(bench.sessions.pop("p1")))
    bench.tick(SETTINGS.timeouts.reconnect_s)
    assert ranks(sent(bench.all_are(READY, 3, "p2"), Plan)["p0"]) == [2, 3]


def test_another_spare_comes_first() -> None:
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(3, "p0")
    bench.go_on()
    bench.join("p3")
    bench.step(AgentDisconnected(bench.sessions.pop("p1")))
    bench.tick(SETTINGS.timeouts.reconnect_s)
    plans = sent(bench.all_are(READY, 3, "p2"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items() if ranks(plan) != NONE} == {"p2": [0, 1], "p3": [2, 3]}


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        pytest.param(("p0", "p1"), "no GPU", id="both say the same"),
        pytest.param(("p1", "p0"), "no GPU", id="in another order"),
    ],
)
def test_what_fails_everywhere_moves_nobody(failing: tuple[str, ...], words: str) -> None:
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(10, *failing, words=words)
    assert bench.active == ["p0", "p1"]


def test_pods_that_fail_in_turn_keep_their_ranks() -> None:
    bench = FailingBench(SETTINGS, "p2")
    for number in range(10):
        bench.fail(f"p{number % 2}")
        bench.go_on()
    assert bench.active == ["p0", "p1"]
    bench.fail("p0")
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)


def test_progress_between_them_forgives() -> None:
    bench = FailingBench(SETTINGS, "p2")
    for step in range(9):
        for pod in ("p0", "p1"):
            for local_rank in range(2):
                bench.worker(pod, local_rank, RUNNING, step=step, has_progress=True)
        bench.fail("p0", step=step)
        bench.go_on()
    assert bench.active == ["p0", "p1"]


@pytest.mark.parametrize(
    ("settings", "spares"),
    [
        pytest.param(replace(SETTINGS, spares=0), (), id="nobody else"),
        pytest.param(replace(SETTINGS, spares=0, min_replicas=1), (), id="it would be smaller"),
        pytest.param(
            replace(SETTINGS, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.PROCESS))), ("p2",), id="no rung"
        ),
    ],
)
def test_without_others_it_goes_on_in_place_until_the_limit(settings: JobSettings, spares: tuple[str, ...]) -> None:
    bench = FailingBench(settings, *spares)
    bench.fail_often(10, "p0")
    assert bench.active == ["p0", "p1"]
    bench.go_on()
    bench.fail("p0")
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)


def test_a_rank_that_fails_wherever_it_is_ends_the_job_as_before() -> None:
    """Each spare is tried, none twice, and the limit counts on."""
    bench = FailingBench(replace(SETTINGS, spares=2), "p2", "p3")
    seen = []
    while bench.status().phase is not JobPhase.FAILED:
        seen.append(next(pod.pod for pod in bench.status().pods if 0 in pod.ranks))
        bench.fail(seen[-1], words="rank 0 has a bug")
        if bench.status().phase is not JobPhase.FAILED:
            bench.go_on()
    assert seen == ["p0"] * 3 + ["p2"] * 3 + ["p3"] * 5
    assert bench.status().reason is Reason.NO_PROGRESS


IN_PLACE = replace(SETTINGS, spares=0)


def test_third_failure_in_a_row_of_one_pod_that_nobody_can_replace_gets_a_new_process_once() -> None:
    """What a fault has left in the process may be what raises it again."""
    bench = FailingBench(IN_PLACE)
    bench.fail_often(10, "p0")
    rungs = [recovery.rung for recovery in bench.status().recoveries]
    assert rungs == [Rung.IN_PROCESS] * 2 + [Rung.PROCESS] + [Rung.IN_PROCESS] * 7
    assert bench.incarnations == {("p0", 0): 1}


def test_workers_of_a_pod_that_have_the_same_fault_in_turn_go_on_in_their_processes() -> None:
    """It is the script's, or the node's."""
    bench = FailingBench(IN_PLACE)
    for number in range(9):
        iteration = bench.status().iteration
        bench.worker("p0", number % 2, STOPPING, Fault(Cause.EXCEPTION, iteration, "no GPU"))
        bench.renew(bench.all_are(READY, iteration, "p0", "p1"))
        bench.go_on()
    assert {recovery.rung for recovery in bench.status().recoveries} == {Rung.IN_PROCESS}


def test_another_fault_in_a_row_has_its_own_new_process() -> None:
    bench = FailingBench(IN_PLACE)
    bench.fail_often(4, "p0")
    bench.go_on()
    bench.fail_often(3, "p0", words="another one")
    assert [recovery.rung for recovery in bench.status().recoveries][-1] is Rung.PROCESS
    assert bench.incarnations == {("p0", 0): 2}


def test_progress_since_a_new_process_lets_the_next_faults_have_one_too() -> None:
    bench = FailingBench(IN_PLACE)
    bench.fail_often(3, "p0")
    bench.go_on()
    for pod in ("p0", "p1"):
        for local_rank in range(2):
            bench.worker(pod, local_rank, RUNNING, step=1, has_progress=True)
    bench.fail("p0", step=1)
    for _ in range(2):
        bench.go_on()
        bench.fail("p0", step=1)
    assert [recovery.rung for recovery in bench.status().recoveries][2:] == [
        Rung.PROCESS,
        *[Rung.IN_PROCESS] * 2,
        Rung.PROCESS,
    ]


@pytest.mark.parametrize(
    ("settings", "failing", "words"),
    [
        pytest.param(IN_PLACE, ("p0", "p1"), "no GPU", id="it fails everywhere"),
        pytest.param(
            replace(IN_PLACE, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.JOB))), ("p0",), "", id="not a rung"
        ),
        pytest.param(
            replace(IN_PLACE, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.PROCESS, 0))),
            ("p0",),
            "",
            id="no budget",
        ),
    ],
)
def test_its_process_goes_on_where_a_new_one_is_no_answer(
    settings: JobSettings, failing: tuple[str, ...], words: str
) -> None:
    bench = FailingBench(settings)
    bench.fail_often(10, *failing, words=words)
    assert {recovery.rung for recovery in bench.status().recoveries} == {Rung.IN_PROCESS}


@pytest.mark.parametrize("limit", [1, 2])
def test_a_lower_limit_without_progress_comes_before(limit: int) -> None:
    """Before the job ends, others have their try."""
    bench = FailingBench(replace(SETTINGS, no_progress_limit=limit), "p2")
    bench.fail_often(limit, "p0")
    assert bench.active == ["p1", "p2"]


@pytest.mark.parametrize("other", ["p0", "p1"])
def test_what_says_nothing_of_a_pod_does_not_break_its_row(other: str) -> None:
    """Else a pod that fails twice, is killed for want of memory, fails twice, ... would keep its ranks for ever."""
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(2, "p0")
    bench.go_on()
    bench.fail(other, cause=Cause.PROCESS_SIGNAL)
    bench.go_on()
    bench.fail(other, cause=Cause.PROCESS_SIGNAL)
    assert bench.active == ["p0", "p1"]
    bench.go_on()
    bench.fail("p0")
    assert bench.active == ["p1", "p2"]


def test_who_failed_alone_loses_nothing_at_a_fault_that_says_nothing_of_it() -> None:
    bench = FailingBench(SETTINGS)
    bench.fail_often(3, "p0")
    bench.go_on()
    bench.join("p2")
    bench.fail("p1", cause=Cause.PROCESS_SIGNAL)
    assert bench.active == ["p0", "p1"]
    bench.go_on()
    bench.fail("p0")
    assert bench.active == ["p1", "p2"]


def test_the_only_pod_with_ranks_gives_them_to_a_spare() -> None:
    bench = FailingBench(replace(SETTINGS, replicas=1), "p1")
    bench.fail_often(3, "p0")
    assert bench.active == ["p1"]


@pytest.mark.parametrize("cause", [Cause.PROCESS_SIGNAL, Cause.UNHEALTHY])
def test_what_says_nothing_of_a_pod_counts_for_nothing(cause: Cause) -> None:
    bench = FailingBench(SETTINGS, "p2")
    for _ in range(5):
        bench.fail("p0", cause=cause)
        bench.go_on()
    assert bench.active == ["p0", "p1"]


def test_the_scripts_own_assignment_is_left_to_it() -> None:
    bench = FailingBench(SETTINGS, "p2")
    bench.fail_often(2, "p0")
    bench.go_on()
    job = bench.coordinator._job
    job.rules = replace(job.rules, has_code=True)
    bench.fault("p0", 0, Cause.EXCEPTION)
    assert len(job.history.who_failed(3)) == 1
    assert job.failing_alone() == frozenset()


class GrownBench(ShrunkBench):
    """p0 trained alone, and p3 has come in."""

    def __init__(self, settings: JobSettings = GROWING) -> None:
        super().__init__(settings)
        self.stand(order_of(self.stand(order_of(self.grow()))), is_done=True)
        self.all_are(READY, 1, "p0")
        assert [pod.pod for pod in self.status().pods if pod.ranks] == ["p0", "p3"]

    def fail_on_entry(self) -> list[Action]:
        iteration = self.status().iteration
        self.states["p0"] = self.workers(RUNNING, iteration)
        self.report("p0")
        self.worker("p3", 0, STOPPING, Fault(Cause.EXCEPTION, iteration, "no GPU"), iteration=iteration)
        return self.all_are(READY, iteration, "p0", "p3")


def test_who_came_in_and_cannot_train_leaves_again() -> None:
    """Without it the job trained, and goes on so: it neither ends nor tries again for ever."""
    bench = GrownBench()
    actions: list[Action] = []
    while [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0", "p3"]:
        assert bench.status().phase is not JobPhase.FAILED
        actions = bench.fail_on_entry()
    plans = sent(actions, Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0, 1], "p3": NONE}
    bench.all_are(RUNNING, bench.status().iteration, "p0")
    assert bench.status().phase is JobPhase.RUNNING
    assert "2 fewer than wanted; p3 failed alone" in bench.status().message
    later = bench.live(3000)
    assert sent(later, Halt) == sent(later, Interrupt) == {}


def test_another_pod_may_come_in_after_it() -> None:
    bench = GrownBench()
    while [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0", "p3"]:
        bench.fail_on_entry()
    iteration = bench.status().iteration
    bench.all_are(RUNNING, iteration, "p0")
    bench.join("p4")
    bench.stand(order_of(bench.stand(order_of(bench.live(61)))), is_done=True)
    plans = sent(bench.all_are(READY, iteration, "p0"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0, 1], "p3": NONE, "p4": [2, 3]}


def test_it_stays_where_the_job_may_not_shrink() -> None:
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD), RungBudget(Rung.WORLD, 1))
    bench = GrownBench(replace(GROWING, rungs=rungs))
    for _ in range(5):
        bench.fail_on_entry()
    assert [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0", "p3"]


def test_all_that_came_in_may_be_left_out_together() -> None:
    settings = replace(GROWING, replicas=3, min_replicas=1)
    bench = Bench(settings)
    bench.run("p0", "p1", "p2")
    for pod in ("p1", "p2"):
        bench.step(AgentDisconnected(bench.sessions.pop(pod)))
    bench.tick(settings.timeouts.reconnect_s)
    bench.all_are(READY, 0, "p0")
    bench.all_are(RUNNING, 1, "p0")
    for pod in ("p3", "p4"):
        bench.join(pod)
    bench.tick(10.0)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 1, "p0")
    assert bench.status().world_size == 6
    for number in range(3):
        iteration = bench.status().iteration
        for pod in (("p3", "p4"), ("p4", "p3"))[number % 2]:
            bench.worker(pod, 0, STOPPING, Fault(Cause.EXCEPTION, iteration, "no GPU"), iteration=iteration)
        bench.all_are(READY, iteration, "p0", "p3", "p4")
    assert [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0"]


def test_who_came_in_leaves_again_though_another_pod_has_come_in_since() -> None:
    """The job has not got on since it was smaller."""
    settings = replace(GROWING, replicas=3, min_replicas=1)
    bench = Bench(settings)
    bench.run("p0", "p1", "p2")
    for pod in ("p1", "p2"):
        bench.step(AgentDisconnected(bench.sessions.pop(pod)))
    bench.tick(settings.timeouts.reconnect_s)
    bench.all_are(READY, 0, "p0")
    bench.all_are(RUNNING, 1, "p0")
    bench.join("p3")
    bench.tick(10.0)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 1, "p0")
    bench.tick(settings.timeouts.last_call_s)
    assert [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0", "p3"]
    bench.join("p4")
    bench.tick(10.0)
    for _turn in range(3):
        iteration = bench.status().iteration
        bench.worker("p3", 0, STOPPING, Fault(Cause.EXCEPTION, iteration, "no GPU"), iteration=iteration)
        bench.all_are(READY, iteration, *(pod.pod for pod in bench.status().pods if pod.ranks))
    assert [pod.pod for pod in bench.status().pods if pod.ranks] == ["p0", "p4"]
