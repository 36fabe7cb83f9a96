"""Findings of watches in a running job: told in any case, and acted on only where the job wants it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_core.coordinator.test_coordinator import GONE, READY, RUNNING, SETTINGS, ranks, sent
from tests.unit.unbroken_core.coordinator.test_moves import MovingBench, order_of

from unbroken_core.coordinator.contact import start_over
from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported, Observed
from unbroken_core.protocol.messages import (
    NO_STEP,
    Halt,
    Hello,
    Interrupt,
    Observation,
    Plan,
    PodObservation,
    Report,
    Respawn,
)
from unbroken_core.protocol.settings import HealthMode, JobSettings, RungBudget
from unbroken_core.recovery.health import BREAKER_S, BUDGET_S, MAX_BLAMED, SWITCH_S, finding_text
from unbroken_core.recovery.health_words import nodes_healthy
from unbroken_core.vocabulary.findings import MATMUL, Finding, Health, Verdict
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Rung

LOST = Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79", message="XID 79: the GPU has fallen off the bus")
WRONG = Finding(MATMUL, "cuda:0", Verdict.FATAL)
DOWN = Finding("ports", "mlx5_0/1", Verdict.SUSPECT, "link-down", seen=2)
SLOW = Finding("gpu", "GPU-b", Verdict.DEGRADED, "throttled", seen=3)
OWN = Finding("gpu-events", "GPU-a", Verdict.OK, "xid-31", seen=3)
SILENT = Finding("ports", "", Verdict.UNKNOWN, "not-told")
TEXT = "xid-79 on GPU-a is fatal: XID 79: the GPU has fallen off the bus"
ACT = replace(SETTINGS, health=HealthMode.ACT)
PATIENT = replace(SETTINGS.timeouts, heartbeat_s=90_000.0)
"""Nobody is lost for saying nothing."""
OBSERVE = replace(SETTINGS, health=HealthMode.OBSERVE)


class WatchedBench(MovingBench):
    def __init__(self, settings: JobSettings = SETTINGS, domains: tuple[str, ...] = ()) -> None:
        self.domains = domains
        super().__init__(settings)

    def hello(self, pod: str, **changes: Any) -> Hello:
        return super().hello(pod, **{"domains": self.domains, **changes})

    def find(self, pod: str, *findings: Finding) -> list[Action]:
        """Let a pod's watch say what it has found."""
        self.seq += 1
        report = Report(self.seq, tuple(self.states[pod]), health=Health(findings))
        return self.step(AgentReported(self.sessions[pod], report))

    def move(self, actions: list[Action], active: Sequence[str] = ("p0", "p1")) -> list[Action]:
        """Let the active pods stand and save, once they are asked to."""
        first, last = active
        order = order_of(actions)
        self.answer(first, order, 5, 5, is_held=True)
        common = order_of(self.answer(last, order, 5, 5, is_held=True))
        self.answer(first, common, 5, 5, is_held=True, is_done=True)
        return self.answer(last, common, 5, 5, is_held=True, is_done=True)


@pytest.mark.parametrize("finding", [LOST, DOWN], ids=["fatal", "suspect"])
def test_ranks_of_a_broken_device_move_to_a_spare_after_a_step(finding: Finding) -> None:
    bench = WatchedBench(ACT)
    over = bench.move(bench.find("p0", finding, SILENT))
    interrupt = sent(over, Interrupt)["p1"]
    assert (interrupt.cause, interrupt.pod) == (Cause.DEVICE_FAULT, "p0")
    assert interrupt.detail.startswith(finding.code)
    assert interrupt.detail.endswith("; moves after step 5")
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert (ranks(plans["p2"]), ranks(plans["p0"])) == ([0, 1], [None, None])
    bench.all_are(RUNNING, 1, "p1", "p2")
    status = bench.status()
    assert (status.phase, status.recoveries[-1].rung, status.recoveries[-1].node) == (
        JobPhase.RUNNING,
        Rung.POD,
        "node-p0",
    )
    assert [pod.pod for pod in status.pods if pod.unfit] == ["p0"]


