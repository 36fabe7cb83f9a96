"""OpenAPI documents, as far as kubectl reads them: schemas for `explain` and patches, parameters for validation."""

import hashlib
from collections.abc import Iterator
from typing import Any

from unbroken_local.apiserver.documents import Document, encode
from unbroken_local.apiserver.kinds import Catalogue, Resource, core_table

_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def index(catalogue: Catalogue) -> Document:
    """Return the answer of /openapi/v3: a document for each group and version."""
    paths = {}
    for group, versions in catalogue.groups().items():
        for version in versions:
            name = f"apis/{group}/{version}" if group else f"api/{version}"
            digest = hashlib.sha256(encode(_schemas(catalogue, group, version))).hexdigest()[:32]
            paths[name] = {"serverRelativeURL": f"/openapi/v3/{name}?hash={digest}"}
    return {"paths": paths}


def document_v3(catalogue: Catalogue, group: str, version: str) -> Document | None:
    """Return the OpenAPI v3 document of a group and version, None if it is not served."""
    resources = [entry for entry in catalogue.all() if (entry.group, entry.version) == (group, version)]
    if not resources:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "unversioned"},
        "paths": {path: entry for resource in resources for path, entry in _paths(resource)},
        "components": {"schemas": _schemas(catalogue, group, version)},
    }


def document_v2(catalogue: Catalogue) -> Document:
    """Return the OpenAPI v2 document of everything."""
    definitions: Document = {}
    for group, versions in catalogue.groups().items():
        for version in versions:
            definitions.update(_schemas(catalogue, group, version, "#/definitions/"))
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": "unversioned"},
        "paths": {},
        "definitions": definitions,
    }


def schema_name(resource: Resource) -> str:
    """Return the name of the resource's schema: its group reversed, version, kind."""
    reference = resource.schema.get("$ref")
    if isinstance(reference, str):
        return reference
    return ".".join([*reversed((resource.group or "core").split(".")), resource.version, resource.kind])


def _schemas(catalogue: Catalogue, group: str, version: str, prefix: str = "#/components/schemas/") -> Document:
    schemas: Document = {}
    wanted = {_META}
    for resource in catalogue.all():
        if (resource.group, resource.version) == (group, version):
            name = schema_name(resource)
            schemas[name] = _root(resource, prefix)
            wanted.update(_references(core_table()["definitions"].get(name, {})))
    core = core_table()["definitions"]
    reached: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in reached and name in core:
            reached.add(name)
            schemas.setdefault(name, _linked(core[name], prefix))
            wanted.update(_references(core[name]))
    return schemas


def _root(resource: Resource, prefix: str) -> Document:
    own = core_table()["definitions"].get(schema_name(resource), resource.schema)
    root: Document = _linked(own, prefix)
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    properties = {**root.get("properties", {})}
    properties.setdefault("apiVersion", {"type": "string"})
    properties.setdefault("kind", {"type": "string"})
    properties["metadata"] = {"allOf": [{"$ref": prefix + _META}], "default": {}}
    return {**root, "type": "object", "properties": properties, "x-kubernetes-group-version-kind": [kind]}


def _linked(schema: Any, prefix: str, is_map: bool = False) -> Any:
    """Return the schema with its references written as links into the document."""
    if isinstance(schema, list):
        return [_linked(entry, prefix) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if not is_map and isinstance(schema.get("$ref"), str):
        linked = {name: _linked(entry, prefix) for name, entry in schema.items() if name != "$ref"}
        return {**linked, "allOf": [{"$ref": prefix + schema["$ref"]}]} if linked else {"$ref": prefix + schema["$ref"]}
    return {name: _linked(entry, prefix, not is_map and name == "properties") for name, entry in schema.items()}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for entry in schema.values():
            yield from _references(entry)
    elif isinstance(schema, list):
        for entry in schema:
            yield from _references(entry)


def _parameter(name: str, kind: str = "string") -> Document:
    return {"name": name, "in": "query", "schema": {"type": kind, "uniqueItems": True}}


_WRITE = [_parameter("dryRun"), _parameter("fieldManager"), _parameter("fieldValidation")]


def _paths(resource: Resource) -> Iterator[tuple[str, Document]]:
    base = resource.path_prefix + ("/namespaces/{namespace}" if resource.namespaced else "") + f"/{resource.plural}"
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    link = {"$ref": f"#/components/schemas/{schema_name(resource)}"}

    def operation(action: str, parameters: list[Document], *media: str) -> Document:
        made: Document = {
            "operationId": f"{action}{resource.version.capitalize()}{resource.kind}",
            "parameters": parameters,
            "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": link}}}},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": kind,
        }
        if media:
            made["requestBody"] = {"content": {name: {"schema": link} for name in media}}
        return made

    patches = ["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"]
    if not resource.custom:
        patches.append("application/strategic-merge-patch+json")
    yield base, {"get": operation("list", []), "post": operation("post", _WRITE, "application/json")}
    yield (
        base + "/{name}",
        {
            "get": operation("get", []),
            "put": operation("put", _WRITE, "application/json"),
            "patch": operation("patch", [*_WRITE, _parameter("force", "boolean")], *patches),
            "delete": operation("delete", []),
        },
    )
