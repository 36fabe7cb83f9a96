"""Nodes of a job are emptied: through the Eviction API, with and without budgets, and by NVSentinel."""

import asyncio
import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import yaml
from tests.waiting import eventually

from .e2e_bench import KUBECTL_PAUSE_S, ON_ONE_REAL_SERVER, ROOT, Bench, CommandError, Json, job

pytestmark = [pytest.mark.timeout(400), ON_ONE_REAL_SERVER]

NAME = "digits"
"""That of the example."""
DRAIN_S = 120.0


class Administrator:
    """Somebody who empties nodes, and what he sees of the job."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._kubectl = bench.cluster.kubectl
        # Kubernetes 1.20 knows no policy/v1.
        self._version = "policy/v1beta1" if bench.profile == "full" else "policy/v1"

    async def apply_budgets(self) -> None:
        """Apply the example's; returns once they allow no eviction."""
        budgets = list(yaml.safe_load_all((ROOT / "examples" / "disruption-budgets.yaml").read_text()))
        await self._bench.apply(NAME, *({**budget, "apiVersion": self._version} for budget in budgets))
        if self._bench.profile == "local":
            return  # Its API server counts at each eviction.

        async def are_counted() -> bool:
            text = await self._kubectl("get", "pdb", "-n", NAME, "-o", "json")
            found = [item.get("status") or {} for item in json.loads(text)["items"]]
            counts = [(status.get("currentHealthy"), status.get("disruptionsAllowed")) for status in found]
            return counts == [(1, 0), (1, 0)]

        await eventually(are_counted, "budgets of pods that are healthy", pause_s=KUBECTL_PAUSE_S)

    async def evict(self, pod: Json) -> None:
        """Ask for the eviction of one pod. Raises CommandError where it is refused."""
        name = pod["metadata"]["name"]
        file = self._bench.cluster.folder / "eviction.json"
        metadata = {"namespace": NAME, "name": name}
        file.write_text(json.dumps({"apiVersion": self._version, "kind": "Eviction", "metadata": metadata}))
        path = f"/api/v1/namespaces/{NAME}/pods/{name}/eviction"
        await self._kubectl("create", "--raw", path, "-f", str(file))

    async def drain(self, node: str) -> None:
        """Empty a node and take it back. Raises CommandError where that does not end."""
        words = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAIN_S:.0f}s")
        try:
            await self._kubectl("drain", node, *words, limit_s=DRAIN_S + 30.0)
        finally:
            await self._kubectl("uncordon", node)

    async def the(self, key: str, value: str) -> Json:
        """Return the only pod with this label under unbroken.dev that is not ending."""
        text = await self._kubectl("get", "pods", "-n", NAME, "-l", f"unbroken.dev/{key}={value}", "-o", "json")
        (found,) = (item for item in json.loads(text)["items"] if "deletionTimestamp" not in item["metadata"])
        pod: Json = found
        return pod

    async def sees(self, what: str, num_restarts: int, above_term: int = 0) -> Json:
        """Return the status once the job trains with so many restarts, under a later term, and with a ready spare."""

        def is_so(status: Json) -> bool:
            conditions = {item["type"]: item["status"] for item in status.get("conditions", ())}
            is_whole = conditions.get("SparesExhausted") == conditions.get("Degraded") == "False"
            is_new = status["rendezvous"]["term"] > above_term
            return is_whole and is_new and status["restarts"]["total"] >= num_restarts

        return await self._bench.wait_training(NAME, what, is_so)


