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
