"""From reports of a hang to a name, or none: nobody waits for it, and no strike goes to who only waited."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import Bench, sent

from unbroken_core.coordinator.hangs import ANSWERS_WITHIN_S
from unbroken_core.protocol.messages import Activity, Fault, Interrupt, Plan, Recovery
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, Doing, JobPhase, WorkerPhase

READY, RUNNING, STOPPING = WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.STOPPING
SETTINGS = JobSettings("digits", replicas=4, ranks_per_pod=1, max_faults_per_rank=1)
PODS = ("p0", "p1", "p2", "p3")
OVERDUE = Fault(Cause.SOFT_TIMEOUT, 0, "no progress", 62.0, is_hang=True)
WAITS = Activity(0, Doing.COLLECTIVE, "all_reduce", 62.0, 62.0, 40, 1)
LOADS = Activity(0, Doing.OWN_CODE, "train.py:41 load_batch", 60.0, 60.0, 39, 1, ("/me/train.py:41 in load_batch",))
SENTENCE = "rank 2 hung for 60 s in its own code (train.py:41 load_batch) while ranks 0, 1, 3 waited in all_reduce"


def running() -> Bench:
    """Return a job of four ranks in which rank 0, who waits, is reported for a hang."""
    bench = Bench(SETTINGS)
    bench.run(*PODS)
    return bench


def answer(bench: Bench, pod: str, activity: Activity | None, phase: WorkerPhase = RUNNING) -> None:
    bench.worker(pod, 0, phase, activity=activity, iteration=0)


def last(bench: Bench) -> Recovery:
    return bench.status().recoveries[-1]


def test_everybody_is_told_to_leave_at_once_and_nobody_is_named_before_the_answers() -> None:
    bench = running()
    actions = bench.worker("p0", 0, RUNNING, OVERDUE)
    orders = sent(actions, Interrupt)
    assert set(orders) == set(PODS)
    assert {(order.rank, order.pod) for order in orders.values()} == {(None, "")}
    recovery = last(bench)
    assert (recovery.rank, recovery.pod, recovery.node) == (None, "", "")
    assert recovery.detail == "no progress for 62 s; asks all ranks what they do"


@pytest.mark.parametrize("order", [PODS, PODS[::-1]])
def test_rank_that_the_others_wait_for_is_named_whoever_was_reported_first(order: tuple[str, ...]) -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    for pod in order:
        answer(bench, pod, LOADS if pod == "p2" else WAITS)
    recovery = last(bench)
    assert (recovery.rank, recovery.pod, recovery.node) == (2, "p2", "node-p2")
    assert (recovery.detail, recovery.stack) == (SENTENCE, LOADS.stack)


def test_name_is_given_without_those_who_are_silent_and_again_when_they_have_left() -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    for pod in ("p0", "p1"):
        answer(bench, pod, WAITS)
    bench.tick(ANSWERS_WITHIN_S - 0.1)
    assert last(bench).detail.startswith("no progress")
    bench.tick(0.2)
    assert last(bench).detail == "rank not known: ranks 0, 1 in all_reduce, ranks 2, 3 did not answer"
    answer(bench, "p2", LOADS)
    answer(bench, "p3", WAITS)
    assert (last(bench).rank, last(bench).detail) == (2, SENTENCE)


def test_rank_that_all_others_have_returned_before_is_named() -> None:
    bench = running()
    for pod in ("p0", "p1", "p3"):
        bench.worker(pod, 0, WorkerPhase.COMPLETED)
    bench.worker("p2", 0, RUNNING, OVERDUE)
    answer(bench, "p2", LOADS)
    assert (last(bench).rank, last(bench).detail) == (
        2,
        "rank 2 hung for 60 s in its own code (train.py:41 load_batch); ranks 0, 1, 3 have returned from the training "
        "function",
    )


def test_next_plan_waits_for_no_answer() -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    actions = bench.all_are(READY, 0, *PODS)
    assert set(sent(actions, Plan)) == set(PODS)
    assert last(bench).detail == "rank not known: ranks 0-3 did not answer"
    assert (last(bench).pod, last(bench).node) == ("", "")


def test_late_report_of_a_longer_silence_changes_no_name() -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    for pod in PODS:
        answer(bench, pod, LOADS if pod == "p2" else WAITS)
    bench.worker("p3", 0, RUNNING, replace(OVERDUE, detect_s=99.0, is_certain=True))
    assert last(bench).rank == 2


def test_fault_is_counted_for_the_rank_that_hung_and_for_no_other() -> None:
    bench = running()
    for iteration in range(2):
        bench.worker("p0", 0, RUNNING, replace(OVERDUE, iteration=iteration))
        for pod in PODS:
            activity = replace(LOADS if pod == "p2" else WAITS, iteration=iteration)
            bench.worker(pod, 0, RUNNING, activity=activity)
        bench.all_are(READY, iteration, *PODS)
        if iteration == 0:
            bench.all_are(RUNNING, 1, *PODS)
            assert bench.status().phase is JobPhase.RUNNING
    # One more than a rank may have: p2 gets no further rank; p0, which was reported twice, would.
    faults = bench.coordinator.history.by_place
    assert faults == {("uid-p2", 0): 2}


def test_several_ranks_that_hang_in_several_pods_are_told_and_no_pod_is_blamed() -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    answer(bench, "p0", WAITS)
    answer(bench, "p3", WAITS)
    answer(bench, "p1", LOADS)
    answer(bench, "p2", LOADS)
    recovery = last(bench)
    assert (recovery.rank, recovery.pod, recovery.node) == (None, "", "")
    assert recovery.detail == (
        "ranks 1, 2 hung for 60 s in their own code (train.py:41 load_batch) while ranks 0, 3 waited in all_reduce"
    )


def test_rank_that_waited_and_could_not_leave_is_not_the_culprit_of_the_hang() -> None:
    bench = running()
    bench.worker("p0", 0, RUNNING, OVERDUE)
    for pod in PODS:
        answer(bench, pod, LOADS if pod == "p2" else WAITS)
    bench.all_are(READY, 0, "p0", "p2", "p3")
    bench.worker("p1", 0, WorkerPhase.GONE, Fault(Cause.HARD_TIMEOUT, 0, "did not leave", 30.0))
    assert (last(bench).rank, last(bench).cause, last(bench).detail) == (2, Cause.SOFT_TIMEOUT, SENTENCE)
    assert ("uid-p1", 0) not in bench.coordinator.history.by_place


def test_a_step_that_is_told_together_with_the_hang_was_made_before_it() -> None:
    """Seen before: the seconds that nothing moved counted as progress, and detection took none."""
    bench = running()
    bench.live(1.0)
    for pod in PODS:
        bench.worker(pod, 0, RUNNING, step=9)
    bench.live(66.0)
    bench.worker("p0", 0, RUNNING, OVERDUE, step=10)
    spent = bench.status().time
    assert spent is not None
    # A step takes 4 s: for so long it was none that hung.
    assert (spent.progress_s, spent.redo_s, spent.detect_s) == (1.0 + 66.0 - 62.0, 4.0, 58.0)
