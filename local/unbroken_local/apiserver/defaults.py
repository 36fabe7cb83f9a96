"""Values that the API server fills in for core kinds, so that clients may leave them out."""

import base64
import binascii
import zlib
from collections.abc import Callable, Container
from ipaddress import IPv4Network
from typing import Any

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.definitions import CLEANUP, complete_definition
from unbroken_local.apiserver.documents import Document, as_dict, as_list, look_up
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.store import Place, Store

SERVICE_NETWORK = IPv4Network("127.96.0.0/16")
_NODE_PORTS = range(30000, 32768)
_TOLERATED_S = 300


def fill_defaults(resource: Resource, document: Document) -> None:
    """Fill in the defaults of a core kind, in place. Safe to repeat."""
    filler = _FILLERS.get(resource.place)
    if filler is not None and not resource.custom:
        filler(document)


def _pod(document: Document) -> None:
    _pod_spec(document.setdefault("spec", {}))


def _pod_spec(spec: Document) -> None:
    for name, value in (
        ("restartPolicy", "Always"),
        ("dnsPolicy", "ClusterFirst"),
        ("terminationGracePeriodSeconds", 30),
        ("schedulerName", "default-scheduler"),
        ("enableServiceLinks", True),
    ):
        spec.setdefault(name, value)
    spec.setdefault("securityContext", {})
    for group in ("initContainers", "containers"):
        for container in _objects(spec.get(group)):
            _container(container)
    for volume in _objects(spec.get("volumes")):
        _volume(volume)


def _objects(value: Any) -> list[Document]:
    return [entry for entry in as_list(value) if isinstance(entry, dict)]


def _container(container: Document) -> None:
    image = str(container.get("image") or "")
    tag = image.rpartition("/")[2].partition(":")[2]
    container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") and "@" not in image else "IfNotPresent")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    resources = container.setdefault("resources", {})
    for name, amount in as_dict(resources.get("limits")).items():
        resources.setdefault("requests", {}).setdefault(name, amount)
    for port in _objects(container.get("ports")):
        port.setdefault("protocol", "TCP")
    for variable in _objects(container.get("env")):
        reference = look_up(variable, "valueFrom", "fieldRef")
        if isinstance(reference, dict):
            reference.setdefault("apiVersion", "v1")
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(kind), dict):
            _probe(container[kind])


def _probe(probe: Document) -> None:
    for name, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)):
        probe.setdefault(name, value)
    get = probe.get("httpGet")
    if isinstance(get, dict):
        get.setdefault("path", "/")
        get.setdefault("scheme", "HTTP")


def _volume(volume: Document) -> None:
    if not any(name != "name" for name in volume):
        volume["emptyDir"] = {}
    for kind in ("secret", "configMap", "downwardAPI", "projected"):
        source = volume.get(kind)
        if isinstance(source, dict):
            source.setdefault("defaultMode", 0o644)
            for entry in _objects(source.get("items")):
                if isinstance(entry.get("fieldRef"), dict):
                    entry["fieldRef"].setdefault("apiVersion", "v1")


def _service(document: Document) -> None:
    spec = document.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["type"] != "ExternalName":
        spec.setdefault("internalTrafficPolicy", "Cluster")
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
    for port in _objects(spec.get("ports")):
        port.setdefault("protocol", "TCP")
        if (port.get("targetPort") in (None, "", 0) and spec.get("clusterIP") != "None") or "targetPort" not in port:
            port["targetPort"] = port.get("port")
    document.setdefault("status", {"loadBalancer": {}})


def _secret(document: Document) -> None:
    document.setdefault("type", "Opaque")
    plain = document.pop("stringData", None)
    for name, text in as_dict(plain).items():
        document.setdefault("data", {})[name] = base64.b64encode(str(text).encode()).decode()
    for name, text in as_dict(document.get("data")).items():
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as problem:
            detail = f"illegal base64 data in data[{name}]"
            message = f'Secret in version "v1" cannot be handled as a Secret: {detail}'
            raise problems.bad_request(message) from problem


def _deployment(document: Document) -> None:
    spec = document.setdefault("spec", {})
    spec.setdefault("replicas", 1)
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("progressDeadlineSeconds", 600)
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxSurge", "25%")
        rolling.setdefault("maxUnavailable", "25%")
    _template(document)


def _replicated(document: Document) -> None:
    document.setdefault("spec", {}).setdefault("replicas", 1)
    _template(document)


def _template(document: Document) -> None:
    template = document.setdefault("spec", {}).get("template")
    if isinstance(template, dict):
        _pod_spec(template.setdefault("spec", {}))


def _namespace(document: Document) -> None:
    labels = document["metadata"].setdefault("labels", {})
    if document["metadata"].get("name"):
        labels["kubernetes.io/metadata.name"] = document["metadata"]["name"]


def _subjects(document: Document) -> None:
    reference = document.get("roleRef")
    if isinstance(reference, dict):
        reference.setdefault("apiGroup", "rbac.authorization.k8s.io")
    for subject in _objects(document.get("subjects")):
        if subject.get("kind") in ("User", "Group"):
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")
        elif subject.get("kind") == "ServiceAccount":
            subject.setdefault("apiGroup", "")


