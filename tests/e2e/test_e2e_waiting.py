"""A job that waits for its cluster says what for, and outlives its startup timeout while it waits."""

import asyncio
import json
import time

import pytest
from tests.waiting import LIMIT_S

from unbroken_local.demo.snapshot import Snapshot

from .e2e_bench import ON_ONE_REAL_SERVER, Bench, condition, job

pytestmark = [pytest.mark.timeout(300), ON_ONE_REAL_SERVER]

STARTUP_S = 12
LABEL = "example.com/pool"


def told_to_wait(now: Snapshot) -> bool:
    """Whether it is said that the job waits for the cluster, and the rendezvous has spoken: its time-outs run."""
    ready, running = condition(now, "PodsReady"), condition(now, "Running")
    is_told = now.status is not None and ready.get("reason") == running.get("reason") == "PodsUnschedulable"
    # The scheduler tells of one pod after the other.
    return is_told and "2 wait for nodes (queued-0, queued-1)" in ready["message"]


def test_job_without_nodes_outlives_its_startup_timeout_says_why_and_starts_when_a_node_is_there(bench: Bench) -> None:
    async def scenario() -> None:
        name = namespace = "queued"
        command = ["python", "-c", "print('hello')"]
        document = job(name, command, replicas=2, restart={"rungs": [{"name": "process", "limit": 1}]})
        document["spec"]["timeouts"]["startupSeconds"] = STARTUP_S
        document["spec"]["template"]["spec"]["nodeSelector"] = {LABEL: "late"}
        nodes = json.loads(await bench.cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        node = nodes[0]["metadata"]["name"]
        async with bench.namespace(namespace), bench.observe(namespace, name) as observer:
            await bench.apply(namespace, document)
            seen = await observer.wait("the wait", told_to_wait, LIMIT_S)
            assert f": 0/{len(nodes)} nodes are available" in condition(seen, "PodsReady")["message"]
            assert f"no node has the label {LABEL}=late (seen none)" in condition(seen, "PodsReady")["message"]
            # Nothing tells of a timeout that does not come: its time has to pass.
            over_at_s = time.monotonic() + STARTUP_S + 4
            while time.monotonic() < over_at_s:
                assert (await bench.status(namespace, name))["state"] == "Forming"
                await asyncio.sleep(1.0)
            await bench.cluster.kubectl("label", "node", node, f"{LABEL}=late")
            try:
                end = await observer.wait("the end", lambda now: now.state in {"Complete", "Failed"}, 120.0)
            finally:
                await bench.cluster.kubectl("label", "node", node, f"{LABEL}-")
            assert end.state == "Complete"

    asyncio.run(scenario())
