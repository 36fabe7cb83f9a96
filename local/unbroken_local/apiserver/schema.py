"""Structural schemas: what a field is, which fields are unknown, which values are defaulted.

Core kinds and custom resources share one form (OpenAPI v3 with `x-kubernetes-*`); `$ref` names a core definition.
"""

from dataclasses import dataclass, field
from typing import Any

from unbroken_local.apiserver.documents import Document, copy_of
from unbroken_local.apiserver.kinds import core_table

_META = {"$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
_ANYTHING: Document = {"x-kubernetes-preserve-unknown-fields": True}
_JSON = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1."
_OPAQUE = frozenset({_JSON + "JSON", _JSON + "JSONSchemaPropsOrArray", _JSON + "JSONSchemaPropsOrBool",
                     _JSON + "JSONSchemaPropsOrStringArray", "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1",
                     "io.k8s.apimachinery.pkg.runtime.RawExtension"})  # fmt: skip
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def resolve(schema: Document) -> Document:
    """Return the schema itself, or the core definition that it refers to."""
    name = schema.get("$ref")
    if not isinstance(name, str):
        return schema
    if name in _OPAQUE:
        return _ANYTHING
    if name == _INT_OR_STRING:
        return {"x-kubernetes-int-or-string": True}
    if name == _QUANTITY:
        return {"x-kubernetes-int-or-string": True, "format": "quantity"}
    found: Document = core_table()["definitions"][name]
    return found


def object_schema(schema: Document) -> Document:
    """Return a root schema in which apiVersion, kind and metadata are those of any object."""
    own = resolve(schema)
    properties = {**(own.get("properties") or {})}
    properties.update({"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": _META})
    return {**own, "properties": properties}


def child(schema: Document, name: str) -> Document | None:
    """Return the schema of a field of an object, None if it is unknown."""
    found = (schema.get("properties") or {}).get(name)
    if found is not None:
        return resolve(found)
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        return resolve(additional)
    if additional is True or keeps_unknown(schema):
        return _ANYTHING
    return None


def keeps_unknown(schema: Document) -> bool:
    """True where fields that the schema does not name are kept."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def items_of(schema: Document) -> Document:
    found = schema.get("items")
    return resolve(found) if isinstance(found, dict) else _ANYTHING


def list_type(schema: Document) -> str:
    """Return atomic, set or map: how server-side apply sees a list."""
    return str(schema.get("x-kubernetes-list-type") or "atomic")


def map_keys(schema: Document) -> tuple[str, ...]:
    return tuple(schema.get("x-kubernetes-list-map-keys") or ())


@dataclass(slots=True)
class Findings:
    """What reading a document brought up: paths of unknown fields, and (path, seen, wanted) of wrong types."""

    unknown: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def _word(value: Any) -> str:
    kinds = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


_WANTED = {"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "array": (list,),
           "object": (dict,)}  # fmt: skip


def _has_type(value: Any, schema: Document) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        allowed = (int, str, float) if schema.get("format") == "quantity" else (int, str)
        return isinstance(value, allowed) and not isinstance(value, bool)
    kind = schema.get("type")
    if kind is None:
        return True
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _WANTED[str(kind)])


def read_core(value: Any, schema: Document, path: str, findings: Findings) -> Any:
    """Return a copy in the form of a core kind: no unknown fields, no nulls, quantities and bytes as strings."""
    if not _has_type(value, schema):
        findings.wrong.append((path, _word(value), str(schema.get("type") or "int or string")))
        return None
    if schema.get("format") == "quantity" and not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list):
        items = items_of(schema)
        return [read_core(entry, items, f"{path}[{number}]", findings) for number, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if keeps_unknown(schema) and "properties" not in schema:
        return copy_of(value)
    result: Document = {}
    for name, entry in value.items():
        below = f"{path}.{name}" if path else name
        shape = child(schema, name)
        if shape is None:
            findings.unknown.append(below)
        elif entry is not None or keeps_unknown(shape):
            result[name] = read_core(entry, shape, below, findings)
    return result


def prune(value: Any, schema: Document, path: str, findings: Findings) -> Any:
    """Return a copy of a custom resource's value without the fields that its schema does not name."""
    if isinstance(value, list):
        items = items_of(schema)
        return [prune(entry, items, f"{path}[{number}]", findings) for number, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if schema.get("x-kubernetes-embedded-resource"):
        schema = object_schema(schema)
    result: Document = {}
    for name, entry in value.items():
        below = f"{path}.{name}" if path else name
        shape = child(schema, name)
        if shape is None:
            findings.unknown.append(below)
        elif entry is None and shape is not _ANYTHING and not shape.get("nullable") and "default" not in shape:
            # The real server forgets a null that may not be there, so that clients may write one to mean "unset".
            continue
        elif name == "metadata" and shape is resolve(_META):
            result[name] = read_core(entry, shape, below, findings)
        elif keeps_unknown(shape) and "properties" not in shape and "items" not in shape:
            result[name] = copy_of(entry)
        else:
            result[name] = prune(entry, shape, below, findings)
    return result


def apply_defaults(value: Any, schema: Document) -> None:
    """Fill in the schema's defaults, in place. A null that is not nullable and has a default gives way to it."""
    if isinstance(value, list):
        items = items_of(schema)
        for entry in value:
            apply_defaults(entry, items)
    if not isinstance(value, dict):
        return
    for name, raw in (schema.get("properties") or {}).items():
        shape = resolve(raw)
        if "default" in shape and (name not in value or (value[name] is None and not shape.get("nullable"))):
            value[name] = copy_of(shape["default"])
        if name in value:
            apply_defaults(value[name], shape)
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        named = schema.get("properties") or {}
        for name, entry in value.items():
            if name not in named:
                apply_defaults(entry, resolve(additional))
