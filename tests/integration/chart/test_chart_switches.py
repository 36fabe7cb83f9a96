"""What each switch of the chart adds, takes away or changes, as YAML files in snapshots/.

UNBROKEN_UPDATE_SNAPSHOTS=1 writes them again: look at the difference before you commit it.
"""

import base64
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.handshake import shakes_hands

from unbroken_operator.adapters.webhook import ServingCertificate

from .test_chart import CHART, REGISTRY, helm_or_skip, rendered, run

SNAPSHOTS = Path(__file__).with_name("snapshots")
APIS = ("--api-versions", "monitoring.coreos.com/v1", "--api-versions", "cert-manager.io/v1")
CASES: dict[str, tuple[str, ...]] = {
    "default": (),
    "cluster": ("scope=Cluster", "podMonitor.enabled=true"),
    "namespaces": ("namespaces={a,b}", "podMonitor.enabled=true"),
    "service-monitor": (
        "serviceMonitor.enabled=true",
        "serviceMonitor.labels.release=stack",
        "serviceMonitor.interval=15s",
    ),
    "pod-monitor": ("podMonitor.enabled=true", "podMonitor.labels.release=stack", "podMonitor.interval=15s"),
    "pod-monitor-without-agents": ("podMonitor.enabled=true", "podMonitor.agents=false"),
    "rules": (
        "prometheusRule.enabled=true",
        "prometheusRule.recoveryObjectiveSeconds=5",
        "prometheusRule.runbookUrl=https://example.com/books/",
    ),
    "dashboards": ("dashboards.enabled=true", "dashboards.annotations.grafana_folder=Unbroken"),
    "rendezvous-images": ("rendezvousImages={example.com/team/*,example.com/rendezvous:1}",),
    "without-disruption-budget": ("podDisruptionBudget.enabled=false",),
    "without-encryption": ("encryption=false",),
    "without-job-network-policy": ("jobNetworkPolicy.enabled=false",),
    "job-network-policy-from": ("jobNetworkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",),
    "network-policy": ("networkPolicy.enabled=true",),
    "network-policy-from": (
        "networkPolicy.enabled=true",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
    ),
    "webhook": ("webhook.enabled=true", "networkPolicy.enabled=true"),
    "webhook-guarded": (
        "webhook.enabled=true",
        "webhook.clientAuthoritySecret=api-server",
        "networkPolicy.enabled=true",
        "networkPolicy.webhookFrom[0].ipBlock.cidr=10.0.0.0/28",
    ),
    "webhook-namespaces": ("webhook.enabled=true", "webhook.failurePolicy=Fail", "namespaces={a}"),
    "webhook-cert-manager": ("webhook.enabled=true", "webhook.certManager.enabled=true"),
    "webhook-issuer": (
        "webhook.enabled=true",
        "webhook.certManager.enabled=true",
        "webhook.certManager.issuer.kind=ClusterIssuer",
        "webhook.certManager.issuer.name=internal",
    ),
    "quarantine": (
        "quarantine.mode=On",
        "quarantine.maxNodes=3",
        "quarantine.domainLabel=topology.kubernetes.io/zone",
    ),
    "quarantine-condition": ("quarantine.condition=true",),
    "drains": ("drains.enabled=true", "drains.patienceSeconds=60"),
    "drains-without-crd": ("drains.enabled=true", "drains.crd=false", "drains.namespace=faults", "rbac.create=false"),
    "without-service": ("metrics.service=false",),
    "lease-readers": ("rbac.leaseReaders={team-a}",),
    "own-account": ("serviceAccount.create=false", "serviceAccount.name=mine", "rbac.create=false"),
    "pod": (
        "imagePullSecrets[0].name=pull",
        "podAnnotations.team=a",
        "priorityClassName=high",
        "nodeSelector.pool=cpu",
        "tolerations[0].operator=Exists",
        "affinity.nodeAffinity.x=y",
        "image.tag=1.2.3",
        "sidecarImage.tag=1.2.4",
    ),
}
Objects = dict[str, Any]


def objects(helm: str, *options: str) -> Objects:
    """Return what the chart becomes, by kind and name; what is long, or made anew each time, is cut."""
    sets = [word for option in options for word in ("--set", option)]
    found = {}
    for item in rendered(helm, *APIS, "--set", "crd.install=false", *sets):
        if item["kind"] in ("ConfigMap", "Secret"):
            item["data"] = dict.fromkeys(item["data"], "...")
        if item["kind"] == "Secret":
            item["metadata"]["annotations"] = dict.fromkeys(item["metadata"]["annotations"], "...")
        for hook in item.get("webhooks", ()):
            hook["clientConfig"] |= {key: "..." for key in hook["clientConfig"] if key == "caBundle"}
        if item["kind"] == "PrometheusRule":
            for group in item["spec"]["groups"]:
                group["rules"] = [{key: rule[key] for key in rule if key != "labels"} for rule in group["rules"][:2]]
        found[f"{item['kind']} {item['metadata'].get('namespace', '')}/{item['metadata']['name']}"] = item
    return found


@pytest.fixture(scope="module")
def plain() -> Objects:
    """The chart without options."""
    return objects(helm_or_skip())


