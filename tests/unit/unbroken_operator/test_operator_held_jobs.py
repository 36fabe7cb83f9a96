"""Of a job the operator holds what it reads, and of a spec that is too large hardly anything."""

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Mapping
from typing import Any, cast

import kopf
import pytest

from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.decisions.admission import admit, held
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.limits.report import wanted_pods
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.handlers import configure
from unbroken_operator.jobs import Jobs
from unbroken_operator.worker import JobWorker

from .operator_world import CONTAINER, World, a_job, running_world


def num_values(item: Any) -> int:
    """Return how many values there are in a JSON value."""
    inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return 1 + sum(map(num_values, inner))


def junk(num: int = 100_000, **spec: Any) -> dict[str, Any]:
    """Return a job with so many fields that nobody knows."""
    template = {"spec": {"containers": [dict(CONTAINER)], "junk": [{} for _ in range(num)]}}
    return a_job(template=template, **spec)


def worker_of(job: dict[str, Any]) -> JobWorker:
    """Return the worker of a job, with nobody to speak with."""

    async def make() -> JobWorker:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        worker = JobWorker(job, jobs._shared)
        await jobs.stop()
        return worker

    return asyncio.run(make())


def test_of_a_spec_that_is_too_large_the_size_of_the_job_is_held_and_what_is_wrong() -> None:
    """Before, nine such jobs of 1.3 MB took 542 MB of the operator's memory for as long as they existed."""
    job = junk(replicas=7, spares={"count": 2})
    worker = worker_of(job)
    assert num_values(worker.job) < 30
    assert wanted_pods(worker.job["spec"]) == 9
    assert admit(worker.job) == admit(job)
    world = World(dict(worker.job))
    assert plan(world.snapshot()).counted == {OperatorRefusal.SPEC}
    world.settle()
    ((_, message),) = {(item["reason"], item["message"]) for item in world.job["status"]["conditions"]}
    assert "spec: must have at most 10000 values, got more" in message
    worker.update({**job, "metadata": job["metadata"] | {"resourceVersion": "2", "generation": 2}})
    assert worker.job["metadata"]["generation"] == 2
    assert num_values(worker.job) < 30
    assert held(worker.job) == worker.job, "what is held may be taken once more"


class Event(dict[str, Any]):
    """What kopf's context holds."""


def test_the_context_of_a_job_s_event_is_not_kept_by_what_follows_the_job() -> None:
    """Seen before: kopf's context, with the whole job, lived as long as the worker, 32 MB for 1.3 MB of JSON."""
    cause: contextvars.ContextVar[Event] = contextvars.ContextVar("cause")

    def observe(jobs: Jobs) -> "weakref.ref[Event]":
        event = Event(a_job())
        cause.set(event)
        jobs.observe("ADDED", dict(event))
        return weakref.ref(event)

    async def scenario() -> None:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        seen = contextvars.copy_context().run(observe, jobs)
        assert len(jobs._workers) == 1
        gc.collect()
        assert seen() is None
        for _worker, task in jobs._workers.values():
            task.cancel()  # It has not begun yet.

    asyncio.run(scenario())


def test_a_job_that_runs_goes_on_by_its_last_sound_spec_when_it_becomes_too_large() -> None:
    world = running_world()
    world.settle()
    world.job = dict(held({**world.job, "spec": junk()["spec"]}))
    world.remove_pod("digits-0")
    world.settle()
    assert world.created[-1] == "digits-3"
    assert "10000 values" in str(world.job["status"]["conditions"])


def test_a_sound_job_is_held_with_all_that_is_read_and_without_who_wrote_it() -> None:
    job = a_job()
    written = [{"manager": "kubectl", "fieldsV1": {f"f:{number}": {} for number in range(1000)}}]
    notes = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 200_000}
    status = {"accepted": {"ranksPerPod": 2, "layers": [], "isInProcess": True}}
    large = {**job, "status": status, "metadata": job["metadata"] | {"managedFields": written, "annotations": notes}}
    worker = worker_of(large)
    assert worker.job == {**job, "status": status}


@pytest.mark.parametrize(
    "spec",
    [None, [], "x", {"replicas": "many"}, {"replicas": True, "spares": []}, {"spares": {"count": [1]}}],
    ids=repr,
)
def test_whatever_is_stored_can_be_held(spec: Any) -> None:
    large = {**(spec if isinstance(spec, dict) else {}), "x": [{}] * 20_000}
    for stored in (spec, large):
        job = {**a_job(), "spec": stored}
        assert admit(held(job)) == admit(job)
        assert num_values(held(job)) < 20


def test_the_watch_of_jobs_holds_few_of_them_whole() -> None:
    settings = kopf.OperatorSettings()
    asyncio.run(cast(Any, configure)(settings=settings))
    assert settings.watching.chunk_size is not None
    assert settings.watching.chunk_size <= 10
    assert settings.queueing.idle_timeout <= 0.5
