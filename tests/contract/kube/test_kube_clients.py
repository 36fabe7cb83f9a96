"""The clients that the project uses: kubectl, the kubernetes package, kopf's watch streams."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import kubernetes
import pytest
import yaml
from tests.waiting import LIMIT_S, wait_until

from .kube_target import Document, Target, config_map, definition, needs, pod

# The package's types are partly wrong (metadata as a dict is fine) and partly missing.
client: Any = kubernetes.client
config: Any = kubernetes.config
watch: Any = kubernetes.watch


@pytest.fixture
def api(target: Target) -> Iterator[Any]:
    made = config.new_client_from_config(str(target.kubeconfig))
    yield made
    made.close()


WIDGET_SPEC = {"type": "object", "properties": {"size": {"type": "integer", "description": "How large it is."}}}


@pytest.fixture
def widgets(target: Target) -> Iterator[str]:
    """The group of a custom kind that kubectl knows."""
    schema = {"type": "object", "properties": {"spec": WIDGET_SPEC}}
    crd = definition(schema, additionalPrinterColumns=[{"name": "Size", "type": "integer", "jsonPath": ".spec.size"}])
    target.kubectl("create", "-f", "-", stdin=json.dumps(crd))
    # `kubectl wait` gives up on a definition of which nothing is said yet.
    name, group = crd["metadata"]["name"], crd["spec"]["group"]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    wait_until(lambda: target.get(path).ok().get("status", {}).get("conditions"), "something is said of the kind")
    target.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=50s")
    wait_until(lambda: target.get(f"/apis/{group}/v1/widgets").code == 200, "the kind is served")

    def is_known() -> bool:
        # It may fail because of another test's kind that is just going. It makes kubectl look again, which keeps what
        # it discovered; a kind that is served may not be discovered yet.
        return f"widgets.{group}" in target.kubectl("api-resources", "-o", "name", code=None).stdout.split()

    wait_until(is_known, "kubectl knows the kind")
    yield group
    target.kubectl("delete", f"crd/{crd['metadata']['name']}", "--wait=false")


def widget(group: str, name: str, size: object) -> str:
    body = {"apiVersion": f"{group}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": size}}
    return yaml.safe_dump(body)


def test_kubectl_applies_gets_and_deletes(target: Target, namespace: str, widgets: str) -> None:
    kind, scope = f"widgets.{widgets}", ("-n", namespace)
    assert "created" in target.kubectl("apply", *scope, "-f", "-", stdin=widget(widgets, "w", 1)).stdout
    assert "unchanged" in target.kubectl("apply", *scope, "-f", "-", stdin=widget(widgets, "w", 1)).stdout
    assert "configured" in target.kubectl("apply", *scope, "-f", "-", stdin=widget(widgets, "w", 2)).stdout
    header, row = target.kubectl("get", *scope, kind).stdout.splitlines()
    assert header.split() == ["NAME", "SIZE"]
    assert row.split() == ["w", "2"]
    assert "Size:" in target.kubectl("describe", *scope, kind, "w").stdout
    assert "deleted" in target.kubectl("delete", *scope, kind, "w", "--timeout=50s").stdout
    assert "NotFound" in target.kubectl("get", *scope, kind, "w", code=1).stderr


def test_kubectl_applies_on_the_server_side(target: Target, namespace: str) -> None:
    scope = ("-n", namespace)
    text = yaml.safe_dump(config_map("a", x="1"))
    target.kubectl("apply", *scope, "--server-side", "-f", "-", stdin=text)
    target.kubectl("apply", *scope, "--server-side", "-f", "-", stdin=yaml.safe_dump(config_map("a", x="2")))
    conflict = target.kubectl("apply", *scope, "--server-side", "--field-manager=other", "-f", "-", stdin=text, code=1)
    assert "conflict" in conflict.stderr
    target.kubectl(
        "apply", *scope, "--server-side", "--field-manager=other", "--force-conflicts", "-f", "-", stdin=text
    )
    assert target.get(f"/api/v1/namespaces/{namespace}/configmaps/a").ok()["data"] == {"x": "1"}


def test_kubectl_creates_by_its_own_commands(target: Target, namespace: str) -> None:
    """These commands send protobuf, nothing else."""
    scope = ("-n", namespace)
    target.kubectl("create", *scope, "configmap", "c", "--from-literal=x=1", "--from-literal=y=2")
    target.kubectl("create", *scope, "secret", "generic", "s", "--from-literal=a=b")
    assert target.get(f"/api/v1/namespaces/{namespace}/configmaps/c").ok()["data"] == {"x": "1", "y": "2"}
    assert target.get(f"/api/v1/namespaces/{namespace}/secrets/s").ok()["data"] == {"a": "Yg=="}
    target.kubectl("create", "namespace", f"{namespace}-made")
    target.kubectl("delete", "namespace", f"{namespace}-made", "--wait=false")


@needs("reviews")
def test_kubectl_asks_what_it_may_do(target: Target) -> None:
    assert target.kubectl("auth", "can-i", "delete", "pods").stdout.strip() == "yes"


@needs("openapi-v3")
def test_kubectl_explains_a_custom_kind(target: Target, widgets: str) -> None:

    def is_explained() -> bool:
        return "How large it is." in target.kubectl("explain", f"widgets.{widgets}.spec", code=None).stdout

    wait_until(is_explained, "the kind's schema is published")


@needs("strict-fields", "openapi-v3")
def test_kubectl_refuses_a_field_that_does_not_exist(target: Target, namespace: str, widgets: str) -> None:
    bad = widget(widgets, "w", 1).replace("size", "sise")
    refused = target.kubectl("apply", "-n", namespace, "-f", "-", stdin=bad, code=1)
    assert 'unknown field "spec.sise"' in refused.stderr


def test_kubectl_patches_and_labels_a_pod(target: Target, namespace: str) -> None:
    scope = ("-n", namespace)
    target.kubectl("apply", *scope, "-f", "-", stdin=yaml.safe_dump(pod("p")))
    target.kubectl("label", *scope, "pod/p", "a=b")
    target.kubectl("annotate", *scope, "pod/p", "c=d")
    target.kubectl(
        "patch", *scope, "pod/p", "-p", '{"spec":{"containers":[{"name":"main","image":"example.test/image:2"}]}}'
    )
    found = target.get(f"/api/v1/namespaces/{namespace}/pods/p").ok()
    assert found["metadata"]["labels"] == {"a": "b"}
    assert found["spec"]["containers"][0]["image"] == "example.test/image:2"
    assert "Name:" in target.kubectl("describe", *scope, "pod/p").stdout
    target.kubectl("delete", *scope, "pod/p", "--grace-period=0", "--force", "--timeout=50s")


def test_kubectl_lists_what_it_can_ask_for(target: Target, widgets: str) -> None:
    def listed() -> str | None:
        # It fails when another test's kind goes while it asks for group after group.
        done = target.kubectl("api-resources", "--no-headers", code=None)
        return done.stdout if done.returncode == 0 else None

    kinds = {line.split()[-1] for line in wait_until(listed, "the whole list").splitlines()}
    assert kinds >= {"Pod", "Node", "Namespace", "ConfigMap", "Secret", "Service", "Lease", "Widget"}


@needs("kubelet", "pod-subresources")
def test_kubectl_reads_logs_through_the_kubelet(target: Target, namespace: str) -> None:
    """The node's status names the kubelet; the query reaches it, and what it writes is relayed as it comes."""
    asked: list[str] = []

    class Kubelet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"line one\nline two\n")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Stay silent."""

    node = f"{namespace}-node"
    with ThreadingHTTPServer(("127.0.0.1", 0), Kubelet) as kubelet:
        thread = threading.Thread(target=kubelet.serve_forever)
        thread.start()
        try:
            target.post("/api/v1/nodes", {"metadata": {"name": node}}).ok(201)
            status = {
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.server_port}},
            }
            target.merge(f"/api/v1/nodes/{node}/status", {"status": status}).ok()
            target.post(f"/api/v1/namespaces/{namespace}/pods", pod("p", nodeName=node)).ok(201)
            text = target.kubectl("logs", "-n", namespace, "p", "-c", "main", "--tail=5", "-f").stdout
        finally:
            kubelet.shutdown()
            thread.join(10)
            target.delete(f"/api/v1/namespaces/{namespace}/pods/p", gracePeriodSeconds=0)
            target.delete(f"/api/v1/nodes/{node}")
    assert text == "line one\nline two\n"
    path, _, query = asked[0].partition("?")
    assert path == f"/containerLogs/{namespace}/p/main"
    assert {"follow=true", "tailLines=5"} <= set(query.split("&"))


def test_python_client_does_its_round(target: Target, namespace: str, api: Any) -> None:
    core = client.CoreV1Api(api)
    made = core.create_namespaced_config_map(namespace, client.V1ConfigMap(metadata={"name": "a"}, data={"x": "1"}))
    assert made.metadata.uid
    assert core.patch_namespaced_config_map("a", namespace, {"data": {"y": "2"}}).data == {"x": "1", "y": "2"}
    assert [
        entry.metadata.name
        for entry in core.list_namespaced_config_map(namespace, field_selector="metadata.name=a").items
    ] == ["a"]
    with pytest.raises(client.ApiException) as caught:
        core.create_namespaced_config_map(namespace, client.V1ConfigMap(metadata={"name": "a"}))
    assert json.loads(caught.value.body)["reason"] == "AlreadyExists"
    core.delete_namespaced_config_map("a", namespace)


def test_python_client_watches(target: Target, namespace: str, api: Any) -> None:
    core = client.CoreV1Api(api)
    revision = core.list_namespaced_config_map(namespace).metadata.resource_version
    core.create_namespaced_config_map(namespace, client.V1ConfigMap(metadata={"name": "a"}))
    core.delete_namespaced_config_map("a", namespace)
    stream = watch.Watch()
    found = []
    events = stream.stream(core.list_namespaced_config_map, namespace, resource_version=revision, timeout_seconds=50)
    for event in events:
        if event["object"].metadata.name == "a":
            found.append(event["type"])
        if len(found) == 2:
            stream.stop()
    assert found == ["ADDED", "DELETED"]


@needs("short-history")
def test_python_client_is_told_that_its_revision_is_gone(target: Target, namespace: str, api: Any) -> None:
    core = client.CoreV1Api(api)
    revision = core.list_namespaced_config_map(namespace).metadata.resource_version
    target.post(f"/api/v1/namespaces/{namespace}/configmaps", config_map("a")).ok(201)
    for number in range(220):
        target.merge(f"/api/v1/namespaces/{namespace}/configmaps/a", {"data": {"x": str(number)}})
    with pytest.raises(client.ApiException) as caught:
        for _ in watch.Watch().stream(
            core.list_namespaced_config_map, namespace, resource_version=revision, timeout_seconds=5
        ):
            pass
    assert caught.value.status == 410


@pytest.mark.filterwarnings("ignore")
def test_kopf_sees_what_is_there_and_what_changes(target: Target, namespace: str, widgets: str) -> None:
    """kopf lists, watches, patches and sets finalizers on a custom kind, and lets it go."""
    import kopf

    registry = kopf.OperatorRegistry()
    seen: list[tuple[str, Any]] = []

    @kopf.on.create(widgets, "v1", "widgets", registry=registry)
    def created(spec: kopf.Spec, **_: Any) -> None:
        seen.append(("created", spec.get("size")))

    @kopf.on.update(widgets, "v1", "widgets", registry=registry)
    def updated(spec: kopf.Spec, **_: Any) -> None:
        seen.append(("updated", spec.get("size")))

    @kopf.on.delete(widgets, "v1", "widgets", registry=registry)
    def deleted(**_: Any) -> None:
        seen.append(("deleted", None))

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=target.url, token=target.token, insecure=True)

    stop, ready = threading.Event(), threading.Event()

    async def operate() -> None:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        await kopf.operator(
            registry=registry,
            settings=settings,
            namespaces=[namespace],
            stop_flag=stop,
            ready_flag=ready,
            standalone=True,
        )
        # aiohttp closes TLS connections in the background and offers nothing to wait for (its documentation says so).
        await asyncio.sleep(0.25)

    thread = threading.Thread(target=lambda: asyncio.run(operate()))
    thread.start()
    path = f"/apis/{widgets}/v1/namespaces/{namespace}/widgets"
    try:
        assert ready.wait(LIMIT_S)
        body: Document = yaml.safe_load(widget(widgets, "w", 1))
        target.post(path, body).ok(201)
        wait_until(lambda: ("created", 1) in seen, "kopf sees the creation")
        wait_until(lambda: "last-handled" in target.get(f"{path}/w").text, "kopf notes that it has seen it")
        assert target.get(f"{path}/w").ok()["metadata"]["finalizers"]
        target.merge(f"{path}/w", {"spec": {"size": 2}}).ok()
        wait_until(lambda: ("updated", 2) in seen, "kopf sees the update")
        target.delete(f"{path}/w")
        wait_until(lambda: target.get(f"{path}/w").code == 404, "kopf lets the object go")
        assert ("deleted", None) in seen
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
