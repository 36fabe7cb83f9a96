"""Every panel of the dashboards shows something, in a Prometheus that scraped a job with faults as the chart says."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.e2e_bench import Bench, job
from tests.integration.chart.test_chart import CHART, helm_or_skip
from tests.waiting import eventually

from .scraping import Prometheus, discover, prometheus, scrape_configs

pytestmark = [pytest.mark.timeout(240), pytest.mark.parametrize("bench", ["local"], indirect=True)]

NAME = NAMESPACE = "shown"
WORDS = {
    "$__rate_interval": "15s",
    "$__range_s": "300",
    "$__range": "5m",
    "$namespace": NAMESPACE,
    "$training_job": NAME,
}


def panels() -> Iterator[tuple[str, str, bool]]:
    """Yield name, query and whether it is about this moment, for all queries of all dashboards."""
    for path in sorted((CHART / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']} {target['refId']}", target["expr"], target.get("instant", False)
        for annotation in board["annotations"].get("list", ()):
            yield f"{path.stem}: annotation {annotation['name']}", annotation["expr"], False


def filled(expression: str) -> str:
    """Put values in the place of Grafana's variables."""
    for word, value in WORDS.items():
        expression = expression.replace(word, value)
    return expression


def test_every_panel_shows_something_of_a_job_with_faults(bench: Bench, tmp_path: Path) -> None:
    helm = helm_or_skip()
    if None in (shutil.which("prometheus"), shutil.which("promtool")):
        pytest.skip("needs prometheus and promtool in PATH")

    async def scenario() -> None:
        since_s = time.time()
        targets = tmp_path / "targets.json"
        scrapes = list(scrape_configs(helm, targets, bench.metrics_port))
        async with bench.namespace(NAMESPACE), prometheus(tmp_path, scrapes) as server:
            await break_a_job(bench, server, targets)

            def empty() -> list[str]:
                return [
                    f"{name}: {query}"
                    for name, query, is_instant in panels()
                    if not server.values(filled(query), None if is_instant else since_s)
                ]

            async def look() -> bool:
                return not await asyncio.to_thread(empty)

            await eventually(look, "data in every panel", describe=lambda: "\n".join(empty()), pause_s=1.0)
            rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}

    asyncio.run(scenario())


async def break_a_job(bench: Bench, server: Prometheus, targets: Path) -> None:
    """Run a job, let a worker raise and a pod go."""
    command = [sys.executable, str(Path(__file__).with_name("dashboard_workload.py"))]
    memory = {"sizeLimit": "16Mi", "every": 5, "replicas": 1}
    memory["disk"] = {"directory": str(targets.parent / "checkpoints"), "every": 50}
    document = job(NAME, command, replicas=2, ranksPerPod=2, spares={"count": 1}, memory=memory)
    # Of fewer than four ranks nobody is slow; a window takes half the time of a heartbeat, or longer.
    document["spec"]["health"] = {"stragglers": {"windowSeconds": 5}}
    document["spec"]["health"]["logRules"] = [{"name": "storage", "pattern": "retrying read", "verdict": "slow"}]
    # Nothing hangs here: each fault more would be counted.
    document["spec"]["timeouts"] |= {"softSeconds": 30, "hardSeconds": 40, "heartbeatSeconds": 20}
    pod = document["spec"]["template"]["spec"]
    # The pods of this cluster are processes: they see the folder itself.
    pod["volumes"] = [{"name": "shared", "hostPath": {"path": str(targets.parent)}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": str(targets.parent)}]
    pod["containers"][0]["env"] = [{"name": "FLAGS", "value": str(targets.parent)}]
    await bench.apply(NAMESPACE, document)

    async def are_running() -> bool:
        return await discover(bench, targets, NAMESPACE) == ["Running"] * 4

    await eventually(are_running, "three training pods and the rendezvous", pause_s=0.5)
    for expression in ("unbroken_step > 1", "sum(unbroken_agent_connected) == 3", 'unbroken_ranks{role="spare"} == 2'):
        await server.wait(expression)
    (targets.parent / "raise-1").touch()
    await server.wait('unbroken_restarts_total{rung="in-process", cause="exception"} == 1')
    await bench.cluster.kubectl("delete", "pod", f"{NAME}-0", "-n", NAMESPACE, "--wait=false")
    await server.wait('sum(unbroken_restarts_total{rung="pod"}) == 1')
    await server.wait("sum(unbroken_recent_culprits) == 2")
