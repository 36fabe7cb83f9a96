"""Pods that test themselves before the first plan: one of them computes wrong numbers, and the job goes on."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sidecar.launch import hostile_pairs, hostile_preflight
from tests.waiting import eventually

from unbroken_local.demo.tools import BIN, run

from .e2e_bench import KUBECTL_PAUSE_S, Bench, Json, job

pytestmark = [pytest.mark.timeout(420), pytest.mark.parametrize("bench", ["local"], indirect=True)]

NAME = "flight"
FOUND = "preflight-matmul on cpu is fatal: float32: 1 of 65536 products are wrong"


@asynccontextmanager
async def a_job(bench: Bench, folder: Path, mode: str, broken: str, **changes: Any) -> AsyncIterator[None]:
    """Run a job with a spare, of whose pods those of this name compute wrong numbers in their preflight.

    With pairs they send wrong numbers to others instead.
    """
    has_pairs = "pairs" in changes.get("health", {}).get("preflight", {})
    hostile = hostile_pairs.__file__ if has_pairs else hostile_preflight.__file__
    kinds = ("corrupt", "") if has_pairs else ("product", "well")
    shutil.copy(hostile, folder / "hostile_image.py")
    hook = "import os\nfrom hostile_image import behave\n"
    hook += f"behave({kinds[0]!r} if os.environ.get('UNBROKEN_POD', '').startswith({broken!r}) else {kinds[1]!r})\n"
    (folder / "sitecustomize.py").write_text(hook)
    document = job(
        NAME,
        ["sleep", "600"],
        **{
            "spares": {"count": 1},
            "restart": {"rungs": [{"name": "pod"}]},
            "timeouts": {"softSeconds": 4, "hardSeconds": 6, "barrierSeconds": 60, "startupSeconds": 300},
            "health": {"preflight": {"mode": mode}},
            **changes,
        },
    )
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "PYTHONPATH", "value": str(folder)}]
    async with bench.namespace(NAME):
        await bench.apply(NAME, document)
        yield


def condition_of(status: Json, kind: str) -> tuple[str, str]:
    found = (item for item in status.get("conditions", ()) if item["type"] == kind)
    return next(((item["status"], item["message"]) for item in found), ("", ""))


async def roles(bench: Bench) -> dict[str, str]:
    """Return the roles of the training pods by name."""
    selector = f"unbroken.dev/job={NAME},unbroken.dev/component=trainer"
    text = await bench.cluster.kubectl("get", "pods", "-n", NAME, "-l", selector, "-o", "json")
    found = {item["metadata"]["name"]: item["metadata"] for item in json.loads(text)["items"]}
    return {
        name: metadata["labels"]["unbroken.dev/role"]
        for name, metadata in found.items()
        if not metadata.get("deletionTimestamp")
    }


async def wait_roles(bench: Bench, wanted: dict[str, str]) -> None:
    seen: dict[str, str] = {}

    async def look() -> bool:
        seen.clear()
        seen.update(await roles(bench))
        return seen == wanted

    await eventually(look, f"pods {wanted}", describe=lambda: f"there are {seen}", pause_s=KUBECTL_PAUSE_S)


def test_a_pod_whose_preflight_fails_gets_no_rank_and_another_one_is_made(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_job(bench, tmp_path, "Act", f"{NAME}-0"):
            status = await bench.wait_training(NAME)
            assert status["restarts"]["total"] == 0
            await wait_roles(bench, {f"{NAME}-1": "active", f"{NAME}-2": "spare"})
            status = await bench.wait_training(
                NAME, "all well again", lambda status: condition_of(status, "NodesHealthy")[0] == "True"
            )
            assert (status["restarts"]["total"], status["iteration"]) == (0, 0)
            await bench.wait_event(NAME, NAME, FOUND)

    asyncio.run(scenario())


def test_with_observe_it_gets_one_and_why_says_what_was_found(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_job(bench, tmp_path, "Observe", f"{NAME}-0"):
            status = await bench.wait_training(
                NAME, "what was found", lambda status: condition_of(status, "NodesHealthy")[0] == "False"
            )
            assert f"{NAME}-0" in condition_of(status, "NodesHealthy")[1]
            assert FOUND in condition_of(status, "NodesHealthy")[1]
            assert await roles(bench) == {f"{NAME}-0": "active", f"{NAME}-1": "spare"}
            said = await run(str(BIN / "unbroken"), "why", NAME, "-n", NAME, env=bench.cluster.env)
            assert FOUND in said

    asyncio.run(scenario())


def test_an_image_whose_preflight_fails_everywhere_trains_and_costs_no_pod(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_job(bench, tmp_path, "Act", NAME):
            status = await bench.wait_training(
                NAME, "what holds", lambda status: "false alarm" in condition_of(status, "NodesHealthy")[1]
            )
            assert "the preflight of 2 of 2 pods has failed" in condition_of(status, "NodesHealthy")[1]
            assert status["restarts"]["total"] == 0
            assert sorted(await roles(bench)) == [f"{NAME}-0", f"{NAME}-1"]

    asyncio.run(scenario())


def test_a_pod_that_sends_wrong_numbers_to_all_others_is_replaced(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        pairs = {
            "spares": {"count": 2},
            "timeouts": {"softSeconds": 4, "hardSeconds": 6, "barrierSeconds": 60, "lastCallSeconds": 120},
            "health": {"preflight": {"mode": "Act", "pairs": True, "timeoutSeconds": 200}},
        }
        async with a_job(bench, tmp_path, "Act", f"{NAME}-0", **pairs):
            status = await bench.wait_training(NAME)
            assert status["restarts"]["total"] == 0
            await wait_roles(bench, {f"{NAME}-1": "active", f"{NAME}-2": "spare", f"{NAME}-3": "spare"})
            status = await bench.wait_training(
                NAME, "all well again", lambda status: condition_of(status, "NodesHealthy")[0] == "True"
            )
            assert (status["restarts"]["total"], status["iteration"]) == (0, 0)
            await bench.wait_event(NAME, NAME, "preflight-pairs is fatal: failed 4 tests with ")

    asyncio.run(scenario())
