"""After a fault a plan waits for keepers that alone have a part of the newest step, where they may come back."""

from dataclasses import replace

import pytest
from tests.unit.unbroken_core.coordinator.memory.test_buddies_told import PODS, RACKS, SETTINGS, CopyBench
from tests.unit.unbroken_core.coordinator.memory.test_known_copies import Told, copy, key, own

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.copying import KEEPERS_AWAITED_S, MOST_AWAITED_S
from unbroken_core.coordinator.events import Action, AgentDisconnected, Observed, Send
from unbroken_core.coordinator.memory.holders import Step
from unbroken_core.coordinator.memory.table import Checkpoints, ReportingPod
from unbroken_core.protocol.messages import Buddies, Observation, Plan, PodObservation
from unbroken_core.protocol.settings import RungBudget
from unbroken_core.vocabulary.checkpoints import Held, Holding
from unbroken_core.vocabulary.reasons import Cause, Rung, WorkerPhase

READY = WorkerPhase.READY
OWNER = PODS[0]
GRACE_S = 1.1
"""A pod whose connection is broken is lost after a second, once the others have left."""


def restored(actions: list[Action]) -> set[int] | None:
    """Return the steps that a plan names, of all of its pods; None: no plan was made."""
    plans = [one.message for one in actions if isinstance(one, Send) and isinstance(one.message, Plan)]
    if not plans:
        return None
    return {found.step for plan in plans if plan.restore is not None for found in plan.restore.candidates}


class TwoLost:
    """Step 10 is protected; then the agent of the pod with the copies of another is killed, and that other one lost."""

    def __init__(self) -> None:
        self.bench = CopyBench()
        told = self.bench.run_job(*PODS)
        self.buddy = told[OWNER].keepers[0].uid.removeprefix("uid-")
        self.others = [pod for pod in PODS if pod not in (OWNER, self.buddy)]
        self.bench.save(0, 10, told, *PODS)
        self.bench.settle()
        self.whole = self.bench.held[self.buddy]
        self.bench.step(AgentDisconnected(self.bench.sessions.pop(self.buddy)))

    def lose_owner(self) -> list[Action]:
        """The other pod is no more, and who is left has left the iteration; its agent's time is over."""
        actions = self.bench.see_gone(OWNER)
        actions += self.bench.all_are(READY, 0, *self.others)
        return actions + self.bench.tick(GRACE_S)

    def come_back(self) -> list[Action]:
        """A new agent, whose keeper has not said anything yet."""
        self.bench.held[self.buddy] = replace(self.whole, port=0, host="", copies=(), pinned=())
        self.bench.states[self.buddy] = self.bench.workers_of(self.buddy, READY, 0)
        return self.bench.join(self.buddy, term=1)


def test_a_plan_waits_for_the_keeper_that_comes_back_with_its_agent() -> None:
    """Seen before: all ranks began anew, though the copies were there a second later."""
    both = TwoLost()
    assert restored(both.lose_owner()) is None
    message = both.bench.status().message
    assert message.startswith(f"waits for {both.buddy} to be heard again, where alone the newest checkpoint in memory")
    assert "; otherwise goes on without it, at " in message, "what the time is that follows"
    assert restored(both.come_back() + both.bench.tick(0.5)) is None
    assert restored(both.bench.tell(both.buddy, both.whole) + both.bench.tick(1.0)) == {10}


def test_a_keeper_that_does_not_come_back_is_waited_for_no_longer_than_that() -> None:
    both = TwoLost()
    assert restored(both.lose_owner() + both.bench.tick(KEEPERS_AWAITED_S - GRACE_S - 0.1)) is None
    assert restored(both.bench.tick(0.2)) == set()


def test_a_pod_that_is_no_more_is_not_waited_for() -> None:
    both = TwoLost()
    assert restored(both.lose_owner()) is None
    left = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in both.others}
    actions = both.bench.step(Observed(Observation(left, is_accounted=True)))
    assert restored(actions + both.bench.tick(0.1)) == set()


