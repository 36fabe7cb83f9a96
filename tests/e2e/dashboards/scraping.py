"""A real Prometheus beside a cluster of the end-to-end tests, configured as the chart's monitors say."""

import asyncio
import json
import math
import os
import re
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.e2e_bench import Bench
from tests.integration.chart.test_chart import CHART, rendered
from tests.ports import free_port
from tests.waiting import LIMIT_S, eventually

from unbroken_local.demo.tools import Service

SCRAPE_S = 0.5
Json = dict[str, Any]


class Prometheus:
    """One server, by its address."""

    def __init__(self, url: str, service: Service) -> None:
        self.url = url
        self._service = service

    def get(self, path: str, **words: str) -> Any:
        """Return the data of an answer."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=LIMIT_S
        ) as answer:
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
            except OSError:
                return False  # It is starting, or busy.

        await eventually(look, expression, describe=lambda: self._service.log.read_text()[-2000:], pause_s=0.2)


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


async def discover(bench: Bench, file: Path, *namespaces: str) -> list[str | None]:
    """Tell Prometheus of the ports of all pods, as its discovery by Kubernetes does; return the phases of the pods."""
    pods = [
        pod
        for namespace in namespaces
        for pod in json.loads(await bench.cluster.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    ]
    found = [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
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
    return [pod["status"].get("phase") for pod in pods]


def _snake(word: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", word)


@asynccontextmanager
async def prometheus(folder: Path, scrapes: list[Json], scrape_s: float = SCRAPE_S) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with the chart's rules."""
    program = shutil.which("prometheus")
    assert program is not None
    port = free_port()
    config = folder / "prometheus.yaml"
    scrape = f"{scrape_s * 1000:.0f}ms"
    times = {"scrape_interval": scrape, "evaluation_interval": "1s", "scrape_timeout": scrape}
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
