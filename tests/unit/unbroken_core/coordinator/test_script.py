"""What the script asks for, from the workers' word to the plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentJoined, AgentReported, Send, Tick
from unbroken_core.protocol.messages import Hello, JobStatus, Plan, Policy, Report, WorkerState
from unbroken_core.protocol.settings import JobSettings, RungBudget
from unbroken_core.ranks.rules import Rules
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import JobPhase, RankReason, Reason, Rung, WorkerPhase

READY, RUNNING, STARTING, GONE = WorkerPhase.READY, WorkerPhase.RUNNING, WorkerPhase.STARTING, WorkerPhase.GONE
RESERVE = Layer(replace_from=True)
SETTINGS = JobSettings("digits", replicas=4, min_replicas=1, ranks_per_pod=2)


class Bench:
    """A coordinator and pods whose workers all ask for `policy`, unless a test says otherwise."""

    def __init__(self, settings: JobSettings = SETTINGS, policy: Policy | None = None) -> None:
        self.settings, self.policy = settings, policy
        self.coordinator = Coordinator(settings, 0.0)
        self.now_s = 0.0
        self.num_messages = 0
        self.states: dict[str, list[WorkerState]] = {}
        self.sessions: dict[str, str] = {}
        self.plans: dict[str, Plan] = {}

    def step(self, event: Any) -> list[Action]:
        actions = self.coordinator.step(event, self.now_s)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Plan):
                self.plans[action.session.split("#")[0]] = action.message
        return actions

    def workers(self, phase: WorkerPhase, iteration: int = -1, keys: tuple[str, ...] = ()) -> list[WorkerState]:
        port = 5000 if phase is READY else 0
        policy = self.policy if phase in (READY, RUNNING) else None
        size = self.settings.ranks_per_pod
        return [WorkerState(local, 0, phase, iteration, "h", port, policy=policy, keys=keys) for local in range(size)]

    def join(self, pod: str, states: list[WorkerState], **changes: Any) -> None:
        self.num_messages += 1
        self.states[pod], self.sessions[pod] = states, f"{pod}#{self.num_messages}"
        size = self.settings.ranks_per_pod
        hello = Hello(1, "digits", pod, f"uid-{pod}", "s", f"node-{pod}", size, workers=tuple(states))
        self.step(AgentJoined(self.sessions[pod], replace(hello, **changes)))

    def report(self, pod: str, states: list[WorkerState]) -> None:
        self.num_messages += 1
        self.states[pod] = states
        self.step(AgentReported(self.sessions[pod], Report(self.num_messages, tuple(states))))

    def tick(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while (deadline_s := self.coordinator.next_deadline_s()) is not None and deadline_s <= until_s:
            self.now_s = deadline_s
            self.step(Tick())
        self.now_s = until_s

    def form(self, keys: Mapping[str, tuple[str, ...]] | None = None, num_pods: int = 4) -> None:
        for number in range(num_pods):
            pod = f"p-{number}"
            self.join(pod, self.workers(READY, keys=(keys or {}).get(pod, ())))
        self.tick(self.settings.timeouts.last_call_s)
        self.enter()

    def enter(self) -> None:
        iteration = self.status().iteration
        for pod, plan in list(self.plans.items()):
            if (
                pod in self.sessions
                and plan.iteration == iteration
                and any(part.rank is not None for part in plan.ranks)
            ):
                keys = self.states[pod][0].keys
                self.report(pod, self.workers(RUNNING, iteration, keys))

    def lose(self, *pods: str) -> None:
        """These pods are gone for good, and the others leave the iteration."""
        iteration = self.status().iteration
        for pod in pods:
            self.step(AgentDisconnected(self.sessions.pop(pod)))
            self.plans.pop(pod, None)
        self.tick(self.settings.timeouts.reconnect_s)
        for pod in list(self.sessions):
            self.report(pod, self.workers(READY, iteration, self.states[pod][0].keys))

    def ranks(self) -> dict[str, list[int | None]]:
        iteration = self.status().iteration
        return {
            pod: [part.rank for part in plan.ranks]
            for pod, plan in sorted(self.plans.items())
            if plan.iteration == iteration
        }

    def status(self) -> JobStatus:
        return self.coordinator.status(self.now_s, str)


@pytest.mark.parametrize(
    ("spec", "policy", "sizes"),
    [
        pytest.param({}, None, (8, 6, 4), id="nothing"),
        pytest.param({}, Policy(max_ranks=5), (5, 5, 4), id="MaxActiveWorldSize"),
        pytest.param({"max_ranks": 3}, Policy(max_ranks=5), (3, 3, 3), id="the smaller maximum holds"),
        pytest.param({}, Policy(divisible_by=4), (8, 4, 4), id="ActiveWorldSizeDivisibleBy"),
        pytest.param({"divisible_by": 2}, Policy(divisible_by=3), (6, 6, 0), id="both divisors hold"),
        pytest.param(
            {"max_ranks": 7}, Policy(divisible_by=2), (6, 6, 4), id="maximum of the spec, divisor of the script"
        ),
        pytest.param(
            {}, Policy(layers=(Layer(max_ranks=6, replace_from=False),)), (6, 6, 4), id="maximum of Tree's root"
        ),
    ],
)
def test_script_narrows_what_the_spec_allows(
    spec: dict[str, Any], policy: Policy | None, sizes: tuple[int, ...]
) -> None:
    rules = Rules.of(replace(SETTINGS, **spec), policy)
    assert tuple(rules.world_size(num_ranks) for num_ranks in (8, 6, 4)) == sizes


@pytest.mark.parametrize(
    ("spec", "policy", "least"),
    [
        pytest.param({}, None, 1, id="minReplicas"),
        pytest.param({"divisible_by": 5}, None, 3, id="divisor"),
        pytest.param({"divisible_by": 2}, Policy(divisible_by=3), 3, id="divisors of spec and script"),
        pytest.param({}, Policy(layers=(Layer(min_ranks=4, replace_from=False),)), 2, id="minimum of Tree's root"),
    ],
)
def test_least_number_of_pods_is_one_of_which_a_world_can_be_made(
    spec: dict[str, Any], policy: Policy | None, least: int
) -> None:
    assert Rules.of(replace(SETTINGS, **spec), policy).least_pods == least


@pytest.mark.parametrize(
    ("spec", "policy", "message"),
    [
        pytest.param(
            {}, Policy(max_ranks=0), "want at least 1 active rank, got MaxActiveWorldSize(0)", id="none at all"
        ),
        pytest.param({"max_ranks": 4}, Policy(divisible_by=8), "a multiple of 8 active ranks", id="no room for one"),
        pytest.param({}, Policy(divisible_by=16), "got replicas x ranksPerPod = 8", id="more than there are"),
        pytest.param(
            {"layers": (Layer("rack", "r"),)},
            Policy(layers=(RESERVE, RESERVE)),
            "want the layers in one place, got topology.layers (rack) in the job's spec and Tree in the script",
            id="two trees",
        ),
        pytest.param(
            {},
            Policy(layers=(Layer(min_ranks=9, replace_from=False),)),
            "layers[0].min_ranks: want at most replicas",
            id="root minimum",
        ),
        pytest.param(
            {},
            Policy(layers=(RESERVE, Layer(min_ranks=1, max_ranks=1, replace_from=False))),
            "layers[1].max_ranks: want at least ranksPerPod (2)",
            id="half",
        ),
        pytest.param(
            {},
            Policy(layers=(RESERVE, Layer(min_ranks=4, max_ranks=2, replace_from=False))),
            "max_ranks: want at least min_ranks (4)",
            id="limits",
        ),
    ],
)
def test_contradiction_of_spec_and_script_fails_the_job_and_says_what_was_seen(
    spec: dict[str, Any], policy: Policy, message: str
) -> None:
    settings = replace(SETTINGS, **spec)
    with pytest.raises(InputError) as raised:
        Rules.of(settings, policy)
    assert message in str(raised.value)
    bench = Bench(settings, policy)
    bench.join("p-0", bench.workers(READY, keys=("a",) * (len(policy.layers) - 1)))
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    assert status.message == f"p-0 worker 0: rank_assignment: {raised.value}"


@pytest.mark.parametrize("stage", ["first word", "later word"])
def test_workers_that_ask_for_different_things_fail_the_job_by_name(stage: str) -> None:
    bench = Bench(policy=Policy(max_ranks=4, divisible_by=2))
    bench.join("p-0", bench.workers(READY))
    odd = bench.workers(READY)
    odd[1] = replace(odd[1], policy=None)
    if stage == "first word":
        bench.join("p-1", odd)
    else:
        bench.join("p-1", bench.workers(STARTING))
        assert bench.status().phase is JobPhase.FORMING
        bench.report("p-1", odd)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    assert status.message == (
        "p-1 worker 1: rank_assignment: want the same on all workers, got nothing, "
        "and MaxActiveWorldSize(4), ActiveWorldSizeDivisibleBy(2) on p-0 worker 0"
    )


def test_plans_follow_the_script_and_grow_back_with_what_is_healthy() -> None:
    """2.8, 0.45"""
    bench = Bench(policy=Policy(divisible_by=4))
    bench.form()
    assert bench.status().world_size == 8
    bench.lose("p-1")
    assert bench.ranks() == {"p-0": [0, 1], "p-2": [2, 3], "p-3": [None, None]}
    bench.enter()
    bench.join("p-4", bench.workers(READY))
    bench.lose("p-0")
    assert bench.status().world_size == 4


def test_fill_gaps_moves_the_highest_ranks_into_the_gaps_and_nobody_else() -> None:
    """0.12, 0.13: 8 ranks that lose 2 and 3 are 0, 1, -, -, 4, 5, 2, 3."""
    settings = replace(SETTINGS, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.WORLD)))
    bench = Bench(settings, Policy(fills_gaps=True))
    bench.form()
    bench.lose("p-1")
    assert bench.ranks() == {"p-0": [0, 1], "p-2": [4, 5], "p-3": [2, 3]}
    plan = bench.plans["p-3"]
    assert {part.reason for part in plan.ranks} == {RankReason.FILLED_GAP}
    assert plan.origins == ((0, "p-1"), (1, "p-1"))


def test_keys_of_a_tree_say_where_pods_are() -> None:
    """0.25, 0.26, 0.35: the spare of the same domain takes over; the operator's domains do not count."""
    settings = replace(SETTINGS, replicas=4, spares=2)
    layers = (RESERVE, Layer(max_ranks=4, replace_from=True))
    bench = Bench(settings, Policy(layers=layers, root_key="job"))
    keys = {f"p-{number}": (f"nvl-{number // 3}",) for number in range(6)}
    bench.form(keys, num_pods=6)
    assert bench.ranks() == {
        "p-0": [0, 1],
        "p-1": [2, 3],
        "p-2": [None, None],
        "p-3": [4, 5],
        "p-4": [6, 7],
        "p-5": [None, None],
    }
    assert bench.plans["p-5"].domains == ("nvl-1",)
    bench.lose("p-3")
    assert (bench.ranks()["p-5"], bench.ranks()["p-2"]) == ([4, 5], [None, None])


