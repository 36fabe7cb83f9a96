"""A release that changes the settings of many jobs replaces a few rendezvous at a time, and one that adds some none."""

import dataclasses
from typing import Any

from unbroken_core.layers import Layer
from unbroken_core.settings import DEFAULT_RUNGS, JobSettings, Timeouts
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, DeletePod
from unbroken_operator.decisions.limits.rollouts import MAX_AT_ONCE, MAX_S, Rollouts
from unbroken_operator.decisions.objects.manifests import settings_digest
from unbroken_operator.decisions.plan import plan

from .operator_world import World, running_world


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
    assert [rollouts.take(job, 0.0) for job in jobs] == [True] * MAX_AT_ONCE + [False] * 2
    assert rollouts.take(jobs[0], 1.0), "it has one"
    rollouts.give_back(jobs[0])
    rollouts.give_back("a job without a place")
    assert rollouts.take(jobs[-1], 2.0)
    assert not rollouts.take(jobs[-2], MAX_S - 0.1)
    assert rollouts.take(jobs[-2], MAX_S)
