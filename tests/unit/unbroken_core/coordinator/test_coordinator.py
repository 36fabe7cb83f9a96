"""The coordinator, driven by hand: one test for each rule that a message can trigger."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.state_invariants import check_state

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import (
    Action,
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Close,
    Observed,
    Send,
    Tick,
)
from unbroken_core.coordinator.respawning import MAX_HOLD_S
from unbroken_core.coordinator.state.job import MAX_ALONE
from unbroken_core.pod.liveness import RECOVERY_RECONNECT_S
from unbroken_core.pod.stacks import MAX_FRAME_CHARACTERS, MAX_FRAMES
from unbroken_core.protocol.messages import (
    Fault,
    Finish,
    Heartbeat,
    Hello,
    Interrupt,
    JobStatus,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    Refused,
    Report,
    Respawn,
    TimeSpent,
    Welcome,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.protocol.wire import decode, encode
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, Role, Rung, WorkerPhase

READY, RUNNING, STOPPING = WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.STOPPING
GONE, STARTING, COMPLETED = WorkerPhase.GONE, WorkerPhase.STARTING, WorkerPhase.COMPLETED
SETTINGS = JobSettings("digits", replicas=2, spares=1, ranks_per_pod=2)


class Bench:
    """A coordinator and the last thing that each pod said."""

    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.coordinator = Coordinator(settings, 0.0)
        self.states: dict[str, list[WorkerState]] = {}
        self.sessions: dict[str, str] = {}
        self.seq = 0
        self.num_sessions = 0
        self.incarnations: dict[tuple[str, int], int] = {}
        """Of the places that `renew` gave a new process."""

    def step(self, event: Any) -> list[Action]:
        before = self.coordinator.past
        actions = self.coordinator.step(event, self.now_s)
        check_state(self.coordinator, self.now_s, *before)
        return actions

    def tick(self, seconds: float) -> list[Action]:
        """Pass time as the shell does: every deadline on the way gets its tick, and every pod its heartbeats."""
        until_s, actions = self.now_s + seconds, list[Action]()
        while True:
            deadline_s = self.coordinator.next_deadline_s()
            self.now_s = until_s if deadline_s is None or deadline_s > until_s else deadline_s
            if deadline_s is None or deadline_s > until_s:
                return actions
            actions += self.step(Tick())

    def live(self, seconds: float) -> list[Action]:
        """Pass time while all connected pods repeat what they said."""
        actions = list[Action]()
        for _turn in range(int(seconds)):
            actions += self.tick(1.0)
            for pod in list(self.sessions):
                actions += self.report(pod)
        return actions

    def hello(self, pod: str, **changes: Any) -> Hello:
        states = tuple(self.states.setdefault(pod, self.workers(READY)))
        size = self.settings.ranks_per_pod
        hello = Hello(1, "digits", pod, f"uid-{pod}", "s", f"node-{pod}", size, workers=states)
        return replace(hello, **changes)

    def join(self, pod: str, **changes: Any) -> list[Action]:
        self.num_sessions += 1
        session = self.sessions[pod] = f"{pod}#{self.num_sessions}"
        return self.step(AgentJoined(session, self.hello(pod, **changes)))

    def workers(self, phase: WorkerPhase, iteration: int = -1, incarnation: int = 0) -> list[WorkerState]:
        port = 5000 if phase is READY else 0
        return [
            WorkerState(local, incarnation, phase, iteration, "10.0.0.1" if port else "", port + local if port else 0)
            for local in range(self.settings.ranks_per_pod)
        ]

    def report(self, pod: str, is_leaving: bool = False, entered_ago_s: float = 0.0) -> list[Action]:
        self.seq += 1
        message = Report(self.seq, tuple(self.states[pod]), is_leaving, entered_ago_s)
        return self.step(AgentReported(self.sessions[pod], message))

    def all_are(self, phase: WorkerPhase, iteration: int, *pods: str) -> list[Action]:
        actions = []
        for pod in pods:
            self.states[pod] = self.workers_of(pod, phase, iteration)
            actions += self.report(pod)
        return actions

    def workers_of(self, pod: str, phase: WorkerPhase, iteration: int) -> list[WorkerState]:
        """Return the workers of a pod, new processes included."""
        workers = self.workers(phase, iteration)
        return [replace(each, incarnation=self.incarnations.get((pod, each.local_rank), 0)) for each in workers]

    def renew(self, actions: list[Action]) -> list[Action]:
        """Start each process anew that is to be, once the order is there; they get ready."""
        if self.coordinator._job.members.respawning:
            actions = actions + self.tick(MAX_HOLD_S)
        for pod, order in sent(actions, Respawn).items():
            for local_rank, incarnation in order.places:
                self.incarnations[pod, local_rank] = incarnation + 1
                actions = actions + self.worker(pod, local_rank, READY, iteration=-1, incarnation=incarnation + 1)
        return actions

    def worker(
        self, pod: str, local_rank: int, phase: WorkerPhase, fault: Fault | None = None, **more: Any
    ) -> list[Action]:
        old = self.states[pod][local_rank]
        port = 6000 if phase is READY else 0
        self.states[pod][local_rank] = replace(
            old, phase=phase, fault=fault, host="h" if port else "", port=port, **more
        )
        return self.report(pod)

    def fault(
        self, pod: str, local_rank: int, cause: Cause, phase: WorkerPhase = STOPPING, **more: Any
    ) -> list[Action]:
        iteration = self.status().iteration
        return self.worker(pod, local_rank, phase, Fault(cause, iteration, f"{cause} of {pod}", **more))

    def run(self, *pods: str) -> None:
        """Form the job and bring it to RUNNING."""
        for pod in pods:
            self.join(pod)
        self.tick(self.settings.timeouts.last_call_s)
        active = pods[: self.settings.replicas]
        self.all_are(RUNNING, 0, *active)
        assert self.status().phase is JobPhase.RUNNING

    def status(self) -> JobStatus:
        return self.coordinator.status(self.now_s, lambda seconds: f"t{seconds:g}")


def sent(actions: list[Action], kind: type) -> dict[str, Any]:
    """Return the last message of a kind for each pod."""
    return {a.session.split("#")[0]: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)}


def ranks(plan: Plan) -> list[int | None]:
    return [part.rank for part in plan.ranks]


# ---------------------------------------------------------------------------------------------------------- forming


def test_a_job_forms_as_soon_as_all_wanted_pods_are_ready() -> None:
    """3.27"""
    bench = Bench()
    welcome = sent(bench.join("p10"), Welcome)["p10"]
    assert welcome == Welcome(1, 1, 6.0)
    bench.join("p9")
    plans = sent(bench.join("p2"), Plan)
    assert {pod: (plan.role, ranks(plan)) for pod, plan in plans.items()} == {
        "p2": (Role.ACTIVE, [0, 1]),
        "p9": (Role.ACTIVE, [2, 3]),
        "p10": (Role.SPARE, [None, None]),
    }
    assert {part.reason for part in plans["p2"].ranks} == {RankReason.FIRST}
    assert {(plan.world_size, plan.spare_ranks, plan.master_port) for plan in plans.values()} == {(4, 2, 5000)}


def test_spares_get_a_last_call_and_no_more() -> None:
    """3.26"""
    bench = Bench()
    bench.join("p0")
    bench.join("p1")
    assert bench.status().phase is JobPhase.FORMING
    assert "2 of 2 pods are ready" in bench.status().message
    assert set(sent(bench.tick(5.0), Plan)) == {"p0", "p1"}


def test_the_startup_timeout_says_who_is_missing() -> None:
    """3.24, 3.43"""
    bench = Bench()
    bench.join("p0")
    pods = {f"uid-{pod}": PodObservation(pod, "n", ()) for pod in ("p0", "p1", "p2")}
    bench.step(Observed(Observation(pods)))
    actions = bench.live(601)
    finish = sent(actions, Finish)["p0"]
    assert (finish.outcome, finish.reason) == (JobPhase.FAILED, Reason.STARTUP_TIMEOUT)
    assert finish.message == "after 600 s 1 of 2 pods are ready, 1 has joined; not joined: p1, p2"


def test_a_script_that_never_gets_ready_is_told_what_makes_it_ready() -> None:
    bench = Bench(replace(SETTINGS, replicas=1, spares=0))
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    (finish,) = sent(bench.live(601), Finish).values()
    assert "not ready: p0 (workers are ready when they call a function under unbroken.inprocess.Wrapper" in (
        finish.message
    )


def test_a_pod_without_domains_is_waited_for_and_then_put_into_the_unknown_domain() -> None:
    bench = Bench(replace(SETTINGS, spares=0, layers=(Layer("rack", "rack"),)))
    bench.join("p0", domains=("r1",))
    bench.join("p1")
    assert (bench.status().reason, bench.status().phase) == (Reason.WAITING_FOR_TOPOLOGY, JobPhase.FORMING)
    assert "p1" in bench.status().message
    bench.tick(5.0)
    assert [pod.domains for pod in bench.status().pods] == [("r1",), ("unknown",)]
    assert bench.status().phase is JobPhase.PLANNED


def test_an_observation_with_the_domains_ends_the_wait() -> None:
    bench = Bench(replace(SETTINGS, spares=0, layers=(Layer("rack", "rack"),)))
    bench.join("p0", domains=("r2",))
    bench.join("p1")
    plans = sent(bench.step(Observed(Observation({"uid-p1": PodObservation("p1", "n1", ("r1",))}))), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p1": [0, 1], "p0": [2, 3]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 2}, "protocol: want 1, got 2; agent and rendezvous must run the same image"),
        ({"job": "other"}, "job: want 'digits', got 'other'"),
        ({"ranks_per_pod": 8}, "ranksPerPod: want 2 workers in each pod of the job, got 8 in pod p1"),
        ({"pod_uid": ""}, "pod_uid: want the uid of the pod, got an empty string"),
        ({"pod": "thief", "pod_uid": "uid-p0"}, "pod_uid: uid-p0 belongs to pod p0, got pod thief"),
    ],
)
def test_an_agent_that_does_not_belong_is_refused_and_changes_nothing(changes: dict[str, Any], reason: str) -> None:
    bench = Bench()
    bench.join("p0")
    before = bench.status()
    bench.num_sessions += 1
    actions = bench.step(AgentJoined("x#9", replace(bench.hello("p1"), **changes)))
    assert actions == [Send("x#9", Refused(reason)), Close("x#9")]
    after = bench.status()
    assert replace(after, refused=(), revision=before.revision, message=before.message) == before
    assert [text.partition(": ")[2] for text in after.refused] == [reason]
    assert after.message == f"{before.message}; refused: {after.refused[0]}"


def test_a_script_that_exits_at_once_fails_the_job_with_its_last_words() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    bench.join("p1")
    waits: list[float] = []
    for incarnation in range(6):
        died_s = bench.now_s
        fault = Fault(Cause.PROCESS_EXIT, -1, "exited with code 3: OSError: no disk yet")
        actions = bench.worker("p0", 0, GONE, fault, incarnation=incarnation)
        if bench.status().phase is JobPhase.FAILED:
            break
        while not sent(actions, Respawn):
            actions = bench.live(1)
        assert sent(actions, Respawn)["p0"].places == ((0, incarnation),)
        waits.append(round(bench.now_s - died_s))
        bench.worker("p0", 0, STARTING, incarnation=incarnation + 1)
    assert waits == [1, 2, 4, 8]
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.FAILED_BEFORE_READY)
    assert "p0 worker 0 ended 5 times: exited with code 3: OSError: no disk yet" in status.message


# ---------------------------------------------------------------------------------------------------------- recovery


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("exited with code 1: NameError: name 'modle' is not defined", ""),
        ("exited with code 1: TypeError: got <function train at 0x7f01>", ""),
        ("exited with code 1: python3: No module named trian", ""),
        ("exited with code 1: python3: Error while finding module specification: No module named 'a.b'", ""),
        ("exited with code 2: python3: can't open file '/home/me/trian.py': [Errno 2] No such file or directory", ""),
        ("exited with code 1: KeyError: 'RANK'", "leave in-process out of restart.rungs"),
        (
            "exited with code 1: ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
            "variable RANK expected, but not set",
            "A process has a rank only inside a function wrapped by unbroken.inprocess.Wrapper: move what needs one, "
            "such as init_process_group, into it, or, for a script as written for torchrun, leave in-process out",
        ),
        ("exited with code 0 before it completed (does the script call it?)", "leave in-process out of restart.rungs"),
        ("exited with code 1: ValueError: torch.distributed is already initialised", "Move init_process_group inside"),
    ],
)
def test_a_mistake_in_the_script_is_tried_once_more_and_told_with_what_to_change(words: str, advice: str) -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    bench.join("p1")
    for incarnation in range(2):
        assert bench.status().phase is JobPhase.FORMING
        words = words.replace("0x7f01", f"0x7f0{incarnation}")
        bench.worker("p0", 0, GONE, Fault(Cause.PROCESS_EXIT, -1, words), incarnation=incarnation)
        bench.live(2)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.FAILED_BEFORE_READY)
    assert f"p0 worker 0 ended 2 times: {words}" in status.message
    assert advice in status.message


def test_the_time_of_a_plan_that_not_all_have_entered_counts() -> None:
    """Seen before: a spare that stood still cost 30 s, and the recovery was said to have taken 0.4 s."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.now_s = 10.0
    bench.fault("p0", 1, Cause.EXCEPTION)
    bench.now_s = 11.0
    bench.all_are(READY, 0, "p0", "p1")
    bench.now_s = 16.0
    bench.fault("p0", 1, Cause.EXCEPTION)
    bench.now_s = 18.0
    bench.all_are(READY, 1, "p0", "p1")
    bench.now_s = 20.0
    bench.all_are(RUNNING, 2, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert recovery.phase_s == {"detect": 0.0, "stop": 3.0, "plan": 0.0, "enter": 7.0}
    assert (recovery.started_at, recovery.ended_at) == ("t10", "t20")


def test_an_exception_costs_an_in_process_restart() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.now_s = 10.0
    interrupts = sent(bench.fault("p0", 1, Cause.EXCEPTION, detect_s=0.25), Interrupt)
    assert interrupts["p1"] == Interrupt(1, 0, Cause.EXCEPTION, 1, "p0", "exception of p0")
    assert set(interrupts) == {"p0", "p1", "p2"}
    bench.all_are(READY, 0, "p0")
    bench.now_s = 11.0
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert [part.reason for part in plans["p0"].ranks] == [RankReason.KEPT] * 2
    bench.now_s = 13.0
    bench.all_are(RUNNING, 1, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert (recovery.rung, recovery.cause, recovery.rank, recovery.pod) == (Rung.IN_PROCESS, Cause.EXCEPTION, 1, "p0")
    assert recovery.phase_s == {"detect": 0.25, "stop": 1.0, "plan": 0.0, "enter": 2.0}
    assert (recovery.started_at, recovery.ended_at) == ("t10", "t13")
    assert bench.status().restarts_by_rung == {"in-process": 1}
    assert bench.status().restarts_by_cause == {"exception": 1}


def test_a_killed_worker_is_replaced_by_a_spare_at_once_and_heals_into_a_spare() -> None:
    """Spare before respawn."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    assert not sent(bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE), Respawn)
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p2": [0, 1], "p1": [2, 3], "p0": [None, None]}
    assert {part.reason for part in plans["p2"].ranks} == {RankReason.REPLACED}
    actions = bench.all_are(RUNNING, 1, "p1", "p2")
    assert not sent(actions, Respawn), "a new process takes no core from the recovery, nor from its first collective"
    assert sent(bench.tick(0.3), Respawn)["p0"].places == ((0, 0),)
    assert bench.status().recoveries[0].replaced_by == ("p2",)
    bench.states["p0"] = [replace(bench.workers(READY, -1, 1)[0]), bench.workers(READY, 0)[1]]
    bench.report("p0")
    assert (bench.status().spare_ranks, bench.status().phase) == (2, JobPhase.RUNNING)


def test_a_new_process_does_not_wait_for_a_recovery_that_takes_long() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    assert not sent(bench.tick(0.9), Respawn)
    assert sent(bench.tick(0.2), Respawn)["p0"].places == ((0, 0),)


def test_without_a_spare_the_others_wait_for_the_new_process() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    assert set(sent(bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE), Respawn)) == {"p0"}
    bench.worker("p0", 1, READY)
    assert not sent(bench.all_are(READY, 0, "p1"), Plan)
    assert bench.status().reason is Reason.WAITING_FOR_WORKERS
    assert set(sent(bench.worker("p0", 0, READY, incarnation=1, iteration=-1), Plan)) == {"p0", "p1"}
    bench.all_are(RUNNING, 1, "p1")
    bench.states["p0"] = [replace(state, phase=RUNNING, iteration=1, fault=None) for state in bench.states["p0"]]
    bench.report("p0")
    assert bench.status().restarts_by_rung == {"process": 1}


def test_the_strongest_evidence_names_the_culprit_then_the_earliest() -> None:
    """4.26"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.now_s = 5.0
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.now_s = 6.0
    bench.fault("p0", 1, Cause.EXCEPTION, detect_s=2.0)
    assert bench.status().recoveries[0].rank == 1
    bench.fault("p1", 0, Cause.PROCESS_SIGNAL, GONE)
    recovery = bench.status().recoveries[0]
    assert (recovery.cause, recovery.rank, recovery.num_faults) == (Cause.PROCESS_SIGNAL, 2, 3)


def test_other_faults_of_a_recovery_are_told_with_who_took_over_from_whom() -> None:
    """A process that exits at once, and a rank elsewhere that hangs and cannot be interrupted."""
    bench = Bench(replace(SETTINGS, spares=2))
    bench.run("p0", "p1", "p2", "p3")
    bench.fault("p1", 0, Cause.PROCESS_EXIT, GONE)
    (recovery,) = bench.status().recoveries
    assert (recovery.num_faults, recovery.taken_by, recovery.others) == (1, "", ())
    bench.fault("p0", 1, Cause.HARD_TIMEOUT, GONE)
    (recovery,) = bench.status().recoveries
    assert (recovery.rank, recovery.num_faults, recovery.replaced_by) == (2, 2, ("p2", "p3"))
    assert [(other.cause, other.rank, other.pod) for other in recovery.others] == [(Cause.HARD_TIMEOUT, 1, "p0")]
    seats = {rank: pod.pod for pod in bench.status().pods for rank in pod.ranks}
    assert (recovery.taken_by, recovery.others[0].taken_by) == (seats[2], seats[1])
    assert sorted(seats.values()) == ["p2", "p2", "p3", "p3"]


def test_only_a_few_faults_of_a_recovery_are_told_the_strongest_and_short() -> None:
    bench = Bench(replace(SETTINGS, replicas=5))
    pods = ["p0", "p1", "p2", "p3", "p4"]
    bench.run(*pods, "p5")
    for number, pod in enumerate(pods):
        bench.now_s += 1.0
        said = Fault(Cause.EXCEPTION, 0, f"ValueError:\n  {number} {'x' * 1000}")
        bench.worker(pod, 0, STOPPING, said)
    bench.fault("p4", 1, Cause.PROCESS_EXIT, GONE)
    (recovery,) = bench.status().recoveries
    assert (recovery.rank, recovery.num_faults) == (9, 6)
    assert [other.rank for other in recovery.others] == [0, 2, 4, 6], "the earliest of those that are alike"
    assert recovery.others[0].detail == f"ValueError: 0 {'x' * 1000}"[:300]
    assert decode(encode(bench.status()), JobStatus) == bench.status()


def test_what_only_waited_in_a_hang_is_no_other_fault() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    for pod in ("p0", "p1"):
        bench.fault(pod, 0, Cause.SOFT_TIMEOUT, is_hang=True)
    (recovery,) = bench.status().recoveries
    assert (recovery.num_faults, recovery.others) == (2, ())


def test_the_culprits_stack_is_told_and_bounded_whatever_was_sent() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    frames = tuple(f"train.py:{line} in step" for line in range(MAX_FRAMES))
    bench.fault("p0", 0, Cause.EXCEPTION, stack=("outer.py:1 in main", *frames))
    assert bench.status().recoveries[0].stack == frames
    bench.fault("p1", 1, Cause.HARD_TIMEOUT, stack=("x" * 100_000,))
    assert bench.status().recoveries[0].stack == ("x" * MAX_FRAME_CHARACTERS,)


def test_a_fault_is_as_old_as_it_was_when_it_was_told_first() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.now_s = 5.0
    bench.fault("p0", 0, Cause.EXCEPTION, detect_s=0.5)
    bench.now_s = 6.0
    bench.fault("p1", 0, Cause.EXCEPTION, detect_s=3.0)
    bench.now_s = 7.0
    bench.fault("p1", 0, Cause.EXCEPTION, detect_s=0.0)
    bench.fault("p0", 0, Cause.EXCEPTION, detect_s=6.0)
    recovery = bench.status().recoveries[0]
    assert (recovery.rank, recovery.num_faults) == (2, 2)


def test_a_fault_while_planned_belongs_to_the_same_recovery() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    assert bench.status().iteration == 1
    bench.all_are(RUNNING, 1, "p0")
    assert bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 1, "p0", "p1")
    bench.all_are(READY, 1, "p0", "p1")
    bench.live(13)  # p1 never entered iteration 1, and says so: it is ready.
    bench.all_are(RUNNING, 2, "p0", "p1")
    status = bench.status()
    assert (status.phase, status.iteration) == (JobPhase.RUNNING, 2)
    assert status.restarts_by_rung == {"in-process": 1}


def test_a_fault_of_an_iteration_that_is_over_is_ignored() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    before = bench.status()
    assert bench.worker("p0", 0, RUNNING, Fault(Cause.SOFT_TIMEOUT, 0, "late")) == []
    assert bench.status().phase is before.phase


def test_a_broken_connection_has_a_grace_and_then_costs_the_pod() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.step(AgentDisconnected(bench.sessions["p0"]))
    assert not sent(bench.tick(4.9), Interrupt)
    interrupt = sent(bench.tick(0.2), Interrupt)["p1"]
    assert (interrupt.cause, interrupt.pod, interrupt.rank) == (Cause.POD_LOST, "p0", None)
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p2": [0, 1], "p1": [2, 3]}


def test_an_agent_that_comes_back_in_time_costs_nothing() -> None:
    """3.23"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    old = bench.sessions["p0"]
    plan = Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, ())
    bench.step(AgentDisconnected(old))
    bench.tick(4.0)
    actions = bench.join("p0", term=1, plan=plan)
    assert not sent(actions, Interrupt)
    bench.live(10)
    assert (bench.status().phase, bench.status().iteration) == (JobPhase.RUNNING, 0)
    assert bench.coordinator.term == 1


@pytest.mark.parametrize(
    ("iteration", "incarnation", "cause", "culprit"),
    [(0, 0, Cause.EXCEPTION, "p1"), (-1, 1, Cause.PROCESS_EXIT, "p0")],
)
def test_processes_that_never_heard_a_plan_of_their_restarted_agent_are_no_new_ones(
    iteration: int, incarnation: int, cause: Cause, culprit: str
) -> None:
    """3.23: who failed before stays the culprit; one that took the place of another is evidence of a fault."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.EXCEPTION)
    plan = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)["p0"]
    assert ranks(plan) == [0, 1]
    bench.all_are(RUNNING, 1, "p1")
    bench.step(AgentDisconnected(bench.sessions["p0"]))
    bench.states["p0"] = bench.workers(READY, iteration, incarnation)
    actions = bench.join("p0", term=1, plan=plan)
    interrupt = sent(actions, Interrupt)["p1"]
    assert (interrupt.cause, interrupt.pod, interrupt.iteration) == (cause, culprit, 1)
    assert not sent(actions, Respawn)
    plans = sent(bench.all_are(READY, 1, "p1"), Plan)
    assert ranks(plans["p0"]) == [0, 1]


