"""The loss of the Secret of a job that trains: by hand, also while no operator looks."""

import asyncio
import json

import pytest
from tests.waiting import eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, Bench, CommandError, job

pytestmark = [pytest.mark.timeout(300), ON_ONE_REAL_SERVER]

NAME = "keyless"
SECRET = f"{NAME}-rendezvous"
LIMIT_S = 90.0


async def wait_token(bench: Bench) -> str:
    """Return the text of the Secret's token, which follows from the job's key, once there is one."""

    async def look() -> str | None:
        try:
            text = await bench.cluster.kubectl("get", "secret", SECRET, "-n", NAME, "-o", "json")
        except CommandError:
            return None
        return str(json.loads(text)["data"]["token"])

    return await eventually(look, f"a Secret {SECRET}", LIMIT_S, pause_s=KUBECTL_PAUSE_S)


async def delete_pod(bench: Bench, component: str) -> None:
    """Delete the pods of a component; others are made in their place."""
    selector = f"unbroken.dev/job={NAME},unbroken.dev/component={component}"
    await bench.cluster.kubectl("delete", "pod", "-n", NAME, "-l", selector, "--wait=false")


def test_job_goes_on_when_its_secret_is_deleted_with_and_without_an_operator_that_knew_it(bench: Bench) -> None:
    async def scenario() -> None:
        document = job(NAME, ["sleep", "600"], restart={"rungs": [{"name": "pod"}]})
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            await bench.wait_training(NAME)
            token = await wait_token(bench)

            # The operator knows the key: the Secret comes back as it was when the next pod needs it.
            await bench.cluster.kubectl("delete", "secret", SECRET, "-n", NAME)
            await delete_pod(bench, "trainer")
            await bench.wait_training(NAME, "a recovery", lambda status: status["restarts"]["total"] == 1)
            assert await wait_token(bench) == token

            # A new operator does not know it: there is a new key, whose tokens the kubelet brings to all pods.
            await bench.operator.stop()
            await bench.cluster.kubectl("delete", "secret", SECRET, "-n", NAME)
            bench.operator.start()
            assert await wait_token(bench) != token
            await delete_pod(bench, "trainer")
            before = await bench.wait_training(NAME, "a recovery", lambda status: status["restarts"]["total"] == 2)

            # A rendezvous that knows the new key only takes the running job over.
            await delete_pod(bench, "rendezvous")
            after = await bench.wait_training(
                NAME,
                "a job that was taken over",
                lambda status: status["rendezvous"]["podUid"] != before["rendezvous"]["podUid"],
            )
            assert after["iteration"] == before["iteration"], json.dumps(after["history"], indent=1)
            assert after["restarts"]["total"] == 2

    asyncio.run(scenario())
