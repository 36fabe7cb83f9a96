"""A spec change that needs another rendezvous: the one that serves stays until the next one can lead."""

import asyncio
import json
from typing import Any

import pytest
from tests.waiting import eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, Bench, job

pytestmark = [pytest.mark.timeout(300), ON_ONE_REAL_SERVER]

NAME = "handed"


async def rendezvous_pods(bench: Bench) -> dict[str, Any]:
    """Return the job's rendezvous pods by name."""
    text = await bench.cluster.kubectl("get", "pods", "-n", NAME, "-l", f"unbroken.dev/job={NAME}", "-o", "json")
    pods = {item["metadata"]["name"]: item for item in json.loads(text)["items"]}
    return {name: pod for name, pod in pods.items() if "rendezvous" in name}


def up_to_date(status: dict[str, Any]) -> dict[str, Any]:
    return next((item for item in status.get("conditions") or () if item["type"] == "UpToDate"), {})


def test_training_goes_on_while_the_next_rendezvous_cannot_run_and_is_handed_over_when_it_can(bench: Bench) -> None:
    async def patch(spec: dict[str, Any]) -> None:
        await bench.cluster.kubectl("patch", "rtj", NAME, "-n", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))

    async def scenario() -> None:
        document = job(NAME, ["sleep", "600"], restart={"rungs": [{"name": "pod", "limit": 9}]})
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            before = await bench.wait_training(NAME)
            (old,) = await rendezvous_pods(bench)
            nowhere = {"nodeSelector": {"example.com/pool": "none"}}
            await patch({"restart": {"maxFaultsPerRank": 7}, "rendezvous": nowhere})

            def is_stuck(status: dict[str, Any]) -> bool:
                seen = up_to_date(status)
                return seen.get("reason") == "RendezvousOutdated" and "cannot run" in seen["message"]

            stuck = await bench.wait_training(NAME, "a successor that cannot run", is_stuck)
            pods = await rendezvous_pods(bench)
            assert "deletionTimestamp" not in pods[old]["metadata"]
            assert (stuck["state"], stuck["iteration"]) == ("Running", before["iteration"])
            assert stuck["rendezvous"]["term"] == before["rendezvous"]["term"]
            await patch({"rendezvous": {"nodeSelector": None}})

            def is_handed_over(status: dict[str, Any]) -> bool:
                return bool(status["rendezvous"]["term"] > before["rendezvous"]["term"])

            after = await bench.wait_training(NAME, "the hand-over", is_handed_over)
            assert after["iteration"] == before["iteration"]
            assert after["restarts"]["total"] == before["restarts"]["total"] == 0

            async def is_alone() -> bool:
                return old not in await rendezvous_pods(bench)

            await eventually(is_alone, "the end of the one before", pause_s=KUBECTL_PAUSE_S)
            (new,) = (await rendezvous_pods(bench)).values()
            assert new["metadata"]["labels"]["unbroken.dev/component"] == "rendezvous"
            assert "unbroken.dev/standby" not in new["metadata"]["annotations"]

    asyncio.run(scenario())