def pass_over(bench: Bench, pod: str, plan: Plan) -> list[Action]:
    """Restart the agent of a pod just as it has the plan: its processes never get it."""
    bench.step(AgentDisconnected(bench.sessions[pod]))
    return bench.join(pod, term=1, plan=plan)


PROCESS_RUNGS = (RungBudget(Rung.PROCESS), RungBudget(Rung.POD), RungBudget(Rung.IN_PROCESS, 0))


@pytest.mark.parametrize("has_another_fault", [False, True])
def test_a_process_whose_agent_was_restarted_at_the_first_plan_goes_on_though_the_cheapest_rung_is_used_up(
    has_another_fault: bool,
) -> None:
    """A recovery blamed it for the end of a process, and ended it; who really failed went on."""
    bench = Bench(replace(SETTINGS, rungs=PROCESS_RUNGS))
    for pod in ("p0", "p1", "p2"):
        actions = bench.join(pod)
    bench.all_are(RUNNING, 0, "p1")
    actions = pass_over(bench, "p0", sent(actions, Plan)["p0"])
    assert sent(actions, Interrupt)["p1"].detail.startswith("never got the plan")
    if has_another_fault:
        bench.fault("p1", 0, Cause.EXCEPTION)
    actions = bench.all_are(READY, 0, "p1") + bench.live(5)
    assert list(sent(actions, Respawn)) == ["p1"] * has_another_fault
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod) == (Cause.EXCEPTION, "p1" if has_another_fault else "p0")