@pytest.mark.parametrize("name", CASES)
def test_switch_changes_what_it_says(name: str, plain: Objects) -> None:
    seen = objects(helm_or_skip(), *CASES[name]) if CASES[name] else plain
    before = {} if name == "default" else plain
    changed = {key: item for key, item in seen.items() if item != before.get(key)}
    changed |= dict.fromkeys(before.keys() - seen.keys(), "left out")
    text = yaml.safe_dump(changed, sort_keys=True, width=120)
    file = SNAPSHOTS / f"{name}.yaml"
    if os.environ.get("UNBROKEN_UPDATE_SNAPSHOTS"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize(
    ("policy", "name"),
    [("networkPolicy", "webhookFrom"), ("networkPolicy", "metricsFrom"), ("jobNetworkPolicy", "metricsFrom")],
)
def test_peers_of_a_policy_that_is_not_made_are_refused(policy: str, name: str) -> None:
    """Seen before: the chart took them, and everybody reached the port."""
    options = ("--set", "registry=r.io", "--set", f"{policy}.enabled=false")
    peers = ("--set", f"{policy}.{name}[0].ipBlock.cidr=10.0.0.0/28")
    result = run(helm_or_skip(), "template", "unbroken", str(CHART), *options, *peers)
    assert result.returncode != 0
    assert f"{policy}.{name}: wants {policy}.enabled true" in result.stderr


def test_every_snapshot_belongs_to_a_switch() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == set(CASES)


def test_pods_keep_to_the_restricted_standard_and_state_their_resources(plain: Objects) -> None:
    pods = [plain["Pod ops/unbroken-test"]["spec"], plain["Deployment ops/unbroken"]["spec"]["template"]["spec"]]
    for pod in pods:
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(volume.keys() == {"name", "emptyDir"} for volume in pod.get("volumes", ()))
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= container["resources"].keys()
    assert {"livenessProbe", "readinessProbe"} <= pods[1]["containers"][0].keys()


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("scope=Everywhere", r"scope.*(must be one of|one of the following).*Cluster"),
        ("scope=Cluster,namespaces={a}", r"namespaces"),
        ("namespaces={a/b}", r"namespaces"),
        ("webhook.enabled=true,webhook.port=9090", r"webhook\.port: want another port than metrics\.port \(9090\)"),
        ("logLevel=loud", r"logLevel"),
        ("metrics.port=0", r"metrics.port.*|/metrics/port"),
        ("webhook.failurePolicy=Never", r"failurePolicy"),
        ("webhook.timeoutSeconds=31", r"timeoutSeconds"),
        ("nonsense=1", r"nonsense"),
        ("podMonitor.interval=often", r"interval"),
        ("prometheusRule.recoveryObjectiveSeconds=0", r"recoveryObjectiveSeconds"),
        ("serviceAccount.create=false", r"serviceAccount\.name: is required"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(option: str, wanted: str) -> None:
    result = run(helm_or_skip(), "template", "unbroken", str(CHART), "--set", f"registry={REGISTRY},{option}")
    assert result.returncode != 0
    assert re.search(wanted, result.stderr, flags=re.DOTALL), result.stderr


def test_a_monitor_in_a_cluster_without_its_operator_is_refused_with_what_to_do() -> None:
    for switch in ("serviceMonitor", "podMonitor", "prometheusRule"):
        options = ("--set", f"registry={REGISTRY},{switch}.enabled=true")
        result = run(helm_or_skip(), "template", "unbroken", str(CHART), *options)
        assert f"{switch}.enabled: needs the API monitoring.coreos.com/v1" in result.stderr


def test_a_certificate_of_a_cert_manager_that_is_not_there_is_refused_with_what_to_do() -> None:
    options = ("--set", f"registry={REGISTRY},webhook.enabled=true,webhook.certManager.enabled=true")
    result = run(helm_or_skip(), "template", "unbroken", str(CHART), *options)
    assert "webhook.certManager.enabled: needs the API cert-manager.io/v1 of cert-manager, which" in result.stderr


def test_the_webhooks_certificate_is_for_its_service_and_signed_by_what_the_api_server_trusts(tmp_path: Path) -> None:
    """In-memory handshake, as the API server makes it."""
    items = rendered(helm_or_skip(), "--set", "webhook.enabled=true,crd.install=false")
    (secret,) = (item for item in items if item["kind"] == "Secret")
    (configuration,) = (item for item in items if item["kind"] == "ValidatingWebhookConfiguration")
    client = configuration["webhooks"][0]["clientConfig"]
    for file in ("tls.crt", "tls.key"):
        (tmp_path / file).write_bytes(base64.b64decode(secret["data"][file]))
    certificate = ServingCertificate(tmp_path)
    assert certificate.look()
    authority = base64.b64decode(client["caBundle"]).decode()
    name = f"{client['service']['name']}.{client['service']['namespace']}.svc"
    assert shakes_hands(certificate.context, authority, name)
    assert not shakes_hands(certificate.context, authority, "other.ops.svc")
    # helm writes the date from the wall clock, and takes no other.
    left_s = int(secret["metadata"]["annotations"]["unbroken.dev/renew-after"]) - time.time()
    assert 7.9 < left_s / (365 * 86_400) < 8.1, "renewed in the last two years of ten"


def test_a_cluster_that_is_too_old_is_refused() -> None:
    result = run(helm_or_skip(), "template", "unbroken", str(CHART), "--kube-version", "1.19.0")
    assert "requires kubeVersion: >=1.20" in result.stderr


def test_the_dashboards_of_the_configmaps_are_the_files() -> None:
    maps = [
        item for item in rendered(helm_or_skip(), "--set", "dashboards.enabled=true") if item["kind"] == "ConfigMap"
    ]
    data = {name.removeprefix("unbroken-"): text for item in maps for name, text in item["data"].items()}
    assert data == {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
