"""A job that wants more Events, status writes or pods than its size explains gets them later, or not, and is told."""

import dataclasses
from collections.abc import Callable

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job, a_recovery, running_world

from unbroken_core.protocol.messages import Observation
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.decisions.actions import (
    COSTS,
    Action,
    CreatePod,
    Decision,
    DeletePod,
    PostEvent,
    PushObservation,
    WriteStatus,
    within_budgets,
)
from unbroken_operator.decisions.limits.budgets import Budget, allowances
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.plan import plan

Meddle = Callable[[World, int], None]
NONE_LEFT = dict.fromkeys(Budget, 0.0)


class Worker:
    """Plans and acts as a job's worker does, with a clock that moves by hand; counts what was done."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory = JobMemory()
        self.memory.resize(3)
        self.now_s = 1000.0
        self.done = dict.fromkeys(Budget, 0)
        self.held = dict.fromkeys(Budget, 0)

    def step(self) -> None:
        """Plan and act once."""
        snapshot = self.world.snapshot()
        pods = (*snapshot.trainers(), *snapshot.rendezvous_pods())
        self.memory.update(pods, self.world.report, is_over=False, now_s=self.now_s)
        posted = self.world.memory.posted | frozenset(self.memory.posted)
        self.world.memory = dataclasses.replace(self.memory.view(self.now_s), posted=posted)
        found = within_budgets(plan(self.world.snapshot()), self.memory.left(self.now_s))
        for name in found.dropped:
            self.memory.note_posted(name)
        for budget, number in found.held.items():
            self.held[budget] += number
            self.memory.note_held(budget, self.now_s)
        for action in found.decision.actions:
            self.world.apply(action)
            cost = COSTS.get(type(action))
            if cost is not None:
                self.done[cost] += 1
                self.memory.spend(cost, 1, self.now_s)

    def run(self, num: int, meddle: Meddle = lambda _world, _number: None) -> None:
        """Step ten times a second."""
        for number in range(num):
            meddle(self.world, number)
            self.step()
            self.now_s += 0.1


def many_recoveries(world: World, number: int) -> None:
    """Be a rendezvous that reports twenty others each time."""
    recoveries = tuple(a_recovery(number=1 + 20 * number + index) for index in range(20))
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], recoveries=recoveries)


def flapping(world: World, number: int) -> None:
    """Be a rendezvous that changes its mind all the time."""
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], iteration=number)


def failing(world: World, _number: int) -> None:
    """Be a script that fails as soon as it is ready, which is a fault like any other, and never a circle."""
    world.run_pods()
    for name in list(world.pods):
        if "rendezvous" not in name:
            world.end_pod(name, "Failed")
        if "deletionTimestamp" in world.pods[name]["metadata"]:
            world.remove_pod(name)


@pytest.mark.parametrize(
    ("meddle", "budgets"),
    [
        pytest.param(many_recoveries, (Budget.EVENTS, Budget.STATUS_WRITES), id="20 other recoveries in each report"),
        pytest.param(flapping, (Budget.STATUS_WRITES,), id="a status that changes all the time"),
    ],
)
def test_news_without_end_becomes_rare_and_the_job_is_told_once(meddle: Meddle, budgets: tuple[Budget, ...]) -> None:
    worker = Worker(running_world())
    worker.run(600, meddle)
    for budget in budgets:
        allowance = allowances(3)[budget]
        assert worker.done[budget] <= allowance.burst + 60.0 * allowance.per_s + 2
        assert worker.held[budget] > 100
    assert worker.world.condition("Throttled") == ("True", "Throttled")
    assert len(worker.world.messages("Throttled")) <= 2, "once for the first budget, once for both"


def test_pods_without_end_become_rare_and_their_ordinals_have_no_gaps() -> None:
    world = World(a_job(failedPodsHistoryLimit=0))
    worker = Worker(world)
    for _ in range(600):
        # Members, so that no back-off of another kind applies.
        worker.memory.joined |= {world.uid_of(name) for name in world.names()}
        failing(world, 0)
        worker.step()
        worker.now_s += 0.1
    allowance = allowances(3)[Budget.POD_CREATIONS]
    assert worker.done[Budget.POD_CREATIONS] <= allowance.burst + 60.0 * allowance.per_s + 1
    ordinals = [int(name.rpartition("-")[2]) for name in world.created if "rendezvous" not in name]
    assert ordinals == list(range(len(ordinals))), "what is held back has no number yet"
    assert world.condition("Throttled") == ("True", "Throttled")


def test_it_is_over_ten_minutes_after_the_last_time() -> None:
    worker = Worker(running_world())
    worker.run(300, flapping)
    assert worker.world.condition("Throttled") == ("True", "Throttled")
    worker.now_s += 601.0
    worker.run(1)
    assert worker.world.condition("Throttled") == ("False", "WithinBudgets")


def test_what_is_never_held_back() -> None:
    told = PostEvent({"metadata": {"name": "a"}, "reason": "Throttled"})
    pod = CreatePod({"metadata": {"name": "digits-0"}})
    actions: tuple[Action, ...] = (
        PushObservation("uid", 1, Observation({})),
        told,
        WriteStatus({"state": "Running"}),
        pod,
    )
    found = within_budgets(Decision(actions), NONE_LEFT)
    assert (found.decision.actions, dict(found.held), found.dropped) == (actions, {}, ())


def test_what_is_held_back() -> None:
    event, status = PostEvent({"metadata": {"name": "a"}, "reason": "Recovered"}), WriteStatus({"state": "Running"})
    actions: tuple[Action, ...] = (event, status, DeletePod("digits-0", "uid", "why"))
    found = within_budgets(Decision(actions, 5.0, num_pods_held=2), NONE_LEFT)
    assert found.decision.actions == ()
    assert found.held == dict.fromkeys((Budget.EVENTS, Budget.STATUS_WRITES, Budget.POD_DELETIONS), 1) | {
        Budget.POD_CREATIONS: 2
    }
    assert found.dropped == ("a",)


def test_every_budget_has_a_word_in_the_metric() -> None:
    assert {budget.name for budget in Budget} <= {refusal.name for refusal in OperatorRefusal}


def test_a_spec_with_reserved_keys_is_counted() -> None:
    template = a_job()["spec"]["template"] | {"metadata": {"annotations": {"unbroken.dev/settings": "x"}}}
    assert plan(World(a_job(template=template)).snapshot()).counted == {OperatorRefusal.RESERVED_KEYS}
    assert plan(World().snapshot()).counted == frozenset()


def test_a_spec_with_another_fault_is_counted_beside_the_reserved_keys() -> None:
    assert plan(World(a_job(replicas=0)).snapshot()).counted == {OperatorRefusal.SPEC}
    pod = {"containers": [dict(CONTAINER)], "shareProcessNamespace": True}
    template = {"metadata": {"labels": {"unbroken.dev/job": "x"}}, "spec": pod}
    both = World(a_job(template=template))
    assert plan(both.snapshot()).counted == {OperatorRefusal.RESERVED_KEYS, OperatorRefusal.SPEC}
    assert plan(World(a_job()).snapshot()).counted == frozenset()
