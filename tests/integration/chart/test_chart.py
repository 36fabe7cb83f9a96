"""The chart: what helm makes of it, and that the operator can do its work with the rights that it grants."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters import kubeconfig_of
from tests.integration.operator import operator_bench as tools
from tests.waiting import eventually

from unbroken_core.conventions.images import image_of
from unbroken_operator.adapters.errors import KubeRefused
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.lease import LeaseName
from unbroken_operator.adapters.permissions import Right, rights
from unbroken_operator.api import layout
from unbroken_operator.config import parse

CHART = Path(__file__).parents[3] / "charts" / "unbroken"
JsonObject = dict[str, Any]
REGISTRY = "registry.example.com/team"
"""Of the images: the chart has no default."""


@pytest.fixture
def helm() -> str:
    """Path of helm."""
    return helm_or_skip()


def helm_or_skip() -> str:
    """Return the path of helm, or skip the test."""
    found = os.environ.get("UNBROKEN_TEST_HELM") or shutil.which("helm")
    if found is None:
        pytest.skip("needs helm in PATH or UNBROKEN_TEST_HELM; tools/get-helm.sh fetches it")
    return found


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **variables}
    )


def rendered(helm: str, *options: str) -> list[JsonObject]:
    """Return the objects that the chart becomes."""
    named = ("--set", f"registry={REGISTRY}")
    result = run(helm, "template", "unbroken", str(CHART), "--namespace", "ops", *named, *options)
    assert result.returncode == 0, result.stderr
    return [item for item in yaml.safe_load_all(result.stdout) if item]


def one(items: list[JsonObject], kind: str) -> JsonObject:
    """Return the only object of a kind."""
    (found,) = (item for item in items if item["kind"] == kind)
    return found


def test_lint_finds_nothing(helm: str) -> None:
    result = run(helm, "lint", "--strict", str(CHART), "--set", f"registry={REGISTRY}")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_arguments_of_the_deployment_are_those_of_the_operator(helm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    for options, namespaces in (
        ((), ("ops",)),
        (("namespaces={b,ops,a}",), ("ops", "b", "a")),
        (("scope=Cluster",), ()),
    ):
        sets = [word for option in options for word in ("--set", option)]
        (container,) = one(rendered(helm, *sets), "Deployment")["spec"]["template"]["spec"]["containers"]
        config = parse(container["args"])
        assert config.namespaces == namespaces
        assert config.is_json_log
        assert config.metrics_listen is not None
        assert config.metrics_listen.port == container["ports"][0]["containerPort"]
        assert str(config.lease) == "ops/unbroken"


def test_images_come_from_the_registry_that_was_named(helm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    for registry in ("registry.example.com:5000/team", "localhost:5000", "docker.io/team/"):
        deployment = one(rendered(helm, "--set", f"registry={registry}"), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        prefix = registry.removesuffix("/")
        assert container["image"] == f"{prefix}/{image_of('operator')}"
        assert parse(container["args"]).sidecar_image == f"{prefix}/{image_of('sidecar')}"


DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        pytest.param((), f"{REGISTRY}/{image_of('operator')}", id="registry and version of the chart"),
        pytest.param(("image.tag=1.2",), f"{REGISTRY}/unbroken/operator:1.2", id="tag"),
        pytest.param((f"image.tag={DIGEST}",), f"{REGISTRY}/unbroken/operator@{DIGEST}", id="digest as tag"),
        pytest.param((f"image.repository=op@{DIGEST}",), f"{REGISTRY}/op@{DIGEST}", id="digest in the name"),
        pytest.param(
            (f"image.repository=own.example.com/op@{DIGEST}",),
            f"own.example.com/op@{DIGEST}",
            id="full name and digest",
        ),
        pytest.param(
            ("image.repository=localhost/op",), f"localhost/op:{image_of('operator').partition(':')[2]}", id="full"
        ),
    ],
)
def test_an_image_is_named_by_tag_or_digest_and_a_full_name_needs_no_registry(
    helm: str, options: tuple[str, ...], wanted: str
) -> None:
    sets = [word for option in options for word in ("--set", option)]
    (container,) = one(rendered(helm, *sets), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param("", "registry: is required: the container runtime would look for unbroken/operator:", id="none"),
        pytest.param("image.repository=r.io/op", "look for unbroken/sidecar:0.1.0 in its default registry", id="half"),
        pytest.param(
            "registry=https://r.io", 'registry.example.com/team), without https://, got "https://r.io"', id="URL"
        ),
        pytest.param("registry=team", "registry: want its host first (docker.io/team for Docker Hub)", id="no host"),
        pytest.param("registry=r.io/Team", "registry: want a host and perhaps a path", id="capitals"),
        pytest.param(
            "registry=r.io,image.repository=operator:sha256:ab", "image.repository: want a name without a tag", id="tag"
        ),
        pytest.param(
            "registry=r.io,image.tag=sha256:ab", "image.tag: want a tag, or a digest (sha256: and 64", id="short"
        ),
        pytest.param(
            f"registry=r.io,sidecarImage.tag=v1,sidecarImage.repository=op@{DIGEST}",
            "sidecarImage.tag: want none beside the digest in sidecarImage.repository",
            id="tag and digest",
        ),
    ],
)
def test_an_image_that_may_be_somebody_elses_or_nobodys_is_refused_in_a_sentence(
    helm: str, options: str, message: str
) -> None:
    result = run(helm, "template", "unbroken", str(CHART), *(("--set", options) if options else ()))
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("version", "has_rules"), [pytest.param("1.33.0", True, id="new"), pytest.param("1.20.2", False, id="old")]
)
def test_validation_rules_are_left_out_where_kubernetes_does_not_know_them(
    helm: str, version: str, has_rules: bool
) -> None:
    crd = one(rendered(helm, "--kube-version", version), "CustomResourceDefinition")
    assert ("x-kubernetes-validations" in json.dumps(crd)) is has_rules
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_an_operator_for_namespaces_has_rights_on_jobs_there_only(helm: str) -> None:
    items = rendered(helm, "--set", "namespaces={a}")
    rule, of_slices = one(items, "ClusterRole")["rules"]
    assert (of_slices["resources"], of_slices["verbs"]) == (["resourceslices"], ["list"])
    assert rule == {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    readers, lease, own, role = (item for item in items if item["kind"] == "Role")
    assert readers["rules"][0]["verbs"] == ["get"], "users may see who leads, no more"
    assert (own["metadata"]["namespace"], role["metadata"]["namespace"]) == ("ops", "a")
    assert own["rules"] == role["rules"]
    assert lease["metadata"]["namespace"] == "ops"
    assert {resource for rule in lease["rules"] for resource in rule["resources"]} == {"leases"}
    (secrets,) = (rule for rule in role["rules"] if rule["resources"] == ["secrets"])
    assert secrets["verbs"] == ["get", "create", "patch"]


@pytest.mark.parametrize("namespaces", [(), ("ops", "a", "b")], ids=["cluster", "namespaces"])
def test_the_roles_grant_what_the_operator_asks_for_at_its_start_and_nothing_else(
    helm: str, namespaces: tuple[str, ...]
) -> None:
    words = "namespaces={a,b}" if namespaces else "scope=Cluster,quarantine.mode=On,quarantine.condition=true"
    options = ("--set", words)
    granted = set()
    for item in rendered(helm, *options):
        is_for_users = item["metadata"]["name"].endswith("-lease-readers")
        for rule in item["rules"] if item["kind"] in ("Role", "ClusterRole") and not is_for_users else ():
            place = item["metadata"].get("namespace") if item["kind"] == "Role" else None
            granted |= {
                Right(group, resource, verb, place, name)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
                for name in rule.get("resourceNames", ("",))
            }
    has_more = not namespaces
    wanted = rights(
        namespaces,
        LeaseName("ops", "unbroken"),
        has_taints=has_more,
        has_node_condition=has_more,
        has_policies=True,
        has_claims=True,
    )
    assert granted == set(wanted)


async def service_account_kubeconfig(kube: Kube, admin: Path, namespace: str, name: str, target: Path) -> None:
    """Write a kubeconfig with the rights of a service account."""
    path = f"{collection_path('serviceaccounts', namespace)}/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    answer = await kube.create(path, request)
    config = yaml.safe_load(await asyncio.to_thread(admin.read_text))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": answer["status"]["token"]}}]
    await asyncio.to_thread(target.write_text, yaml.safe_dump(config))


async def _upgrade_and_roll_back(made: tools.Bench, words: list[str], helm_home: dict[str, str]) -> None:
    """Turn on every switch that needs nothing but Kubernetes, and off again by `helm rollback`."""
    helm, release, *place = words
    switches = ["networkPolicy.enabled=true", "dashboards.enabled=true", "logLevel=debug"]
    options = ["--reset-then-reuse-values", *(word for switch in switches for word in ("--set", switch))]

    async def objects() -> tuple[bool, int, int]:
        """Whether the log is verbose, and the number of NetworkPolicies and dashboards."""
        here = f"namespaces/{made.namespace}"
        deployment = await made.kube.get(f"/apis/apps/v1/{here}/deployments/{release}")
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        policies = await made.kube.list(
            f"/apis/networking.k8s.io/v1/{here}/networkpolicies", "app.kubernetes.io/managed-by=Helm"
        )
        maps = await made.kube.list(f"/api/v1/{here}/configmaps")
        boards = [item for item in maps[0] if "-dashboard-" in item["metadata"]["name"]]
        return "--log-level=debug" in arguments, len(policies[0]), len(boards)

    before = await objects()
    assert before == (False, 0, 0)
    for command in (["upgrade", release, str(CHART), *options], ["rollback", release, "1"]):
        done = await asyncio.to_thread(run, helm, *command, *place, **helm_home)
        assert done.returncode == 0, done.stdout + done.stderr
        assert await objects() == ((True, 1, 3) if command[0] == "upgrade" else before)


async def _run_the_command_of_the_test_pod(words: list[str], port: int, helm_home: dict[str, str]) -> None:
    """Do what `helm test` lets a kubelet do: its program asks the operator, by another address than the Service's."""
    helm, release, *place = words
    hooks = await asyncio.to_thread(run, helm, "get", "hooks", release, *place, **helm_home)
    (pod,) = (item for item in yaml.safe_load_all(hooks.stdout) if item and item["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    service = f"http://{release}-metrics.{place[-1]}.svc:9090"
    (program,) = container["args"]
    assert (container["command"], service in program) == (["python", "-c"], True)
    for address, code in ((f"http://127.0.0.1:{port}", 0), ("http://127.0.0.1:1", 1)):
        done = await asyncio.to_thread(run, sys.executable, "-c", program.replace(service, address))
        assert done.returncode == code, done.stdout + done.stderr


async def _refuse_to_leave_most_jobs_alone(words: list[str], helm_home: dict[str, str]) -> None:
    """As after an upgrade from a chart whose default was all namespaces."""
    helm, release, *place = words
    options = ("--reset-then-reuse-values", "--set", "scope=Namespaces")
    done = await asyncio.to_thread(run, helm, "upgrade", release, str(CHART), *place, *options, **helm_home)
    assert done.returncode != 0
    assert f"scope: this release serves all namespaces, and would now serve {place[-1]} only" in done.stderr


async def _refuse_a_second_release(words: list[str], helm_home: dict[str, str]) -> None:
    helm, release, *place = words
    named = ("--set", f"registry={REGISTRY}")
    second = await asyncio.to_thread(run, helm, "install", f"{release}-b", str(CHART), *place, *named, **helm_home)
    assert second.returncode != 0
    assert f"the release {release} in namespace {place[-1]} has the CRD of this cluster, and runs" in second.stderr
    assert "scope=Namespaces), and this one crd.install=false" in second.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("scope", ["Cluster", "Namespaces"])
def test_the_operator_does_its_work_with_the_charts_service_account(helm: str, scope: str, tmp_path: Path) -> None:
    admin = kubeconfig_of("full")  # the one with RBAC
    release = f"unbroken-{uuid.uuid4().hex[:6]}"

    async def scenario() -> None:
        async with tools.bench(admin, tmp_path) as made:
            options = ["--set", f"scope={scope},registry={REGISTRY}"]
            helm_home = {"HELM_CACHE_HOME": str(tmp_path / "cache"), "HELM_CONFIG_HOME": str(tmp_path / "config")}
            place = ["--kubeconfig", str(admin), "--namespace", made.namespace]
            installed = await asyncio.to_thread(
                run, helm, "install", release, str(CHART), *place, "--take-ownership", *options, **helm_home
            )
            assert installed.returncode == 0, installed.stdout + installed.stderr
            try:
                deployment = await made.kube.get(f"/apis/apps/v1/namespaces/{made.namespace}/deployments/{release}")
                account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
                limited = tmp_path / "service-account.kubeconfig"
                await service_account_kubeconfig(made.kube, admin, made.namespace, account, limited)
                arguments = ["--all-namespaces"] if scope == "Cluster" else ["--namespace", made.namespace]
                arguments += ["--lease", f"{made.namespace}/{release}", "--job-network-policies", made.namespace]
                with tools.operator(made, *arguments, kubeconfig=limited) as running:
                    await made.apply("digits", replicas=2, spares={"count": 1})
                    await made.wait_for_pods("digits-0", "digits-1", "digits-2")
                    policies = f"/apis/networking.k8s.io/v1/namespaces/{made.namespace}/networkpolicies"
                    policy = await made.kube.get(f"{policies}/digits-rendezvous")
                    assert [len(rule.get("from", ())) for rule in policy["spec"]["ingress"]] == [2, 0]
                    await made.end_pod("digits-1", "Failed")
                    await made.wait_for_pods("digits-0", "digits-1", "digits-2", "digits-3")

                    async def has_status() -> bool:
                        return bool(await made.condition("digits", "PodsReady"))

                    await eventually(has_status, "a status")
                    assert "forbidden" not in running.log.read_text()
                    assert "permissions are missing" not in running.log.read_text()
                    await _run_the_command_of_the_test_pod([helm, release, *place], running.metrics_port, helm_home)
                if scope == "Cluster":
                    await _refuse_to_leave_most_jobs_alone([helm, release, *place], helm_home)
                    await _refuse_a_second_release([helm, release, *place], helm_home)
                    await _upgrade_and_roll_back(made, [helm, release, *place], helm_home)
                other = await Kube.connect(str(limited))
                try:
                    for path in (
                        "/api/v1/secrets",
                        f"/api/v1/namespaces/{made.namespace}/secrets",
                        "/api/v1/namespaces",
                    ):
                        with pytest.raises(KubeRefused):
                            await other.list(path)
                    with pytest.raises(KubeRefused):
                        await other.merge(made.path(layout.PLURAL, "digits"), {"spec": {"replicas": 3}})
                finally:
                    await other.close()
            finally:
                removed = await asyncio.to_thread(run, helm, "uninstall", release, *place, **helm_home)
                assert removed.returncode == 0, removed.stderr

    asyncio.run(scenario())