def test_a_restart_of_an_agent_is_no_fault_of_a_rank() -> None:
    bench = Bench(replace(SETTINGS, max_faults_per_rank=0))
    for pod in ("p0", "p1", "p2"):
        actions = bench.join(pod)
    bench.all_are(RUNNING, 0, "p1")
    assert sent(pass_over(bench, "p0", sent(actions, Plan)["p0"]), Interrupt)
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert ranks(plans["p0"]) == [0, 1]


def test_a_process_that_fails_by_itself_after_it_never_got_a_plan_is_replaced() -> None:
    bench = Bench(replace(SETTINGS, spares=0, rungs=PROCESS_RUNGS))
    for pod in ("p0", "p1"):
        actions = bench.join(pod)
    bench.all_are(RUNNING, 0, "p1")
    pass_over(bench, "p0", sent(actions, Plan)["p0"])
    bench.all_are(READY, 0, "p1")
    assert bench.status().iteration == 1
    bench.all_are(RUNNING, 1, "p0")
    bench.worker("p0", 0, STOPPING, Fault(Cause.EXCEPTION, 1, "CudaError: broken"), iteration=1)
    actions = bench.all_are(READY, 1, "p0", "p1") + bench.live(5)
    assert list(sent(actions, Respawn)) == ["p0"]
    (recovery,) = bench.status().recoveries
    assert (recovery.pod, recovery.detail) == ("p0", "CudaError: broken")