@pytest.mark.parametrize("mode", [HealthMode.OFF, HealthMode.OBSERVE])
@pytest.mark.parametrize("finding", [LOST, DOWN, SLOW])
def test_a_job_that_does_not_act_recovers_as_without_findings(mode: HealthMode, finding: Finding) -> None:
    plain, watched = WatchedBench(SETTINGS), WatchedBench(replace(SETTINGS, health=mode))
    assert watched.find("p0", finding) == []
    assert [bench.live(20.0) for bench in (plain, watched)] == [[], []]
    for bench in (plain, watched):
        bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE)
        bench.all_are(READY, 0, "p1")
        bench.tick(5.0)
    mine, other = (bench.status().recoveries[-1] for bench in (plain, watched))
    assert replace(other, number=mine.number) == mine
    assert plain.status().phase == watched.status().phase


def test_findings_are_told_with_what_was_not_checked() -> None:
    bench = WatchedBench(OBSERVE)
    bench.find("p0", LOST, SILENT)
    bench.find("p1", SILENT)
    health = bench.status().health
    assert health is not None
    assert [(item.pod, item.node, item.finding) for item in health.findings] == [("p0", "node-p0", LOST)]
    assert (health.num_pods, health.num_findings, health.unchecked) == (2, 1, (("ports", 2),))
    assert WatchedBench(SETTINGS).status().health is None


def test_a_check_that_says_itself_that_it_knows_a_part_is_told_as_such() -> None:
    bench = WatchedBench(OBSERVE)
    bench.find("p0", replace(SILENT, check="storage"), Finding("storage", "/data", Verdict.OK))
    health = bench.status().health
    assert health is not None
    assert health.unchecked == (("storage.in-part", 1),)
    assert nodes_healthy(health).message.endswith("not checked everywhere: storage (in part)")
    bench.find("p1", replace(SILENT, check="storage"))
    health = bench.status().health
    assert health is not None
    assert dict(health.unchecked) == {"storage": 1, "storage.in-part": 1}
    assert nodes_healthy(health).message.endswith("not checked everywhere: storage")


def test_the_text_of_a_probe_names_it() -> None:
    failed = Finding("fans", "", Verdict.FATAL, "probe-failed", message="fan 3 stands")
    assert finding_text(failed) == "probe-failed of check fans is fatal: fan 3 stands"
    assert finding_text(replace(LOST, message="")) == f"{LOST.code} on {LOST.entity} is fatal"


@pytest.mark.parametrize("finding", [SLOW, OWN, SILENT, replace(DOWN, seen=1)], ids=["worn", "own", "unknown", "once"])
def test_what_is_no_strike_moves_nothing(finding: Finding) -> None:
    bench = WatchedBench(ACT)
    assert bench.find("p0", finding) == []
    assert bench.live(10.0) == []


def test_a_fatal_finding_explains_the_death_of_a_process_and_nothing_is_started_there() -> None:
    bench = WatchedBench(ACT)
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    found = bench.find("p0", LOST)
    actions = [*found, *bench.all_are(READY, 0, "p1")]
    assert "p0" not in sent(actions, Respawn)
    assert ranks(sent(actions, Plan)["p2"]) == [0, 1]
    assert "p0" not in sent(bench.live(20.0), Respawn)
    bench.all_are(RUNNING, 1, "p1", "p2")
    recovery = bench.status().recoveries[-1]
    assert (recovery.cause, recovery.pod, recovery.detail) == (Cause.DEVICE_FAULT, "p0", TEXT)


def test_a_pod_that_lost_its_ranks_in_this_interruption_is_no_spare_for_another_one() -> None:
    """Before, the job was a pod short for what was found, and failed after its startup timeout."""
    bench = WatchedBench(replace(ACT, spares=0))
    bench.all_are(GONE, -1, "p2")
    bench.step(AgentDisconnected(bench.sessions.pop("p1")))
    bench.tick(bench.settings.timeouts.reconnect_s + 1.0)
    assert bench.status().phase is JobPhase.INTERRUPTED
    bench.states["p1"] = bench.workers(READY)
    bench.join("p1")
    bench.find("p0", LOST)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []
    plans = sent(bench.all_are(READY, 0, "p0"), Plan)
    assert sorted(rank for plan in plans.values() for rank in ranks(plan) if rank is not None) == [0, 1, 2, 3]


