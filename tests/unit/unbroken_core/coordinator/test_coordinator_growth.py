"""What one event costs the coordinator must not depend on how many pods the job has."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import AgentJoined, AgentReported, Event, Observed
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Fault,
    Heartbeat,
    Hello,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    Report,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings, RungBudget
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Role, Rung, WorkerPhase


def count_instructions(call: Callable[[], object]) -> int:
    """Return how many instructions of the interpreter a call takes: work, whatever the machine's speed."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return count


class Life:
    """A job of so many pods, from the first join on; each stage gives every pod one event."""

    def __init__(self, num_pods: int, rungs: tuple[RungBudget, ...]) -> None:
        self.num_pods = num_pods
        self.coordinator = Coordinator(
            JobSettings("digits", replicas=num_pods, ranks_per_pod=2, layers=(Layer("rack", "rack"),), rungs=rungs), 0.0
        )
        self.num_reports = 0
        self.now_s = 0.0
        pods = {f"u{i}": PodObservation(f"p-{i}", f"n{i}", (f"r{i // 8}",)) for i in range(num_pods)}
        self.step(Observed(Observation(pods)))

    def step(self, event: Event) -> None:
        self.coordinator.step(event, self.now_s)

    def join(self) -> None:
        for i in range(self.num_pods):
            states = tuple(WorkerState(rank, 0, WorkerPhase.STARTING) for rank in range(2))
            hello = Hello(PROTOCOL, "digits", f"p-{i}", f"u{i}", "x", f"n{i}", 2, workers=states)
            self.step(AgentJoined(f"s{i}", hello))

    def come_back(self) -> None:
        for i in range(self.num_pods):
            states = tuple(WorkerState(rank, 0, WorkerPhase.RUNNING, 3) for rank in range(2))
            parts = tuple(RankPlan(rank, 2 * i + rank, RankReason.KEPT) for rank in range(2))
            plan = Plan(1, 3, Role.ACTIVE, 2 * self.num_pods, "h", 1, parts, (f"r{i // 8}",))
            hello = Hello(PROTOCOL, "digits", f"p-{i}", f"u{i}", "x", f"n{i}", 2, (), 1, plan, states)
            assert self.coordinator.phase is JobPhase.FORMING
            self.step(AgentJoined(f"s{i}", hello))
        assert self.coordinator.phase is JobPhase.RUNNING

    def report(self, phase: WorkerPhase, iteration: int, incarnation: int = 0) -> None:
        self.now_s += 1.0
        self.num_reports += 1
        port = 1000 if phase is WorkerPhase.READY else 0
        states = tuple(WorkerState(rank, incarnation, phase, iteration, "h", port) for rank in range(2))
        for i in range(self.num_pods):
            self.step(AgentReported(f"s{i}", Report(self.num_reports, states)))

    def beat(self) -> None:
        self.now_s += 1.0
        self.num_reports += 1
        for i in range(self.num_pods):
            self.step(AgentReported(f"s{i}", Heartbeat(self.num_reports)))

    def fail(self) -> None:
        self.now_s += 1.0
        self.num_reports += 1
        fault = Fault(Cause.EXCEPTION, 0, "ValueError")
        states = tuple(WorkerState(rank, 0, WorkerPhase.STOPPING, 0, fault=fault) for rank in range(2))
        self.step(AgentReported("s1", Report(self.num_reports, states)))

    def fail_everywhere(self) -> None:
        """One fault makes the collectives of all ranks fail."""
        self.now_s += 1.0
        self.num_reports += 1
        fault = Fault(Cause.EXCEPTION, 0, "connection reset by peer")
        states = tuple(WorkerState(rank, 0, WorkerPhase.STOPPING, 0, fault=fault) for rank in range(2))
        for i in range(self.num_pods):
            self.step(AgentReported(f"s{i}", Report(self.num_reports, states)))

    def beat_late(self) -> None:
        """Pods that take long to leave are waited for."""
        self.now_s += 15.0
        self.beat()


IN_PROCESS = (RungBudget(Rung.IN_PROCESS),)
JOB = (RungBudget(Rung.IN_PROCESS, limit=0), RungBudget(Rung.JOB))


@pytest.mark.parametrize("rungs", [pytest.param(IN_PROCESS, id="in-process"), pytest.param(JOB, id="job")])
def test_each_stage_of_a_job_costs_each_pod_the_same_in_large_jobs_as_in_small_ones(
    rungs: tuple[RungBudget, ...],
) -> None:
    """Forming with 16,384 pods once took a minute, because every join looked at all pods."""
    few, many = (_work(num_pods, rungs) for num_pods in (32, 256))
    shares = {stage: many[stage] / few[stage] / 8 for stage in few}
    # A first plan sorts its pods; a stage that looked at all pods in each event would cost eight times as much.
    assert {stage: share for stage, share in shares.items() if share > 1.5} == {}


def test_taking_a_large_job_over_costs_each_pod_the_same_as_a_small_one() -> None:
    """With 4,096 pods a new rendezvous once was busy for twenty seconds, longer than it may be silent."""
    few, many = (count_instructions(Life(num_pods, IN_PROCESS).come_back) for num_pods in (32, 256))
    assert many / few / 8 < 1.5


def _work(num_pods: int, rungs: tuple[RungBudget, ...]) -> dict[str, int]:
    life = Life(num_pods, rungs)
    stages: dict[str, Callable[[], None]] = {
        "join": life.join,
        "ready": lambda: life.report(WorkerPhase.READY, -1),
        "enter": lambda: life.report(WorkerPhase.RUNNING, 0),
        "beat": life.beat,
        "fail": life.fail,
        "fail everywhere": life.fail_everywhere,
        "beat late": life.beat_late,
        "leave": lambda: life.report(WorkerPhase.READY, 0),
    }
    if rungs is JOB:
        stages["start again"] = lambda: life.report(WorkerPhase.STARTING, -1, 1)
        stages["ready again"] = lambda: life.report(WorkerPhase.READY, -1, 1)
    stages["enter again"] = lambda: life.report(WorkerPhase.RUNNING, 1, int(rungs is JOB))
    work = {stage: count_instructions(act) for stage, act in stages.items()}
    assert life.coordinator.phase is JobPhase.RUNNING
    return work