def test_a_pod_whose_agent_is_restarted_at_each_plan_loses_its_ranks_to_a_spare() -> None:
    """Its agent may run out of memory there, or its disk be full."""
    bench = Bench()
    for pod in ("p0", "p1", "p2"):
        actions = bench.join(pod)
    plans = sent(actions, Plan)
    for iteration in range(MAX_ALONE):
        assert plans["p0"].role is Role.ACTIVE
        bench.all_are(RUNNING, iteration, "p1")
        pass_over(bench, "p0", plans["p0"])
        plans = sent(bench.all_are(READY, iteration, "p1") + bench.live(6), Plan)
    assert (plans["p0"].role, plans["p2"].role) == (Role.SPARE, Role.ACTIVE)


def test_a_silent_pod_is_lost_after_the_heartbeat_timeout() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    silent = bench.sessions.pop("p0")
    actions = bench.live(31)
    assert Close(silent) in actions
    assert sent(actions, Interrupt)["p1"].cause is Cause.HEARTBEAT_LOST


@pytest.mark.parametrize(("is_silent", "cause"), [(False, Cause.POD_LOST), (True, Cause.HEARTBEAT_LOST)])
def test_a_lost_pod_is_blamed_though_its_worker_without_a_rank_starts(is_silent: bool, cause: Cause) -> None:
    """Nothing that its other workers had to tell is known."""
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD))
    bench = Bench(replace(SETTINGS, spares=0, min_replicas=1, max_ranks=3, rungs=rungs))
    for pod in ("p0", "p1"):
        bench.join(pod)
    bench.all_are(RUNNING, 0, "p0")
    bench.worker("p1", 0, RUNNING, iteration=0)
    assert bench.status().phase is JobPhase.RUNNING
    bench.worker("p1", 1, GONE, Fault(Cause.PROCESS_SIGNAL, -1, "killed by signal 9 (SIGKILL)"))
    session = bench.sessions.pop("p1")
    if not is_silent:
        bench.step(AgentDisconnected(session))
    bench.fault("p0", 0, Cause.EXCEPTION)
    actions = bench.all_are(READY, 0, "p0") + bench.live(31)
    assert ranks(sent(actions, Plan)["p0"]) == [0, 1]
    bench.all_are(RUNNING, 1, "p0")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.rank) == (cause, "p1", None)


@pytest.mark.parametrize("gone", [Cause.POD_LEAVING, Cause.POD_LOST, Cause.NODE_LOST])
def test_a_pod_that_the_operator_reports_gone_is_replaced_at_once(gone: Cause) -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    pods = {
        f"uid-{pod}": PodObservation(pod, "n", (), gone=gone if pod == "p0" else None) for pod in ("p0", "p1", "p2")
    }
    assert sent(bench.step(Observed(Observation(pods))), Interrupt)["p1"].cause is gone
    assert set(sent(bench.all_are(READY, 0, "p1"), Plan)) == {"p0", "p1", "p2"}
    assert {pod.pod: pod.ranks for pod in bench.status().pods} == {"p0": (), "p1": (2, 3), "p2": (0, 1)}


def test_a_pod_that_the_operator_has_not_seen_yet_is_not_gone() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    pods = {"uid-p0": PodObservation("p0", "n", ())}
    assert bench.step(Observed(Observation(pods))) == []
    assert sent(bench.step(Observed(Observation({}))), Interrupt)["p1"].pod == "p0"