def test_where_all_can_be_read_without_a_pod_it_is_not_waited_for() -> None:
    """What it has saved lies with its buddy as well."""
    both = TwoLost()
    actions = both.bench.fault(both.others[0], 0, Cause.EXCEPTION)
    actions += both.bench.all_are(READY, 0, OWNER, *both.others)
    assert restored(actions + both.bench.tick(GRACE_S)) == {10}


class MuteSpare:
    """Step 10 is protected; the agent of the spare was killed, and is back: its keeper has not said anything yet."""

    def __init__(self, *, is_new: bool = True) -> None:
        self.bench = CopyBench(replace(SETTINGS, min_replicas=4))
        self.spare = PODS[4]
        self.whole = self.bench.held[self.spare]
        if not is_new:
            self.bench.held[self.spare] = replace(self.whole, port=0, host="")
        told = self.bench.run_job(*PODS)
        self.bench.save(0, 10, told, *[pod for pod in PODS if pod in told])
        self.bench.settle()
        if not is_new:
            return
        self.bench.step(AgentDisconnected(self.bench.sessions.pop(self.spare)))
        self.bench.held[self.spare] = replace(self.whole, port=0, host="")
        self.bench.states[self.spare] = self.bench.workers_of(self.spare, READY, -1)
        self.bench.join(self.spare, term=1)

    def lose_owner(self) -> list[Action]:
        """The spare is to take over from a pod that is no more."""
        actions = self.bench.see_gone(OWNER)
        return actions + self.bench.all_are(READY, 0, *PODS[1:4]) + self.bench.tick(0.1)


def test_a_plan_waits_for_the_keeper_of_a_pod_that_has_to_fetch() -> None:
    """Seen before: all ranks began anew, though all copies were there: who took over could not fetch one yet."""
    job = MuteSpare()
    assert restored(job.lose_owner()) is None
    assert job.bench.status().message.startswith(f"waits for the keeper of {job.spare}, without which")
    assert restored(job.bench.tell(job.spare, job.whole) + job.bench.tick(0.1)) == {10}


def test_a_keeper_that_never_says_anything_is_waited_for_no_longer_than_that() -> None:
    job = MuteSpare()
    assert restored(job.lose_owner() + job.bench.tick(KEEPERS_AWAITED_S - 0.2)) is None
    assert restored(job.bench.tick(0.2)) == set()


def test_a_keeper_that_was_never_reached_costs_no_fault_its_time() -> None:
    """Where no copies can be made there, as without a certificate's package, all is as if it were not waited for."""
    job = MuteSpare(is_new=False)
    job.bench.tick(KEEPERS_AWAITED_S)
    assert restored(job.lose_owner()) == set()


def test_where_the_same_pods_go_on_no_mute_keeper_is_waited_for() -> None:
    job = MuteSpare()
    actions = job.bench.fault(PODS[1], 0, Cause.EXCEPTION)
    actions += job.bench.all_are(READY, 0, *PODS[:4])
    assert restored(actions + job.bench.tick(0.1)) == {10}


def test_the_keeper_of_a_pod_that_comes_long_after_the_fault_is_waited_for() -> None:
    """As a new pod does, where there is no spare: its keeper may be slower than its workers."""
    job = MuteSpare()
    job.bench.step(AgentDisconnected(job.bench.sessions.pop(job.spare)))
    assert restored(job.bench.see_gone(OWNER) + job.bench.tick(KEEPERS_AWAITED_S + 1.0)) is None, "others have to leave"
    job.bench.states[job.spare] = job.bench.workers_of(job.spare, READY, -1)
    actions = job.bench.join(job.spare, term=1) + job.bench.all_are(READY, 0, *PODS[1:4])
    assert restored(actions + job.bench.tick(KEEPERS_AWAITED_S - 1.0)) is None, job.bench.status().message
    assert restored(job.bench.tell(job.spare, job.whole) + job.bench.tick(0.1)) == {10}


