"""Findings on all pods of a large job do not hold it up: they are judged when something changes that this rests on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_core.coordinator.health.test_health import ACT, DOWN, LOST, OBSERVE, PATIENT, WatchedBench
from tests.unit.unbroken_core.coordinator.test_coordinator import GONE, READY

from unbroken_core.coordinator.health import settling
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, JobPhase

NUM_PODS = 40


class LargeBench(WatchedBench):
    """A job of many pods with one spare."""

    def __init__(self, settings: JobSettings, num_pods: int = NUM_PODS) -> None:
        self.pods = [f"p{number}" for number in range(num_pods)]
        super().__init__(replace(settings, replicas=num_pods, min_replicas=num_pods - 5, spares=1, timeouts=PATIENT))

    def run(self, *_pods: str) -> None:
        super().run(*self.pods, f"p{len(self.pods)}")


def counted_calls(patch: pytest.MonkeyPatch, name: str) -> list[None]:
    """Return a list that grows with each call of this function by the judgement."""
    calls: list[None] = []
    plain: Callable[..., Any] = getattr(settling, name)

    def counting(*given: Any) -> Any:
        calls.append(None)
        return plain(*given)

    patch.setattr(settling, name, counting)
    return calls


@pytest.mark.parametrize("settings", [ACT, OBSERVE], ids=["act", "observe"])
def test_a_false_alarm_of_all_pods_is_judged_once_and_not_with_each_event(
    settings: JobSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each event of the job cost as much as there were findings."""
    bench = LargeBench(settings)
    for pod in bench.pods:
        bench.find(pod, LOST)
    health = bench.status().health
    judged = counted_calls(monkeypatch, "assess")
    for _round in range(3):
        for pod in bench.pods:
            bench.report(pod)
    assert len(judged) <= 1
    assert health is not None
    assert bench.status().health == health
    assert health.num_findings == NUM_PODS


@pytest.mark.parametrize("is_gone", [True, False], ids=["no spare", "half a spare"])
def test_a_strike_that_nobody_can_act_on_is_not_weighed_with_each_event_of_a_recovery(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each event of a recovery cost as much as there were pods: four times as much in all with 4,000 pods."""
    bench = LargeBench(ACT)
    spare = bench.workers(GONE)
    bench.states[f"p{NUM_PODS}"] = spare if is_gone else [bench.workers(READY)[0], *spare[1:]]
    bench.report(f"p{NUM_PODS}")
    bench.find("p5", LOST)
    weighed = counted_calls(monkeypatch, "takers_of")
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, *bench.pods)
    assert bench.status().phase is JobPhase.PLANNED
    assert len(weighed) <= 3


def test_whoever_could_not_move_does_with_the_first_event_that_makes_it_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = LargeBench(ACT)
    bench.all_are(GONE, -1, f"p{NUM_PODS}")
    bench.find("p5", LOST)
    weighed = counted_calls(monkeypatch, "takers_of")
    for pod in bench.pods:
        bench.report(pod)
    assert (len(weighed) <= 1, [pod.pod for pod in bench.status().pods if pod.unfit]) == (True, [])
    bench.states[f"p{NUM_PODS}"] = bench.workers(READY, incarnation=1)
    bench.report(f"p{NUM_PODS}")
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p5"]


def test_a_burst_of_findings_of_all_pods_is_judged_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each report cost as much as there were findings: 10 s of CPU time for 4,000 pods."""
    bench = LargeBench(ACT, 200)
    judged = counted_calls(monkeypatch, "assess")
    for pod in bench.pods:
        bench.find(pod, DOWN)
    # One by one as long as they are few.
    assert len(judged) <= 2 * 64 + 5
    before = len(judged)
    bench.tick(1.0)
    assert before < len(judged) <= before + 3
    health = bench.status().health
    assert health is not None
    assert (health.num_findings, health.held != "") == (200, True)


def test_what_was_put_off_is_judged_without_another_event() -> None:
    """One more of many is found, and nobody says anything after it."""
    bench = LargeBench(ACT, 100)
    for pod in bench.pods[:80]:
        bench.find(pod, DOWN)
    bench.tick(5.0)
    for pod in bench.pods[80:90]:
        bench.find(pod, LOST)
    job = bench.coordinator._job
    assert job.health.basis != settling._basis(job, bench.now_s)
    bench.tick(2.0)
    assert job.health.basis == settling._basis(job, bench.now_s)


def test_what_is_due_while_it_is_put_off_is_no_tick_without_an_end() -> None:
    bench = LargeBench(ACT, 100)
    for pod in bench.pods[:80]:
        bench.find(pod, DOWN)
    bench.tick(5.0)
    bench.find(bench.pods[80], DOWN)
    bench.coordinator._job.health.due_s = bench.now_s
    bench.report(bench.pods[0])
    deadline_s = bench.coordinator.next_deadline_s()
    assert deadline_s is not None
    assert deadline_s > bench.now_s