@pytest.mark.parametrize(
    ("keys", "seen"),
    [
        pytest.param((("a",), ("b",)), "got ['b'], and ['a'] on worker 0", id="two domains in a pod"),
        pytest.param(((), ()), "want the same 1 keys on all workers of a pod, got []", id="no key"),
    ],
)
def test_workers_of_a_pod_in_different_domains_fail_the_job(keys: tuple[tuple[str, ...], ...], seen: str) -> None:
    bench = Bench(policy=Policy(layers=(RESERVE, RESERVE)))
    states = [replace(state, keys=key) for state, key in zip(bench.workers(READY), keys, strict=True)]
    bench.join("p-0", states)
    assert (bench.status().phase, bench.status().reason) == (JobPhase.FAILED, Reason.POLICY_REFUSED)
    assert seen in bench.status().message


def test_pod_that_comes_later_with_another_policy_gets_no_ranks_and_disturbs_nobody() -> None:
    bench = Bench(replace(SETTINGS, spares=1), Policy(max_ranks=6))
    bench.form()
    assert bench.status().phase is JobPhase.RUNNING
    bench.policy = Policy(max_ranks=2)
    bench.join("p-9", bench.workers(READY))
    assert (bench.status().phase, bench.status().spare_ranks) == (JobPhase.RUNNING, 2)
    bench.policy = Policy(max_ranks=6)
    bench.lose("p-1")
    assert {pod: rank for pod, rank in bench.ranks().items() if pod != "p-9"} == {
        "p-0": [0, 1],
        "p-2": [4, 5],
        "p-3": [2, 3],
    }
    assert bench.ranks()["p-9"] == [None, None]
    bench.report("p-9", [replace(state, incarnation=1) for state in bench.workers(READY)])
    assert bench.status().spare_ranks == 2