def test_where_all_processes_start_again_all_keepers_are_waited_for() -> None:
    """Their ranks are given anew, so that each of them may have to fetch; this one has no copies of what was lost."""
    bench = CopyBench(replace(SETTINGS, rungs=(RungBudget(Rung.IN_PROCESS, limit=0), RungBudget(Rung.JOB))))
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    bench.settle()
    whole = bench.held[PODS[1]]
    bench.step(AgentDisconnected(bench.sessions.pop(PODS[1])))
    bench.held[PODS[1]] = replace(whole, port=0, host="", copies=(), pinned=())
    bench.join(PODS[1], term=1)
    actions = bench.renew(bench.fault(PODS[0], 0, Cause.EXCEPTION) + bench.all_are(READY, 0, *PODS[:4]))
    assert restored(actions + bench.tick(6.0)) is None, bench.status().message
    assert bench.status().message.startswith(f"waits for the keeper of {PODS[1]}")
    assert restored(bench.tell(PODS[1], whole) + bench.tick(0.1)) == {10}


def test_pods_without_a_keeper_that_come_and_go_hold_up_no_plan_for_ever() -> None:
    """Each of them has its time from when it comes; before, that had no end."""
    job = MuteSpare()
    bench, go = job.bench, job.spare
    assert restored(job.lose_owner()) is None
    for turn in range(20):
        come = f"digits-{5 + turn}"
        bench.racks[come], bench.held[come] = "r3", Held(f"{turn:02}", (), (), (), "", 0)
        bench.states[come] = bench.workers_of(come, READY, -1)
        actions = list[Action]()
        for there in ((*PODS[1:4], go, come), (*PODS[1:4], come)):
            seen = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (bench.racks[pod],)) for pod in there}
            actions += bench.step(Observed(Observation(seen, is_accounted=True)))
            actions += [] if come in bench.sessions else bench.join(come)
        bench.sessions.pop(go)
        go = come
        if restored(actions + bench.live(4.0)) is not None:
            break
        assert bench.status().message.startswith("waits for the keeper of"), bench.status().message
    assert KEEPERS_AWAITED_S < 4.0 * turn <= MOST_AWAITED_S


class CutOff:
    """Step 10 is protected; all pods but a spare are cut off, and a coordinator, mostly a new one, lacks them long."""

    def __init__(self, num_spares: int = 1, *, is_observed: bool = True, is_new: bool = True) -> None:
        self.bench = bench = CopyBench(replace(SETTINGS, replicas=len(PODS) - num_spares, spares=num_spares))
        told = bench.run_job(*PODS)
        bench.save(0, 10, told, *PODS)
        bench.settle()
        if not is_new:
            self.save_more({pod: replace(one, owners=()) for pod, one in told.items()})
        self.spare = PODS[4]
        self.plans = {uid.removeprefix("uid-"): one.plan for uid, one in bench.coordinator._job.members.by_uid.items()}
        if is_new:
            bench.coordinator, bench.sessions = Coordinator(bench.settings, bench.now_s), {}
        for pod in () if is_new else PODS[:4]:
            bench.step(AgentDisconnected(bench.sessions.pop(pod)))
        if is_observed:
            self.observe(*PODS)
        if is_new:
            self.back(self.spare)
        bench.live(180.0)

    def save_more(self, told: dict[str, Buddies]) -> None:
        """All save step 20 beside it, of which nobody has a copy yet."""
        before = dict(self.bench.held)
        self.bench.save(0, 20, told, *PODS)
        for pod in PODS:
            now = self.bench.held[pod]
            self.bench.tell(pod, replace(now, holdings=now.holdings + before[pod].holdings, copies=before[pod].copies))

    def observe(self, *pods: str) -> list[Action]:
        seen = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in pods}
        return self.bench.step(Observed(Observation(seen, is_accounted=True)))

    def back(self, *pods: str) -> list[Action]:
        actions = list[Action]()
        for pod in pods:
            self.bench.states[pod] = self.bench.workers_of(pod, READY, 0)
            actions += self.bench.join(pod, plan=self.plans[pod], term=1)
        return actions


