"""What a complete job leaves."""

import asyncio
import json

import pytest
from tests.waiting import LIMIT_S, eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, Bench, Json, job

pytestmark = [pytest.mark.timeout(300), ON_ONE_REAL_SERVER]


async def ended_containers(bench: Bench, namespace: str) -> dict[str, Json]:
    """Return how each container of the training pods has ended, once all have."""
    selector = "unbroken.dev/component=trainer"
    statuses: dict[str, Json] = {}

    async def look() -> bool:
        nonlocal statuses
        text = await bench.cluster.kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json")
        statuses = {
            f"{pod['metadata']['name']} {item['name']}": item
            for pod in json.loads(text)["items"]
            for kind in ("initContainerStatuses", "containerStatuses")
            for item in pod["status"].get(kind) or ()
        }
        return bool(statuses) and all("terminated" in item["state"] for item in statuses.values())

    await eventually(look, "the end of all containers", LIMIT_S, lambda: f"there is {statuses}", KUBECTL_PAUSE_S)
    return statuses


def test_every_container_of_a_complete_job_has_ended_well(bench: Bench) -> None:
    """The agents, too: an Error beside a Completed looks like a fault to whoever looks at the pods."""

    async def scenario() -> None:
        command = ["python", "-c", "print('hello')"]
        rungs = {"rungs": [{"name": "process", "limit": 1}]}
        async with bench.namespace("ends-well") as namespace, bench.observe(namespace, "ends-well") as observer:
            await bench.apply(namespace, job("ends-well", command, replicas=4, spares={"count": 1}, restart=rungs))
            end = await observer.wait("the end", lambda now: now.state in {"Complete", "Failed"}, 90.0)
            assert end.state == "Complete"
            codes = {
                name: status["state"]["terminated"]["exitCode"]
                for name, status in (await ended_containers(bench, namespace)).items()
            }
            assert len(codes) == 3 * 5
            assert set(codes.values()) == {0}, codes

    asyncio.run(scenario())