def test_a_spare_without_all_of_its_workers_takes_no_whole_pod_over() -> None:
    """Before, a finding made the job a rank smaller."""
    bench = WatchedBench(replace(ACT, min_ranks_per_pod=1))
    bench.states["p2"] = [bench.workers(READY)[0], bench.workers(GONE)[1]]
    bench.report("p2")
    assert not sent(bench.find("p0", LOST), Halt)
    bench.states["p2"] = bench.workers(READY, incarnation=1)
    assert sorted(sent(bench.report("p2"), Halt)) == ["p0", "p1"]


def test_who_could_not_be_blamed_while_ranks_were_given_is_as_soon_as_all_train() -> None:
    """Before, only with the next message of any pod."""
    bench = WatchedBench(ACT)
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.all_are(READY, 0, "p0", "p1")
    bench.find("p0", LOST)
    assert sorted(sent(bench.all_are(RUNNING, 1, "p0", "p1"), Halt)) == ["p0", "p1"]


def test_a_suspicion_takes_no_part_in_somebody_elses_fault() -> None:
    bench = WatchedBench(ACT)
    bench.fault("p1", 0, Cause.EXCEPTION)
    bench.find("p0", DOWN)
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p0", "p1")
    assert bench.status().recoveries[-1].pod == "p1"


def test_without_a_ready_spare_nobody_is_blamed_and_as_soon_as_there_is_one_it_takes_over() -> None:
    bench = WatchedBench(ACT)
    bench.all_are(GONE, -1, "p2")
    assert bench.find("p0", LOST) == []
    assert not sent(bench.live(5.0), Halt)
    bench.states["p2"] = bench.workers(READY, incarnation=1)
    assert sorted(sent(bench.report("p2"), Halt)) == ["p0", "p1"]


def test_a_spare_that_is_broken_itself_takes_nothing_over() -> None:
    bench = WatchedBench(ACT)
    assert bench.find("p2", LOST) == []
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p2"]
    assert bench.find("p0", LOST) == []


def test_a_false_alarm_of_the_whole_fleet_moves_one_pod_at_most() -> None:
    bench = WatchedBench(replace(ACT, spares=6, timeouts=PATIENT))
    for number in range(3, 8):
        bench.join(f"p{number}")
    bench.move(bench.find("p0", LOST))
    for pod in ("p1", "p2", "p3", "p4", "p5", "p6", "p7"):
        bench.find(pod, LOST)
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    active = [pod for pod, plan in plans.items() if plan.ranks[0].rank is not None]
    bench.all_are(RUNNING, 1, *active)
    assert not sent(bench.tick(600.0), Halt)
    status = bench.status()
    assert (len(status.recoveries), sum(bool(pod.unfit) for pod in status.pods)) == (1, 1)
    assert status.health is not None
    assert "may be a false alarm: no ranks move for it" in status.health.held


@pytest.mark.parametrize("limit_s", [BREAKER_S, BUDGET_S])
def test_what_ends_after_a_while_has_ended_at_its_tick(limit_s: float) -> None:
    """Before, where the sum of two numbers was rounded, a tick was due at the moment in which it was taken."""
    bench = WatchedBench(replace(ACT, timeouts=PATIENT))
    moments = (bench.now_s + number / 7 for number in range(1, 10_000))
    bench.now_s = next(at_s for at_s in moments if (at_s + limit_s) - at_s < limit_s)
    bench.find("p2", LOST)
    bench.report("p0")
    bench.tick(limit_s + 1.0)
    assert [pod.unfit for pod in bench.status().pods] == ["", "", TEXT]


def test_two_pods_under_one_switch_blame_the_switch() -> None:
    settings = replace(ACT, spares=2, layers=(Layer("rack", "l/rack"),))
    bench = WatchedBench(settings, domains=("r1",))
    bench.join("p3")
    assert bench.find("p0", DOWN) == []
    bench.tick(1.0)
    bench.find("p1", DOWN)
    assert not sent(bench.live(60.0), Halt)
    status = bench.status()
    assert status.health is not None
    assert status.health.held == ("links of several pods are down or lossy, look at what they share: r1 (2 pods)")