def restarted(bench: Bench) -> Bench:
    """Return a new rendezvous that knows nothing."""
    other = Bench(bench.settings, bench.policy)
    other.plans = dict(bench.plans)
    return other


def test_new_rendezvous_follows_those_who_are_in_the_iteration() -> None:
    bench = Bench(replace(SETTINGS, spares=1), Policy(divisible_by=4))
    bench.form()
    other = restarted(bench)
    other.policy = None
    other.join("p-9", other.workers(READY))
    other.policy = bench.policy
    for pod, states in bench.states.items():
        other.join(pod, states, term=1, plan=bench.plans[pod])
    assert other.status().phase is JobPhase.RUNNING
    other.lose("p-1")
    assert (other.status().world_size, other.ranks()["p-9"]) == (4, [None, None])


def test_new_rendezvous_that_finds_no_living_worker_learns_the_policy_when_they_are_back() -> None:
    bench = Bench(policy=Policy(divisible_by=4, layers=(RESERVE, RESERVE)))
    keys = {f"p-{number}": (f"r-{number % 2}",) for number in range(4)}
    bench.form(keys)
    other = restarted(bench)
    gone = [replace(state, phase=GONE, policy=None, keys=()) for state in bench.workers(RUNNING, 0)]
    for pod in bench.states:
        other.join(pod, gone, term=1, plan=bench.plans[pod])
    assert other.status().phase is JobPhase.INTERRUPTED
    other.step(AgentDisconnected(other.sessions.pop("p-1")))
    for number in (0, 2, 3):
        pod = f"p-{number}"
        other.report(pod, [replace(s, incarnation=1) for s in other.workers(READY, -1, keys[pod])])
    other.tick(SETTINGS.timeouts.reconnect_s)
    assert other.status().world_size == 4
    assert other.plans["p-3"].domains == ("r-1",)
