"""The script's own rank assignment: one worker is asked, its answer is checked, another one takes its place."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentJoined, AgentReported, Send, Tick
from unbroken_core.protocol.messages import (
    Answer,
    Consult,
    Fault,
    Hello,
    JobStatus,
    Plan,
    Policy,
    Report,
    Respawn,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, WorkerPhase

READY, RUNNING, STARTING = WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.STARTING
POLICY = Policy(code="script.Backwards")
SETTINGS = JobSettings("digits", replicas=3, min_replicas=1, ranks_per_pod=2)


class Bench:
    """Pods of two workers, and what the coordinator told them last."""

    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        self.settings = settings
        self.coordinator = Coordinator(settings, 0.0)
        self.now_s = 0.0
        self.num_messages = 0
        self.states: dict[str, list[WorkerState]] = {}
        self.sessions: dict[str, str] = {}
        self.plans: dict[str, Plan] = {}
        self.asked: list[tuple[str, Consult]] = []
        self.respawned: list[tuple[str, Respawn]] = []

    def step(self, event: Any) -> list[Action]:
        actions = self.coordinator.step(event, self.now_s)
        for action in actions:
            if not isinstance(action, Send):
                continue
            pod = action.session.split("#")[0]
            if isinstance(action.message, Plan):
                self.plans[pod] = action.message
            elif isinstance(action.message, Consult):
                self.asked.append((pod, action.message))
            elif isinstance(action.message, Respawn):
                self.respawned.append((pod, action.message))
        return actions

    def workers(self, phase: WorkerPhase, iteration: int = -1, incarnation: int = 0) -> list[WorkerState]:
        port, policy = (5000, POLICY) if phase is READY else (0, POLICY if phase is RUNNING else None)
        return [WorkerState(local, incarnation, phase, iteration, "h", port, policy=policy) for local in range(2)]

    def join(self, pod: str, states: list[WorkerState], **changes: Any) -> None:
        self.num_messages += 1
        self.states[pod], self.sessions[pod] = states, f"{pod}#{self.num_messages}"
        hello = Hello(1, "digits", pod, f"uid-{pod}", "s", f"node-{pod}", 2, workers=tuple(states))
        self.step(AgentJoined(self.sessions[pod], replace(hello, **changes)))

    def report(self, pod: str, states: list[WorkerState]) -> None:
        self.num_messages += 1
        self.states[pod] = states
        self.step(AgentReported(self.sessions[pod], Report(self.num_messages, tuple(states))))

    def live(self, seconds: float) -> None:
        """Pass time while all pods repeat what they said."""
        until_s = self.now_s + seconds
        while (deadline_s := self.coordinator.next_deadline_s()) is not None and deadline_s <= until_s:
            self.now_s = min(deadline_s, self.now_s + 5.0)
            for pod in list(self.sessions):
                self.report(pod, self.states[pod])
            self.step(Tick())
        self.now_s = until_s

    def gather(self, num_pods: int = 3) -> None:
        for number in range(num_pods):
            self.join(f"p-{number}", self.workers(READY))
        self.live(self.settings.timeouts.last_call_s)

    def answer(self, *workers: int, error: str = "", number: int | None = None) -> None:
        """Let the worker that was asked last say who shall be rank 0, 1, ..."""
        pod, consult = self.asked[-1]
        question = consult.question
        said = Answer(question.term, number or question.number, workers, error)
        states = list(self.states[pod])
        states[consult.local_rank] = replace(states[consult.local_rank], answer=said)
        self.report(pod, states)
        # The next thing that it says is without it.
        self.states[pod] = [replace(state, answer=None) for state in states]

    def form(self, num_pods: int = 3) -> None:
        """Six workers, the last of which is rank 0."""
        self.gather(num_pods)
        self.answer(*reversed(range(2 * num_pods)))
        for pod, plan in self.plans.items():
            if any(part.rank is not None for part in plan.ranks):
                self.report(pod, self.workers(RUNNING, 0))
        assert self.status().phase is JobPhase.RUNNING

    def lose(self, pod: str) -> None:
        """Gone for good; the others leave the iteration."""
        iteration = self.status().iteration
        self.step(AgentDisconnected(self.sessions.pop(pod)))
        self.live(self.settings.timeouts.reconnect_s)
        for other in list(self.sessions):
            self.report(other, self.workers(READY, iteration))

    def ranks(self, iteration: int) -> dict[str, list[int | None]]:
        return {
            pod: [part.rank for part in plan.ranks]
            for pod, plan in sorted(self.plans.items())
            if plan.iteration == iteration
        }

    def status(self) -> JobStatus:
        return self.coordinator.status(self.now_s, str)


def test_first_plan_is_what_the_lowest_worker_says() -> None:
    bench = Bench()
    bench.gather()
    ((pod, consult),) = bench.asked
    assert (pod, consult.local_rank, consult.incarnation) == ("p-0", 0, 0)
    question = consult.question
    assert (question.iteration, question.world_size, question.active_world_size, question.terminated) == (0, 6, 0, ())
    assert bench.status().message == "waits for the rank assignment of the script on p-0 worker 0"
    bench.answer(5, 4, 3, 2, 1, 0, number=99)
    assert not bench.plans
    bench.answer(5, 4, 3, 2, 1, 0)
    assert bench.ranks(0) == {"p-0": [5, 4], "p-1": [3, 2], "p-2": [1, 0]}
    assert {part.reason for plan in bench.plans.values() for part in plan.ranks} == {RankReason.FIRST}


def test_lowest_healthy_active_rank_is_asked_who_takes_the_lost_ranks() -> None:
    bench = Bench(replace(SETTINGS, spares=1))
    bench.form(num_pods=4)
    assert bench.ranks(0) == {"p-0": [None, None], "p-1": [5, 4], "p-2": [3, 2], "p-3": [1, 0]}
    bench.lose("p-3")
    pod, consult = bench.asked[-1]
    assert (pod, consult.local_rank) == ("p-2", 1)
    question = consult.question
    assert (question.world_size, question.active_world_size, question.terminated) == (8, 6, (0, 1))
    bench.answer(7, 6, 2, 3, 4, 5)
    assert bench.ranks(1) == {"p-0": [1, 0], "p-1": [5, 4], "p-2": [3, 2]}
    reasons = {pod: {part.reason for part in plan.ranks} for pod, plan in bench.plans.items() if pod != "p-3"}
    assert reasons == {"p-0": {RankReason.ASSIGNED}, "p-1": {RankReason.KEPT}, "p-2": {RankReason.KEPT}}


def test_ranks_beyond_what_the_spec_allows_step_aside() -> None:
    bench = Bench(replace(SETTINGS, divisible_by=4))
    bench.gather()
    bench.answer(5, 4, 3, 2, 1, 0)
    assert bench.ranks(0) == {"p-0": [None, None], "p-1": [3, 2], "p-2": [1, 0]}


@pytest.mark.parametrize("layers", [(), (Layer("rack", "rack"),)], ids=["no layers", "layers"])
def test_a_fault_in_a_world_of_fewer_pods_than_are_wanted_costs_no_restart_of_all(layers: tuple[Layer, ...]) -> None:
    """Before, all processes were started again: pods counted that had ranks, not those that the script may choose."""
    bench = Bench(replace(SETTINGS, divisible_by=4, min_replicas=3, layers=layers))
    bench.form()
    assert bench.ranks(0) == {"p-0": [None, None], "p-1": [3, 2], "p-2": [1, 0]}
    raised = replace(bench.workers(RUNNING, 0)[0], fault=Fault(Cause.EXCEPTION, 0, "ValueError: no", 0.0))
    bench.report("p-2", [replace(raised, phase=WorkerPhase.STOPPING), bench.workers(RUNNING, 0)[1]])
    for pod in ("p-1", "p-2"):
        bench.report(pod, bench.workers(READY, 0))
    bench.answer(0, 1, 2, 3, 4, 5)
    assert sorted(rank for ranks in bench.ranks(1).values() for rank in ranks if rank is not None) == [0, 1, 2, 3]
    assert bench.respawned == []


def test_another_one_is_asked_when_the_one_that_was_asked_is_lost() -> None:
    bench = Bench()
    bench.form()
    bench.lose("p-0")
    assert bench.asked[-1][0] == "p-2"
    bench.step(AgentDisconnected(bench.sessions.pop("p-2")))
    bench.live(bench.settings.timeouts.reconnect_s)
    pod, consult = bench.asked[-1]
    assert (pod, consult.question.terminated) == ("p-1", (0, 1, 4, 5))
    bench.answer(2, 3)
    assert bench.ranks(1) == {"p-1": [1, 0]}


def test_one_that_is_silent_gets_a_new_process_and_another_one_is_asked() -> None:
    bench = Bench()
    bench.form()
    bench.lose("p-0")
    num_asked = len(bench.asked)
    bench.live(SETTINGS.timeouts.soft_s + 1.0)
    ((pod, respawn),) = bench.respawned
    assert (pod, respawn.places) == ("p-2", ((1, 0),))
    fresh = bench.workers(READY, 0)
    fresh[1] = WorkerState(1, 1, READY, -1, "h", 5001, policy=POLICY)
    bench.report("p-2", fresh)
    assert [pod for pod, _consult in bench.asked[num_asked:]] == ["p-2"]
    bench.answer(0, 1, 2, 3)
    assert bench.ranks(1) == {"p-1": [3, 2], "p-2": [1, 0]}
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod) == ("pod-lost", "p-0")


def test_one_that_is_silent_at_the_end_of_the_startup_time_has_time_for_its_new_process() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=2))
    bench.gather(num_pods=2)
    bench.live(SETTINGS.timeouts.startup_s)
    bench.live(SETTINGS.timeouts.soft_s + 1.0)
    ((pod, _respawn),) = bench.respawned
    assert (pod, bench.status().phase) == ("p-0", JobPhase.FORMING)
    fresh = bench.workers(READY)
    fresh[0] = WorkerState(0, 1, READY, -1, "h", 5001, policy=POLICY)
    bench.report("p-0", fresh)
    bench.answer(3, 2, 1, 0)
    assert bench.ranks(0) == {"p-0": [3, 2], "p-1": [1, 0]}


def test_one_whose_answer_came_too_late_for_a_change_is_not_taken_for_silent() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=2))
    bench.gather()
    pod, consult = bench.asked[-1]
    # One pod is to leave, another is not ready any more: there is no world to be asked about, but the answer comes.
    bench.report("p-1", bench.workers(STARTING, incarnation=1))
    bench.report("p-2", bench.workers(STARTING, incarnation=1))
    bench.answer(5, 4, 3, 2, 1, 0)
    bench.states["p-0"] = [
        replace(state, answer=Answer(1, consult.question.number, (0,))) if state.local_rank == 0 else state
        for state in bench.states["p-0"]
    ]
    bench.live(2 * SETTINGS.timeouts.soft_s)
    num_asked = len(bench.asked)
    bench.report("p-1", bench.workers(READY, incarnation=1))
    bench.report("p-2", bench.workers(READY, incarnation=1))
    assert [asked for asked, _consult in bench.asked[num_asked:]] == [pod]
    assert bench.respawned == []


def test_one_that_was_given_up_and_comes_back_has_its_time_to_answer_once_more() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=2))
    bench.form()
    bench.lose("p-0")
    assert bench.asked[-1][0] == "p-2"
    bench.step(AgentDisconnected(bench.sessions.pop("p-2")))
    bench.live(2 * SETTINGS.timeouts.soft_s)
    assert bench.status().phase is JobPhase.INTERRUPTED
    num_asked = len(bench.asked)
    bench.join("p-2", bench.workers(READY, 0))
    bench.live(SETTINGS.timeouts.soft_s - 2.0)
    assert ({pod for pod, _consult in bench.asked[num_asked:]}, bench.respawned) == ({"p-2"}, [])
    bench.live(3.0)
    assert [pod for pod, _respawn in bench.respawned] == ["p-2"]


def test_policy_that_never_answers_fails_the_job_and_names_the_time_limit() -> None:
    bench = Bench()
    bench.gather()
    bench.live(2 * SETTINGS.timeouts.startup_s)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    text = "the rank assignment of the script did not answer for 60 s (timeouts.softSeconds), nor did 2 others"
    assert status.message == f"p-2 worker 0: {text}"
    assert [pod for pod, _respawn in bench.respawned] == ["p-0", "p-1"]


@pytest.mark.parametrize(
    ("workers", "error", "message"),
    [
        pytest.param((), "ValueError: no", "ValueError: no", id="raises"),
        pytest.param((0, 1, 1), "", "want each worker once, got one twice", id="twice"),
        pytest.param((0, 6), "", "want workers 0 to 5, got others", id="nobody"),
        pytest.param((-1, 0), "", "want workers 0 to 5, got others", id="negative"),
    ],
)
def test_answer_that_cannot_be_fails_the_job(workers: tuple[int, ...], error: str, message: str) -> None:
    bench = Bench()
    bench.gather()
    bench.answer(*workers, error=error)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    assert status.message == f"p-0 worker 0: rank_assignment: {message}"


@pytest.mark.parametrize(
    ("settings", "workers", "message"),
    [
        pytest.param(
            replace(SETTINGS, min_replicas=2),
            (0, 1),
            "2 workers of 1 pod a rank, at least 2 pods are wanted (minReplicas)",
            id="too few pods",
        ),
        pytest.param(SETTINGS, (), "0 workers of 0 pods a rank, at least 1 pod is wanted (minReplicas)", id="nobody"),
        pytest.param(
            replace(SETTINGS, divisible_by=4),
            (3, 0, 1),
            "3 workers of 2 pods a rank, a multiple of 4 is wanted",
            id="no multiple: never a world of nobody",
        ),
    ],
)
def test_script_that_gives_too_few_a_rank_though_all_are_there_fails_the_job(
    settings: JobSettings, workers: tuple[int, ...], message: str
) -> None:
    """0.45"""
    bench = Bench(settings)
    bench.gather()
    bench.answer(*workers)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    assert status.message == f"the rank assignment of the script gives {message}"
    assert not bench.plans


def test_script_that_gives_too_few_a_rank_after_a_loss_waits_for_another_pod_and_is_asked_again() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=2))
    bench.form()
    bench.lose("p-2")
    num_asked = len(bench.asked)
    bench.answer(2, 3)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.INTERRUPTED, Reason.BELOW_MINIMUM)
    text = "the rank assignment of the script gives 2 workers of 1 pod a rank, at least 2 pods are wanted"
    assert status.message.endswith(f"2 of 3 are there (0 starting), at least 2 are wanted; {text} (minReplicas)")
    bench.live(SETTINGS.timeouts.startup_s / 2)
    assert len(bench.asked) == num_asked, "nothing has changed"
    bench.join("p-3", bench.workers(READY))
    assert (len(bench.asked) > num_asked, bench.asked[-1][1].question.world_size) == (True, 8)
    bench.answer(2, 3, 4, 5, 6, 7)
    assert bench.ranks(1) == {"p-0": [3, 2], "p-1": [1, 0], "p-3": [4, 5]}


def test_script_that_gives_too_few_a_rank_ends_the_job_when_no_other_pod_comes_in_time() -> None:
    bench = Bench(replace(SETTINGS, min_replicas=2))
    bench.form()
    bench.lose("p-2")
    bench.answer(2, 3)
    num_answered = len(bench.asked)
    for _try in range(int(SETTINGS.timeouts.startup_s / 10.0) * 4):
        bench.live(10.0)
        for pod in bench.sessions:
            bench.report(pod, bench.states[pod])
        # The rung of the whole job starts every process again, at last.
        for pod, respawn in bench.respawned:
            _local_rank, incarnation = respawn.places[0]
            if bench.states[pod][0].incarnation <= incarnation:
                bench.report(pod, bench.workers(READY, -1, incarnation + 1))
        if len(bench.asked) > num_answered:
            num_answered = len(bench.asked)
            question = bench.asked[-1][1].question
            healthy = [number for number in range(question.world_size) if number not in question.terminated]
            bench.answer(*healthy[:2])
    status = bench.status()
    assert status.phase is JobPhase.FAILED
    assert "the rank assignment of the script gives 2 workers of 1 pod a rank" in status.message


@pytest.mark.parametrize(("size", "phase"), [(5_500, JobPhase.FORMING), (6_000, JobPhase.FAILED)])
def test_keys_that_fit_in_no_message_fail_the_job_at_once(size: int, phase: JobPhase) -> None:
    """No worker could be asked: its agent would refuse the question each time."""
    bench = Bench()
    for number in range(3):
        keys = [tuple(f"{number} {local_rank} {'x' * size}" for _key in range(60)) for local_rank in range(2)]
        workers = bench.workers(READY)
        bench.join(f"p-{number}", [replace(state, keys=keys[state.local_rank]) for state in workers])
    status = bench.status()
    assert (status.phase, bool(bench.asked)) == (phase, phase is JobPhase.FORMING)
    if phase is JobPhase.FAILED:
        wanted = (
            "want keys that take at most 2,097,152 bytes together, since one worker is sent those of all, got 2,162"
        )
        assert status.message.startswith(f"rank_assignment: {wanted}")
        assert status.message.endswith(" bytes of 6 different keys: make them shorter")


def test_keys_of_all_workers_go_with_the_question_those_of_the_lost_included() -> None:
    """0.16: each combination once, and whose is which; a pod that said nothing is not known."""
    bench = Bench()
    for number, keys in enumerate(("aa", "", "ab")):
        workers = bench.workers(READY)
        bench.join(f"p-{number}", [replace(state, keys=tuple(keys[state.local_rank :][:1])) for state in workers])
    question = bench.asked[-1][1].question
    assert (question.names, question.keys) == ((("a",), ("b",)), (0, 0, -1, -1, 0, 1))
    bench.answer(5, 4, 3, 2, 1, 0)
    for pod in bench.sessions:
        bench.report(pod, bench.workers(RUNNING, 0))
    bench.lose("p-2")
    question = bench.asked[-1][1].question
    assert (question.terminated, question.names, question.keys) == ((0, 1), (("b",), ("a",)), (0, 1, -1, -1, 1, 1))
    bench.answer(2, 3, 4, 5)
    for pod in bench.sessions:
        bench.report(pod, bench.workers(RUNNING, 1))
    bench.lose("p-1")
    assert bench.asked[-1][1].question.keys == (-1, -1, 0, 0)


def test_answer_with_a_lost_worker_fails_the_job() -> None:
    bench = Bench()
    bench.form()
    bench.lose("p-2")
    bench.answer(0, 1, 2, 3, 4, 5)
    assert bench.status().message.endswith("rank_assignment: want healthy workers, got [0, 1], which are lost")


def test_answer_that_breaks_a_limit_of_a_domain_fails_the_job() -> None:
    bench = Bench(replace(SETTINGS, layers=(Layer("rack", "rack", max_ranks=4),)))
    for number in range(3):
        bench.join(f"p-{number}", bench.workers(READY), domains=("r1",))
    bench.live(SETTINGS.timeouts.last_call_s)
    assert bench.asked[-1][1].question.world_size == 6
    bench.answer(0, 1, 2, 3, 4, 5)
    assert bench.status().message == "rank_assignment: r1: want at most 4 active ranks, got 6"


def test_question_is_repeated_on_a_new_connection() -> None:
    bench = Bench()
    bench.gather()
    bench.join("p-0", bench.workers(READY))
    first, again = bench.asked
    assert first == again
    bench.answer(0, 1, 2, 3, 4, 5)
    assert bench.ranks(0)["p-0"] == [0, 1]