_RBAC = "rbac.authorization.k8s.io"
_FILLERS: dict[Place, Callable[[Document], None]] = {
    ("", "pods"): _pod,
    ("", "services"): _service,
    ("", "secrets"): _secret,
    ("", "namespaces"): _namespace,
    ("apps", "deployments"): _deployment,
    ("apps", "replicasets"): _replicated,
    ("apps", "statefulsets"): _replicated,
    ("apps", "daemonsets"): _template,
    ("batch", "jobs"): _template,
    (_RBAC, "rolebindings"): _subjects,
    (_RBAC, "clusterrolebindings"): _subjects,
}


def complete_create(resource: Resource, document: Document, store: Store) -> None:
    """Fill in what depends on the cluster or is written once, in place: status, addresses, admission's additions."""
    place = resource.place
    if place == ("", "pods"):
        _new_pod(document, store)
    elif place == ("", "services"):
        document["status"] = {"loadBalancer": {}}
        _allocate(document, store)
    elif place == ("", "namespaces"):
        document["spec"] = {"finalizers": ["kubernetes"]}
        document["status"] = {"phase": "Active"}
    elif place == ("apiextensions.k8s.io", "customresourcedefinitions"):
        document["status"] = {}
        _complete_definition(document)
        metadata = document["metadata"]
        metadata["finalizers"] = list(dict.fromkeys([*as_list(metadata.get("finalizers")), CLEANUP]))
    elif resource.has_status and place != ("", "nodes") and not resource.custom:
        document["status"] = {}


def complete_update(resource: Resource, old: Document, document: Document) -> None:
    """Keep what was allocated when a replacement leaves it out, in place."""
    place = resource.place
    if place == ("", "services"):
        spec, before = as_dict(document.get("spec")), as_dict(old.get("spec"))
        for name in ("clusterIP", "clusterIPs"):
            if name not in spec and name in before:
                spec[name] = before[name]
    elif place == ("apiextensions.k8s.io", "customresourcedefinitions"):
        _complete_definition(document)


def _complete_definition(document: Document) -> None:
    if as_dict(look_up(document, "spec", "names")).get("kind") and look_up(document, "spec", "versions"):
        complete_definition(document, document["metadata"]["creationTimestamp"])


def _new_pod(document: Document, store: Store) -> None:
    spec = document["spec"]
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    _priority(spec, store)
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(_tolerates(entry, key) for entry in _objects(tolerations)):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _TOLERATED_S}
            )
    document["status"] = {"phase": "Pending", "qosClass": quality_of_service(spec)}


def _priority(spec: Document, store: Store) -> None:
    if "priority" in spec:
        return
    name = spec.get("priorityClassName")
    found = store.get(("scheduling.k8s.io", "priorityclasses"), ("", name)) if name else None
    spec["priority"] = found.document.get("value", 0) if found else 0
    spec.setdefault(
        "preemptionPolicy", (found.document.get("preemptionPolicy") if found else None) or "PreemptLowerPriority"
    )


def _tolerates(toleration: Document, key: str) -> bool:
    return toleration.get("key") in (key, None, "") and toleration.get("effect") in ("NoExecute", None, "")


def quality_of_service(spec: Document) -> str:
    """Return Guaranteed, Burstable or BestEffort, from cpu and memory only."""
    containers = [*_objects(spec.get("containers")), *_objects(spec.get("initContainers"))]
    asked = [as_dict(entry.get("resources")) for entry in containers]
    named = [{k: v for k, v in as_dict(entry.get(part)).items() if k in ("cpu", "memory")}
             for entry in asked for part in ("requests", "limits")]  # fmt: skip
    if not any(named):
        return "BestEffort"
    guaranteed = all(
        set(as_dict(entry.get("limits"))) >= {"cpu", "memory"}
        and all(as_dict(entry.get("requests")).get(k) == as_dict(entry.get("limits"))[k] for k in ("cpu", "memory"))
        for entry in asked
    )
    return "Guaranteed" if guaranteed else "Burstable"


def _free_address(uid: str, taken: Container[Any]) -> str:
    """Return an address for the Service of this uid.

    The uid says where to look first: clusters on one machine share its loopback, and all that count from the first
    address would give the same ones.
    """
    num_hosts = SERVICE_NETWORK.num_addresses - 2
    first = zlib.crc32(uid.encode())
    candidates = (str(SERVICE_NETWORK[1 + (first + step) % num_hosts]) for step in range(num_hosts))
    return next(text for text in candidates if text not in taken)


def _allocate(document: Document, store: Store) -> None:
    spec = document["spec"]
    others = [stored.document["spec"] for _, stored in store.current(("", "services"))]
    if spec["type"] != "ExternalName" and not spec.get("clusterIP"):
        taken = {entry.get("clusterIP") for entry in others}
        spec["clusterIP"] = _free_address(str(document["metadata"]["uid"]), taken)
    if spec.get("clusterIP"):
        spec["clusterIPs"] = [spec["clusterIP"]]
    if spec["type"] in ("NodePort", "LoadBalancer"):
        used = {port.get("nodePort") for entry in others for port in _objects(entry.get("ports"))}
        free = (number for number in _NODE_PORTS if number not in used)
        for port in _objects(spec.get("ports")):
            if not port.get("nodePort"):
                port["nodePort"] = next(free)
