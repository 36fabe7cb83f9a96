"""What is served: groups, versions, resources, in the old form and in the aggregated one."""

from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.kinds import Catalogue, Resource

_SUBRESOURCE_VERBS = {"status": ["get", "patch", "update"], "scale": ["get", "patch", "update"], "log": ["get"],
                      "binding": ["create"], "eviction": ["create"], "finalize": ["update"]}  # fmt: skip
_SUBRESOURCE_KINDS = {"scale": ("autoscaling", "v1", "Scale"), "eviction": ("policy", "v1", "Eviction"),
                      "binding": ("", "v1", "Binding")}  # fmt: skip
VERSION: Document = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0-unbroken",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "cpython",
    "platform": "any",
}


def api_versions(address: str) -> Document:
    """Return the answer of /api."""
    return {"kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]}  # fmt: skip


def group_list(catalogue: Catalogue) -> Document:
    """Return the answer of /apis."""
    groups = [_group(name, versions) for name, versions in sorted(catalogue.groups().items()) if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group(catalogue: Catalogue, name: str) -> Document | None:
    """Return the answer of /apis/NAME, None if there is no such group."""
    versions = catalogue.groups().get(name)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, versions)} if versions and name else None


def _group(name: str, versions: list[str]) -> Document:
    entries = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": entries, "preferredVersion": entries[0]}


def resource_list(catalogue: Catalogue, group_name: str, version: str) -> Document | None:
    """Return the answer of /api/v1 or /apis/GROUP/VERSION, None if it is not served."""
    resources = [entry for entry in catalogue.all() if (entry.group, entry.version) == (group_name, version)]
    if not resources:
        return None
    entries = [form for resource in resources for form in _entries(resource)]
    served = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": served, "resources": entries}


def _entries(resource: Resource) -> list[Document]:
    main: Document = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if resource.categories:
        main["categories"] = list(resource.categories)
    return [main, *(_subresource_entry(resource, name) for name in resource.subresources)]


def _subresource_entry(resource: Resource, name: str) -> Document:
    entry: Document = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _SUBRESOURCE_VERBS[name],
    }
    if name in _SUBRESOURCE_KINDS:
        group_name, version, kind = _SUBRESOURCE_KINDS[name]
        entry.update({"kind": kind, "group": group_name, "version": version})
    return entry


def aggregated(catalogue: Catalogue, core: bool) -> Document:
    """Return the APIGroupDiscoveryList of /api (`core`) or /apis."""
    items = []
    for name, versions in sorted(catalogue.groups().items()):
        if (name == "") is core:
            entries = [
                {
                    "version": version,
                    "freshness": "Current",
                    "resources": [
                        _aggregated_entry(resource)
                        for resource in catalogue.all()
                        if (resource.group, resource.version) == (name, version)
                    ],
                }
                for version in versions
            ]
            items.append({"metadata": {"name": name} if name else {}, "versions": entries})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _aggregated_entry(resource: Resource) -> Document:
    own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    entry: Document = {
        "resource": resource.plural,
        "responseKind": own,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(resource.verbs),
        "shortNames": list(resource.short_names),
        "categories": list(resource.categories),
    }
    subresources = []
    for name in resource.subresources:
        group_name, version, kind = _SUBRESOURCE_KINDS.get(name, (resource.group, resource.version, resource.kind))
        kinds = {"group": group_name, "version": version, "kind": kind}
        subresources.append({"subresource": name, "responseKind": kinds, "verbs": _SUBRESOURCE_VERBS[name]})
    return {**entry, "subresources": subresources} if subresources else entry
