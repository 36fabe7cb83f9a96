"""Plans of large jobs are made beside the loop, from what was seen at one moment."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from unbroken_operator import worker as worker_module
from unbroken_operator.adapters.executor import Services
from unbroken_operator.adapters.job_secret import JobSecret
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import Decision
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import OperatorOptions, Snapshot, WriteRefusal, node_view
from unbroken_operator.jobs import Jobs
from unbroken_operator.worker import NUM_QUICK, JobWorker

from .operator_world import World, a_job, a_node


def planned(monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], during: Callable[[Services], None]) -> Decision:
    """Let a worker plan; `during` runs meanwhile, in the loop."""
    began, may_end = threading.Event(), threading.Event()

    def watched(snapshot: Snapshot) -> Decision:
        began.set()
        if not may_end.wait(60):
            raise AssertionError("the loop waits for the plan")
        return plan(snapshot)

    async def scenario() -> Decision:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        shared = jobs._shared
        shared.nodes.upsert(a_node("a"))
        snapshot = World(job).snapshot()
        made = asyncio.create_task(
            JobWorker(job, shared)._plan(dataclasses.replace(snapshot, nodes=shared.nodes.nodes))
        )
        while not began.is_set():
            await asyncio.sleep(0.001)
        during(shared)
        may_end.set()
        decision = await made
        await jobs.stop()
        return decision

    monkeypatch.setattr(worker_module, "plan", watched)
    return asyncio.run(scenario())


def test_the_plan_of_a_large_job_leaves_the_loop_free_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a plan for 4,096 pods held up all jobs, the polls and the webhook for 1.2 s."""
    job = a_job(replicas=NUM_QUICK + 1)
    ticks: list[str] = []
    decision = planned(monkeypatch, job, lambda _: ticks.append("the loop runs"))
    assert ticks == ["the loop runs"]
    assert [type(action) for action in decision.actions] == [type(item) for item in plan(World(job).snapshot()).actions]


def test_what_changes_while_a_plan_is_made_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are one table that the watch changes in place: a plan would meet it in the middle of a change."""
    seen: list[Snapshot] = []

    def remember(snapshot: Snapshot) -> Decision:
        seen.append(snapshot)
        return Decision(())

    monkeypatch.setitem(globals(), "plan", remember)

    def change(shared: Services) -> None:
        shared.nodes.upsert(a_node("b"))
        shared.nodes.remove(a_node("a"))

    planned(monkeypatch, a_job(replicas=NUM_QUICK + 1), change)
    assert dict(seen[0].nodes) == {"a": node_view(a_node("a"))}


class Nobody:
    """A client for jobs without a rendezvous."""

    def is_token_old(self, _: object) -> bool:
        """See RendezvousApi."""
        return False


def calls_on_the_loop(monkeypatch: pytest.MonkeyPatch, num_pods: int) -> int:
    """Return how many functions one look at a job, and its plan, call on the loop's own thread."""
    num = 0

    def count(_frame: Any, event: str, _what: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    async def nothing(*_: Any) -> None:
        pass

    async def scenario() -> None:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, Nobody()), OperatorOptions("s:1"), OperatorMetrics(), ())
        for number in range(num_pods):
            jobs._shared.pods.upsert(trainer(number))
        worker = JobWorker(a_job(replicas=num_pods), jobs._shared)
        sys.setprofile(count)
        try:
            snapshot = await worker._observe(1.0)
            decision = await worker._plan(snapshot)
        finally:
            sys.setprofile(None)
        assert len(snapshot.pods) == num_pods
        assert len(snapshot.hosts) == num_pods
        assert decision.actions
        await jobs.stop()

    monkeypatch.setattr(JobSecret, "refresh", nothing)
    monkeypatch.setattr(JobSecret, "refresh_tokens", nothing)
    asyncio.run(scenario())
    return num


def trainer(number: int) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"digits-{number}",
            "namespace": "ml",
            "uid": f"pod-{number}",
            "resourceVersion": str(number + 1),
            "labels": {layout.JOB_LABEL: "digits", layout.COMPONENT_LABEL: layout.TRAINER},
            "ownerReferences": [{"uid": "uid-of-digits", "controller": True}],
        },
        "spec": {"nodeName": f"node-{number}"},
        "status": {"phase": "Running"},
    }


def test_what_a_job_costs_the_loop_does_not_grow_with_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of 65,536 pods was looked at several times on the loop: 195 ms and more."""
    few, many = (calls_on_the_loop(monkeypatch, num) for num in (2 * NUM_QUICK, 6 * NUM_QUICK))
    # The loop itself wakes more often while a thread works longer.
    assert many < few + NUM_QUICK


def test_a_new_spec_is_noted_by_who_uses_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch brings it at any moment, and the memory may be in use in a thread."""

    async def scenario() -> None:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, Nobody()), OperatorOptions("s:1"), OperatorMetrics(), ())
        job = a_job()
        worker = JobWorker(job, jobs._shared)
        worker._memory.refuse((WriteRefusal("digits-0", "quota"),), 1.0)
        changed = {**job, "metadata": {**job["metadata"], "generation": 2, "resourceVersion": "2"}}
        worker.update(changed)
        assert worker._memory.refusals
        snapshot = await worker._observe(1.0)
        assert snapshot.job["metadata"]["generation"] == 2
        assert not snapshot.memory.refusals
        await jobs.stop()

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(JobSecret, "refresh", nothing)
    monkeypatch.setattr(JobSecret, "refresh_tokens", nothing)
    asyncio.run(scenario())


def test_a_small_job_is_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job(replicas=NUM_QUICK - 1)

    async def scenario() -> str:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        found: list[str] = []
        monkeypatch.setattr(worker_module, "plan", lambda _: found.append(threading.current_thread().name))
        await JobWorker(job, jobs._shared)._plan(World(job).snapshot())
        await jobs.stop()
        return found[0]

    assert asyncio.run(scenario()) == threading.main_thread().name