def test_a_link_that_is_down_alone_in_its_rack_is_its_pods() -> None:
    bench = WatchedBench(replace(ACT, layers=(Layer("rack", "l/rack"),)), domains=("r1",))
    assert bench.find("p0", DOWN) == []
    assert sorted(sent(bench.live(SWITCH_S + 1), Halt)) == ["p0", "p1"]


def test_a_suspicion_is_not_worth_the_steps_since_a_checkpoint() -> None:
    """Where every fault restarts the processes, only what is broken for sure moves ranks."""
    settings = replace(ACT, rungs=(RungBudget(Rung.PROCESS), RungBudget(Rung.POD)))
    bench = WatchedBench(settings)
    assert bench.find("p0", DOWN) == []
    assert sent(bench.find("p0", LOST), Interrupt)["p1"].cause is Cause.DEVICE_FAULT


def test_a_pod_whose_link_is_back_is_a_spare_again() -> None:
    bench = WatchedBench(ACT)
    bench.move(bench.find("p0", DOWN))
    bench.all_are(READY, 0, "p0", "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    assert bench.status().spare_ranks == 0
    bench.find("p0", replace(DOWN, verdict=Verdict.OK, code="", seen=1))
    assert (bench.status().spare_ranks, [pod.unfit for pod in bench.status().pods]) == (2, ["", "", ""])


def test_a_worn_spare_is_promoted_only_where_nobody_else_can_be() -> None:
    bench = WatchedBench(replace(ACT, spares=2))
    bench.join("p3")
    bench.find("p2", SLOW)
    bench.move(bench.report("p0", is_leaving=True))
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert (ranks(plans["p3"]), ranks(plans["p2"])) == ([0, 1], [None, None])
    alone = WatchedBench(ACT)
    alone.find("p2", SLOW)
    alone.move(alone.report("p0", is_leaving=True))
    assert ranks(sent(alone.all_are(READY, 0, "p0", "p1"), Plan)["p2"]) == [0, 1]


def test_a_new_coordinator_learns_of_findings_when_agents_join() -> None:
    bench = WatchedBench(OBSERVE)
    bench.join("p0", health=Health((LOST,)))
    health = bench.status().health
    assert health is not None
    assert [item.pod for item in health.findings] == ["p0"]


def test_a_job_is_led_to_no_step_for_a_watch_that_talks_all_the_time() -> None:
    settings: JobSettings = ACT
    bench = WatchedBench(settings)
    for number in range(200):
        assert bench.find("p0", replace(DOWN, entity=f"mlx5_{number}/1", seen=1)) == []


def test_a_finding_ends_no_job_whose_budget_for_pods_is_used_up() -> None:
    """Before, one forged finding, or a sound one, failed a job that trained."""
    bench = WatchedBench(replace(ACT, rungs=(RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD, 1, 60.0))))
    bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE)
    bench.all_are(READY, 0, "p1")
    bench.all_are(RUNNING, 1, "p1", "p2")
    bench.states["p0"] = bench.workers(READY, incarnation=1)
    bench.report("p0")
    assert bench.status().spare_ranks == 2
    assert bench.find("p1", LOST) == []
    assert not sent(bench.live(40.0), Halt)
    assert bench.status().phase is JobPhase.RUNNING
    assert sorted(sent(bench.live(25.0), Halt)) == ["p1", "p2"]


class RackedBench(WatchedBench):
    """Pod p0 is alone in its rack, p1 shares one with the spare, and no spare leaves its rack."""

    def hello(self, pod: str, **changes: Any) -> Hello:
        self.domains = ("w", "r1" if pod == "p0" else "r2")
        return super().hello(pod, **changes)


def test_a_finding_leaves_the_job_as_many_pods_as_it_needs_at_least() -> None:
    """Before, the spares took the ranks, one pod too few was left, and the next fault failed the job."""
    bench = WatchedBench(replace(ACT, replicas=3, spares=0, max_ranks=4))
    bench.all_are(READY, -1, "p2")
    assert bench.status().spare_ranks == 2
    assert bench.find("p0", LOST) == []
    assert not sent(bench.live(10.0), Halt)
    bench.fault("p1", 0, Cause.EXCEPTION)
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert {pod: ranks(plan) for pod, plan in plans.items()} == {"p0": [0, 1], "p1": [2, 3], "p2": [None, None]}
    bench.all_are(RUNNING, 1, "p0", "p1")
    assert sorted(sent(bench.join("p3"), Halt)) == ["p0", "p1"]