FIRST_BACK = [
    pytest.param(1, 0, id="one with a part of the step"),
    pytest.param(2, 3, id="one that has nothing"),
]
"""How many spares there are, and which pod comes back first."""


@pytest.mark.parametrize(("num_spares", "first"), FIRST_BACK)
def test_pods_that_were_cut_off_together_are_waited_for_once_the_first_is_back(num_spares: int, first: int) -> None:
    """Seen in the simulation: a tenth of a second before the others a world was possible, and all began anew."""
    job, others = CutOff(num_spares), [pod for pod in PODS[:4] if pod != PODS[first]]
    assert restored(job.back(PODS[first]) + job.bench.tick(KEEPERS_AWAITED_S - 0.5)) is None
    assert job.bench.status().message.startswith(f"waits for {', '.join(others)} to be heard again, which may")
    assert restored(job.back(*others) + job.bench.tick(0.1)) == {10}


def test_a_step_of_which_all_had_gone_is_known_by_what_those_had_who_may_come_back() -> None:
    """Seen in the simulation: the same coordinator had forgotten that it was whole, and began anew with the first."""
    job = CutOff(is_new=False)
    job.observe(*PODS[:3], job.spare)
    assert restored(job.back(PODS[0]) + job.bench.tick(KEEPERS_AWAITED_S - 0.5)) is None, job.bench.status().message
    assert "to be heard again, where alone the newest checkpoint in memory" in job.bench.status().message
    assert restored(job.back(*PODS[1:3]) + job.bench.tick(0.1)) == {10}


@pytest.mark.parametrize(("num_spares", "first"), FIRST_BACK)
def test_pods_that_stay_cut_off_are_waited_for_no_longer_than_that(num_spares: int, first: int) -> None:
    job = CutOff(num_spares)
    assert restored(job.back(PODS[first]) + job.bench.tick(KEEPERS_AWAITED_S - 0.1)) is None
    assert restored(job.bench.tick(0.2)) == set()


def test_a_plan_without_pods_that_stay_cut_off_says_what_is_lacking() -> None:
    """Seen before: the status said that nothing was restored, and not why, since no step was known to be whole."""
    job = CutOff()
    job.back(PODS[0])
    assert restored(job.bench.tick(KEEPERS_AWAITED_S + 0.1)) == set()
    memory = job.bench.status().memory
    assert memory is not None
    assert memory.reason == "step 10: no pod that is heard has 2 of its 4 shards"


def test_a_pod_that_comes_back_again_and_again_makes_the_wait_no_longer() -> None:
    job = CutOff()
    job.back(PODS[0])
    for _turn in range(3):
        assert restored(job.bench.tick(KEEPERS_AWAITED_S / 4)) is None
        job.observe(*PODS[1:])
        job.bench.sessions.pop(PODS[0])
        job.observe(*PODS)
        assert restored(job.back(PODS[0])) is None
    assert restored(job.bench.tick(KEEPERS_AWAITED_S / 4 + 0.1)) == set()


@pytest.mark.parametrize(("num_spares", "first"), FIRST_BACK)
def test_before_the_operator_has_named_the_pods_those_that_it_may_name_are_waited_for(
    num_spares: int, first: int
) -> None:
    """Seen with real processes: the pods of a new rendezvous were there before the operator's word, and began anew."""
    job, others = CutOff(num_spares, is_observed=False), [pod for pod in PODS[:4] if pod != PODS[first]]
    assert restored(job.back(PODS[first]) + job.bench.tick(KEEPERS_AWAITED_S / 2)) is None
    assert job.bench.status().message.startswith("waits for pods that the operator has yet to name to be heard again")
    assert restored(job.observe(*PODS) + job.bench.tick(0.1)) is None
    assert job.bench.status().message.startswith(f"waits for {', '.join(others)} to be heard again, which may have")
    assert restored(job.back(*others) + job.bench.tick(0.1)) == {10}


