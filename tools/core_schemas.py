"""Write the field table of the built-in API server: names, types, list and merge keys of the core kinds, no prose.

    python tools/core_schemas.py KUBECONFIG [KUBECONFIG...] > local/unbroken_local/apiserver/core_schemas.json

Asks running API servers for their OpenAPI; of a kind that several know, the first one's counts.
"""

import json
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOTS = {
    ("", "v1"): [
        "Binding",
        "ConfigMap",
        "Endpoints",
        "Event",
        "Namespace",
        "Node",
        "PersistentVolumeClaim",
        "Pod",
        "Secret",
        "Service",
        "ServiceAccount",
    ],
    ("apps", "v1"): ["DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"],
    ("batch", "v1"): ["Job"],
    ("coordination.k8s.io", "v1"): ["Lease"],
    ("discovery.k8s.io", "v1"): ["EndpointSlice"],
    ("events.k8s.io", "v1"): ["Event"],
    ("networking.k8s.io", "v1"): ["NetworkPolicy"],
    ("policy", "v1"): ["PodDisruptionBudget"],
    ("rbac.authorization.k8s.io", "v1"): ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"],
    ("scheduling.k8s.io", "v1"): ["PriorityClass"],
    ("apiextensions.k8s.io", "v1"): ["CustomResourceDefinition"],
}
KEPT = (
    "$ref",
    "type",
    "format",
    "properties",
    "items",
    "additionalProperties",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-patch-merge-key",
    "x-kubernetes-patch-strategy",
)


def definitions_of(kubeconfig: Path) -> dict[str, Any]:
    """Return the definitions of the server's OpenAPI v2 document."""
    config = json.loads(kubeconfig.read_text())
    request = urllib.request.Request(
        f"{config['clusters'][0]['cluster']['server']}/openapi/v2",
        headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}", "Accept": "application/json"},
    )
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(request) as reply:
        document: dict[str, Any] = json.load(reply)
    definitions: dict[str, Any] = document["definitions"]
    return definitions


def stripped(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without its prose."""
    kept = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("default"):
        kept["default"] = schema["default"]
    if "$ref" in kept:
        kept["$ref"] = kept["$ref"].removeprefix("#/definitions/")
    if "properties" in kept:
        kept["properties"] = {name: stripped(entry) for name, entry in kept["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = stripped(kept[key])
    return kept


def references(schema: Any) -> Iterator[str]:
    """Yield the names of all definitions that the schema names."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for entry in schema.values():
            yield from references(entry)


def table(sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {"kinds": {"group/version/Kind": definition}, "definitions": {...}} of all roots."""
    merged: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for definitions in sources:
        for name, schema in definitions.items():
            merged.setdefault(name, stripped(schema))
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                kinds.setdefault(f"{kind['group']}/{kind['version']}/{kind['kind']}", name)
    wanted = {f"{group}/{version}/{kind}" for (group, version), names in ROOTS.items() for kind in names}
    reached: set[str] = set()
    waiting = [kinds[entry] for entry in wanted]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(references(merged[name]))
    return {
        "kinds": {entry: kinds[entry] for entry in sorted(wanted)},
        "definitions": {name: merged[name] for name in sorted(reached)},
    }


if __name__ == "__main__":
    json.dump(table([definitions_of(Path(path)) for path in sys.argv[1:]]), sys.stdout, indent=0, sort_keys=True)
    sys.stdout.write("\n")
