"""All pods of a job and its rendezvous are replaced at once: nobody is left who remembers, but the job's status."""

import asyncio

import pytest
from tests.waiting import eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, Bench, job

pytestmark = [pytest.mark.timeout(300), ON_ONE_REAL_SERVER]

NAME = "replaced"


async def training_pods(bench: Bench) -> list[str]:
    """Return the training pods that run and are not being deleted, once the kubelet has said that one does."""
    columns = "jsonpath={range .items[*]}{.metadata.name} {.status.phase} {.metadata.deletionTimestamp}{'\\n'}{end}"
    selector = f"unbroken.dev/job={NAME},unbroken.dev/component=trainer"

    async def look() -> list[str]:
        text = await bench.cluster.kubectl("get", "pods", "-n", NAME, "-l", selector, "-o", columns)
        return [line.split()[0] for line in text.splitlines() if line.split()[1:] == ["Running"]]

    return await eventually(look, "a training pod", pause_s=KUBECTL_PAUSE_S)


def test_history_restarts_and_numbers_go_on_when_all_pods_are_replaced_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        # What was deleted by force may train on: a new rendezvous waits so long for the end of the only pod.
        boxes = {"softSeconds": 4, "hardSeconds": 6, "barrierSeconds": 60, "startupSeconds": 60, "heartbeatSeconds": 8}
        document = job(NAME, ["sleep", "600"], restart={"rungs": [{"name": "pod", "limit": 9}]}, timeouts=boxes)
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            await bench.wait_training(NAME)
            await bench.cluster.kubectl("delete", "pod", *await training_pods(bench), "-n", NAME, "--wait=false")
            before = await bench.wait_training(NAME, "a recovery", lambda status: bool(status.get("lastRecovery")))
            selector = f"unbroken.dev/job={NAME}"
            await bench.cluster.kubectl("delete", "pod", "-n", NAME, "-l", selector, "--force", "--grace-period=0")
            former = before["rendezvous"]["podUid"]
            between = await bench.wait_training(
                NAME, "another rendezvous", lambda status: bool(status["rendezvous"]["podUid"] != former)
            )
            assert between["rendezvous"]["term"] > before["rendezvous"]["term"]
            assert between["iteration"] > before["iteration"]
            assert between["restarts"]["total"] >= before["restarts"]["total"] == 1
            assert between["history"][0] == before["history"][0]
            number = between["restarts"]["total"] + 1
            await bench.cluster.kubectl("delete", "pod", *await training_pods(bench), "-n", NAME, "--wait=false")
            after = await bench.wait_training(
                NAME, "one more recovery", lambda status: bool(status["restarts"]["total"] == number)
            )
            keys = [(item["term"], item["number"]) for item in after["history"]]
            assert keys == sorted(set(keys))
            # That of the moment in which all were lost has never ended.
            assert sum("endedAt" in item for item in after["history"]) == number
            assert after["history"][0] == before["history"][0]

    asyncio.run(scenario())
