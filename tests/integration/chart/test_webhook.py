"""The webhook as the chart installs it: what kubectl shows of a bad job, and that its absence holds up nobody."""

import asyncio
import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.clusters import kubeconfig_of
from tests.integration.operator import operator_bench as tools
from tests.ports import free_port
from tests.waiting import eventually

from unbroken_operator.api import layout

from .test_chart import CHART, REGISTRY, helm_or_skip, run

JsonObject = dict[str, Any]
KUBECTL = str(Path(sys.executable).parent / "kubectl")


def a_job(**spec: Any) -> JsonObject:
    """Return a job to apply."""
    container = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}
    return {
        "apiVersion": layout.API_VERSION,
        "kind": layout.KIND,
        "metadata": {"name": "digits"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [container]}}, **spec},
    }


async def _redirect(made: tools.Bench, service: str, port: int) -> None:
    """Stand in for kube-proxy: the API server finds the operator of the test behind the chart's Service."""
    path = made.path("services", service)
    patch = {"type": "ExternalName", "externalName": "localhost", "clusterIP": None, "clusterIPs": None}
    await made.kube.merge(path, {"spec": {**patch, "ports": [{"name": "webhook", "port": port}]}})


@pytest.mark.cluster
def test_kubectl_is_told_what_is_wrong_with_a_job_and_nobody_is_held_up_without_an_operator(
    tmp_path: Path,
) -> None:
    helm = helm_or_skip()
    admin = kubeconfig_of("full")
    release = f"unbroken-{uuid.uuid4().hex[:6]}"
    configuration = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{release}"

    async def scenario() -> None:
        async with tools.bench(admin, tmp_path) as made:
            place = ["--kubeconfig", str(admin), "--namespace", made.namespace]
            home = {"HELM_CACHE_HOME": str(tmp_path / "cache"), "HELM_CONFIG_HOME": str(tmp_path / "config")}
            options = ["--set", "webhook.enabled=true,crd.install=false"]
            options += ["--set", f"registry={REGISTRY}"]

            async def helm_does(*words: str) -> None:
                done = await asyncio.to_thread(run, helm, *words, *place, **home)
                assert done.returncode == 0, done.stdout + done.stderr

            async def kubectl(*words: str, item: JsonObject) -> subprocess.CompletedProcess[str]:
                command: Sequence[str] = [KUBECTL, *place, *words, "-f", "-"]
                return await asyncio.to_thread(
                    subprocess.run, command, input=json.dumps(item), capture_output=True, text=True, timeout=60
                )

            async def certificate() -> JsonObject:
                secret = await made.kube.get(made.path("secrets", f"{release}-webhook-certificate"))
                data: JsonObject = secret["data"]
                (hook,) = (await made.kube.get(configuration))["webhooks"]
                assert hook["clientConfig"]["caBundle"] == data["ca.crt"]
                return data

            await helm_does("install", release, str(CHART), *options)
            try:
                first = await certificate()
                await helm_does("upgrade", release, str(CHART), "--reuse-values", "--set", "logLevel=debug")
                assert await certificate() == first, "an upgrade keeps the certificate"
                for file in ("tls.crt", "tls.key"):
                    (tmp_path / file).write_bytes(base64.b64decode(first[file]))
                port = free_port()
                await _redirect(made, f"{release}-webhook", port)
                hook = {"service": {"name": f"{release}-webhook", "namespace": made.namespace, "port": port}}
                stored = await made.kube.get(configuration)
                stored["webhooks"][0]["clientConfig"]["service"] |= hook["service"]
                await made.kube.merge(configuration, {"webhooks": stored["webhooks"]})
                bad, message = a_job(minReplicas=2), "spec.minReplicas: want 1 to replicas (1), got 2"
                serving = ("--webhook-listen", f"127.0.0.1:{port}", "--webhook-certificates", str(tmp_path))
                with tools.operator(made, "--namespace", made.namespace, *serving) as running:

                    async def refusal(item: JsonObject) -> subprocess.CompletedProcess[str]:
                        async def is_refused() -> subprocess.CompletedProcess[str] | None:
                            done = await kubectl("apply", "--dry-run=server", item=item)
                            return done if "denied the request" in done.stderr else None

                        # The API server learns of a new configuration a moment after it was written, and lets pass
                        # what an operator without CPU has not answered in five seconds.
                        return await eventually(is_refused, "a refusal")

                    refused = await refusal(bad)
                    assert f'"jobs.unbroken.dev" denied the request: {message}' in refused.stderr, refused.stderr
                    applied = await kubectl("apply", item=a_job())
                    assert applied.returncode == 0, applied.stderr

                    async def is_admitted() -> bool:
                        return (await made.condition("digits", "Admitted")).get("status") == "True"

                    await eventually(is_admitted, "the job is admitted")
                    changed = await refusal(a_job(ranksPerPod=2))
                    assert "spec.ranksPerPod: cannot change after the job was admitted (from 1 to 2)" in changed.stderr
                    assert "refused job=" in running.log.read_text()
                passed = await kubectl("apply", item=bad)
                assert passed.returncode == 0, passed.stderr
            finally:
                await helm_does("uninstall", release)

    asyncio.run(scenario())
