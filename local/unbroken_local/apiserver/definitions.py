"""CustomResourceDefinitions: checked, and turned into resources that are served."""

from collections.abc import Iterator
from typing import Any

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.constraints import violations
from unbroken_local.apiserver.documents import Document, as_dict, as_list, look_up
from unbroken_local.apiserver.kinds import Column, Resource, Scale
from unbroken_local.apiserver.problems import Cause
from unbroken_local.apiserver.rules import BadRule, compile_rules, rule_violations
from unbroken_local.apiserver.schema import object_schema

CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
_AGE = Column("Age", "date", ".metadata.creationTimestamp")


def check_custom(resource: Resource, document: Document, old: Document | None) -> list[Cause]:
    """Return what the resource's schema and its rules forbid; rules are asked only when the schema holds."""
    causes = list(violations(document, object_schema(resource.schema), ""))
    if not causes and resource.rules is not None:
        causes = list(rule_violations(resource.rules, document, old, ""))
    return causes


def resources_of(definition: Document) -> list[Resource]:
    """Return what a CRD serves: one resource for each served version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            singular=names.get("singular") or names["kind"].lower(),
            kind=names["kind"],
            list_kind=names.get("listKind") or f"{names['kind']}List",
            namespaced=spec["scope"] == "Namespaced",
            schema=as_dict(look_up(version, "schema", "openAPIV3Schema")),
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            subresources=tuple(sorted(as_dict(version.get("subresources")))),
            custom=True,
            columns=_columns(version),
            scale=_scale(version),
            selectable=tuple(
                entry["jsonPath"].lstrip(".")
                for entry in as_list(version.get("selectableFields"))
                if "jsonPath" in entry
            ),
            rules=compile_rules(as_dict(look_up(version, "schema", "openAPIV3Schema"))),
        )
        for version in spec["versions"]
        if version.get("served")
    ]


def _columns(version: Document) -> tuple[Column, ...]:
    declared = [
        Column(
            entry["name"],
            entry["type"],
            entry["jsonPath"],
            entry.get("description", ""),
            entry.get("format", ""),
            entry.get("priority", 0),
        )
        for entry in as_list(version.get("additionalPrinterColumns"))
    ]
    return tuple(declared) or (_AGE,)


def _scale(version: Document) -> Scale | None:
    found = look_up(version, "subresources", "scale")
    if not isinstance(found, dict):
        return None
    return Scale(
        found["specReplicasPath"].lstrip("."),
        found["statusReplicasPath"].lstrip("."),
        str(found.get("labelSelectorPath") or "").lstrip("."),
    )


def complete_definition(document: Document, now: str) -> None:
    """Fill in names and the status that the real server's controllers would write, in place."""
    spec = document["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    spec.setdefault("conversion", {"strategy": "None"})
    stored = [version["name"] for version in spec["versions"] if version.get("storage")]
    status = as_dict(document.get("status"))
    since = {entry.get("type"): entry.get("lastTransitionTime") for entry in as_list(status.get("conditions"))}
    document["status"] = {
        "acceptedNames": dict(names),
        "conditions": [
            {
                "type": kind,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastTransitionTime": since.get(kind) or now,
            }
            for kind, reason, message in (
                ("NamesAccepted", "NoConflicts", "no conflicts found"),
                ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
            )
        ],
        "storedVersions": list(dict.fromkeys([*as_list(status.get("storedVersions")), *stored])),
    }


def check_definition(document: Document) -> list[Cause]:
    """Return what is wrong with a CRD: its names, versions and schemas."""
    return list(_definition_problems(document))


def _definition_problems(document: Document) -> Iterator[Cause]:
    spec = as_dict(document.get("spec"))
    names = as_dict(spec.get("names"))
    for field, value in (("spec.group", spec.get("group")), ("spec.names.plural", names.get("plural")),
                         ("spec.names.kind", names.get("kind")), ("spec.scope", spec.get("scope"))):  # fmt: skip
        if not value:
            yield problems.required(field)
    wanted = f"{names.get('plural')}.{spec.get('group')}"
    if document["metadata"].get("name") != wanted:
        detail = 'must be spec.names.plural+"."+spec.group'
        yield problems.invalid_value("metadata.name", document["metadata"].get("name"), detail)
    if spec.get("scope") not in ("Namespaced", "Cluster"):
        yield problems.unsupported("spec.scope", spec.get("scope"), ["Cluster", "Namespaced"])
    versions = [entry for entry in as_list(spec.get("versions")) if isinstance(entry, dict)]
    if sum(bool(entry.get("storage")) for entry in versions) != 1:
        yield problems.invalid_value("spec.versions", "", "must have exactly one version marked as storage version")
    for number, version in enumerate(versions):
        path = f"spec.versions[{number}]"
        schema = look_up(version, "schema", "openAPIV3Schema")
        if not isinstance(schema, dict):
            yield problems.required(f"{path}.schema.openAPIV3Schema", "schemas are required")
        else:
            yield from _schema_problems(schema, f"{path}.schema.openAPIV3Schema")
            try:
                compile_rules(schema)
            except BadRule as problem:
                yield problems.invalid_value(f"{path}.schema.openAPIV3Schema", "x-kubernetes-validations", str(problem))


_TYPES = ("array", "boolean", "integer", "number", "object", "string")


def _schema_problems(schema: Document, path: str) -> Iterator[Cause]:
    """Yield where the schema is not structural."""
    kind = schema.get("type")
    free = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
    if kind is None and not free:
        yield problems.required(f"{path}.type", "must not be empty for specified object fields")
    elif kind is not None and kind not in _TYPES:
        yield problems.unsupported(f"{path}.type", kind, _TYPES)
    if kind == "array" and "items" not in schema:
        yield problems.required(f"{path}.items", "must be specified")
    for name, entry in as_dict(schema.get("properties")).items():
        if path.endswith("openAPIV3Schema") and name == "metadata":
            continue
        yield from _schema_problems(entry, f"{path}.properties[{name}]")
    for keyword in ("items", "additionalProperties"):
        below: Any = schema.get(keyword)
        if isinstance(below, dict):
            yield from _schema_problems(below, f"{path}.{keyword}")
    if schema.get("x-kubernetes-list-type") == "map" and not schema.get("x-kubernetes-list-map-keys"):
        yield problems.required(
            f"{path}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map"
        )
