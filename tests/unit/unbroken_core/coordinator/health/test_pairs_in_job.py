"""Pods of a job that test with each other: before the first plan, and later those without ranks. Pure."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_core.coordinator.health.test_health import PATIENT
from tests.unit.unbroken_core.coordinator.test_coordinator import RUNNING, SETTINGS, Bench, ranks, sent

from unbroken_core.coordinator.events import Action, AgentDisconnected, AgentReported, Send
from unbroken_core.coordinator.health.pairs import GRACE_S, MOST_PARTNERS, PAIR_S
from unbroken_core.protocol.messages import Halt, Hello, PairOrder, PairState, Plan, Report
from unbroken_core.protocol.settings import HealthMode, JobSettings
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import MATMUL, PAIRS, PREFLIGHT, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import JobPhase, Reason

OWN = tuple(Finding(check, "", Verdict.OK) for check in PREFLIGHT)
WRONG = Finding(MATMUL, "cuda:0", Verdict.FATAL, message="12 products are wrong")
TESTS = replace(
    SETTINGS,
    replicas=4,
    spares=1,
    ranks_per_pod=1,
    preflight=HealthMode.ACT,
    preflight_s=120.0,
    preflight_pairs=True,
    timeouts=PATIENT,
)
SPARE = [None]


class PairsBench(Bench):
    """Pods that test with each other, some of which, or of their links, are broken."""

    def __init__(
        self, settings: JobSettings = TESTS, bad: Collection[str] = (), links: Collection[set[str]] = ()
    ) -> None:
        super().__init__(settings)
        self.bad, self.links = bad, links
        self.silent: set[str] = set()
        """Pods that say nothing of their tests."""
        self.unable: set[str] = set()
        """Pods that do not know how theirs went."""
        self.mute: set[str] = set()
        """Pods that take no tests, such as those of an earlier release."""
        self.said: dict[str, PairState] = {}
        self.orders: list[tuple[str, PairOrder]] = []
        """All that were given, with the pod."""

    def hello(self, pod: str, **changes: Any) -> Hello:
        said = self.said.setdefault(pod, PairState(29000 + len(self.said), f"10.0.0.{len(self.said)}"))
        more = {"health": Health(OWN), "pairs": None if pod in self.mute else said}
        return super().hello(pod, **{**more, **changes})

    def step(self, event: Any) -> list[Action]:
        actions = super().step(event)
        self.orders += [
            (action.session.split("#")[0], action.message)
            for action in actions
            if isinstance(action, Send) and isinstance(action.message, PairOrder)
        ]
        return actions

    def say(self, pod: str, state: PairState) -> list[Action]:
        self.said[pod] = state
        self.seq += 1
        return self.step(AgentReported(self.sessions[pod], Report(self.seq, tuple(self.states[pod]), pairs=state)))

    def fly(self, actions: list[Action]) -> list[Action]:
        """Let pods do the tests that they are told to do, and time pass where one does not answer."""
        every = list(actions)
        while orders := sent(actions, PairOrder):
            partners: dict[int, list[str]] = {}
            for pod, order in orders.items():
                partners.setdefault(order.number, []).append(pod)
            actions = []
            for pod, order in orders.items():
                pair = partners[order.number]
                assert len(pair) == 2
                has_passed = not (self.silent | set(self.bad)).intersection(pair) and set(pair) not in self.links
                if pod in self.silent:
                    continue
                answer = None if pod in self.unable else has_passed
                state = replace(self.said[pod], term=order.term, number=order.number, has_passed=answer, why="no end")
                actions += self.say(pod, state)
            if self.silent.intersection(orders):
                actions += self.tick(PAIR_S + GRACE_S)
            every += actions
        return every

    def form(self, *pods: str) -> dict[str, list[int | None]]:
        """Let pods come, and test; return who gets which rank."""
        actions = [action for pod in pods for action in self.join(pod)]
        if len(pods) < self.settings.replicas + self.settings.spares:
            actions += self.tick(self.settings.timeouts.last_call_s)
        return self.plan(self.fly(actions))

    def plan(self, actions: list[Action]) -> dict[str, list[int | None]]:
        return {pod: ranks(plan) for pod, plan in sent(actions, Plan).items()}

    def found(self) -> dict[tuple[str, str], Verdict]:
        """Return what the status says of pairs that is wrong, by pod and entity."""
        health = self.status().health
        assert health is not None
        return {
            (each.pod, each.finding.entity): each.finding.verdict
            for each in health.findings
            if each.finding.check == PAIRS
        }

    def unchecked(self) -> int:
        """Return of how many pods nothing is known."""
        health = self.status().health
        assert health is not None
        return dict(health.unchecked).get(PAIRS, 0)


FIVE = ("p0", "p1", "p2", "p3", "p4")


def test_sound_pods_test_in_rounds_and_train() -> None:
    bench = PairsBench()
    assert bench.form(*FIVE) == {"p0": [0], "p1": [1], "p2": [2], "p3": [3], "p4": SPARE}
    assert (bench.found(), bench.unchecked()) == ({}, 0)
    assert {order.side for _pod, order in bench.orders} == {0, 1}
    for pod, order in bench.orders:
        pair = [other for other, each in bench.orders if each.number == order.number]
        place = next(other for other, each in bench.orders if (each.number, each.side) == (order.number, 0))
        assert (order.host, order.port) == (bench.said[place].host, bench.said[place].port)
        assert len(pair) == 2
        assert pod in pair
        assert order.within_s == PAIR_S


def test_a_pod_that_fails_with_all_others_gets_no_rank_while_others_are_there() -> None:
    bench = PairsBench(bad={"p1"})
    assert bench.form(*FIVE) == {"p0": [0], "p1": SPARE, "p2": [1], "p3": [2], "p4": [3]}
    assert bench.found() == {("p1", ""): Verdict.FATAL}
    health = bench.status().health
    assert health is not None
    (finding,) = (each.finding for each in health.findings)
    assert finding.message.startswith("failed 4 tests with p")
    assert finding.message.endswith(", who pass with others (no end)")


def test_with_observe_it_is_told_only() -> None:
    bench = PairsBench(replace(TESTS, preflight=HealthMode.OBSERVE), bad={"p1"})
    assert bench.form(*FIVE) == {"p0": [0], "p1": [1], "p2": [2], "p3": [3], "p4": SPARE}
    assert bench.found() == {("p1", ""): Verdict.FATAL}


def test_a_link_is_said_of_both_ends_and_nobody_is_passed_over_for_it() -> None:
    bench = PairsBench(links=[{"p0", "p1"}])
    assert bench.form(*FIVE) == {"p0": [0], "p1": [1], "p2": [2], "p3": [3], "p4": SPARE}
    assert bench.found() == {("p0", "p1"): Verdict.SUSPECT, ("p1", "p0"): Verdict.SUSPECT}
    bench.all_are(RUNNING, 0, "p0", "p1", "p2", "p3")
    assert not sent(bench.live(10.0), Halt)


def test_what_is_said_of_a_link_ends_with_the_pod_at_its_other_end() -> None:
    bench = PairsBench(links=[{"p0", "p4"}])
    bench.form(*FIVE)
    assert ("p0", "p4") in bench.found()
    bench.step(AgentDisconnected(bench.sessions.pop("p4")))
    bench.tick(TESTS.timeouts.reconnect_s + 1.0)
    assert bench.found() == {}


def test_of_two_pods_that_fail_with_each_other_neither_is_named() -> None:
    bench = PairsBench(replace(TESTS, replicas=2, spares=0), bad={"p1"})
    assert bench.form("p0", "p1") == {"p0": [0], "p1": [1]}
    assert Verdict.FATAL not in bench.found().values()
    assert bench.unchecked() == 2 or set(bench.found().values()) == {Verdict.SUSPECT}


def test_where_all_fail_nobody_is_named() -> None:
    bench = PairsBench(bad=set(FIVE))
    assert bench.form(*FIVE)["p0"] == [0]
    assert (bench.found(), bench.unchecked()) == ({}, 5)


def test_who_does_not_answer_is_unknown_and_speaks_against_nobody() -> None:
    bench = PairsBench()
    bench.silent.add("p1")
    assert bench.form(*FIVE)["p1"] == [1]
    assert (bench.found(), bench.unchecked()) == ({}, 1)


def test_who_cannot_say_how_it_went_is_unknown() -> None:
    bench = PairsBench()
    bench.unable.add("p1")
    assert bench.form(*FIVE)["p1"] == [1]
    assert (bench.found(), bench.unchecked()) == ({}, 1)


def test_a_pod_of_the_release_before_is_given_no_order_and_is_unknown() -> None:
    bench = PairsBench()
    bench.mute.add("p1")
    assert bench.form(*FIVE)["p1"] == [1]
    assert "p1" not in {pod for pod, _order in bench.orders}
    assert bench.unchecked() == 1


def test_without_the_setting_nobody_is_asked() -> None:
    bench = PairsBench(replace(TESTS, preflight_pairs=False))
    assert bench.form(*FIVE)["p0"] == [0]
    assert bench.orders == []


def test_tests_of_pairs_need_a_preflight() -> None:
    with pytest.raises(InputError, match=r"health\.preflight\.pairs: want health\.preflight\.mode Observe or Act"):
        replace(TESTS, preflight=HealthMode.OFF)


def test_the_first_plan_waits_no_longer_than_the_preflight_may_take() -> None:
    bench = PairsBench(replace(TESTS, preflight_s=12.0))
    actions = [action for pod in FIVE for action in bench.join(pod)]
    assert not sent(actions, Plan)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.FORMING, Reason.WAITING_FOR_WORKERS)
    assert "tests of pods with each other" in status.message
    assert not sent(bench.tick(11.0), Plan)
    assert set(sent(bench.tick(1.0), Plan)) == set(FIVE)
    assert bench.found() == {}


def test_it_waits_no_longer_than_the_startup_timeout() -> None:
    settings = replace(TESTS, spares=0, preflight_s=120.0, timeouts=replace(PATIENT, startup_s=130.0))
    bench = PairsBench(settings)
    for pod in FIVE[:3]:
        bench.join(pod)
    bench.tick(120.0)
    bench.join("p3")
    assert not sent(bench.tick(9.0), Plan)
    assert len(sent(bench.tick(1.0), Plan)) == 4


def test_an_answer_to_another_order_is_passed_over() -> None:
    bench = PairsBench()
    actions = [action for pod in FIVE for action in bench.join(pod)]
    orders = sent(actions, PairOrder)
    first, other = next((a, b) for a in orders for b in orders if orders[a].number != orders[b].number)
    for pod, number, term in ((first, orders[other].number, 1), (first, orders[first].number, 9), (first, 0, 0)):
        bench.say(pod, replace(bench.said[pod], term=term, number=number, has_passed=False, why="a lie"))
    assert not sent(bench.tick(1.0), Plan)
    plans = bench.plan(bench.fly(actions))
    assert plans["p4"] == SPARE
    assert bench.found() == {}


def test_an_answer_that_comes_late_changes_nothing() -> None:
    bench = PairsBench()
    actions = [action for pod in FIVE for action in bench.join(pod)]
    orders = sent(actions, PairOrder)
    bench.silent.add("p1")
    bench.fly(actions)
    bench.say("p1", replace(bench.said["p1"], term=1, number=orders["p1"].number, has_passed=False, why="late"))
    assert (bench.found(), bench.unchecked()) == ({}, 1)


def test_a_pod_may_say_nothing_of_pairs_itself() -> None:
    bench = PairsBench(replace(TESTS, preflight_pairs=False))
    bench.join("p0", health=Health((*OWN, Finding(PAIRS, "p1", Verdict.FATAL, "pairs"))))
    assert bench.found() == {}


def test_a_pod_that_goes_amid_a_round_does_not_hold_the_others_up() -> None:
    bench = PairsBench()
    actions = [action for pod in FIVE for action in bench.join(pod)]
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    bench.silent.add("p1")
    lost = bench.tick(bench.settings.timeouts.reconnect_s)
    del bench.sessions["p1"]
    orders = {pod: order for pod, order in sent(actions, PairOrder).items() if pod != "p1"}
    more = list(lost)
    for pod, order in orders.items():
        more += bench.say(pod, replace(bench.said[pod], term=1, number=order.number, has_passed=pod != "p0", why="x"))
    plans = bench.plan(bench.fly([*more, *bench.tick(PAIR_S + GRACE_S)]))
    assert set(plans) == {"p0", "p2", "p3", "p4"}
    assert bench.found() == {}


def run(bench: PairsBench, *pods: str) -> None:
    """Form the job, and let it train."""
    plans = bench.form(*pods)
    bench.all_are(RUNNING, 0, *(pod for pod, given in plans.items() if given != SPARE))
    assert bench.status().phase is JobPhase.RUNNING


SPACIOUS = replace(TESTS, replicas=2, spares=4)
SIX = (*FIVE, "p5")


def test_a_spare_that_joins_tests_with_others_without_ranks_and_disturbs_nobody() -> None:
    bench = PairsBench(SPACIOUS)
    run(bench, *SIX)
    bench.orders.clear()
    bench.fly(bench.join("p6"))
    tested = {pod for pod, _order in bench.orders}
    assert "p6" in tested
    assert not tested & {"p0", "p1"}
    assert len(tested) <= 1 + MOST_PARTNERS
    assert (bench.found(), bench.unchecked()) == ({}, 0)


def test_a_spare_that_joins_and_fails_with_proven_ones_is_named_and_replaced() -> None:
    bench = PairsBench(SPACIOUS, bad={"p6"})
    run(bench, *SIX)
    bench.fly(bench.join("p6"))
    assert bench.found() == {("p6", ""): Verdict.FATAL}
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == ["p6"]


def test_a_spare_that_has_passed_before_is_not_named_for_two_that_join() -> None:
    bench = PairsBench(replace(TESTS, replicas=3, spares=3), links=[{"p3", "p6"}, {"p3", "p7"}])
    run(bench, *FIVE[:4])
    bench.fly(bench.join("p6"))
    bench.fly(bench.join("p7"))
    assert Verdict.FATAL not in bench.found().values()
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []


def test_a_spare_with_one_partner_is_named_by_nobody() -> None:
    bench = PairsBench(replace(TESTS, replicas=2, spares=1), bad={"p6"})
    run(bench, "p0", "p1", "p2")
    bench.fly(bench.join("p6"))
    assert Verdict.FATAL not in bench.found().values()
    assert [pod.pod for pod in bench.status().pods if pod.unfit] == []


def test_a_spare_without_a_partner_is_unknown() -> None:
    bench = PairsBench(replace(TESTS, replicas=2, spares=1))
    run(bench, "p0", "p1")
    bench.orders.clear()
    bench.fly(bench.join("p2"))
    assert bench.orders == []
    assert bench.unchecked() == 1


def test_a_pod_that_says_again_and_again_that_it_takes_tests_is_tested_once() -> None:
    bench = PairsBench(SPACIOUS)
    run(bench, *SIX)
    bench.orders.clear()
    for _turn in range(5):
        actions = bench.say("p5", replace(bench.said["p5"], port=0))
        actions += bench.say("p5", replace(bench.said["p5"], port=29000))
        bench.fly(actions)
    assert bench.orders == []


def test_whose_own_checks_have_failed_is_in_no_pair() -> None:
    bench = PairsBench()
    bench.join("p1", health=Health((WRONG, *OWN)))
    assert bench.form("p0", "p2", "p3", "p4")["p1"] == SPARE
    assert "p1" not in {pod for pod, _order in bench.orders}


def test_a_rendezvous_that_begins_anew_tests_again() -> None:
    bench = PairsBench()
    for pod in FIVE:
        bench.join(pod)
    again = PairsBench()
    again.said = {
        pod: replace(said, term=1, number=1, has_passed=False, why="of the one before")
        for pod, said in bench.said.items()
    }
    assert again.form(*FIVE)["p4"] == SPARE
    assert again.found() == {}
    assert len(again.orders) >= 8
