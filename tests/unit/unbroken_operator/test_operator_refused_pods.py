"""A template that the API server refuses costs one attempt now and then, however the job is edited meanwhile."""

import asyncio
import dataclasses
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.decisions.actions import Action, CreatePod, CreateSecret, CreateService, Decision
from unbroken_operator.decisions.limits.retry import MAX_RETRY_S, retry_delay_s
from unbroken_operator.decisions.limits.weight import QUICK_CHARACTERS, QUICK_VALUES, exceeds, is_heavy
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import OperatorOptions, WriteRefusal
from unbroken_operator.jobs import Jobs
from unbroken_operator.worker import JobWorker

from .operator_world import CONTAINER, World, a_job, running_world
from .test_operator_large_jobs import planned

REFUSED = (WriteRefusal("digits-0", "spec.containers[0].resources: Invalid value"),)


def new_pods(world: World) -> list[str]:
    """Return the names of the pods that the plan makes now."""
    return [
        str(action.manifest["metadata"]["name"])
        for action in plan(world.snapshot()).actions
        if isinstance(action, CreatePod)
    ]


def test_after_a_refusal_one_pod_is_tried_before_the_rest() -> None:
    """Before, each attempt made 32 of 250 large pods, all of which were refused."""
    fresh, grown = World(a_job(replicas=250)), running_world()
    grown.job["spec"]["replicas"] = 250
    for world, tried in ((fresh, "digits-rendezvous-0"), (grown, "digits-3")):
        world.memory = dataclasses.replace(world.memory, num_refused_rounds=1, since_refusal_s=3.0)
        assert new_pods(world) == [tried]
        world.memory = dataclasses.replace(world.memory, num_refused_rounds=0)
        assert len(new_pods(world)) >= 250 - 2


def test_an_edit_each_second_does_not_end_the_back_off() -> None:
    memory = JobMemory()
    now_s, num_tried = 1000.0, 0
    for _ in range(600):
        memory.note_new_spec()
        view = memory.view(now_s)
        if view.since_refusal_s >= retry_delay_s(view.num_refused_rounds):
            num_tried += 1
            memory.refuse(REFUSED, now_s)
        now_s += 1.0
    assert memory.num_refused_rounds == num_tried <= 301, "one pod every two seconds"
    memory.refuse(REFUSED, now_s)
    # As soon as the edits end, all that was refused counts.
    assert memory.view(now_s + 299.0).since_refusal_s < retry_delay_s(memory.num_refused_rounds) == MAX_RETRY_S


def test_a_person_who_mends_the_spec_waits_for_nothing() -> None:
    memory = JobMemory()
    for at_s in (0.0, 2.0, 10.0, 42.0):
        memory.refuse(REFUSED, at_s)
    assert memory.view(50.0).since_refusal_s < retry_delay_s(4)
    memory.note_new_spec()
    view = memory.view(50.0)
    assert view.since_refusal_s >= retry_delay_s(4)
    assert (view.num_refused_rounds, view.refusals) == (4, ()), "one pod is tried, and nothing is said of the old spec"
    memory.refuse((), 51.0)
    assert memory.view(51.0).num_refused_rounds == 0


@pytest.mark.parametrize(
    ("made", "is_over"),
    [
        ((), False),
        ((CreateService({"metadata": {"name": "digits-rendezvous"}}),), False),
        ((CreateSecret({"metadata": {"name": "refused"}}),), True),
        ((CreatePod({"metadata": {"name": "digits-7"}}),), True),
    ],
    ids=["nothing made", "a Service that somebody deleted", "what was refused", "a pod"],
)
def test_what_shows_that_refusals_are_over(made: tuple[Action, ...], is_over: bool) -> None:
    """Whoever may delete the job's Service could end its back-off."""

    async def scenario() -> bool:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        worker = JobWorker(a_job(), jobs._shared)
        worker._memory.refuse((WriteRefusal("refused", "quota"),), 1.0)
        found = worker._is_made(Decision(made))
        await jobs.stop()
        return found

    assert asyncio.run(scenario()) is is_over


@pytest.mark.parametrize(
    "container", [{"x": [{} for _ in range(2 * QUICK_VALUES)]}, {"args": ["x" * (QUICK_CHARACTERS + 1)]}]
)
def test_the_plan_of_a_small_job_with_a_heavy_spec_leaves_the_loop_free(
    container: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, 250 pods of 9,000 values were planned on the loop: 2 s at each edit."""
    ticks: list[str] = []
    job = a_job(replicas=1, template={"spec": {"containers": [CONTAINER | container]}})
    planned(monkeypatch, job, lambda _: ticks.append("the loop runs"))
    assert ticks == ["the loop runs"]


def test_an_edit_that_makes_a_spec_heavy_is_noticed() -> None:
    async def scenario() -> tuple[bool, bool]:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        job = a_job()
        worker = JobWorker(job, jobs._shared)
        before = worker._is_large()
        template = {"spec": {"containers": [CONTAINER | {"x": [{} for _ in range(2 * QUICK_VALUES)]}]}}
        metadata = job["metadata"] | {"generation": 2, "resourceVersion": "2"}
        worker.update({**a_job(template=template), "metadata": metadata})
        await jobs.stop()
        return before, worker._is_large()

    assert asyncio.run(scenario()) == (False, True)


def size(item: Any) -> tuple[int, int]:
    """Return the number of values and characters."""
    inner = [*item.values(), *item] if isinstance(item, dict) else item if isinstance(item, list) else []
    found = [size(one) for one in inner]
    num_keys = len(item) if isinstance(item, dict) else 0
    num_characters = len(item) if isinstance(item, str) else 0
    return 1 + sum(one for one, _ in found) - num_keys, num_characters + sum(one for _, one in found)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        max_leaves=30,
    )
)
def test_a_spec_is_heavy_by_its_values_and_characters(item: Any) -> None:
    num_values, num_characters = size(item)
    assert not exceeds(item, num_values, num_characters)
    assert exceeds(item, num_values - 1, num_characters)
    assert exceeds(item, num_values, num_characters - 1)


def test_of_a_heavy_spec_only_a_part_is_looked_at() -> None:
    class Counted(list[Any]):
        """A list that tells when somebody looks into it."""

        def __iter__(self) -> Any:
            raise AssertionError("this one is too long")

    assert is_heavy({"x": Counted([{}] * (QUICK_VALUES + 1))})
    assert not is_heavy(a_job()["spec"])
