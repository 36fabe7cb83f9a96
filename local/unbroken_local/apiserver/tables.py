"""Tables as kubectl prints them: columns and cells of core kinds, and of custom resources by their printer columns."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from unbroken_local.apiserver import jsonpath
from unbroken_local.apiserver.documents import Document, as_dict, as_list, look_up, time_value
from unbroken_local.apiserver.kinds import Column, Resource
from unbroken_local.apiserver.store import Place

_NAME = Column("Name", format="name")
_AGE = Column("Age")
_NONE = "<none>"
Cells = Callable[[Document, float], list[Any]]


def table(
    resource: Resource, documents: Sequence[Document], include: str, now_s: float, metadata: Document
) -> Document:
    """Return the Table of these objects. `include`: Object, Metadata or None; `now_s`: seconds since the epoch."""
    columns = [_NAME, *resource.columns] if resource.custom else list(_layout(resource)[0])
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {
                "name": column.name,
                "type": column.type,
                "format": column.format,
                "description": column.description,
                "priority": column.priority,
            }
            for column in columns
        ],
        "rows": table_rows(resource, documents, include, now_s),
    }


def table_rows(resource: Resource, documents: Sequence[Document], include: str, now_s: float) -> list[Document]:
    """Return the rows of these objects."""
    cells = _custom_cells(resource.columns) if resource.custom else _layout(resource)[1]
    return [{"cells": cells(document, now_s), **_attached(document, include)} for document in documents]


def _attached(document: Document, include: str) -> Document:
    if include == "Object":
        return {"object": document}
    if include == "None":
        return {"object": None}
    shown = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": document["metadata"]}
    return {"object": shown}


def duration_text(seconds: float) -> str:  # noqa: PLR0911 - one for each unit
    """Return a duration in kubectl's words: 42s, 3m5s, 14m, 5h3m, 12h, 4d2h, 30d, 3y."""
    total = int(seconds)
    if total < -1:
        return "<invalid>"
    total = max(total, 0)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if total < 120:
        return f"{total}s"
    if minutes < 10:
        return _two(minutes, "m", total % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if days < 730:
        return f"{days}d"
    return _two(days // 365, "y", days % 365, "d") if days < 2920 else f"{days // 365}y"


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def age_text(timestamp: Any, now_s: float) -> str:
    """Return the time since a timestamp; <unknown> when there is none."""
    try:
        return duration_text(now_s - time_value(str(timestamp)))
    except ValueError:
        return "<unknown>"


def _age(document: Document, now_s: float) -> str:
    return age_text(look_up(document, "metadata", "creationTimestamp"), now_s)


def _name(document: Document) -> str:
    return str(document["metadata"].get("name", ""))


def _custom_cells(columns: Sequence[Column]) -> Cells:
    def cells(document: Document, now_s: float) -> list[Any]:
        return [_name(document), *(_custom_cell(document, column, now_s) for column in columns)]

    return cells


def _custom_cell(document: Document, column: Column, now_s: float) -> Any:  # noqa: PLR0911 - one for each type
    found = jsonpath.find(document, column.path)
    value = found[0] if found else None
    if value is None:
        return None
    match column.type:
        case "date":
            return age_text(value, now_s)
        case "integer":
            return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        case "number":
            return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        case "boolean":
            return value if isinstance(value, bool) else None
    if len(found) > 1:
        return ",".join(_plain(entry) for entry in found)
    return _plain(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


# -- pods


def _pod_cells(pod: Document, now_s: float) -> list[Any]:
    statuses = [as_dict(entry) for entry in as_list(look_up(pod, "status", "containerStatuses"))]
    initial = [as_dict(entry) for entry in as_list(look_up(pod, "status", "initContainerStatuses"))]
    sidecars = {entry.get("name") for entry in as_list(look_up(pod, "spec", "initContainers"))
                if entry.get("restartPolicy") == "Always"}  # fmt: skip
    counted = [*statuses, *(entry for entry in initial if entry.get("name") in sidecars)]
    total = len(as_list(look_up(pod, "spec", "containers"))) + len(sidecars)
    ready = sum(bool(entry.get("ready")) and "running" in as_dict(entry.get("state")) for entry in counted)
    gates = len(as_list(look_up(pod, "spec", "readinessGates")))
    return [
        _name(pod),
        f"{ready}/{total}",
        pod_status(pod),
        _restarts(counted, now_s),
        _age(pod, now_s),
        look_up(pod, "status", "podIP") or _NONE,
        look_up(pod, "spec", "nodeName") or _NONE,
        look_up(pod, "status", "nominatedNodeName") or _NONE,
        f"0/{gates}" if gates else _NONE,
    ]


def _restarts(statuses: list[Document], now_s: float) -> str:
    count = sum(int(entry.get("restartCount") or 0) for entry in statuses)
    ended = [look_up(entry, "lastState", "terminated", "finishedAt") for entry in statuses]
    last = max((text for text in ended if text), default=None)
    return f"{count} ({age_text(last, now_s)} ago)" if count and last else str(count)


def pod_status(pod: Document) -> str:
    """Return the word under STATUS: of its containers rather than the phase, where these say more."""
    text = str(look_up(pod, "status", "reason") or look_up(pod, "status", "phase") or "Unknown")
    if any(entry.get("reason") == "SchedulingGated" for entry in as_list(look_up(pod, "status", "conditions"))):
        text = "SchedulingGated"
    initial = _initial_status(pod)
    # A sidecar that ended badly after the containers says nothing about them.
    is_begun = initial is None or _is_initialized(pod)
    text = _container_status(pod, initial or text) if is_begun else str(initial)
    if "deletionTimestamp" in pod["metadata"]:
        return "Unknown" if look_up(pod, "status", "reason") == "NodeLost" else "Terminating"
    return text


def _is_initialized(pod: Document) -> bool:
    conditions = [as_dict(entry) for entry in as_list(look_up(pod, "status", "conditions"))]
    return any(entry.get("type") == "Initialized" and entry.get("status") == "True" for entry in conditions)


def _initial_status(pod: Document) -> str | None:
    specs = {entry.get("name"): entry for entry in as_list(look_up(pod, "spec", "initContainers"))}
    for number, status in enumerate(as_list(look_up(pod, "status", "initContainerStatuses"))):
        state = as_dict(status.get("state"))
        ended, waiting = state.get("terminated"), as_dict(state.get("waiting"))
        is_sidecar = as_dict(specs.get(status.get("name"))).get("restartPolicy") == "Always"
        if isinstance(ended, dict) and ended.get("exitCode") == 0:
            continue
        if is_sidecar and status.get("started"):
            continue
        if isinstance(ended, dict):
            return "Init:" + _ended_text(ended)
        if waiting.get("reason") not in (None, "", "PodInitializing"):
            return f"Init:{waiting['reason']}"
        return f"Init:{number}/{len(specs)}"
    return None


def _ended_text(ended: Document) -> str:
    if ended.get("reason"):
        return str(ended["reason"])
    return f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode')}"


def _container_status(pod: Document, text: str) -> str:
    running = False
    for status in reversed(as_list(look_up(pod, "status", "containerStatuses"))):
        state = as_dict(as_dict(status).get("state"))
        if as_dict(state.get("waiting")).get("reason"):
            text = str(state["waiting"]["reason"])
        elif isinstance(state.get("terminated"), dict):
            text = _ended_text(state["terminated"])
        elif status.get("ready") and "running" in state:
            running = True
    if text == "Completed" and running:
        ready = any(entry.get("type") == "Ready" and entry.get("status") == "True"
                    for entry in as_list(look_up(pod, "status", "conditions")))  # fmt: skip
        return "Running" if ready else "NotReady"
    return text


# -- other kinds


def _node_cells(node: Document, now_s: float) -> list[Any]:
    ready = [entry for entry in as_list(look_up(node, "status", "conditions")) if entry.get("type") == "Ready"]
    words = ["Ready" if ready and ready[0].get("status") == "True" else "NotReady" if ready else "Unknown"]
    if look_up(node, "spec", "unschedulable"):
        words.append("SchedulingDisabled")
    prefix = "node-role.kubernetes.io/"
    labels = as_dict(node["metadata"].get("labels"))
    roles = sorted(key.removeprefix(prefix) for key in labels if key.startswith(prefix) and len(key) > len(prefix))
    info = as_dict(look_up(node, "status", "nodeInfo"))
    addresses = {entry.get("type"): entry.get("address") for entry in as_list(look_up(node, "status", "addresses"))}
    return [
        _name(node),
        ",".join(words),
        ",".join(roles) or _NONE,
        _age(node, now_s),
        info.get("kubeletVersion", ""),
        addresses.get("InternalIP", _NONE),
        addresses.get("ExternalIP", _NONE),
        info.get("osImage") or "<unknown>",
        info.get("kernelVersion") or "<unknown>",
        info.get("containerRuntimeVersion") or "<unknown>",
    ]


def _node_port(port: Document) -> str:
    return f":{port['nodePort']}" if port.get("nodePort") else ""


def _service_cells(service: Document, now_s: float) -> list[Any]:
    spec = as_dict(service.get("spec"))
    ports = ",".join(
        f"{port.get('port')}{_node_port(port)}/{port.get('protocol', 'TCP')}" for port in as_list(spec.get("ports"))
    )
    selector = ",".join(f"{key}={value}" for key, value in sorted(as_dict(spec.get("selector")).items()))
    external = ",".join(as_list(spec.get("externalIPs"))) or spec.get("externalName") or _NONE
    address = spec.get("clusterIP") or _NONE
    return [
        _name(service),
        spec.get("type"),
        address,
        external,
        ports or _NONE,
        _age(service, now_s),
        selector or _NONE,
    ]


def _event_cells(event: Document, now_s: float) -> list[Any]:
    about = as_dict(event.get("involvedObject") or event.get("regarding"))
    source = as_dict(event.get("source") or event.get("deprecatedSource"))
    series = as_dict(event.get("series"))
    first = event.get("firstTimestamp") or event.get("deprecatedFirstTimestamp") or event.get("eventTime")
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("deprecatedLastTimestamp") or first
    component = source.get("component") or event.get("reportingComponent") or event.get("reportingController") or ""
    if source.get("host"):
        component = f"{component}, {source['host']}"
    return [
        age_text(last, now_s),
        event.get("type", ""),
        event.get("reason", ""),
        f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}",
        about.get("fieldPath", ""),
        component,
        str(event.get("message") or event.get("note") or "").strip(),
        age_text(first, now_s),
        int(series.get("count") or event.get("count") or event.get("deprecatedCount") or 1),
        _name(event),
    ]


def _lease_cells(lease: Document, now_s: float) -> list[Any]:
    return [_name(lease), look_up(lease, "spec", "holderIdentity") or "", _age(lease, now_s)]


def _namespace_cells(namespace: Document, now_s: float) -> list[Any]:
    return [_name(namespace), look_up(namespace, "status", "phase") or "Active", _age(namespace, now_s)]


def _secret_cells(secret: Document, now_s: float) -> list[Any]:
    return [_name(secret), secret.get("type", ""), len(as_dict(secret.get("data"))), _age(secret, now_s)]


def _configmap_cells(config: Document, now_s: float) -> list[Any]:
    return [
        _name(config),
        len(as_dict(config.get("data"))) + len(as_dict(config.get("binaryData"))),
        _age(config, now_s),
    ]


def _definition_cells(definition: Document, now_s: float) -> list[Any]:
    return [_name(definition), look_up(definition, "metadata", "creationTimestamp")]


def _deployment_cells(deployment: Document, now_s: float) -> list[Any]:
    status = as_dict(deployment.get("status"))
    wanted = look_up(deployment, "spec", "replicas")
    containers = as_list(look_up(deployment, "spec", "template", "spec", "containers"))
    labels = as_dict(look_up(deployment, "spec", "selector", "matchLabels"))
    return [
        _name(deployment),
        f"{status.get('readyReplicas', 0)}/{wanted}",
        status.get("updatedReplicas", 0),
        status.get("availableReplicas", 0),
        _age(deployment, now_s),
        ",".join(str(entry.get("name")) for entry in containers),
        ",".join(str(entry.get("image")) for entry in containers),
        ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
    ]


def _budget_cells(budget: Document, now_s: float) -> list[Any]:
    spec, status = as_dict(budget.get("spec")), as_dict(budget.get("status"))
    least, most = spec.get("minAvailable", "N/A"), spec.get("maxUnavailable", "N/A")
    return [_name(budget), str(least), str(most), status.get("disruptionsAllowed", 0), _age(budget, now_s)]


def _plain_cells(document: Document, now_s: float) -> list[Any]:
    return [_name(document), _age(document, now_s)]


def _created_cells(document: Document, now_s: float) -> list[Any]:
    return [_name(document), look_up(document, "metadata", "creationTimestamp")]


def _columns(text: str, wide: str = "", numbers: str = "") -> tuple[Column, ...]:
    made = []
    for priority, names in ((0, text), (1, wide)):
        for name in filter(None, names.split(",")):
            kind = "integer" if name in numbers.split(",") else "string"
            made.append(Column(name, kind, format="name" if name == "Name" else "", priority=priority))
    return tuple(made)


_LAYOUTS: dict[Place, tuple[tuple[Column, ...], Cells]] = {
    ("", "pods"): (_columns("Name,Ready,Status,Restarts,Age", "IP,Node,Nominated Node,Readiness Gates"), _pod_cells),
    ("", "nodes"): (
        _columns("Name,Status,Roles,Age,Version", "Internal-IP,External-IP,OS-Image,Kernel-Version,Container-Runtime"),
        _node_cells,
    ),
    ("", "services"): (_columns("Name,Type,Cluster-IP,External-IP,Port(s),Age", "Selector"), _service_cells),
    ("", "events"): (
        (*_columns("Last Seen,Type,Reason,Object"), Column("Subobject", priority=1), Column("Source", priority=1),
         Column("Message"), Column("First Seen", priority=1), Column("Count", "integer", priority=1),
         Column("Name", format="name", priority=1)),
        _event_cells,
    ),
    ("coordination.k8s.io", "leases"): (_columns("Name,Holder,Age"), _lease_cells),
    ("", "namespaces"): (_columns("Name,Status,Age"), _namespace_cells),
    ("", "secrets"): (_columns("Name,Type,Data,Age", numbers="Data"), _secret_cells),
    ("", "configmaps"): (_columns("Name,Data,Age", numbers="Data"), _configmap_cells),
    ("apiextensions.k8s.io", "customresourcedefinitions"): (_columns("Name,Created At"), _definition_cells),
    ("rbac.authorization.k8s.io", "roles"): (_columns("Name,Created At"), _created_cells),
    ("rbac.authorization.k8s.io", "clusterroles"): (_columns("Name,Created At"), _created_cells),
    ("apps", "deployments"): (
        _columns("Name,Ready,Up-to-date,Available,Age", "Containers,Images,Selector", "Up-to-date,Available"),
        _deployment_cells,
    ),
    ("policy", "poddisruptionbudgets"): (
        _columns("Name,Min Available,Max Unavailable,Allowed Disruptions,Age", numbers="Allowed Disruptions"),
        _budget_cells,
    ),
}  # fmt: skip


def _layout(resource: Resource) -> tuple[tuple[Column, ...], Cells]:
    return _LAYOUTS.get(resource.place, ((_NAME, _AGE), _plain_cells))
