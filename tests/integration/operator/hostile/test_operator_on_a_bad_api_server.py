"""The operator where its API server fails it, and where it is killed itself."""

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.integration.operator.operator_bench import Bench, bench, operator
from tests.waiting import LIMIT_S, eventually

from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.api import layout

from .bad_api_server import BadApiServer, Call, Cut, Held, Lost, Status, Trouble

pytestmark = pytest.mark.parametrize("kubeconfig", [pytest.param("full", marks=pytest.mark.cluster)], indirect=True)

WRONG: dict[tuple[str, str], list[Trouble]] = {
    # An API server that has just started serves jobs before it tells of them.
    ("GET", f"apis/{layout.API_VERSION}"): [Status(404)],
    ("GET", "pods"): [Status(429, "0")],
    ("GET", "secrets"): [Status(503)],
    ("POST", "secrets"): [Lost()],
    ("POST", "services"): [Lost()],
    ("POST", "pods"): [Status(429, "0"), Lost(), Lost(), Status(503)],
    ("PATCH", "resilienttrainingjobs/status"): [Lost(), Status(409)],
    ("DELETE", "pods"): [Status(429, "0"), Lost()],
    ("WATCH", "pods"): [Status(500), Cut(1), Cut(2), Cut(1, is_gone=True), Cut(0)],
    ("WATCH", "services"): [Cut(0, is_gone=True)],
    ("WATCH", "resilienttrainingjobs"): [Cut(1), Status(503), Cut(1, is_gone=True)],
}
"""What goes wrong with the first calls of each kind."""


def _fails_first(call: Call) -> Trouble | None:
    wrong = WRONG.get((call.verb, call.resource), [])
    return wrong[call.number] if call.number < len(wrong) else None


async def _pods_are(made: Bench, num: int) -> None:
    """Wait for so many training pods without an end, and for one rendezvous."""

    async def look() -> bool:
        pods = [pod for pod in await made.pods() if pod["status"]["phase"] in ("Pending", "Running")]
        return len(pods) == num and len(await made.pods(layout.RENDEZVOUS)) == 1

    await eventually(look, f"{num} training pods and a rendezvous")


async def _num_created(proxy: BadApiServer, kind: str, least: int) -> int:
    """Return how many of a kind were created once these are known: the answer comes after the object."""

    async def look() -> bool:
        return proxy.created.count(kind) >= least

    await eventually(look, f"{least} {kind} created", describe=lambda: str(proxy.created))
    return proxy.created.count(kind)


def test_a_job_is_made_and_repaired_once_whatever_calls_and_watches_fail(kubeconfig: Path, tmp_path: Path) -> None:
    """429, 5xx, 409 and 410, answers that are lost after the deed, and watches that are cut, of every kind of call."""

    async def scenario() -> None:
        proxy = BadApiServer(kubeconfig, tmp_path)
        async with bench(kubeconfig, tmp_path) as made, proxy.serving() as bad:
            proxy.trouble = _fails_first
            await made.apply("digits", replicas=2, spares={"count": 1})
            with operator(made, kubeconfig=bad):
                await _pods_are(made, 3)
                await made.kube.merge(made.path(layout.PLURAL, "digits"), {"spec": {"spares": {"count": 0}}})
                await _pods_are(made, 2)
                await made.end_pod((await made.pod_names())[0], "Failed")
                await _pods_are(made, 2)

                async def is_troubled() -> bool:
                    told = {(verb, resource) for verb, resource, _ in proxy.troubled}
                    return told == set(WRONG)

                await eventually(is_troubled, "every kind of call to have failed", describe=lambda: str(proxy.troubled))
                # Four, another rendezvous for other settings, and one for the pod that failed.
                assert await _num_created(proxy, "pods", 6) == 6
                # The job's own Secret, and one with the tokens of its pods.
                assert (proxy.created.count("services"), proxy.created.count("secrets")) == (1, 2)

    asyncio.run(scenario())


def test_an_operator_that_is_killed_among_its_calls_leaves_nothing_twice_and_nothing_out(
    kubeconfig: Path, tmp_path: Path
) -> None:
    """Killed in the middle of creating and of deleting: some calls had been done, some not, none had been answered."""

    async def scenario() -> None:
        proxy = BadApiServer(kubeconfig, tmp_path)
        async with bench(kubeconfig, tmp_path) as made, proxy.serving() as bad:

            async def killed_among(verb: str, num: int) -> None:
                """Run an operator and kill it among so many calls: one is answered, one is done, the others are not."""
                is_reached = asyncio.Event()
                seen: list[Call] = []

                def trouble(call: Call) -> Trouble | None:
                    if (call.verb, call.resource) != (verb, "pods"):
                        return None
                    seen.append(call)
                    if len(seen) == num:
                        # All are here: none that comes late is taken for one of the next operator's.
                        is_reached.set()
                    return None if len(seen) == 1 else Held(is_passed=len(seen) == 2)

                proxy.trouble = trouble
                with operator(made, kubeconfig=bad, wanted_status=-signal.SIGKILL) as running:
                    await asyncio.wait_for(is_reached.wait(), LIMIT_S)
                    running.process.kill()
                    running.process.wait()
                proxy.trouble = lambda _: None

            await made.apply("digits", replicas=1, spares={"count": 5})
            await killed_among("POST", 7)
            with operator(made, kubeconfig=bad):
                await _pods_are(made, 6)
            assert await _num_created(proxy, "pods", 7) == 7
            names = await made.pod_names()
            await made.kube.merge(made.path(layout.PLURAL, "digits"), {"spec": {"spares": {"count": 1}}})
            await killed_among("DELETE", 5)
            with operator(made, kubeconfig=bad):
                await _pods_are(made, 2)
            # One more: another rendezvous for other settings.
            assert await _num_created(proxy, "pods", 8) == 8
            assert set(await made.pod_names()) < set(names)

    asyncio.run(scenario())


def test_a_namespace_that_is_deleted_under_its_jobs_troubles_no_other_and_fills_no_log(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as kept, bench(kubeconfig, tmp_path) as deleted:
            await deleted.apply("digits", replicas=2)
            await kept.apply("digits")
            spaces = ("--namespace", kept.namespace, "--namespace", deleted.namespace)
            with operator(kept, *spaces) as running:
                await deleted.wait_for_pods("digits-0", "digits-1")
                await kept.wait_for_pods("digits-0")
                path = f"{collection_path('namespaces')}/{deleted.namespace}"
                await deleted.kube.delete(path, (await deleted.kube.get(path))["metadata"]["uid"])

                async def is_forgotten() -> bool:
                    url = f"http://127.0.0.1:{running.metrics_port}/metrics"
                    async with aiohttp.ClientSession() as session, session.get(url) as answer:
                        return 'unbroken_operator_jobs{state="Forming"} 1.0' in await answer.text()

                await eventually(is_forgotten, "one job left")
                uid = (await kept.pods())[0]["metadata"]["uid"]
                await kept.kube.delete(kept.path("pods", "digits-0"), uid, is_forced=True)
                await kept.wait_for_pods("digits-1")
                whole = running.log.read_text().rpartition("\n")[0]
                lines = [json.loads(line) for line in whole.splitlines()]
                troubles = [line for line in lines if line["level"] in ("warning", "error")]
                assert len(troubles) <= 10, troubles
                assert not [line for line in troubles if "exception" in line]

    asyncio.run(scenario())
