"""Every panel of the dashboards shows something, in a Prometheus that scraped a job with faults as the chart says."""

import asyncio
import json
import math
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.chart.test_chart import CHART, helm_or_skip, rendered
from tests.integration.operator.operator_bench import free_port
from tests.waiting import eventually

from unbroken_local.demo.tools import Service

from .e2e_bench import Bench, job

pytestmark = [pytest.mark.timeout(240), pytest.mark.parametrize("bench", ["local"], indirect=True)]

NAME = NAMESPACE = "shown"
SCRAPE_S = 0.5
WORDS = {
    "$__rate_interval": "15s",
    "$__range_s": "300",
    "$__range": "5m",
    "$namespace": NAMESPACE,
    "$training_job": NAME,
}
Json = dict[str, Any]


class Prometheus:
    """One server, by its address."""

    def __init__(self, url: str, service: Service) -> None:
        self._url = url
        self._service = service

    def get(self, path: str, **words: str) -> Any:
        """Return the data of an answer."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str, since_s: float | None = None) -> list[float]:
        """Return the numbers that a query finds now, or at any time since then."""
        if since_s is None:
            found = [item["value"] for item in self.get("query", query=expression)["result"]]
        else:
            # Prometheus keeps its samples by the wall clock; what is asserted is that there are any.
            span = {"start": str(since_s), "end": str(time.time()), "step": str(SCRAPE_S)}
            found = [
                pair for item in self.get("query_range", query=expression, **span)["result"] for pair in item["values"]
            ]
        return [number for _, text in found if not math.isnan(number := float(text))]

    async def wait(self, expression: str) -> None:
        """Wait until a query finds something."""

        async def look() -> bool:
            try:
                return bool(await asyncio.to_thread(self.values, expression))
            except urllib.error.URLError:
                return False  # It is starting.

        await eventually(look, expression, 60.0, lambda: self._service.log.read_text()[-2000:], pause_s=0.2)


def scrape_configs(helm: str, targets: Path, operator_port: int) -> Iterator[Json]:
    """Yield what the Prometheus Operator makes of the chart's monitors, roughly."""
    options = ["--api-versions", "monitoring.coreos.com/v1"]
    for switch in ("serviceMonitor", "podMonitor"):
        options += ["--set", f"{switch}.enabled=true"]
    for item in rendered(helm, *options):
        if item["kind"] == "ServiceMonitor":
            (endpoint,) = item["spec"]["endpoints"]
            static = [{"targets": [f"127.0.0.1:{operator_port}"], "labels": {"namespace": "ops"}}]
            yield {"job_name": "operator", "honor_labels": endpoint["honorLabels"], "static_configs": static}
        elif item["kind"] == "PodMonitor":
            (endpoint,) = item["spec"]["podMetricsEndpoints"]
            ((label, value),) = item["spec"]["selector"]["matchLabels"].items()
            pod_label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)
            relabelings = [
                {"source_labels": [pod_label], "regex": value, "action": "keep"},
                {
                    "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                    "regex": endpoint["port"],
                    "action": "keep",
                },
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                *({_snake(key): value for key, value in rule.items()} for rule in endpoint["relabelings"]),
            ]
            yield {
                "job_name": item["metadata"]["name"],
                # Not every Prometheus is built with discovery by Kubernetes; what that would say is in this file.
                "file_sd_configs": [{"files": [str(targets)]}],
                "relabel_configs": relabelings,
            }


async def discover(bench: Bench, file: Path) -> bool:
    """Tell Prometheus of the ports of all pods, as its discovery by Kubernetes does; return whether all pods run."""
    pods = json.loads(await bench.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    found = [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": NAMESPACE,
                "__meta_kubernetes_pod_container_port_name": port["name"],
                **{
                    "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label): value
                    for label, value in pod["metadata"]["labels"].items()
                },
            },
        }
        for pod in pods
        if pod["status"].get("podIP")
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
        for port in container.get("ports", ())
    ]
    file.with_suffix(".new").write_text(json.dumps(found))
    file.with_suffix(".new").replace(file)
    return [pod["status"].get("phase") for pod in pods] == ["Running"] * 4


def _snake(word: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", word)


@asynccontextmanager
async def prometheus(folder: Path, scrapes: list[Json]) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with the chart's rules."""
    program = shutil.which("prometheus")
    assert program is not None
    port = free_port()
    config = folder / "prometheus.yaml"
    times = {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "evaluation_interval": "1s", "scrape_timeout": "500ms"}
    rules = [str(CHART / "files" / "alerts.yaml")]
    config.write_text(yaml.safe_dump({"global": times, "rule_files": rules, "scrape_configs": scrapes}))
    command = (
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    service = Service("prometheus", command, os.environ, folder / "prometheus.log")
    service.start()
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", service)
    finally:
        await service.stop()


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

            await eventually(look, "data in every panel", 30.0, lambda: "\n".join(empty()), pause_s=1.0)
            rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}

    asyncio.run(scenario())


async def break_a_job(bench: Bench, server: Prometheus, targets: Path) -> None:
    """Run a job, let a worker raise and a pod go."""
    command = [sys.executable, str(Path(__file__).with_name("dashboard_workload.py"))]
    document = job(NAME, command, replicas=2, spares={"count": 1})
    document["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "FLAGS", "value": str(targets.parent)}]
    await bench.apply(NAMESPACE, document)
    await eventually(lambda: discover(bench, targets), "three training pods and the rendezvous", 60.0, pause_s=0.5)
    for expression in ("unbroken_step > 1", "sum(unbroken_agent_connected) == 3", 'unbroken_ranks{role="spare"} == 1'):
        await server.wait(expression)
    (targets.parent / "raise-1").touch()
    await server.wait('unbroken_restarts_total{rung="in-process", cause="exception"} == 1')
    await bench.cluster.kubectl("delete", "pod", f"{NAME}-0", "-n", NAMESPACE, "--wait=false")
    await server.wait('sum(unbroken_restarts_total{rung="pod"}) == 1')
    await server.wait("sum(unbroken_recent_culprits) == 2")
