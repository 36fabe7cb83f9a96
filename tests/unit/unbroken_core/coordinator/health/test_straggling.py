"""Stragglers in a running job: told, and moved to a spare where the job wants that."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import READY, RUNNING, SETTINGS, ranks, sent
from tests.unit.unbroken_core.coordinator.test_moves import order_of

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported
from unbroken_core.protocol.messages import NO_STEP, Halt, HealthStatus, Heartbeat, Interrupt, Pace, Plan
from unbroken_core.protocol.settings import HealthMode, JobSettings, StragglerMode, Timeouts
from unbroken_core.recovery.health_words import straggling
from unbroken_core.vocabulary.findings import STRAGGLERS, WAS_SLOW, Finding, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase

from .test_health import DOWN, LOST, OWN, TEXT, WatchedBench

REPORT = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, heartbeat_s=120.0))
WINDOW_S = REPORT.window_s
Paces = Mapping[str, tuple[float, ...]]
MOVE = replace(REPORT, stragglers=StragglerMode.MOVE)
EVEN: Paces = {"p0": (1.0, 1.0), "p1": (1.0, 1.0)}
SLOW: Paces = {"p0": (1.0, 1.2), "p1": (1.0, 1.0)}


class PacedBench(WatchedBench):
    def __init__(self, settings: JobSettings = REPORT) -> None:
        super().__init__(settings)
        self.iteration = 0
        self.window = -1

    def tell(self, pod: str, *busy_s: float, window: int | None = None, iteration: int | None = None) -> list[Action]:
        """Let the workers of a pod tell how busy they were."""
        self.seq += 1
        window = self.window if window is None else window
        iteration = self.iteration if iteration is None else iteration
        paces = tuple(Pace(local, iteration, window, busy, 1.3) for local, busy in enumerate(busy_s))
        return self.step(AgentReported(self.sessions[pod], Heartbeat(self.seq, paces=paces)))

    def pass_window(self, busy_s: Paces) -> list[Action]:
        """Let a window pass, and all tell it; others only that they are there."""
        actions = self.tick(WINDOW_S)
        self.window += 1
        for pod in self.sessions:
            actions += self.tell(pod, *busy_s.get(pod, ()))
        return actions

    def restart(self) -> None:
        """Let a fault end the iteration, and all ranks go on in the next one where they were."""
        self.fault("p1", 0, Cause.EXCEPTION)
        self.all_are(READY, self.iteration, "p0", "p1")
        self.iteration, self.window = self.iteration + 1, -1
        self.all_are(RUNNING, self.iteration, "p0", "p1")

    def move_away(self) -> None:
        """Let the ranks of p0 move to the spare, as one of them is slow."""
        self.pass_window(SLOW)
        self.move(self.pass_window(SLOW))
        self.take_over()

    def take_over(self) -> None:
        """Let the spare have the ranks of p0."""
        self.all_are(READY, 0, "p0", "p1")
        self.all_are(RUNNING, 1, "p1", "p2")
        self.iteration, self.window = 1, -1
        self.tick(1.0)

    def told(self) -> list[tuple[str, str, Verdict]]:
        """Return pod, entity and verdict of each straggler in the status."""
        health = self.status().health
        found = () if health is None else health.findings
        return [(item.pod, item.finding.entity, item.finding.verdict) for item in found]

    def health(self) -> HealthStatus:
        health = self.status().health
        assert health is not None
        return health


def test_a_rank_that_is_slow_in_two_windows_is_told_and_nothing_moves() -> None:
    bench = PacedBench()
    assert bench.status().health is None
    assert not sent(bench.pass_window(SLOW), Halt)
    assert (bench.told(), bench.health().num_paced) == ([], 4)
    revision = bench.status().revision
    assert not sent(bench.pass_window(SLOW), Halt)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]
    assert bench.status().revision > revision
    text = bench.health().findings[0].finding.message
    assert text == "in two windows busy for 1.2 s of a step of 1.3 s, 20 % longer than its stage (1 s)"
    bench.pass_window(EVEN)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]
    bench.pass_window(EVEN)
    assert bench.told() == []


def test_a_straggler_moves_to_a_spare_after_a_step_and_is_the_last_choice_as_a_spare() -> None:
    bench = PacedBench(MOVE)
    bench.pass_window(SLOW)
    over = bench.move(bench.pass_window(SLOW))
    interrupt = sent(over, Interrupt)["p1"]
    assert (interrupt.cause, interrupt.pod) == (Cause.STRAGGLER, "p0")
    assert interrupt.detail.endswith("; moves after step 5")
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert (ranks(plans["p2"]), ranks(plans["p0"])) == ([0, 1], [None, None])
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.tick(1.0)
    status = bench.status()
    assert (status.recoveries[-1].cause, [pod.pod for pod in status.pods if pod.unfit]) == (Cause.STRAGGLER, [])
    assert bench.told() == [("p0", "worker 1", Verdict.DEGRADED)]
    assert "uid-p0" in bench.coordinator._job.health.worn
    assert not bench.coordinator._job.members.unfit


def test_a_rank_that_is_slow_wherever_it_runs_moves_once() -> None:
    bench = PacedBench(MOVE)
    bench.pass_window(SLOW)
    bench.move(bench.pass_window(SLOW))
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.iteration, bench.window = 1, -1
    again: Paces = {"p2": (1.0, 1.2), "p1": (1.0, 1.0)}
    for _ in range(4):
        assert not sent(bench.pass_window(again), Halt)
    (found,) = [item.finding for item in bench.health().findings if item.pod == "p2"]
    assert (found.verdict, found.entity) == (Verdict.DEGRADED, "rank 1")
    assert found.message.endswith("it was so on another pod, too: look at what the script does on this rank")


def test_without_a_ready_spare_no_straggler_moves() -> None:
    bench = PacedBench(replace(MOVE, spares=0))
    bench.fault("p2", 0, Cause.PROCESS_EXIT)
    for _ in range(3):
        assert not sent(bench.pass_window(SLOW), Halt)
    assert bench.told() == [("p0", "rank 1", Verdict.SUSPECT)]


def test_a_straggler_on_another_pod_soon_after_the_first_moves_nothing() -> None:
    bench = PacedBench(replace(MOVE, spares=2))
    bench.join("p3")
    bench.pass_window(SLOW)
    bench.move(bench.pass_window(SLOW))
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.iteration, bench.window = 1, -1
    other: Paces = {"p2": (1.0, 1.0), "p1": (1.0, 1.2)}
    bench.pass_window(other)
    assert not sent(bench.pass_window(other), Halt)
    assert "may be a false alarm" in bench.health().held


@pytest.mark.parametrize(
    ("settings", "does_move"),
    [
        pytest.param(replace(MOVE, health=HealthMode.OFF), True, id="stragglers move, findings do not count"),
        pytest.param(replace(REPORT, health=HealthMode.ACT), False, id="findings move, stragglers do not"),
    ],
)
def test_findings_and_stragglers_are_acted_on_apart(settings: JobSettings, does_move: bool) -> None:
    bench = PacedBench(settings)
    bench.pass_window(SLOW)
    assert bool(sent(bench.pass_window(SLOW), Halt)) is does_move
    found = sent(bench.find("p1", DOWN), Halt)
    assert bool(found) is (settings.health is HealthMode.ACT)


def test_what_cannot_be_is_no_word_about_the_others() -> None:
    bench = PacedBench()
    bench.pass_window(EVEN)
    bench.tell("p0", 9.0, 9.0, window=10**9)
    bench.tell("p0", 9.0, 9.0, iteration=7)
    bench.tell("p0", *(9.0,) * 9, window=bench.window)
    bench.tell("p2", 9.0, 9.0)
    bench.pass_window(SLOW)
    bench.pass_window(SLOW)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]


def test_windows_are_counted_on_when_another_rendezvous_takes_the_iteration_over() -> None:
    """Workers know nothing of it."""
    bench = PacedBench()
    for _ in range(9):
        bench.pass_window(EVEN)
    plans = {pod: bench.coordinator._job.members.by_pod[pod].plan for pod in bench.sessions}
    bench.coordinator = Coordinator(REPORT, bench.now_s, term=2)
    for pod, plan in plans.items():
        bench.join(pod, term=1, plan=plan, entered_ago_s=0.0 if pod == "p2" else bench.now_s)
    assert bench.status().phase is JobPhase.RUNNING
    for _ in range(3):
        bench.pass_window(SLOW)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]


def test_a_rank_that_tells_nothing_keeps_nobody_from_being_compared() -> None:
    bench = PacedBench(replace(REPORT, replicas=3, spares=0))
    bench.all_are(READY, 0, "p0", "p1", "p2")
    bench.all_are(RUNNING, 1, "p0", "p1", "p2")
    bench.iteration = 1
    for _ in range(3):
        bench.pass_window(SLOW)
    assert (bench.told(), bench.health().num_paced) == ([("p0", "rank 1", Verdict.DEGRADED)], 4)


def test_a_job_that_wants_none_of_it_keeps_nothing() -> None:
    bench = PacedBench(replace(REPORT, stragglers=StragglerMode.OFF))
    bench.pass_window(SLOW)
    bench.pass_window(SLOW)
    assert (bench.status().health, bench.coordinator._job.paces.told) == (None, {})


def test_a_watch_cannot_forge_a_straggler() -> None:
    bench = PacedBench(MOVE)
    forged = Finding(STRAGGLERS, "rank 1", Verdict.SUSPECT, "slow-rank", seen=3)
    assert not sent(bench.find("p0", forged), Halt)
    assert bench.told() == []


def test_what_nobody_measures_is_said_to_be_unchecked() -> None:
    bench = PacedBench(replace(REPORT, health=HealthMode.OBSERVE))
    bench.find("p0", DOWN)
    bench.find("p1", OWN)
    assert dict(bench.health().unchecked) == {}
    for _ in range(4):
        bench.pass_window({})
    assert dict(bench.health().unchecked) == {"stragglers": 2}
    bench.pass_window(EVEN)
    assert dict(bench.health().unchecked) == {}


def test_a_rank_that_is_slow_only_after_a_restart_is_named_in_its_second_window_there() -> None:
    bench = PacedBench()
    bench.pass_window(EVEN)
    bench.pass_window(EVEN)
    bench.restart()
    bench.pass_window(SLOW)
    assert bench.told() == []
    bench.pass_window(SLOW)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]


def test_windows_of_two_iterations_confirm_nothing_and_acquit_nobody() -> None:
    """What is slow around a restart may be the restart: a cold cache, a compiler."""
    bench = PacedBench()
    bench.pass_window(EVEN)
    bench.pass_window(SLOW)
    bench.restart()
    bench.pass_window(SLOW)
    assert bench.told() == []
    bench.pass_window(SLOW)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]
    bench.pass_window(EVEN)
    bench.restart()
    bench.pass_window(EVEN)
    assert bench.told() == [("p0", "rank 1", Verdict.DEGRADED)]
    bench.pass_window(EVEN)
    assert bench.told() == []


def test_a_pod_that_was_slow_and_has_no_ranks_holds_nobody_up() -> None:
    """Seen before: the condition stayed True, and the alert fired, for as long as the pod was a spare."""
    bench = PacedBench(MOVE)
    bench.move_away()
    even: Paces = {"p1": (1.0, 1.0), "p2": (1.0, 1.0)}
    for _ in range(2):
        bench.pass_window(even)
    (item,) = bench.health().findings
    assert (item.pod, item.finding.entity, item.finding.code) == ("p0", "worker 1", WAS_SLOW)
    said = straggling(bench.health())
    assert said.is_true is False
    assert said.message.startswith("no rank was busy longer than usual in its stage, of 4 ranks in a window; the last")
    assert "p0 on node node-p0: was-slow on worker 1 is degraded: while it had a rank, in two windows" in said.message
    bench.pass_window({**even, "p1": (1.0, 1.2)})
    bench.pass_window({**even, "p1": (1.0, 1.2)})
    said = straggling(bench.health())
    assert (said.is_true, "rank 3" in said.message, "the last choice for ranks: p0" in said.message) == (True,) * 3


def test_a_slow_pod_that_is_broken_before_it_has_left_is_a_broken_one() -> None:
    """Seen before: it was replaced as a slow one, and stayed a spare that nobody knew to be broken."""
    bench = PacedBench(replace(MOVE, health=HealthMode.ACT))
    bench.pass_window(SLOW)
    order = order_of(bench.pass_window(SLOW))
    bench.find("p0", LOST)
    bench.answer("p0", order, 5, 5, is_held=True)
    common = order_of(bench.answer("p1", order, 5, 5, is_held=True))
    bench.answer("p0", common, 5, 5, is_held=True, is_done=True)
    bench.answer("p1", common, 5, 5, is_held=True, is_done=True)
    bench.take_over()
    status = bench.status()
    (recovery,) = status.recoveries
    assert (recovery.cause, recovery.replaced_by) == (Cause.DEVICE_FAULT, ("p2",))
    assert recovery.detail == f"{TEXT}; moves after step 5"
    assert {pod.pod: pod.unfit for pod in status.pods if pod.unfit} == {"p0": TEXT}


def test_a_slow_pod_that_is_broken_once_its_ranks_stand_is_called_so() -> None:
    bench = PacedBench(replace(MOVE, health=HealthMode.ACT))
    bench.pass_window(SLOW)
    bench.move(bench.pass_window(SLOW))
    bench.find("p0", LOST)
    bench.take_over()
    assert {pod.pod: pod.unfit for pod in bench.status().pods if pod.unfit} == {"p0": TEXT}


@pytest.mark.parametrize("is_late", [False, True], ids=["before it is slow", "while its ranks move"])
def test_what_a_job_only_observes_keeps_no_slow_rank_where_it_is_and_no_pod_from_ranks(is_late: bool) -> None:
    """Seen before: a finding hid the straggler; one that came later kept the pod from ranks for good."""
    bench = PacedBench(replace(MOVE, health=HealthMode.OBSERVE))
    if not is_late:
        bench.find("p0", LOST)
    bench.pass_window(SLOW)
    over = bench.pass_window(SLOW)
    if is_late:
        bench.find("p0", LOST)
    assert sent(bench.move(over), Interrupt)["p1"].cause is Cause.STRAGGLER
    bench.take_over()
    assert not bench.coordinator._job.members.unfit
    bench.step(AgentDisconnected(bench.sessions.pop("p2")))
    bench.live(REPORT.timeouts.heartbeat_s + 1.0)
    plans = sent(bench.all_are(READY, 1, "p0", "p1"), Plan)
    assert ranks(plans["p0"]) == [0, 1]


def test_a_rank_that_hangs_while_a_slow_one_is_to_move_is_the_culprit_and_the_ranks_stay_until_then() -> None:
    bench = PacedBench(MOVE)
    bench.pass_window(SLOW)
    order = order_of(bench.pass_window(SLOW))
    bench.answer("p0", order, 5, 5, is_held=True)
    bench.answer("p1", order, 5, 5)
    released = bench.live(Timeouts().drain_s + 1.0)
    assert [halt.step for halt in sent(released, Halt).values()] == [NO_STEP, NO_STEP]
    assert "those of p0 stay for now: not all ranks stood after the same step" in bench.status().message
    bench.fault("p1", 0, Cause.SOFT_TIMEOUT)
    bench.all_are(READY, 0, "p0", "p1")
    again = bench.all_are(RUNNING, 1, "p0", "p1")
    (recovery,) = bench.status().recoveries
    assert (recovery.cause, recovery.pod, recovery.replaced_by) == (Cause.SOFT_TIMEOUT, "p1", ())
    assert sorted(sent(again, Halt)) == ["p0", "p1"], "it is a straggler still, and moves in the next iteration"


def test_no_slow_rank_moves_once_something_speaks_against_the_spare() -> None:
    bench = PacedBench(replace(MOVE, health=HealthMode.ACT))
    bench.pass_window(SLOW)
    order = order_of(bench.pass_window(SLOW))
    bench.answer("p0", order, 5, 5, is_held=True)
    assert order_of(bench.find("p2", LOST)).step == NO_STEP
    assert not bench.coordinator._job.members.unfit
    assert not sent(bench.live(Timeouts().drain_s + 5.0), Interrupt)
