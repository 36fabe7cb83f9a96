"""What can be served: one `Resource` for each kind and version, core kinds as a table, custom ones made from CRDs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.store import Place

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@cache
def core_table() -> Document:
    """Return the generated field table (tools/core_schemas.py)."""
    table: Document = json.loads((Path(__file__).parent / "core_schemas.json").read_text())
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `path` is the JSONPath of a custom resource's column, empty for core kinds."""

    name: str
    type: str = "string"
    path: str = ""
    description: str = ""
    format: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """Dotted paths of the scale subresource of a custom resource."""

    spec_path: str
    status_path: str
    selector_path: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A kind as served in one version. `schema` is its structural schema; `custom` says that a CRD made it."""

    group: str
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    schema: Document
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    list_kind: str = ""
    custom: bool = False
    columns: tuple[Column, ...] = ()
    scale: Scale | None = None
    stored_as: Place | None = None
    selectable: tuple[str, ...] = ()
    rules: Any = field(default=None)

    @property
    def place(self) -> Place:
        return self.stored_as or (self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def list_kind_name(self) -> str:
        return self.list_kind or f"{self.kind}List"

    @property
    def path_prefix(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources


def _core(group: str, version: str, plural: str, kind: str, **options: Any) -> Resource:
    name = core_table()["kinds"].get(f"{group}/{version}/{kind}")
    options.setdefault("namespaced", True)
    return Resource(
        group=group,
        version=version,
        plural=plural,
        singular=options.pop("singular", kind.lower()),
        kind=kind,
        schema={"$ref": name} if name else {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        **options,
    )


_STATUS = ("status",)
_SCALED = ("status", "scale")
_ALL = ("all",)
_NO_COLLECTION = tuple(verb for verb in ALL_VERBS if verb != "deletecollection")


@cache
def core_resources() -> tuple[Resource, ...]:
    """Return all built-in resources, in the order of discovery."""
    rbac, auth = "rbac.authorization.k8s.io", "authorization.k8s.io"
    reserved = _apps()
    return (
        _core("", "v1", "bindings", "Binding", verbs=("create",)),
        _core("", "v1", "configmaps", "ConfigMap", short_names=("cm",)),
        _core("", "v1", "endpoints", "Endpoints", singular="endpoints", short_names=("ep",)),
        _core("", "v1", "events", "Event", short_names=("ev",)),
        _core("", "v1", "namespaces", "Namespace", namespaced=False, short_names=("ns",),
              subresources=("finalize", "status"), verbs=_NO_COLLECTION),
        _core("", "v1", "nodes", "Node", namespaced=False, short_names=("no",), subresources=_STATUS),
        _core("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",), subresources=_STATUS),
        _core("", "v1", "pods", "Pod", short_names=("po",), categories=_ALL,
              subresources=("binding", "eviction", "log", "status")),
        _core("", "v1", "secrets", "Secret"),
        _core("", "v1", "serviceaccounts", "ServiceAccount", short_names=("sa",)),
        _core("", "v1", "services", "Service", short_names=("svc",), categories=_ALL, subresources=_STATUS),
        _core("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False,
              short_names=("crd", "crds"), categories=("api-extensions",), subresources=_STATUS),
        *reserved,
        _core(auth, "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False, verbs=("create",)),
        _core(auth, "v1", "selfsubjectrulesreviews", "SelfSubjectRulesReview", namespaced=False, verbs=("create",)),
        _core(auth, "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False, verbs=("create",)),
        _core("batch", "v1", "jobs", "Job", categories=_ALL, subresources=_STATUS),
        _core("coordination.k8s.io", "v1", "leases", "Lease"),
        _core("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
        _core("events.k8s.io", "v1", "events", "Event", short_names=("ev",), stored_as=("", "events")),
        _core("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", short_names=("netpol",)),
        _core("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short_names=("pdb",),
              subresources=_STATUS),
        _core(rbac, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
        _core(rbac, "v1", "clusterroles", "ClusterRole", namespaced=False),
        _core(rbac, "v1", "rolebindings", "RoleBinding"),
        _core(rbac, "v1", "roles", "Role"),
        _core("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False, short_names=("pc",)),
    )  # fmt: skip


def _apps() -> tuple[Resource, ...]:
    return (
        _core("apps", "v1", "daemonsets", "DaemonSet", short_names=("ds",), categories=_ALL, subresources=_STATUS),
        _core("apps", "v1", "deployments", "Deployment", short_names=("deploy",), categories=_ALL,
              subresources=_SCALED),
        _core("apps", "v1", "replicasets", "ReplicaSet", short_names=("rs",), categories=_ALL, subresources=_SCALED),
        _core("apps", "v1", "statefulsets", "StatefulSet", short_names=("sts",), categories=_ALL,
              subresources=_SCALED),
    )  # fmt: skip


class Catalogue:
    """Every resource that is served now. Custom ones come and go with their CRDs."""

    def __init__(self) -> None:
        self._core = core_resources()
        self._custom: dict[str, tuple[Resource, ...]] = {}
        self._by_path: dict[tuple[str, str, str], Resource] = {}
        self.changes = 0
        self._rebuild()

    def set_custom(self, definition_name: str, resources: Iterable[Resource]) -> None:
        """Serve these resources for the CRD; none at all to stop serving it."""
        kept = tuple(resources)
        if kept:
            self._custom[definition_name] = kept
        else:
            self._custom.pop(definition_name, None)
        self._rebuild()

    def _rebuild(self) -> None:
        self.changes += 1
        self._by_path = {(entry.group, entry.version, entry.plural): entry for entry in self.all()}

    def all(self) -> list[Resource]:
        return [*self._core, *(entry for resources in self._custom.values() for entry in resources)]

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._by_path.get((group, version, plural))

    def of_place(self, place: Place) -> Resource | None:
        """Return one resource that is stored at this place."""
        return next((entry for entry in self.all() if entry.place == place), None)

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        return next((entry for entry in self.all() if entry.api_version == api_version and entry.kind == kind), None)

    def groups(self) -> dict[str, list[str]]:
        """Return the versions of each group, preferred first; the core group is ''."""
        found: dict[str, list[str]] = {}
        for entry in self.all():
            versions = found.setdefault(entry.group, [])
            if entry.version not in versions:
                versions.append(entry.version)
        return {group: sorted(versions, key=version_order) for group, versions in found.items()}


def version_order(version: str) -> tuple[int, int, int, str]:
    """Sort key that puts v2 before v1 before v1beta2 before v1alpha1 before other names."""
    stages = {"": 0, "beta": 1, "alpha": 2}
    rest = version[1:]
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    stage = rest[len(digits) :].rstrip("0123456789")
    if not version.startswith("v") or not digits or stage not in stages:
        return (9, 0, 0, version)
    minor = rest[len(digits) + len(stage) :]
    return (stages[stage], -int(digits), -int(minor or 0), version)
