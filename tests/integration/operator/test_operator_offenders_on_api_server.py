"""The condition of nodes on which jobs fail again and again, on a real API server and with the chart's rights."""

import asyncio
import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters import kubeconfig_of
from tests.integration.chart.test_chart import CHART, REGISTRY, helm_or_skip, run, service_account_kubeconfig
from tests.waiting import eventually

from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator, ready_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RBAC = "/apis/rbac.authorization.k8s.io/v1"
PLACES = {
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
    "Role": f"{RBAC}/namespaces/{{}}/roles",
    "RoleBinding": f"{RBAC}/namespaces/{{}}/rolebindings",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}
LOOKS = ("--quarantine-condition", "--quarantine-score", "2", "--quarantine-min-namespaces", "1")


async def install(made: Bench, helm: str, target: Path) -> None:
    """Create the account of the chart with its rights, and write its kubeconfig."""
    words = [f"registry={REGISTRY}", "quarantine.condition=true", "quarantine.minNamespaces=1"]
    options = ["--namespace", made.namespace]
    options += [word for name in ("rbac", "serviceaccount") for word in ("--show-only", f"templates/{name}.yaml")]
    options += [word for option in words for word in ("--set", option)]
    done = await asyncio.to_thread(run, helm, "template", made.namespace, str(CHART), *options)
    assert done.returncode == 0, done.stderr
    account = ""
    for item in filter(None, yaml.safe_load_all(done.stdout)):
        await made.kube.create(PLACES[item["kind"]].format(made.namespace), item)
        account = item["metadata"]["name"] if item["kind"] == "ServiceAccount" else account
    await service_account_kubeconfig(made.kube, made.kubeconfig, made.namespace, account, target)


async def conditions(made: Bench, node: str) -> dict[str, dict[str, Any]]:
    item = await made.kube.get(f"{collection_path('nodes')}/{node}")
    return {each["type"]: each for each in item["status"].get("conditions") or ()}


async def blame(made: Bench, job: str, node: str, address: str) -> None:
    """Let a job have run on a node, and remember that it failed there."""
    await made.run_pod(f"{job}-0", address, node)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    suspect = {"name": node, "faults": 4, "score": 4.0, "scoreTime": now}
    await made.kube.merge(f"{made.path(layout.PLURAL, job)}/status", {"status": {"suspectNodes": [suspect]}})


def test_a_node_on_which_jobs_fail_says_so_until_a_person_forgives_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        limited = tmp_path / "limited.kubeconfig"
        async with bench(kubeconfig_of("full"), tmp_path) as made:
            node = f"{made.namespace}-bad"
            await install(made, helm_or_skip(), limited)
            arguments = ("--namespace", made.namespace, *LOOKS, "--quarantine-max-percent", "100")
            async with ready_node(made.kube, node, {}):
                with operator(made, *arguments, kubeconfig=limited) as process:
                    for number, job in enumerate(("one", "two"), 1):
                        await made.apply(job, replicas=1)
                        await blame(made, job, node, f"10.0.0.{number}")
                    told = await eventually(lambda: offender(made, node), "the condition", describe=made.operator_log)
                    assert (told["status"], told["reason"]) == ("True", "JobsFailThere")
                    message = told["message"]
                    for job in ("one", "two"):
                        assert f"{made.namespace}/{job}" in message
                    # Nothing else is done to the node, and its kubelet goes on saying what it says.
                    item = await made.kube.get(f"{collection_path('nodes')}/{node}")
                    assert layout.QUARANTINE not in str(item["spec"])
                    assert (await conditions(made, node))["Ready"]["status"] == "True"
                    exempt = {"metadata": {"labels": {layout.QUARANTINE: "never"}}}
                    await made.kube.merge(f"{collection_path('nodes')}/{node}", exempt)

                    async def is_forgiven() -> bool:
                        return await offender(made, node) is None

                    await eventually(is_forgiven, "no condition", describe=made.operator_log)
                    assert (await conditions(made, node))["Ready"]["status"] == "True"
                    log = await asyncio.to_thread(process.log.read_text)
                    assert "cannot be written" not in log
                    assert "permissions are missing" not in log

    asyncio.run(scenario())


async def offender(made: Bench, node: str) -> dict[str, Any] | None:
    return (await conditions(made, node)).get(layout.OFFENDER_CONDITION)