def test_a_pod_without_ranks_that_is_needed_is_not_called_broken() -> None:
    bench = WatchedBench(replace(ACT, replicas=3, spares=0, max_ranks=4))
    bench.all_are(READY, -1, "p2")
    bench.find("p2", LOST)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []
    bench.join("p3")
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p2"]


@pytest.mark.parametrize("settings", [ACT, replace(ACT, min_replicas=1)], ids=["whole", "may shrink"])
def test_nobody_moves_once_the_spare_is_lost_before_all_stand(settings: JobSettings) -> None:
    """Before, the job went on without the ranks, or not at all."""
    bench = WatchedBench(settings)
    first = order_of(bench.find("p0", LOST))
    bench.answer("p0", first, 5, 5, is_held=True)
    assert order_of(bench.step(AgentDisconnected(bench.sessions.pop("p2")))).step == NO_STEP
    assert not sent(bench.live(40.0), Interrupt)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []
    assert sorted(sent(bench.join("p2"), Halt)) == ["p0", "p1"]
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p0"]


@pytest.mark.parametrize("is_preflight", [False, True], ids=["watch", "preflight"])
def test_a_spare_that_comes_and_goes_uses_up_no_budget_and_is_waited_for_a_while_only(is_preflight: bool) -> None:
    """Before, nobody moved for an hour, and the status spoke of four pods that had."""
    bench = WatchedBench(replace(ACT, preflight=HealthMode.ACT, timeouts=PATIENT))
    asked = bench.find("p0", WRONG if is_preflight else LOST)
    for _turn in range(MAX_BLAMED):
        assert sorted(sent(asked, Halt)) == ["p0", "p1"]
        gone = bench.step(AgentDisconnected(bench.sessions.pop("p2")))
        assert order_of(gone).step == NO_STEP
        asked = bench.join("p2")
        bench.tick(1.0)
    health = bench.status().health
    assert health is not None
    assert health.held == ("ranks were to leave a pod 4 times within 5 min, and did not: no more for now")
    assert (sent(asked, Halt), bench.status().recoveries) == ({}, ())
    again = bench.tick(BREAKER_S - MAX_BLAMED)
    assert sent(bench.move(again), Interrupt)["p1"].cause is Cause.DEVICE_FAULT
    assert len(bench.coordinator._job.health.blames_s) == 1


def test_a_finding_that_comes_and_goes_stays_in_the_budget() -> None:
    bench = WatchedBench(replace(ACT, timeouts=PATIENT))
    for _turn in range(MAX_BLAMED):
        assert sorted(sent(bench.find("p0", LOST), Halt)) == ["p0", "p1"]
        assert order_of(bench.find("p0", OWN)).step == NO_STEP
    assert bench.find("p0", LOST) == []
    health = bench.status().health
    assert health is not None
    assert health.held == "pods were blamed for findings 4 times within 60 min: no more for now"
    assert sorted(sent(bench.tick(BUDGET_S), Halt)) == ["p0", "p1"]


def test_a_rendezvous_that_begins_anew_knows_how_often_it_has_blamed() -> None:
    bench = WatchedBench(replace(ACT, timeouts=PATIENT))
    for _turn in range(MAX_BLAMED):
        bench.find("p0", LOST)
        bench.find("p0", OWN)
    job = bench.coordinator._job
    before = job.health
    start_over(job, "has heard no pod", bench.now_s)
    assert job.health is not before
    assert (len(before.blames_s), job.health.blames_s) == (MAX_BLAMED, before.blames_s)


def test_an_alarm_of_the_spare_takes_back_what_rests_on_it() -> None:
    bench = WatchedBench(ACT)
    bench.find("p0", LOST)
    assert order_of(bench.find("p2", LOST)).step == NO_STEP
    before = bench.status()
    assert before.health is not None
    assert before.health.held.startswith("findings speak against 2 pods")
    assert (bench.report("p1"), bench.status().health) == ([], before.health)
    assert not sent(bench.live(40.0), Interrupt)


