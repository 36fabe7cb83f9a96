"""A release that changes the settings of many jobs replaces a few rendezvous at a time, and one that adds some none."""

import dataclasses
from typing import Any

from tests.unit.unbroken_operator.operator_world import World, running_world

from unbroken_core.protocol.settings import DEFAULT_RUNGS, JobSettings, Timeouts
from unbroken_core.vocabulary.layers import Layer
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, DeletePod
from unbroken_operator.decisions.limits.rollouts import FORGOTTEN_S, MAX_AT_ONCE, MAX_S, NUM_RESERVED, RETRY_S, Rollouts
from unbroken_operator.decisions.objects.manifests import settings_digest
from unbroken_operator.decisions.plan import plan


@dataclasses.dataclass(frozen=True)
class NewerTimeouts(Timeouts):
    """As a later release may have them."""

    patience_s: float = 5.0


@dataclasses.dataclass(frozen=True)
class NewerSettings(JobSettings):
    """As a later release may have them."""

    colours: tuple[str, ...] = ()


def test_a_setting_that_a_release_adds_does_not_change_the_digest_until_it_is_used() -> None:
    usual: dict[str, Any] = {}
    layers = (Layer("rack", "example.com/rack", 2),)
    others: dict[str, Any] = {"replicas": 3, "layers": layers, "rungs": DEFAULT_RUNGS[:2]}
    for values in (usual, others):
        before = JobSettings("digits", **values)
        after = NewerSettings("digits", **values, timeouts=NewerTimeouts())
        assert settings_digest(before) == settings_digest(after)
        assert settings_digest(before) != settings_digest(dataclasses.replace(after, colours=("red",)))
        patient = dataclasses.replace(after, timeouts=NewerTimeouts(patience_s=6.0))
        assert settings_digest(before) != settings_digest(patient)


def test_every_change_of_a_setting_changes_the_digest() -> None:
    usual = JobSettings("digits", replicas=4)
    others = [
        dataclasses.replace(usual, spares=1),
        dataclasses.replace(usual, min_replicas=2),
        dataclasses.replace(usual, timeouts=Timeouts(drain_s=31.0)),
        dataclasses.replace(usual, rungs=DEFAULT_RUNGS[1:]),
        dataclasses.replace(usual, layers=(Layer("rack", "a"),)),
        dataclasses.replace(usual, layers=(Layer("rack", "b"),)),
        dataclasses.replace(usual, layers=(Layer("rack", "a", close_gaps=True),)),
    ]
    assert len({settings_digest(settings) for settings in (usual, *others)}) == len(others) + 1


def _with_other_settings() -> World:
    world = running_world()
    annotations = world.pods["digits-rendezvous-0"]["metadata"]["annotations"]
    annotations[layout.SETTINGS_ANNOTATION] = "of another release"
    return world


def test_a_rendezvous_that_works_is_kept_until_it_may_be_replaced() -> None:
    world = _with_other_settings()
    waiting = plan(dataclasses.replace(world.snapshot(), may_replace_rendezvous=False))
    assert (waiting.actions, waiting.wants_new_rendezvous) == ((), True)
    now = plan(world.snapshot())
    assert now.wants_new_rendezvous, "until the next one leads"
    made = [action.manifest["metadata"]["name"] for action in now.actions if isinstance(action, CreatePod)]
    gone = [action.name for action in now.actions if isinstance(action, DeletePod)]
    assert (made, gone) == (["digits-rendezvous-1"], [])


def test_a_rendezvous_that_does_not_work_is_replaced_at_once() -> None:
    world = _with_other_settings()
    world.end_pod("digits-rendezvous-0", "Failed")
    decision = plan(dataclasses.replace(world.snapshot(), may_replace_rendezvous=False))
    assert not decision.wants_new_rendezvous
    assert any(isinstance(action, CreatePod) for action in decision.actions)


def test_a_few_jobs_at_a_time_have_a_place_and_none_keeps_it_for_ever() -> None:
    rollouts = Rollouts()
    jobs = [f"job-{number}" for number in range(MAX_AT_ONCE + 2)]
    assert [rollouts.take("ml", job, 0.0) for job in jobs] == [True] * MAX_AT_ONCE + [False] * 2
    assert rollouts.take("ml", jobs[0], 1.0), "it has one"
    rollouts.give_back(jobs[0])
    rollouts.give_back("a job without a place")
    assert rollouts.take("ml", jobs[-2], 2.0)
    assert not rollouts.take("ml", jobs[-1], MAX_S - 0.1)
    assert rollouts.take("ml", jobs[-1], MAX_S)


def test_a_tenant_who_edits_all_of_his_jobs_for_ever_keeps_no_other_from_its_place() -> None:
    """Before, an honest job waited 178 s beside 40 hostile ones whose rendezvous never came up."""
    rollouts = Rollouts()
    for tick in range(200):
        for number in range(40):
            rollouts.take("evil", f"evil-{number}", tick * RETRY_S)
    now_s = 200 * RETRY_S
    assert rollouts.take("ml", "first", now_s), "from the reserve"
    waited_s = 0.0
    while not rollouts.take("ml", "second", now_s + waited_s):
        for number in range(40):
            rollouts.take("evil", f"evil-{number}", now_s + waited_s)
        waited_s += RETRY_S
    assert waited_s <= MAX_S, "the next place that gets free"


def test_a_place_that_gets_free_goes_to_the_namespace_that_has_the_fewest() -> None:
    rollouts = Rollouts()
    for number in range(MAX_AT_ONCE - 1):
        assert rollouts.take("a", f"a-{number}", 0.0)
    assert rollouts.take("b", "b-0", 0.0)
    assert not rollouts.take("a", "a-late", 1.0)
    assert not rollouts.take("b", "b-1", 2.0)
    rollouts.give_back("a-0")
    assert not rollouts.take("a", "a-late", 3.0), "b has fewer"
    assert rollouts.take("b", "b-1", 3.0)
    rollouts.give_back("a-1")
    assert rollouts.take("a", "a-late", 4.0), "nobody else waits"


def test_who_asks_no_more_is_not_waited_for() -> None:
    rollouts = Rollouts()
    for number in range(MAX_AT_ONCE - 1):
        assert rollouts.take("a", f"a-{number}", 0.0)
    assert rollouts.take("b", "b-0", 0.0)
    assert not rollouts.take("b", "b-gone", 1.0)
    assert not rollouts.take("a", "a-late", 2.0)
    rollouts.give_back("a-0")
    assert not rollouts.take("a", "a-late", 1.0 + FORGOTTEN_S / 2)
    assert rollouts.take("a", "a-late", 1.0 + FORGOTTEN_S)


def test_the_reserve_is_bounded_and_places_of_one_namespace_are_what_they_were() -> None:
    rollouts = Rollouts()
    assert sum(rollouts.take("a", f"a-{number}", 0.0) for number in range(40)) == MAX_AT_ONCE
    assert sum(rollouts.take(f"n-{number}", f"n-{number}", 0.0) for number in range(40)) == NUM_RESERVED