@pytest.mark.parametrize(("num_spares", "first"), FIRST_BACK)
def test_an_operator_that_names_no_pods_is_waited_for_no_longer_than_that(num_spares: int, first: int) -> None:
    job = CutOff(num_spares, is_observed=False)
    assert restored(job.back(PODS[first]) + job.bench.tick(KEEPERS_AWAITED_S - 0.1)) is None
    assert restored(job.bench.tick(0.2)) == set()


def test_where_all_can_be_read_in_a_smaller_world_pods_that_are_still_cut_off_are_not_waited_for() -> None:
    """Seen with real processes: a plan waited 10 s for pods that were to read nothing, and restored the same step."""
    assert restored(CutOff().back(*PODS[:2])) == {10}


def test_a_pod_that_is_back_without_its_keeper_is_not_said_to_be_missing() -> None:
    job = CutOff()
    job.bench.held[PODS[0]] = replace(job.bench.held[PODS[0]], port=0, host="", copies=(), pinned=())
    assert restored(job.back(PODS[0]) + job.bench.tick(0.1)) is None
    missing = ", ".join(PODS[1:4])
    assert job.bench.status().message.startswith(f"waits for {missing} to be heard again, which may have")


def test_pods_that_are_no_more_are_not_waited_for_when_others_are_back() -> None:
    job = CutOff()
    job.observe(PODS[0], job.spare)
    assert restored(job.back(PODS[0]) + job.bench.tick(0.1)) == set()


@pytest.mark.parametrize("is_new", [True, False])
def test_pods_that_have_not_begun_or_have_ended_are_not_waited_for(is_new: bool) -> None:
    job = CutOff()
    seen = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in PODS}
    seen |= {
        uid: replace(pod, is_waiting=is_new, is_ended=not is_new) for uid, pod in seen.items() if pod.pod in PODS[1:4]
    }
    if is_new:
        job.bench.coordinator, job.bench.sessions = Coordinator(job.bench.settings, job.bench.now_s), {}
        job.bench.step(Observed(Observation(seen, is_accounted=True)))
        job.back(job.spare)
        job.bench.live(180.0)
    else:
        job.bench.step(Observed(Observation(seen, is_accounted=True)))
    assert restored(job.back(PODS[0]) + job.bench.tick(0.1)) == set()


def test_pods_that_came_after_the_coordinator_have_nothing_that_is_waited_for() -> None:
    """A new pod starts for each lost one: that no step is left is no reason to wait for it."""
    job = CutOff()
    new = {f"uid-new-{number}": PodObservation(f"digits-{number}", "node", ()) for number in (5, 6, 7)}
    seen = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in (PODS[0], job.spare)}
    job.bench.step(Observed(Observation(seen | new, is_accounted=True)))
    assert restored(job.back(PODS[0]) + job.bench.tick(0.1)) == set()


