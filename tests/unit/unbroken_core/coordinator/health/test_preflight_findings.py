"""What pods find of themselves before their first process: who gets ranks, who is replaced, and when nobody is."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.health.test_health import LOST, PATIENT, WatchedBench
from tests.unit.unbroken_core.coordinator.test_coordinator import GONE, READY, RUNNING, SETTINGS, Bench, ranks, sent

from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported
from unbroken_core.protocol.messages import Halt, Interrupt, Plan, Report
from unbroken_core.protocol.settings import HealthMode, JobSettings
from unbroken_core.recovery.health import (
    BUDGET_S,
    MAX_BLAMED,
    Strike,
    assess_preflights,
    preflight_strike_of,
    why_spent,
)
from unbroken_core.vocabulary.findings import DEVICES, LOOPBACK, MATMUL, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Rung

WRONG = Finding(MATMUL, "cuda:0", Verdict.FATAL, message="bfloat16: 12 of 16777216 products are wrong")
TEXT = "preflight-matmul on cuda:0 is fatal: bfloat16: 12 of 16777216 products are wrong"
SOUND = Finding(MATMUL, "", Verdict.OK)
FEWER = Finding(DEVICES, "", Verdict.FATAL, message="want 8 GPUs, got 7")
SILENT = Finding(MATMUL, "cuda:0", Verdict.UNKNOWN, "no-answer", message="no end within 40 s")
ODD = Finding(LOOPBACK, "", Verdict.SUSPECT, message="rank 0: its process was ended by SIGSEGV")
ACTS = replace(SETTINGS, preflight=HealthMode.ACT, timeouts=PATIENT)
OBSERVES = replace(SETTINGS, preflight=HealthMode.OBSERVE)


class FormingBench(Bench):
    """Pods that come with what their preflight has found, before the first plan."""

    def find(self, pod: str, *findings: Finding) -> list[Action]:
        """Let a pod that has come find more."""
        self.seq += 1
        return self.step(
            AgentReported(self.sessions[pod], Report(self.seq, tuple(self.states[pod]), health=Health(findings)))
        )

    def come(self, pod: str, *findings: Finding) -> list[Action]:
        return self.join(pod, health=Health(findings))

    def plan(self, actions: list[Action]) -> dict[str, list[int | None]]:
        """Return the ranks of each pod, local ranks in order."""
        return {pod: ranks(plan) for pod, plan in sent(actions, Plan).items()}


SPARE = [None, None]


def lose(bench: Bench, pod: str) -> None:
    bench.step(AgentDisconnected(bench.sessions.pop(pod)))
    bench.tick(bench.settings.timeouts.reconnect_s + 1.0)


@pytest.mark.parametrize("first", [True, False], ids=["it comes first", "it comes last"])
def test_who_has_failed_gets_no_rank_while_others_are_there(first: bool) -> None:
    bench = FormingBench(ACTS)
    if first:
        bench.come("p0", WRONG)
    bench.come("p1")
    actions = bench.come("p2")
    if not first:
        actions = [*actions, *bench.come("p0", WRONG)]
    assert bench.plan(actions) == {"p0": SPARE, "p1": [0, 1], "p2": [2, 3]}


@pytest.mark.parametrize("settings", [OBSERVES, SETTINGS], ids=["Observe", "Off"])
def test_with_observe_ranks_are_given_as_if_nothing_had_been_found(settings: JobSettings) -> None:
    bench, plain = FormingBench(settings), FormingBench(SETTINGS)
    for each, findings in ((bench, (WRONG,)), (plain, ())):
        each.come("p0", *findings)
        each.come("p1")
    assert bench.plan(bench.come("p2")) == plain.plan(plain.come("p2")) == {"p0": [0, 1], "p1": [2, 3], "p2": SPARE}
    bench.all_are(RUNNING, 0, "p0", "p1")
    health = bench.status().health
    if settings is SETTINGS:
        assert health is None
        return
    assert health is not None
    assert ([(item.pod, item.finding) for item in health.findings], health.num_pods, health.held) == (
        [("p0", WRONG)],
        1,
        "",
    )
    assert not sent(bench.live(10.0), Halt)


@pytest.mark.parametrize("finding", [SILENT, ODD], ids=["unknown", "suspect"])
def test_what_is_not_for_sure_is_no_reason_to_pass_a_pod_over(finding: Finding) -> None:
    bench = FormingBench(ACTS)
    bench.come("p0", finding)
    bench.come("p1")
    assert bench.plan(bench.come("p2")) == {"p0": [0, 1], "p1": [2, 3], "p2": SPARE}


def test_others_that_may_still_come_are_waited_for_as_long_as_their_own_preflight_takes() -> None:
    bench = FormingBench(ACTS)
    bench.come("p0", WRONG)
    bench.come("p1")
    assert not sent(bench.tick(ACTS.preflight_s), Plan)
    assert "since the preflight of p0 has failed" in bench.status().message
    assert bench.plan(bench.come("p2")) == {"p0": SPARE, "p1": [0, 1], "p2": [2, 3]}


def test_the_wait_ends_and_a_finding_ends_no_job() -> None:
    bench = FormingBench(ACTS)
    bench.come("p0", WRONG)
    bench.come("p1")
    actions = bench.tick(ACTS.preflight_s + ACTS.timeouts.last_call_s + 1.0)
    assert bench.plan(actions) == {"p0": [0, 1], "p1": [2, 3]}


def test_a_job_without_spares_waits_for_nobody() -> None:
    bench = FormingBench(replace(ACTS, spares=0))
    bench.come("p0", WRONG)
    assert bench.plan(bench.come("p1")) == {"p0": [0, 1], "p1": [2, 3]}
    bench.all_are(RUNNING, 0, "p0", "p1")
    assert (bench.status().phase, sent(bench.live(10.0), Halt)) == (JobPhase.RUNNING, {})


def test_an_image_that_fails_everywhere_moves_nothing_and_replaces_no_pod() -> None:
    bench = FormingBench(replace(ACTS, spares=4))
    actions: list[Action] = []
    for number in range(6):
        actions = bench.come(f"p{number}", WRONG)
    assert bench.plan(actions)["p0"] == [0, 1]
    bench.all_are(RUNNING, 0, "p0", "p1")
    assert not sent(bench.tick(2 * BUDGET_S), Halt)
    status = bench.status()
    assert (status.phase, [pod.pod for pod in status.pods if pod.unfit]) == (JobPhase.RUNNING, [])
    assert status.health is not None
    assert status.health.held == (
        "the preflight of 6 of 6 pods has failed, which may be a false alarm: no ranks move for it, "
        "and no pod is replaced"
    )


def test_an_image_that_fails_on_all_pods_of_a_job_that_waits_for_others_is_waited_for_once() -> None:
    """More have failed than there are spares: nobody could take all of their places."""
    bench = FormingBench(replace(ACTS, spares=1))
    bench.come("p0", WRONG)
    bench.come("p1", WRONG)
    assert bench.plan(bench.tick(ACTS.timeouts.last_call_s + 1.0)) == {"p0": [0, 1], "p1": [2, 3]}


def test_a_spare_whose_preflight_has_failed_is_replaced_once_an_hour() -> None:
    bench = WatchedBench(ACTS)
    bench.find("p2", WRONG)
    assert [(pod.pod, pod.unfit) for pod in bench.status().pods if pod.unfit] == [("p2", TEXT)]
    lose(bench, "p2")
    bench.join("p3", health=Health((WRONG,)))
    status = bench.status()
    assert [pod.pod for pod in status.pods if pod.unfit] == []
    assert status.health is not None
    assert status.health.held.startswith("the preflight of 1 more pod has failed within 60 min")
    bench.tick(BUDGET_S)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p3"]


def test_ranks_move_from_who_has_failed_as_soon_as_a_spare_is_there() -> None:
    bench = WatchedBench(ACTS)
    bench.all_are(GONE, -1, "p2")
    assert bench.find("p0", WRONG) == []
    bench.states["p2"] = bench.workers(READY, incarnation=1)
    bench.move(bench.report("p2"))
    plans = sent(bench.all_are(READY, 0, "p0", "p1"), Plan)
    assert (ranks(plans["p2"]), ranks(plans["p0"])) == ([0, 1], SPARE)
    bench.all_are(RUNNING, 1, "p1", "p2")
    recovery = bench.status().recoveries[-1]
    assert (recovery.cause, recovery.rung, recovery.pod) == (Cause.DEVICE_FAULT, Rung.POD, "p0")
    assert recovery.detail.startswith(TEXT)


def test_ranks_that_could_not_move_from_who_has_failed_do_as_soon_as_another_spare_is_there() -> None:
    """Before, they moved to nobody."""
    bench = WatchedBench(replace(ACTS, min_replicas=1))
    assert sorted(sent(bench.find("p0", WRONG), Halt)) == ["p0", "p1"]
    bench.step(AgentDisconnected(bench.sessions.pop("p2")))
    assert not sent(bench.live(40.0), Interrupt)
    assert sorted(sent(bench.join("p3"), Halt)) == ["p0", "p1"]


def test_a_spare_that_has_failed_is_promoted_only_where_nobody_else_can_be() -> None:
    bench = WatchedBench(replace(ACTS, spares=2))
    bench.join("p3")
    bench.find("p2", WRONG)
    bench.fault("p0", 0, Cause.PROCESS_EXIT, GONE)
    assert ranks(sent(bench.all_are(READY, 0, "p1"), Plan)["p3"]) == [0, 1]


def test_a_false_alarm_of_all_preflights_does_not_hold_up_what_watches_find() -> None:
    bench = FormingBench(replace(ACTS, health=HealthMode.ACT))
    for pod in ("p0", "p1", "p2"):
        bench.come(pod, WRONG)
    bench.all_are(RUNNING, 0, "p0", "p1")
    assert bench.find("p2") == []
    assert bench.find("p1", WRONG) == []
    assert bench.find("p1", WRONG, LOST) != []
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p1"]


def test_a_pod_that_is_gone_leaves_nothing_behind() -> None:
    bench = WatchedBench(ACTS)
    bench.find("p2", WRONG)
    lose(bench, "p2")
    assert bench.status().health is None


def strike(finding: Finding = WRONG) -> Strike:
    found = preflight_strike_of((finding,))
    assert found is not None
    return found


def test_only_what_is_fatal_and_of_a_preflight_speaks_against_a_pod() -> None:
    assert preflight_strike_of((SILENT, ODD, LOST)) is None
    assert preflight_strike_of((WRONG, FEWER)) == Strike(FEWER, True, False)


def test_one_pod_is_blamed_for_its_preflight_and_no_other_one_soon() -> None:
    one, two = {"a": strike()}, {"a": strike(), "b": strike()}
    assert assess_preflights({}, 0, (), ()).held == ""
    assert assess_preflights(one, 1, (), ()).blamed == one
    assert assess_preflights(two, 4, (), ()).blamed == two
    assert assess_preflights(two, 3, (), ()).blamed == {}
    assert assess_preflights(two, 4, ("a",), ("a",)).blamed == one
    assert assess_preflights({"b": strike()}, 4, (), ("a",)).blamed == {}
    assert assess_preflights(one, 4, (), (), why_spent(MAX_BLAMED, 0)).held.endswith("no more for now")


def test_of_two_pods_that_have_failed_among_many_one_is_replaced_in_an_hour() -> None:
    bench = FormingBench(replace(ACTS, spares=3))
    for number in range(5):
        actions = bench.come(f"p{number}", WRONG if number < 2 else SOUND)
    assert {pod: ranks for pod, ranks in bench.plan(actions).items() if ranks != SPARE} == {"p2": [0, 1], "p3": [2, 3]}
    bench.all_are(RUNNING, 0, "p2", "p3")
    bench.live(1.0)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p0"]
    lose(bench, "p0")
    bench.come("p5", SOUND)
    health = bench.status().health
    assert health is not None
    assert health.held == (
        "the preflight of 1 more pod has failed within 60 min after one had to move: no other one does for it"
    )
    bench.tick(BUDGET_S)
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p1"]