def test_the_move_goes_on_while_another_spare_is_there() -> None:
    bench = WatchedBench(replace(ACT, spares=2))
    bench.join("p3")
    asked = bench.find("p0", LOST)
    bench.step(AgentDisconnected(bench.sessions.pop("p2")))
    assert sent(bench.move(asked), Interrupt)["p1"].cause is Cause.DEVICE_FAULT
    assert ranks(sent(bench.all_are(READY, 0, "p0", "p1"), Plan)["p3"]) == [0, 1]


def test_ranks_stay_until_the_domain_of_the_spare_is_known() -> None:
    """Before, they moved to nobody: a pod whose domain nobody has named yet gets no ranks, and the job shrank."""
    layers = (Layer("rack", "l/rack"),)
    bench = WatchedBench(replace(ACT, layers=layers, min_replicas=1), ("r1",))
    bench.step(AgentDisconnected(bench.sessions.pop("p2")))
    bench.live(10.0)
    bench.domains = ()
    bench.join("p3")
    assert not sent(bench.find("p0", LOST), Halt)
    named = bench.step(Observed(Observation({"uid-p3": PodObservation("p3", "n", ("r1",))})))
    assert sorted(sent(named, Halt)) == ["p0", "p1"]


def test_ranks_stay_where_no_layer_lets_a_spare_take_them() -> None:
    """Before, the job waited for another pod, and failed where none came."""
    layers = (Layer("row", "l/row", replace_from=False), Layer("rack", "l/rack"))
    bench = RackedBench(replace(ACT, layers=layers))
    assert bench.find("p0", LOST) == []
    assert not sent(bench.live(20.0), Halt)
    bench.find("p0", OWN)
    assert sorted(sent(bench.find("p1", LOST), Halt)) == ["p0", "p1"]


def test_a_fault_where_no_layer_lets_a_spare_take_over_is_repaired_in_its_place() -> None:
    layers = (Layer("row", "l/row", replace_from=False), Layer("rack", "l/rack"))
    bench = RackedBench(replace(ACT, layers=layers))
    bench.fault("p0", 0, Cause.PROCESS_SIGNAL, GONE)
    bench.find("p0", LOST)
    actions = [*bench.all_are(GONE, 0, "p0"), *bench.all_are(READY, 0, "p1"), *bench.live(20.0)]
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []
    assert "p0" in sent(actions, Respawn)


def test_a_trainer_that_forges_findings_in_each_new_pod_moves_its_job_four_times_an_hour() -> None:
    """All that it reaches: its own job moves, seldom, from one pod to the next, and says why it stops."""
    bench = WatchedBench(replace(ACT, spares=2, timeouts=PATIENT))
    moved_s: list[float] = []
    for number in range(3, 33):
        bench.join(f"p{number}")
        active = [pod.pod for pod in bench.status().pods if pod.ranks]
        asked = bench.find(active[0], LOST)
        if sent(asked, Halt):
            moved_s.append(bench.now_s)
            bench.move(asked, active)
            iteration = bench.status().iteration
            plans = sent(bench.all_are(READY, iteration, *active), Plan)
            heirs = [pod for pod, plan in plans.items() if plan.ranks[0].rank is not None]
            assert active[0] not in heirs
            bench.all_are(RUNNING, iteration + 1, *heirs)
        else:
            health = bench.status().health
            assert health is not None
            assert health.held == "pods were blamed for findings 4 times within 60 min: no more for now"
            bench.find(active[0], OWN)
        assert bench.status().phase is JobPhase.RUNNING
        bench.tick(BREAKER_S + 1)
    assert len(moved_s) == 12
    assert all(later - earlier >= BUDGET_S for earlier, later in zip(moved_s, moved_s[MAX_BLAMED:], strict=False))


def test_a_place_that_is_used_no_more_takes_no_rank_of_a_blamed_pod() -> None:
    """Its process says READY for ever; the job became a rank smaller by a finding."""
    bench = WatchedBench(replace(ACT, min_ranks_per_pod=1, max_faults_per_rank=1))
    members = bench.coordinator._job.members
    spare = members.by_uid["uid-p2"]
    members.count_fault(spare, spare.places[0], 2, 1)
    bench.find("p0", LOST)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []
    bench.join("p3")
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p0"]
