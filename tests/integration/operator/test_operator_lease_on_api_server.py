"""Several operators as processes, of which one acts."""

import asyncio
import signal
import threading
from pathlib import Path

import aiohttp
import pytest
from tests.waiting import eventually

from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.adapters.lease import API_VERSION, LeaseName, electing
from unbroken_operator.api import layout

from .operator_bench import OperatorProcess, bench, operator

pytestmark = pytest.mark.parametrize("kubeconfig", [pytest.param("full", marks=pytest.mark.cluster)], indirect=True)


async def wait_for(process: OperatorProcess, page: str, text: str) -> None:
    """Wait until a page of the operator has this text."""

    async def look() -> bool:
        url = f"http://127.0.0.1:{process.metrics_port}{page}"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return answer.status == 200 and text in await answer.text()
        except aiohttp.ClientError:
            return False

    await eventually(look, f"{text} at {page}")


def test_the_next_operator_leads_when_the_first_stalls_and_no_pod_is_touched(kubeconfig: Path, tmp_path: Path) -> None:
    """One that was stopped for longer than its lease does nothing when it goes on: it ends, to be started again."""

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            lease = ("--lease", f"{made.namespace}/operator", "--lease-seconds", "10")
            arguments = ("--namespace", made.namespace, *lease)
            await made.apply("digits", replicas=2)
            with operator(made, *arguments, wanted_status=3) as first:
                await made.wait_for_pods("digits-0", "digits-1")
                with operator(made, *arguments) as second:
                    await wait_for(second, "/readyz", "ok")
                    await wait_for(second, "/metrics", "unbroken_operator_leads 0.0")
                    before = [pod["metadata"]["uid"] for pod in await made.pods()]
                    first.process.send_signal(signal.SIGSTOP)
                    await wait_for(second, "/metrics", "unbroken_operator_leads 1.0")
                    first.process.send_signal(signal.SIGCONT)
                    assert await asyncio.to_thread(first.process.wait, 60) == 3
                    pod = (await made.pods())[1]
                    await made.kube.delete(made.path("pods", "digits-1"), pod["metadata"]["uid"], is_forced=True)
                    await made.wait_for_pods("digits-0", "digits-2")
                    assert (await made.pods())[0]["metadata"]["uid"] == before[0]
                    assert pod["metadata"]["uid"] == before[1]
                    assert await made.pod_names(layout.RENDEZVOUS) == ["digits-rendezvous-0"]

    asyncio.run(scenario())


def test_the_lease_is_renewed_while_the_main_loop_does_nothing_at_all(kubeconfig: Path, tmp_path: Path) -> None:
    """Reports of twelve jobs kept it busy for 11.8 s, which is longer than a lease lasts."""
    renewals = threading.Semaphore(0)

    def count(verb: str, resource: str, _outcome: str) -> None:
        if (verb, resource) == ("PATCH", "leases"):
            renewals.release()

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            name = LeaseName(made.namespace, "operator")
            async with electing(str(kubeconfig), name, "first", 4, count) as lease:
                await lease.acquire()
                keeping = asyncio.create_task(lease.keep())
                await asyncio.sleep(0)
                # Nothing else runs in this loop meanwhile.
                for _ in range(4):
                    assert renewals.acquire(timeout=60), "a renewal waits for the main loop"
                assert not keeping.done()
                keeping.cancel()
                await lease.release()
                path = f"{collection_path('leases', made.namespace, API_VERSION)}/operator"
                spec = (await made.kube.get(path))["spec"]
            assert spec["leaseTransitions"] == 0

    asyncio.run(scenario())