def test_a_pod_that_is_told_to_end_gives_its_ranks_away() -> None:
    """1.25, 3.20, 3.45"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    assert sent(bench.report("p0", is_leaving=True), Interrupt)["p1"].cause is Cause.POD_LEAVING
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert ranks(plans["p2"]) == [0, 1]


def test_a_worker_that_never_leaves_is_replaced_after_the_barrier() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p1")
    bench.worker("p0", 0, READY)
    bench.worker("p0", 1, STOPPING)
    assert not sent(bench.live(119), Respawn)
    actions = bench.live(2)
    assert sent(actions, Respawn)["p0"].places == ((1, 0),)
    assert ranks(sent(actions, Plan)["p2"]) == [0, 1]
    assert bench.status().recoveries[0].cause is Cause.HARD_TIMEOUT


def test_a_worker_that_never_enters_is_replaced_after_the_barrier() -> None:
    bench = Bench()
    for pod in ("p0", "p1", "p2"):
        bench.join(pod)
    bench.all_are(RUNNING, 0, "p0")
    actions = bench.live(121)
    assert sent(actions, Interrupt)["p0"].pod == "p1"
    assert sent(actions, Respawn)["p1"].places == ((0, 0), (1, 0))


def test_a_pod_that_is_away_when_the_barrier_is_over_is_waited_for_no_longer_than_in_a_recovery() -> None:
    bench = Bench()
    for pod in ("p0", "p1", "p2"):
        bench.join(pod)
    bench.all_are(RUNNING, 0, "p0")
    bench.live(119)
    bench.tick(0.5)
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.tick(0.5)
    assert bench.status().phase is JobPhase.INTERRUPTED
    assert bench.coordinator.next_deadline_s() == 119.5 + RECOVERY_RECONNECT_S


def test_a_world_that_may_shrink_goes_on_with_fewer_ranks() -> None:
    """1.24"""
    bench = Bench(replace(SETTINGS, spares=0, min_replicas=1))
    bench.run("p0", "p1")
    pods = {"uid-p0": PodObservation("p0", "n", ()), "uid-p1": PodObservation("p1", "n", ())}
    bench.step(Observed(Observation(pods)))
    bench.step(Observed(Observation({"uid-p1": pods["uid-p1"]})))
    plans = sent(bench.all_are(READY, 0, "p1"), Plan)
    assert [(part.rank, part.reason) for part in plans["p1"].ranks] == [
        (0, RankReason.SHIFTED),
        (1, RankReason.SHIFTED),
    ]
    bench.all_are(RUNNING, 1, "p1")
    status = bench.status()
    assert (status.restarts_by_rung, status.world_size, status.lost_ranks) == ({"world": 1}, 2, 2)


def test_too_few_pods_are_waited_for_and_then_the_job_fails() -> None:
    """3.6"""
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    bench.report("p0", is_leaving=True)
    bench.all_are(READY, 0, "p1")
    assert bench.status().reason is Reason.BELOW_MINIMUM
    assert "1 of 2 are there" in bench.status().message
    bench.live(601)
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.BELOW_MINIMUM)


def test_waiting_for_pods_changes_the_status_once() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    bench.report("p0", is_leaving=True)
    bench.all_are(READY, 0, "p1")
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.tick(5.0)
    before = bench.status()
    for seq in range(100, 150):
        bench.tick(1.0)
        bench.step(AgentReported(bench.sessions["p1"], Heartbeat(seq)))
    assert (bench.status().revision, bench.status().message) == (before.revision, before.message)


def test_pods_that_come_up_together_after_a_shortage_all_get_ranks() -> None:
    bench = Bench(replace(SETTINGS, replicas=3, min_replicas=2, spares=0))
    bench.run("p0", "p1", "p2")
    for pod in ("p1", "p2"):
        bench.report(pod, is_leaving=True)
    bench.all_are(READY, 0, "p0")
    assert bench.status().reason is Reason.BELOW_MINIMUM
    bench.states["p8"] = bench.workers(STARTING)
    bench.join("p8")
    assert sent(bench.join("p7"), Plan) == {}
    plans = sent(bench.all_are(READY, -1, "p8"), Plan)
    assert sorted(rank for pod in plans for rank in ranks(plans[pod]) if rank is not None) == [0, 1, 2, 3, 4, 5]


def test_a_pod_that_does_not_come_up_after_a_shortage_is_not_waited_for_long() -> None:
    bench = Bench(replace(SETTINGS, replicas=3, min_replicas=2, spares=0))
    bench.run("p0", "p1", "p2")
    for pod in ("p1", "p2"):
        bench.report(pod, is_leaving=True)
    bench.all_are(READY, 0, "p0")
    bench.states["p8"] = bench.workers(STARTING)
    bench.join("p8")
    bench.join("p7")
    plans = sent(bench.tick(SETTINGS.timeouts.last_call_s), Plan)
    assert sorted(rank for pod in plans for rank in ranks(plans[pod]) if rank is not None) == [0, 1, 2, 3]


def test_a_new_process_is_no_end_of_a_shortage_of_pods() -> None:
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.PROCESS), RungBudget(Rung.POD))
    bench = Bench(replace(SETTINGS, min_replicas=1, spares=0, rungs=rungs))
    bench.run("p0", "p1")
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    bench.report("p1", is_leaving=True)
    bench.worker("p0", 1, READY)
    assert bench.status().reason is Reason.WAITING_FOR_WORKERS, "only a new process is waited for"
    bench.states["p8"] = bench.workers(STARTING)
    bench.join("p8")
    bench.worker("p0", 0, READY, incarnation=1, iteration=-1)
    before = bench.status()
    assert before.reason is Reason.BELOW_MINIMUM, "no rung allows the smaller world"
    bench.step(Tick())
    assert bench.status() == before


def test_a_pod_that_comes_in_time_ends_the_wait() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    bench.report("p0", is_leaving=True)
    bench.all_are(READY, 0, "p1")
    assert ranks(sent(bench.join("p7"), Plan)["p7"]) == [0, 1]


def test_when_the_in_process_budget_is_used_up_the_culprits_process_is_replaced() -> None:
    rungs = (RungBudget(Rung.IN_PROCESS, 1, 3600.0), RungBudget(Rung.PROCESS))
    bench = Bench(replace(SETTINGS, spares=0, rungs=rungs))
    bench.run("p0", "p1")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 1, "p0")
    actions = bench.all_are(READY, 1, "p1")
    assert sent(actions, Respawn)["p0"].places == ((0, 0),)
    assert not sent(actions, Plan)


def test_a_pod_that_may_be_split_goes_on_without_its_dead_worker() -> None:
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD))
    bench = Bench(replace(SETTINGS, replicas=1, spares=0, ranks_per_pod=4, min_ranks_per_pod=1, rungs=rungs))
    bench.run("p0")
    bench.fault("p0", 3, Cause.PROCESS_SIGNAL, GONE)
    for local_rank in range(2):
        bench.worker("p0", local_rank, READY)
    plan = sent(bench.worker("p0", 2, READY), Plan)["p0"]
    assert (ranks(plan), plan.world_size) == ([0, 1, 2, None], 3)
    for local_rank in range(3):
        bench.worker("p0", local_rank, RUNNING, iteration=1)
    assert bench.status().restarts_by_rung == {"world": 1}
    bench.worker("p0", 3, READY, incarnation=1, iteration=-1)
    bench.fault("p0", 0, Cause.EXCEPTION)
    plans = [sent(bench.worker("p0", local_rank, READY), Plan) for local_rank in range(3)]
    assert ranks(plans[-1]["p0"]) == [0, 1, 2, 3], "the world grows back at the next plan"


def test_a_new_process_that_the_recovery_does_not_wait_for_is_started_after_it() -> None:
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD))
    bench = Bench(replace(SETTINGS, replicas=2, min_replicas=1, spares=0, rungs=rungs))
    bench.run("p0", "p1")
    assert not sent(bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE), Respawn)
    actions = bench.all_are(READY, 0, "p1")
    assert ranks(sent(actions, Plan)["p1"]) == [0, 1]
    actions += bench.all_are(RUNNING, 1, "p1")
    assert not sent(actions, Respawn)
    assert sent(bench.tick(0.3), Respawn)["p0"].places == ((0, 0),)


def _fail_again(bench: Bench, iteration: int, step: int) -> None:
    """Run both pods to this step, then let a rank raise, and bring them into the next iteration."""
    for pod in ("p0", "p1"):
        bench.states[pod] = [replace(state, step=step) for state in bench.workers_of(pod, RUNNING, iteration)]
        bench.report(pod)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.renew(bench.all_are(READY, iteration, "p0", "p1"))


def test_a_script_that_fails_again_and_again_without_progress_fails_the_job() -> None:
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=3, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    for iteration in range(4):
        assert bench.status().phase in (JobPhase.RUNNING, JobPhase.PLANNED)
        _fail_again(bench, iteration, step=7)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)
    assert "4 faults in a row" in status.message
    assert "exception of rank 0 of p0" in status.message


def test_without_a_limit_only_a_fault_that_comes_back_word_by_word_fails_the_job() -> None:
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=None, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    for iteration in range(40):
        bench.all_are(RUNNING, iteration, "p0", "p1")
        bench.worker("p0", 0, STOPPING, Fault(Cause.EXCEPTION, iteration, f"RuntimeError: batch {iteration}"))
        bench.all_are(READY, iteration, "p0", "p1")
    assert bench.status().phase is JobPhase.PLANNED
    for iteration in range(40, 51):
        assert bench.status().phase is JobPhase.PLANNED
        _fail_again(bench, iteration, step=-1)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)
    assert "the same fault came in 11 recoveries in a row" in status.message


def test_without_a_limit_a_fault_with_another_number_each_time_fails_the_job_in_the_end() -> None:
    """Seen before: an error with the loss in its text went on for ever, 43 iterations a second."""
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=None, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    iteration = 0
    while bench.status().phase is JobPhase.PLANNED or not iteration:
        assert iteration < 200
        bench.all_are(RUNNING, iteration, "p0", "p1")
        bench.worker("p0", 0, STOPPING, Fault(Cause.EXCEPTION, iteration, f"RuntimeError: loss is {iteration}"))
        bench.all_are(READY, iteration, "p0", "p1")
        iteration += 1
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)
    assert status.message.startswith("101 recoveries in a row from faults that a script has, without progress between")
    assert "RuntimeError: loss is 100" in status.message


@pytest.mark.parametrize("progress_at", [None, 20])
def test_without_a_limit_faults_that_take_turns_fail_the_job_too(progress_at: int | None) -> None:
    """A full disk stops two ranks in words of their own, and now one is first, now the other."""
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=None, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    num_recoveries = 0
    while bench.status().phase is JobPhase.PLANNED or not num_recoveries:
        assert num_recoveries < 100
        for pod in ("p0", "p1"):
            step = 7 if progress_at is not None and num_recoveries >= progress_at else -1
            bench.states[pod] = [replace(one, step=step) for one in bench.workers_of(pod, RUNNING, num_recoveries)]
            bench.report(pod)
        words = ("OSError: no space", "SafetensorError: no space")[num_recoveries % 2]
        bench.worker("p0", 0, STOPPING, Fault(Cause.EXCEPTION, num_recoveries, words))
        bench.all_are(READY, num_recoveries, "p0", "p1")
        num_recoveries += 1
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.NO_PROGRESS)
    assert num_recoveries == 61 + (progress_at or 0)
    assert "the same fault came in 31 recoveries, with others between them, without any progress" in status.message


@pytest.mark.parametrize(
    ("num_exits", "is_over"),
    [
        pytest.param(4, True, id="all ranks: the script gives up"),
        pytest.param(1, False, id="one rank: a fault like any other"),
    ],
)
def test_a_script_that_leaves_by_sys_exit_on_all_ranks_is_run_once_more(num_exits: int, is_over: bool) -> None:
    bench = Bench(replace(SETTINGS, spares=0, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    places = [(pod, local) for pod in ("p0", "p1") for local in (0, 1)][:num_exits]
    for iteration in range(2):
        bench.all_are(RUNNING, iteration, "p0", "p1")
        for pod, local in places:
            fault = Fault(Cause.BASE_EXCEPTION, iteration, "SystemExit: 3")
            bench.worker(pod, local, STOPPING, fault)
        bench.all_are(READY, iteration, "p0", "p1")
    status = bench.status()
    assert (status.phase is JobPhase.FAILED) is is_over
    if is_over:
        assert status.reason is Reason.NO_PROGRESS
        assert status.message.startswith("the script failed in the same way 2 times in a row")
        assert status.message.endswith("raise an exception where a restart may help")


def test_a_job_of_one_pod_and_one_rank_speaks_of_one() -> None:
    bench = Bench(replace(SETTINGS, replicas=1, spares=0, ranks_per_pod=1))
    bench.states["p0"] = bench.workers(STARTING)
    bench.join("p0")
    said = [bench.status().message]
    bench.all_are(READY, -1, "p0")
    for phase in (RUNNING, COMPLETED):
        said.append(bench.status().message)
        bench.all_are(phase, 0, "p0")
    said.append(bench.status().message)
    assert bench.status().phase is JobPhase.ENDING
    assert said[0].startswith("0 of 1 pod is ready, 1 has joined")
    assert said[-1] == "the only rank has returned from the training function; waits for its process"

    lost = Bench(replace(SETTINGS, replicas=1, spares=0, ranks_per_pod=1))
    lost.run("p0")
    lost.step(Observed(Observation({"uid-p0": PodObservation("p0", "n", ())})))
    lost.step(Observed(Observation({})))
    said.append(lost.status().message)
    assert "0 of 1 is there (0 starting), at least 1 is wanted" in said[-1]
    assert [text for text in said if re.search(r"\b1 (are|pods|ranks|workers)\b", text)] == []


def test_faults_with_progress_between_them_are_recovered_without_end() -> None:
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=3, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    for iteration in range(30):
        _fail_again(bench, iteration, step=iteration // 3)
    assert bench.status().phase is JobPhase.PLANNED


def test_lost_pods_do_not_count_as_faults_of_the_script() -> None:
    bench = Bench(replace(SETTINGS, no_progress_limit=1, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1", "p2")
    for number in range(4):
        bench.join(f"n{number}")
        active = [status.pod for status in bench.status().pods if status.ranks]
        bench.report(active[0], is_leaving=True)
        bench.all_are(READY, number, active[1])
        now_active = [status.pod for status in bench.status().pods if status.ranks]
        bench.all_are(RUNNING, number + 1, *now_active)
    assert bench.status().phase is JobPhase.RUNNING


def test_without_steps_a_long_run_counts_as_progress() -> None:
    bench = Bench(replace(SETTINGS, spares=0, no_progress_limit=1, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    for iteration in range(4):
        bench.all_are(RUNNING, iteration, "p0", "p1")
        bench.live(61)
        bench.fault("p0", 0, Cause.EXCEPTION)
        bench.all_are(READY, iteration, "p0", "p1")
    assert bench.status().phase is JobPhase.PLANNED


def test_when_nothing_is_left_the_job_fails_and_says_why() -> None:
    """1.28"""
    bench = Bench(replace(SETTINGS, spares=0, rungs=(RungBudget(Rung.IN_PROCESS),)))
    bench.run("p0", "p1")
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    finish = sent(bench.all_are(READY, 0, "p1"), Finish)["p0"]
    assert (finish.outcome, finish.reason) == (JobPhase.FAILED, Reason.BUDGET_EXHAUSTED)
    assert "no rung of the ladder is left (possible: in-process)" in finish.message
    assert "the last fault: process-signal of rank 0 of p0" in finish.message


def test_a_fault_that_ends_the_job_is_no_recovery() -> None:
    bench = Bench(replace(SETTINGS, spares=0, rungs=(RungBudget(Rung.IN_PROCESS),)))
    bench.run("p0", "p1")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    bench.all_are(READY, 1, "p1")
    status = bench.status()
    assert status.phase is JobPhase.FAILED
    assert [(recovery.cause, recovery.rung, recovery.ended_at != "") for recovery in status.recoveries] == [
        (Cause.EXCEPTION, Rung.IN_PROCESS, True),
        (Cause.PROCESS_SIGNAL, None, False),
    ]
    assert status.restarts_by_rung == {"in-process": 1}
    assert status.restarts_by_cause == {"exception": 1}


def test_a_rank_with_too_many_faults_gives_its_place_up() -> None:
    bench = Bench(replace(SETTINGS, max_faults_per_rank=1))
    bench.run("p0", "p1", "p2")
    for iteration in (0, 1):
        bench.fault("p0", 0, Cause.EXCEPTION)
        bench.all_are(READY, iteration, "p0")
        plans = sent(bench.all_are(READY, iteration, "p1"), Plan)
        bench.all_are(RUNNING, iteration + 1, "p0", "p1")
    assert ranks(plans["p2"]) == [0, 1]


def test_faults_of_a_place_are_not_forgotten_while_its_pod_is_away() -> None:
    bench = Bench(replace(SETTINGS, max_faults_per_rank=1, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD))))
    bench.run("p0", "p1", "p2")
    for iteration in (0, 1):
        bench.fault("p0", 0, Cause.EXCEPTION)
        bench.all_are(READY, iteration, "p0", "p1")
        bench.all_are(RUNNING, iteration + 1, "p1", "p2" if iteration else "p0")
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.live(60.0)
    assert "p0" not in {pod.pod for pod in bench.status().pods}
    bench.join("p0")
    bench.fault("p1", 0, Cause.PROCESS_SIGNAL, GONE)
    actions = bench.all_are(READY, 2, "p2") + bench.live(60.0)
    assert not sent(actions, Plan)
    assert "p0 worker 0: 2 faults, more than maxFaultsPerRank" in bench.status().message


# ----------------------------------------------------------------------------------------------- completion, restart


def test_the_job_is_complete_when_all_active_workers_are() -> None:
    """3.21"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.all_are(COMPLETED, 0, "p0")
    assert bench.status().phase is JobPhase.RUNNING
    finish = sent(bench.all_are(COMPLETED, 0, "p1"), Finish)
    assert {pod: message.outcome for pod, message in finish.items()} == dict.fromkeys(
        ("p0", "p1", "p2"), JobPhase.COMPLETE
    )
    assert sent(bench.join("p9"), Finish)["p9"].outcome is JobPhase.COMPLETE
    assert bench.status().phase is JobPhase.ENDING
    for pod in ("p0", "p1"):
        for local_rank in range(2):
            assert bench.coordinator.next_deadline_s() is not None
            bench.worker(pod, local_rank, COMPLETED, has_ended=True)
    assert bench.status().phase is JobPhase.COMPLETE
    assert bench.coordinator.next_deadline_s() is None


