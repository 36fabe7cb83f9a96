"""Suspension, deadline and time to live on a real API server, which has to take every write of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeNotFound
from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator

pytestmark = pytest.mark.parametrize("kubeconfig", [pytest.param("full", marks=pytest.mark.cluster)], indirect=True)


async def change(made: Bench, **spec: Any) -> None:
    """Change the job's spec."""
    await made.kube.merge(made.path(layout.PLURAL, "digits"), {"spec": spec})


async def wait_for_condition(made: Bench, kind: str, reason: str, words: str = "") -> None:
    """Wait until a condition has this reason and these words."""

    async def look() -> bool:
        condition = await made.condition("digits", kind)
        return condition.get("reason") == reason and words in condition["message"]

    await eventually(look, f"{kind} {reason} {words}")


def test_a_job_is_suspended_resumed_and_deleted_after_its_deadline(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, suspend=True, ttlSecondsAfterFinished=0)
            with operator(made):
                await wait_for_condition(made, "Suspended", "Suspended", "has no pods")
                assert await made.pod_names() == []
                assert "startTime" not in (await made.job("digits"))["status"]
                await change(made, suspend=False)
                await made.wait_for_pods("digits-0", "digits-1")
                await change(made, suspend=True)
                await made.wait_for_pods()
                await wait_for_condition(made, "Suspended", "Suspended", "has no pods")
                assert await made.pod_names(layout.RENDEZVOUS) == []
                await change(made, suspend=False)
                await made.wait_for_pods("digits-2", "digits-3")
                await change(made, activeDeadlineSeconds=1)

                async def is_deleted() -> bool:
                    try:
                        await made.job("digits")
                    except KubeNotFound:
                        return True
                    return False

                await eventually(is_deleted, "the job is deleted")
                assert [item["type"] for item in await made.events("DeadlineExceeded")] == ["Warning"]
                assert len(await made.events("Suspended")) == 2
                assert len(await made.events("Resumed")) == 2

    asyncio.run(scenario())


def test_a_job_that_a_finalizer_holds_says_so_is_left_alone_and_goes_when_it_is_let_go(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            job = await made.apply("digits", replicas=2)
            path = made.path(layout.PLURAL, "digits")
            await made.kube.merge(path, {"metadata": {"finalizers": ["example.com/audit"]}})
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1")
                await made.kube.delete(path, job["metadata"]["uid"])

                async def state() -> bool:
                    return bool((await made.job("digits"))["status"]["state"] == "Deleting")

                await eventually(state, "what kubectl shows of the job")
                gone = (await made.pods())[0]["metadata"]
                await made.kube.delete(made.path("pods", "digits-0"), gone["uid"], is_forced=True)
                # Another job, made later, is served: so the operator has seen that pod go.
                await made.apply("other", replicas=1)
                await made.wait_for_pods("digits-1", "other-0")
                await made.kube.merge(path, {"metadata": {"finalizers": None}})

                async def is_gone() -> bool:
                    return await made.pod_names() == ["other-0"]

                await eventually(is_gone, "the end of its pods")

    asyncio.run(scenario())


def test_of_two_releases_that_serve_one_namespace_one_leads_a_job_and_says_so(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            leases = [f"{made.namespace}/{name}" for name in ("a", "b")]
            arguments = [("--namespace", made.namespace, "--lease", lease) for lease in leases]
            with operator(made, *arguments[0]), operator(made, *arguments[1]):
                await made.apply("digits", replicas=2)
                await made.wait_for_pods("digits-0", "digits-1")

                seen: list[Any] = []

                async def is_told() -> bool:
                    seen[:] = await made.events("LedByAnother"), (await made.job("digits"))["status"]
                    return bool(seen[0]) and seen[1].get("lease") == leases[0]

                def describe() -> str:
                    return f"{seen}; {made.operator_log()}"

                await eventually(is_told, "an Event about the other operator", describe=describe)
                (message,) = {item["message"] for item in await made.events("LedByAnother")}
                assert f"that of Lease {leases[0]} goes on, that of Lease {leases[1]} leaves it alone" in message
                # What the other one was doing when it saw that is still done: pods may be too many, or bear old names.
                gone = (await made.pods())[0]["metadata"]
                await made.kube.delete(made.path("pods", gone["name"]), gone["uid"], is_forced=True)

                async def is_replaced() -> bool:
                    seen[:] = [item["metadata"]["uid"] for item in await made.pods()]
                    return len(seen) == 2 and gone["uid"] not in seen

                await eventually(is_replaced, "two pods without the one that was lost", describe=describe)

    asyncio.run(scenario())