def test_a_drain_waits_for_moves_under_the_budgets_and_an_eviction_without_them_costs_one_move(bench: Bench) -> None:
    async def scenario() -> None:
        document = job(NAME, ["sleep", "6000"], spares={"count": 1}, restart={"rungs": [{"name": "pod", "limit": 9}]})
        admin = Administrator(bench)
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            before = await admin.sees("a job at full strength", 0)
            await admin.apply_budgets()
            active = await admin.the("role", "active")
            for pod in (active, await admin.the("component", "rendezvous")):
                with pytest.raises(CommandError, match="disruption budget"):
                    await admin.evict(pod)

            # Its ranks move first; the drain then finds nothing left to evict.
            await admin.drain(active["spec"]["nodeName"])
            moved = await admin.sees("ranks that have moved", 1)
            assert moved["restarts"] == {"total": 1, "byRung": {"pod": 1}, "byCause": {"pod-leaving": 1}}
            recovery = moved["lastRecovery"]
            assert recovery["pod"] == active["metadata"]["name"]
            assert recovery["replacedBy"] == [(await admin.the("role", "active"))["metadata"]["name"]]

            # The next rendezvous leads before this one goes.
            await admin.drain((await admin.the("component", "rendezvous"))["spec"]["nodeName"])
            handed = await admin.sees("the next rendezvous", 1, above_term=before["rendezvous"]["term"])
            assert handed["restarts"]["total"] == 1 or handed["restarts"]["byCause"] == {"pod-leaving": 2}

            await bench.cluster.kubectl("delete", "pdb", "-n", NAME, "--all")
            await admin.evict(await admin.the("component", "rendezvous"))
            replaced = await admin.sees("another rendezvous", 1, above_term=handed["rendezvous"]["term"])
            assert (replaced["iteration"], replaced["restarts"]) == (handed["iteration"], handed["restarts"])
            evicted = await admin.the("role", "active")
            await admin.evict(evicted)
            last = await admin.sees("the move of an evicted pod", replaced["restarts"]["total"] + 1)
            recovery = last["lastRecovery"]
            assert (recovery["cause"], recovery["pod"]) == ("pod-leaving", evicted["metadata"]["name"])
            assert last["iteration"] == replaced["iteration"] + 1

    asyncio.run(scenario())


@contextlib.contextmanager
def drain_plugin(bench: Bench) -> Iterator[None]:
    """Run the program that serves DrainRequests."""
    command = [sys.executable, "-m", "unbroken_operator.drains", "--namespace", NAME, "--every-seconds", "1"]
    log = bench.cluster.folder / "drains.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--kubeconfig", str(bench.cluster.kubeconfig)], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(30) == 0, log.read_text()


def test_a_drain_request_moves_the_ranks_and_is_complete_when_the_pod_is_gone(bench: Bench) -> None:
    async def scenario() -> None:
        document = job(NAME, ["sleep", "6000"], spares={"count": 1}, restart={"rungs": [{"name": "pod", "limit": 9}]})
        admin, kubectl = Administrator(bench), bench.cluster.kubectl
        async with bench.namespace(NAME):
            await kubectl("apply", "-f", str(ROOT / "charts" / "unbroken" / "files" / "drainrequests.yaml"))
            await bench.apply(NAME, document)
            await admin.sees("a job at full strength", 0)
            active = await admin.the("role", "active")
            name, node = active["metadata"]["name"], active["spec"]["nodeName"]
            # The namespace outlives the test, and one that is complete is never looked at again.
            name_of_request = f"drain-{uuid.uuid4().hex[:8]}"
            request: Json = {"apiVersion": "nvsentinel.nvidia.com/v1alpha1", "kind": "DrainRequest"}
            request |= {
                "metadata": {"name": name_of_request},
                "spec": {"nodeName": node, "podsToDrain": {NAME: [name]}},
            }
            with drain_plugin(bench):
                await bench.apply(NAME, request)
                moved = await admin.sees("ranks that have moved", 1)
                assert moved["restarts"] == {"total": 1, "byRung": {"pod": 1}, "byCause": {"pod-leaving": 1}}

                async def is_complete() -> bool:
                    text = await kubectl("get", "drainrequest", name_of_request, "-n", NAME, "-o", "json")
                    conditions = (json.loads(text).get("status") or {}).get("conditions") or ()
                    return [(item["type"], item["status"]) for item in conditions] == [("DrainComplete", "True")]

                await eventually(is_complete, "a request that is complete", pause_s=KUBECTL_PAUSE_S)
            with pytest.raises(CommandError, match="not found"):
                await kubectl("get", "pod", name, "-n", NAME)
            assert (await admin.sees("nothing else", 1))["restarts"]["total"] == 1

    asyncio.run(scenario())