def test_consequences_that_a_new_rendezvous_hears_of_name_nobody() -> None:
    """Whoever began it is READY and has forgotten; what the others tell may be older than this coordinator."""
    before = Bench()
    pods = ("pod-0", "pod-1", "pod-2")
    plans = sent([action for pod in pods for action in before.join(pod)] + before.tick(60.0), Plan)
    after = Bench()
    after.now_s, after.coordinator = 100.0, Coordinator(SETTINGS, 100.0)
    reset = Fault(Cause.EXCEPTION, 0, "connection reset by peer", detect_s=5.0)
    after.states = {
        "pod-0": after.workers(READY, 0),
        "pod-1": [replace(state, fault=reset) for state in after.workers(STOPPING, 0)],
        "pod-2": after.workers(READY),
    }
    after.now_s += 1.0
    for pod in pods:
        after.join(pod, term=1, plan=plans[pod])
    after.all_are(READY, 0, "pod-1")
    after.all_are(RUNNING, 1, "pod-0", "pod-1")
    (recovery,) = after.status().recoveries
    assert (recovery.cause, recovery.rank, recovery.pod) == (Cause.EXCEPTION, None, "")


def test_a_fault_after_some_have_completed_restarts_them_too() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.all_are(COMPLETED, 0, "p0")
    assert "p0" in sent(bench.fault("p1", 0, Cause.EXCEPTION), Interrupt)
    bench.all_are(READY, 0, "p1")
    assert ranks(sent(bench.all_are(READY, 0, "p0"), Plan)["p0"]) == [0, 1]


def taken_over(bench: Bench, pause_s: float = 0.0) -> tuple[Bench, list[Action]]:
    """Return a new coordinator to which the same pods come back, so long after one another."""
    after = Bench(bench.settings)
    after.states = bench.states
    actions = []
    for pod, local_ranks in (("p0", (0, 1)), ("p1", (2, 3)), ("p2", (None, None))):
        parts = tuple(replace(part, rank=rank) for part, rank in zip(_parts(), local_ranks, strict=True))
        role = Role.SPARE if pod == "p2" else Role.ACTIVE
        actions += after.join(pod, term=1, plan=Plan(1, 0, role, 4, "10.0.0.1", 5000, parts))
        actions += after.tick(pause_s) if pause_s else []
    return after, actions


def _parts() -> tuple[Any, ...]:
    return RankPlan(0, None, RankReason.FIRST), RankPlan(1, None, RankReason.FIRST)


def test_a_new_rendezvous_takes_a_running_job_over_without_interrupting_it() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    after, actions = taken_over(bench)
    assert not sent(actions, Plan)
    assert not sent(actions, Interrupt)
    assert {message.term for message in sent(actions, Welcome).values()} == {2}
    status = after.status()
    assert (status.phase, status.iteration, status.world_size, status.term) == (JobPhase.RUNNING, 0, 4, 2)
    assert sent(after.fault("p0", 0, Cause.EXCEPTION), Interrupt)["p1"].term == 2


