"""What a complete job leaves."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, eventually

from unbroken_local.demo.snapshot import Snapshot

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


def is_all_there(now: Snapshot) -> bool:
    """Whether the job trains with its spare, as kubelet and rendezvous say."""
    is_running = all(pod.phase == "Running" for pod in now.pods)
    return is_running and now.is_training and now.num_ready_spares == 1


def test_every_container_of_a_complete_job_has_ended_well(bench: Bench, tmp_path: Path) -> None:
    """The agents, too: an Error beside a Completed looks like a fault to whoever looks at the pods."""

    async def scenario() -> None:
        # A spare that has not started when the job is complete is deleted, and ends in no way.
        may_end = tmp_path / "may-end"
        # The script itself waits for its condition; the job's end, which the test waits for, is bounded.
        wait = f"import pathlib, time\nwhile not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.1)"
        command = ["python", "-c", wait]
        rungs = {"rungs": [{"name": "process", "limit": 1}]}
        async with bench.namespace("ends-well") as namespace, bench.observe(namespace, "ends-well") as observer:
            await bench.apply(namespace, job("ends-well", command, replicas=4, spares={"count": 1}, restart=rungs))
            await observer.wait("a job with a ready spare", is_all_there, LIMIT_S)
            may_end.touch()
            end = await observer.wait("the end", lambda now: now.state in {"Complete", "Failed"}, LIMIT_S)
            assert end.state == "Complete"
            codes = {
                name: status["state"]["terminated"]["exitCode"]
                for name, status in (await ended_containers(bench, namespace)).items()
            }
            assert len(codes) == 3 * 5
            assert set(codes.values()) == {0}, codes

    asyncio.run(scenario())


def test_job_whose_script_fails_after_the_training_has_failed_and_its_pod_shows_the_code(bench: Bench) -> None:
    name = "late-failure"
    script = (
        "import os, sys\n"
        "from unbroken import inprocess\n"
        "@inprocess.Wrapper()\n"
        "def train():\n"
        "    return os.environ['RANK']\n"
        "sys.exit(3 if train() == '1' else 0)\n"
    )

    async def scenario() -> None:
        async with bench.namespace(name) as namespace, bench.observe(namespace, name) as observer:
            await bench.apply(namespace, job(name, ["python", "-c", script], replicas=2))
            end = await observer.wait("the end", lambda now: now.state in {"Complete", "Failed"}, LIMIT_S)
            assert end.state == "Failed"
            status = await bench.status(namespace, name)
            (failed,) = (item for item in status["conditions"] if item["type"] == "Failed")
            assert failed["reason"] == "FailedAfterTraining"
            assert "rank 1 in late-failure-1 exited with code 3 after its training function" in failed["message"]
            containers = await ended_containers(bench, namespace)
            codes = {key: item["state"]["terminated"]["exitCode"] for key, item in containers.items()}
            assert {key: code for key, code in codes.items() if code} == {"late-failure-1 trainer": 3}
            assert len(codes) == 2 * 3, "no pod was replaced"

    asyncio.run(scenario())