@pytest.mark.parametrize(
    ("is_waiting", "is_protected"),
    [
        pytest.param(True, False, id="one that the cluster has not started"),
        pytest.param(False, True, id="one that has nothing newer than what is protected without it"),
    ],
)
def test_a_pod_that_never_joins_costs_no_fault_its_time(is_waiting: bool, is_protected: bool) -> None:
    """As where the cluster lacks a node for a spare: each lost pod cost 10 s, since the newest step is seldom whole."""
    bench = CopyBench()
    never = {"uid-digits-9": PodObservation("digits-9", "", (), is_waiting=is_waiting)}
    seen = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in PODS} | never
    bench.step(Observed(Observation(seen, is_accounted=True)))
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    if is_protected:
        bench.settle()
    ranks = {pod.pod: pod.ranks for pod in bench.status().pods}
    for pod in PODS[:4]:
        new = Holding(f"uid-{pod}", 1, 0, 20, 4, tuple((rank, "1a", f"14{rank}") for rank in ranks[pod]))
        bench.tell(pod, replace(bench.held[pod], holdings=(*bench.held[pod].holdings, new)))
    bench.live(100.0 if is_protected else 0.0)
    bench.sessions.pop(OWNER)
    left = {uid: pod for uid, pod in seen.items() if pod.pod != OWNER}
    actions = bench.step(Observed(Observation(left, is_accounted=True)))
    assert restored(actions + bench.all_are(READY, 0, *PODS[1:4]) + bench.tick(0.1)) == {10}


def test_a_pod_that_was_cut_off_while_copies_were_assigned_is_believed_what_it_has_of_the_dead() -> None:
    """Once, as at the beginning: it could say nothing when the others did."""
    told = Told(is_assigned=False)
    told.table.unheard = {"a"}
    told.table.assign({}, {})
    told.lose("b")
    told.tell("a", port=0)
    told.tell("a", own("a", 10), copy("b", 10))
    assert told.table.num_refused == 0
    assert list(told.table.steps[key(10)].holders) == [0, 1]
    told.lose("c")
    told.tell("a", own("a", 10), (*copy("b", 10), *copy("c", 10)))
    assert told.table.num_refused == 1, "no new claims afterwards"
    assert told.table.unheard == set()


def test_a_coordinator_that_has_just_begun_waits_for_who_may_keep_what_nobody_has_told_of() -> None:
    told = Told(is_assigned=False)
    for uid in "bcd":
        told.tell(uid, own(uid, 10), port=0 if uid == "b" else 7)
    told.living.discard("a")
    assert told.table.mute == {"b"}
    assert told.table.awaited((), "b", "b", "e") == ("b",)
    told.tell("b", own("b", 10), copy("a", 10))
    assert told.table.mute == set()
    assert told.table.awaited((), (), ()) == ()
    assert told.keys({0: "e", 1: "b", 2: "c", 3: "d"}) == (), "the keeper of who takes over"
    told.tell("e")
    assert told.keys({0: "e", 1: "b", 2: "c", 3: "d"}) == (key(10),)


def test_a_step_that_a_pod_invents_for_a_huge_world_is_awaited_from_nobody() -> None:
    """The mute pods could not have all its other ranks: each report would be a look at all of these, for nothing."""
    table, size = Checkpoints(), 200_000
    for uid, port in (("a", 7), ("b", 0)):
        teller = ReportingPod(uid, f"pod-{uid}", 9, size, lambda _other: True)
        holdings = (Holding(uid, 1, 0, 10, size, ((0, "1a", "10"),)),) if uid == "a" else ()
        table.receive(teller, Held(f"0{uid}", holdings, (), (), "10.0.0.1" if port else "", port))
    assert list(table.steps) == [key(10, world_size=size)]
    assert table.mute == {"b"}
    assert table.awaited((), (), "b", "b") == ()


def test_where_thousands_are_away_a_step_that_lacks_a_rank_is_not_looked_at_rank_by_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come back one by one, and each report asks again: with 400 pods it took 20 s of a rendezvous."""
    table = Checkpoints()
    for uid in "ab":
        teller = ReportingPod(uid, f"pod-{uid}", 9, 3, lambda _other: True)
        holding = Holding(uid, 1, 0, 10, 3, ((ord(uid) - ord("a"), "1a", f"1{uid}"),))
        table.receive(teller, Held(f"0{uid}", (holding,), (), (), "10.0.0.1", 7))
    monkeypatch.setattr(Step, "by_content", lambda _step: pytest.fail("looked at all ranks"))
    assert table.awaited((), (), "cd") == ("c", "d")