def test_a_process_that_is_started_again_before_its_job_is_taken_over_stays_the_culprit() -> None:
    """Its new process is ordered when the first pod is back, the iteration taken over when all are."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    killed = Fault(Cause.PROCESS_SIGNAL, 0, "killed by signal 9 (SIGKILL)", detect_s=0.5)
    reset = Fault(Cause.EXCEPTION, 0, "connection reset by peer", detect_s=0.5)
    bench.states = {pod: [replace(state, fault=reset) for state in bench.workers(STOPPING, 0)] for pod in ("p0", "p1")}
    bench.states["p0"][1] = WorkerState(1, 0, GONE, 0, fault=killed)
    bench.states["p2"] = bench.workers(READY)
    after, actions = taken_over(bench, 1.0)
    assert sent(actions, Respawn)["p0"].places == ((1, 0),)
    (recovery,) = after.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.rank) == (Cause.PROCESS_SIGNAL, "p0", 1)
    assert not sent(after.tick(5.0), Respawn)


def with_a_straggler() -> tuple[Bench, list[Action]]:
    """Return a new coordinator to which a pod comes back with a worker that never left the iteration before."""
    rungs = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD))
    bench = Bench(replace(SETTINGS, replicas=1, spares=0, ranks_per_pod=4, min_ranks_per_pod=3, rungs=rungs))
    bench.states["p0"] = [*bench.workers(READY, 1)[:3], WorkerState(3, 0, STOPPING, 0)]
    parts = [RankPlan(local_rank, local_rank, RankReason.KEPT) for local_rank in range(3)]
    lost = RankPlan(3, None, RankReason.LOST)
    plan = Plan(1, 1, Role.ACTIVE, 3, "10.0.0.1", 5000, (*parts, lost))
    actions = bench.join("p0", term=1, plan=plan)
    for local_rank in range(3):
        bench.worker("p0", local_rank, RUNNING, iteration=2)
    return bench, actions


def test_a_worker_without_a_rank_is_not_waited_for_and_replaced_when_it_never_leaves() -> None:
    """The rendezvous before had ordered that; with it the order was lost."""
    bench, actions = with_a_straggler()
    assert [ranks(plan) for plan in sent(actions, Plan).values()] == [[0, 1, 2, None]]
    assert not sent(bench.live(119), Respawn)
    assert sent(bench.live(2), Respawn)["p0"].places == ((3, 0),)
    assert (bench.status().phase, bench.status().recoveries[0].cause) == (JobPhase.RUNNING, Cause.EXCEPTION)


def test_a_worker_without_a_rank_that_leaves_late_gets_one_at_the_next_plan() -> None:
    bench, _actions = with_a_straggler()
    bench.live(100)
    bench.worker("p0", 3, READY)
    assert not sent(bench.live(100), Respawn)
    bench.fault("p0", 0, Cause.EXCEPTION)
    plans = [sent(bench.worker("p0", local_rank, READY), Plan) for local_rank in range(3)]
    assert ranks(plans[-1]["p0"]) == [0, 1, 2, 3]


def test_what_does_not_come_back_to_a_new_rendezvous_is_lost() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    after = Bench(bench.settings)
    after.states = bench.states
    parts = tuple(replace(part, rank=rank) for part, rank in zip(_parts(), (2, 3), strict=True))
    after.join("p1", term=1, plan=Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, parts))
    after.join("p2", term=1)
    assert "2 of 4 ranks have come back" in after.status().message
    assert sent(after.live(31), Interrupt)["p1"].cause is Cause.POD_LOST
    plans = sent(after.all_are(READY, 0, "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p2": [0, 1], "p1": [2, 3]}
    assert plans["p1"].term == 2


def test_nobody_is_told_of_an_iteration_that_a_rendezvous_without_memory_would_not_hear_of() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    after = Bench(bench.settings)
    after.states = {"p1": bench.workers(RUNNING, 7), "p4": bench.workers(RUNNING, 6)}
    parts = tuple(replace(part, rank=rank) for part, rank in zip(_parts(), (2, 3), strict=True))
    after.join("p1", term=1, plan=Plan(1, 7, Role.ACTIVE, 4, "", 0, parts))
    after.join("p2", term=1)
    after.join("p3", term=1, plan=Plan(1, 4, Role.SPARE, 4, "", 0, ()))
    after.join("p4", term=1)
    orders = sent(after.live(31), Interrupt)
    assert {pod: order.iteration for pod, order in orders.items()} == {"p1": 7, "p3": 4, "p4": 6}
    assert {order.cause for order in orders.values()} == {Cause.POD_LOST}


def test_a_second_connection_of_a_pod_replaces_the_first() -> None:
    """3.4"""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    old = bench.sessions["p0"]
    plan = Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, ())
    assert Close(old) in bench.join("p0", term=1, plan=plan)
    before = bench.status()
    bench.step(AgentDisconnected(old))
    assert bench.step(AgentReported(old, Report(99, tuple(bench.workers(GONE))))) == []
    assert bench.status() == before


def test_a_message_that_is_repeated_changes_nothing() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    before = bench.status()
    message = Report(bench.seq, tuple(bench.states["p0"]))
    assert bench.step(AgentReported(bench.sessions["p0"], message)) == []
    assert bench.status() == before


# ------------------------------------------------------------------------------------------------------------- measures


def test_ettr_counts_the_time_to_steps_that_are_reached_for_the_first_time() -> None:
    bench = Bench(replace(SETTINGS, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1", "p2")
    began_s = bench.now_s
    for second, step in ((10.0, 1), (20.0, 2)):
        bench.now_s = began_s + second
        bench.worker("p0", 0, RUNNING, step=step)
    assert bench.status().ettr == 1.0
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.now_s = began_s + 30.0
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    for second, step in ((35.0, 2), (40.0, 3)):
        bench.now_s = began_s + second
        bench.worker("p0", 0, RUNNING, step=step)
    assert bench.status().ettr == pytest.approx((10 + 10 + 5) / 40)
    assert bench.status().max_step == 3


def test_time_after_a_fault_is_detection_then_restart_and_waiting_while_pods_are_missing() -> None:
    bench = Bench(replace(SETTINGS, spares=0, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.now_s += 10.0
    bench.fault("p0", 0, Cause.EXCEPTION, detect_s=6.0)
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.all_are(READY, 0, "p1")
    bench.tick(2.0)
    assert bench.status().time == TimeSpent(
        10.0, 4.0, 6.0, 1.0, 1.0, progress_rank_s=40.0, held_rank_s=4 * 21.0 + 2 * 1.0, wanted_rank_s=4 * 22.0
    )
    bench.tick(30.0)
    bench.join("p2")
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.now_s += 1.0
    found = bench.status().time
    assert found is not None
    assert (found.restart_s, found.waiting_s, found.open_s) == (1.0, 31.0, 1.0)


def test_a_checkpoint_that_agents_tell_is_no_progress_and_does_not_outlive_its_iteration() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")

    def beat(pod: str, step: int, checkpoint_s: float) -> None:
        bench.seq += 1
        bench.step(AgentReported(bench.sessions[pod], Heartbeat(bench.seq, step, checkpoint_s)))

    bench.now_s += 10.0
    beat("p0", 5, 2.0)
    beat("p1", 5, 3.0)
    bench.now_s += 10.0
    beat("p1", 6, 3.5)
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.checkpoint_s) == (16.5, 3.5)
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    beat("p0", -1, 99.0)  # its workers have not entered the next iteration: it speaks of the last one
    bench.all_are(RUNNING, 1, "p0", "p1")
    bench.now_s += 10.0
    beat("p0", 7, 1.0)
    found = bench.status().time
    assert found is not None
    assert (found.checkpoint_s, found.redo_s) == (4.5, 0.0)


@pytest.mark.parametrize(
    ("ago_s", "progress_s"),
    [
        pytest.param(0.0, 20.0, id="just now, or an older agent"),
        pytest.param(4.5, 15.5, id="some time before the heartbeat"),
        pytest.param(1e9, 10.0, id="before the step before it: no time is judged twice"),
        pytest.param(-30.0, 20.0, id="in the future"),
    ],
)
def test_a_step_counts_from_when_it_was_made_and_not_from_when_it_was_told(ago_s: float, progress_s: float) -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.now_s += 10.0
    bench.seq += 1
    bench.step(AgentReported(bench.sessions["p0"], Heartbeat(bench.seq, 3, step_ago_s=ago_s)))
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.open_s) == (progress_s, 20.0 - progress_s)


@pytest.mark.parametrize("is_heartbeat", [True, False])
def test_a_checkpoint_after_a_step_is_none_before_it_though_one_message_tells_both(is_heartbeat: bool) -> None:
    """Seen before: the checkpoint was taken from the progress before the step, and a fault made it `redo`.

    The step was taken to have been quicker by as much, too, where it was one of the first of the job.
    """
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.now_s += 9.0
    bench.seq += 1
    if is_heartbeat:
        message: Heartbeat | Report = Heartbeat(bench.seq, 3, 3.5, step_ago_s=4.0, checkpoint_after_s=3.0)
    else:
        states = tuple(replace(state, step=3) for state in bench.states["p0"])
        message = Report(bench.seq, states, checkpoint_s=3.5, step_ago_s=4.0, checkpoint_after_s=3.0)
    bench.step(AgentReported(bench.sessions["p0"], message))
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.checkpoint_s, found.open_s) == pytest.approx((14.5, 0.5, 4.0))
    bench.worker("p0", 0, STOPPING, fault=Fault(Cause.EXCEPTION, 0, "x"))
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.checkpoint_s, found.redo_s) == pytest.approx((14.5, 3.5, 1.0))


@pytest.mark.parametrize("is_heartbeat", [True, False])
def test_what_was_shown_as_progress_stays_when_the_first_step_is_told_some_time_after_it_was_made(
    is_heartbeat: bool,
) -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    bench.now_s += 5.0
    progress = bench.coordinator.progress
    assert progress.gained_s(bench.now_s) == 5.0
    bench.seq += 1
    if is_heartbeat:
        message: Heartbeat | Report = Heartbeat(bench.seq, 0, step_ago_s=2.0)
    else:
        states = tuple(replace(state, step=0) for state in bench.states["p0"])
        message = Report(bench.seq, states, step_ago_s=2.0)
    bench.step(AgentReported(bench.sessions["p0"], message))
    assert progress.gained_s(bench.now_s) == 5.0


def test_a_hang_is_detected_from_its_last_step_on_though_a_heartbeat_tells_of_that_step_later() -> None:
    """Seen before: what lay between the last step and the heartbeat that told it counted as progress."""
    bench = Bench(replace(SETTINGS, spares=0))
    bench.run("p0", "p1")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.now_s += 10.0
    bench.seq += 1
    bench.step(AgentReported(bench.sessions["p1"], Heartbeat(bench.seq, 3, step_ago_s=5.0)))
    bench.now_s += 10.0
    bench.fault("p0", 0, Cause.SOFT_TIMEOUT, detect_s=15.0, is_hang=True)
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.redo_s, found.detect_s) == (15.0, 5.0, 10.0)


def test_a_step_that_a_pod_tells_when_it_is_back_counts_from_when_it_was_made() -> None:
    bench = Bench(replace(SETTINGS, spares=0, timeouts=Timeouts(heartbeat_s=1000.0, reconnect_s=60.0)))
    bench.run("p0", "p1")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.step(AgentDisconnected(bench.sessions.pop("p0")))
    bench.now_s += 20.0
    states = tuple(replace(state, step=3) for state in bench.states["p0"])
    plan = Plan(1, 0, Role.ACTIVE, 4, "10.0.0.1", 5000, ())
    bench.join("p0", term=1, plan=plan, workers=states, step_ago_s=15.0)
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.open_s) == (15.0, 15.0)


def test_a_heartbeat_of_a_pod_that_has_no_rank_any_more_tells_of_another_iteration() -> None:
    """Seen before: its last step, told once more, ended what the others did before their first one."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    for step in (1, 2):
        bench.now_s += 5.0
        bench.worker("p0", 0, RUNNING, step=step)
    bench.worker("p0", 0, GONE, Fault(Cause.PROCESS_SIGNAL, 0, "killed"))
    bench.all_are(READY, 0, "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    assert bench.status().phase is JobPhase.RUNNING
    bench.now_s += 20.0
    bench.seq += 1
    bench.step(AgentReported(bench.sessions["p0"], Heartbeat(bench.seq, 2, step_ago_s=20.0)))
    bench.now_s += 5.0
    bench.worker("p1", 0, RUNNING, step=3)
    found = bench.status().time
    assert found is not None
    assert (found.progress_s, found.redo_s, found.restart_s) == (15.0, 0.0, 20.0)


def test_a_job_that_is_taken_over_goes_on_from_the_step_that_agents_tell() -> None:
    bench = Bench(replace(SETTINGS, spares=0))
    plan = Plan(1, 4, Role.ACTIVE, 4, "10.0.0.1", 5000, ())
    for pod in ("p0", "p1"):
        bench.states[pod] = [replace(state, step=500) for state in bench.workers(RUNNING, 4)]
        ranks = tuple(RankPlan(local, local + 2 * int(pod[1]), RankReason.KEPT) for local in range(2))
        bench.join(pod, term=1, plan=replace(plan, ranks=ranks), workers=tuple(bench.states[pod]))
    assert bench.status().phase is JobPhase.RUNNING
    assert bench.status().max_step == 500
    for step in (510, 520):
        bench.now_s += 10.0
        bench.worker("p0", 0, RUNNING, step=step)
    found = bench.status().time
    assert found is not None
    assert found.restart_s == 0.0, "it was in its steps already"


def test_without_steps_all_running_time_counts() -> None:
    bench = Bench()
    assert bench.status().ettr is None
    bench.run("p0", "p1", "p2")
    bench.now_s += 30.0
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.now_s += 10.0
    assert bench.status().ettr == pytest.approx(0.75)


def test_first_progress_is_measured_once_all_have_pinged() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    assert "first-progress" not in bench.status().recoveries[0].phase_s
    bench.now_s += 2.0
    for pod in ("p0", "p1"):
        bench.states[pod] = [replace(state, has_progress=True) for state in bench.states[pod]]
        bench.report(pod)
    assert bench.status().recoveries[0].phase_s["first-progress"] == 2.0


@pytest.mark.parametrize(
    ("ages_s", "enter_s"),
    [
        pytest.param((0.0, 0.0), 0.5, id="told at once"),
        pytest.param((0.125, 0.375), 0.25, id="told later: the last to enter counts, not the last to tell"),
        pytest.param((60.0, 70.0), 0.0, id="older than the plan"),
        pytest.param((-1.0, -1.0), 0.5, id="in the future"),
    ],
)
def test_recovery_is_over_when_the_last_pod_has_entered_however_late_that_is_told(
    ages_s: tuple[float, float], enter_s: float
) -> None:
    """What is recorded is what happened."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.fault("p0", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.now_s += 0.375
    bench.states["p0"] = bench.workers(RUNNING, 1)
    bench.report("p0", entered_ago_s=ages_s[0])
    bench.now_s += 0.125
    bench.states["p1"] = bench.workers(RUNNING, 1)
    bench.report("p1", entered_ago_s=ages_s[1])
    (recovery,) = bench.status().recoveries
    assert recovery.phase_s["enter"] == pytest.approx(enter_s)
    assert bench.status().phase is JobPhase.RUNNING


def test_the_revision_rises_with_changes_only() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    before = bench.coordinator.revision
    bench.step(Tick())
    assert bench.coordinator.revision == before
    bench.fault("p0", 0, Cause.EXCEPTION)
    assert bench.coordinator.revision > before


def test_the_history_of_recoveries_is_bounded() -> None:
    bench = Bench(replace(SETTINGS, no_progress_limit=1000, timeouts=Timeouts()))
    bench.run("p0", "p1", "p2")
    for iteration in range(25):
        bench.fault(f"p{iteration % 2}", 0, Cause.EXCEPTION)
        bench.all_are(READY, iteration, "p0", "p1")
        bench.all_are(RUNNING, iteration + 1, "p0", "p1")
    recoveries = bench.status().recoveries
    assert [recovery.number for recovery in recoveries] == list(range(6, 26))
    assert bench.status().restarts_by_cause == {"exception": 25}


def test_a_job_without_in_process_restarts_prefers_the_old_place() -> None:
    rungs = tuple(RungBudget(rung) for rung in (Rung.PROCESS, Rung.POD, Rung.WORLD))
    bench = Bench(replace(SETTINGS, rungs=rungs, timeouts=Timeouts(heartbeat_s=1000.0)))
    bench.run("p0", "p1", "p2")
    bench.now_s += 60.0
    bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE)
    bench.states["p0"][1] = replace(bench.states["p0"][1], phase=READY, incarnation=1)
    bench.report("p0")
    bench.states["p1"] = bench.workers(READY, 0, 1)
    assert not sent(bench.report("p1"), Plan)
    plans = sent(bench.worker("p0", 0, READY, incarnation=1, iteration=-1), Plan)
    assert ranks(plans["p0"]) == [0, 1]


def test_welcome_says_which_iterations_nobody_may_enter_any_more() -> None:
    bench = Bench()
    bench.run("p0", "p1", "p2")
    assert sent(bench.join("p0"), Welcome)["p0"].over == -1
    bench.fault("p1", 0, Cause.EXCEPTION)
    assert bench.status().phase is JobPhase.INTERRUPTED
    assert sent(bench.join("p0"), Welcome)["p0"].over == 0


def test_a_new_rendezvous_lets_nobody_enter_what_is_older_than_the_newest_plan_that_it_knows() -> None:
    bench = Bench()
    parts = tuple(replace(part, rank=rank) for part, rank in zip(_parts(), (0, 1), strict=True))
    newest = Plan(1, 5, Role.ACTIVE, 4, "10.0.0.1", 5000, parts)
    assert sent(bench.join("p0", term=1, plan=newest), Welcome)["p0"].over == 4
    assert sent(bench.join("p1", term=1, plan=replace(newest, iteration=4)), Welcome)["p1"].over == 4
