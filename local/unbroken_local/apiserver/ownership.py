"""Who set which field: managedFields, and server-side apply with its conflicts.

A field set is a set of paths; a path is a tuple of `fieldsV1` steps: `f:NAME`, `k:{KEYS}` or `v:VALUE`, and `.` for a
list's entry itself.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from unbroken_local.apiserver.documents import Document, as_dict, as_list, copy_of
from unbroken_local.apiserver.kinds import Resource
from unbroken_local.apiserver.problems import Cause
from unbroken_local.apiserver.schema import child, items_of, list_type, map_keys, object_schema, resolve

FieldPath = tuple[str, ...]
Fields = frozenset[FieldPath]
_OWNED_METADATA = frozenset({"labels", "annotations", "finalizers", "ownerReferences"})
_UNSET = object()
# The field table carries no defaults; this is the only key of a core list that clients may leave out.
_CORE_DEFAULTS = {"protocol": "TCP"}


@dataclass(frozen=True, slots=True)
class Manager:
    """Whose write this is. `time`: RFC 3339."""

    name: str
    operation: Literal["Apply", "Update"]
    api_version: str
    subresource: str
    time: str

    def owns(self, entry: Document) -> bool:
        """True if the managedFields entry is this manager's."""
        return (entry.get("manager"), entry.get("operation"), entry.get("subresource", "")) == (
            self.name,
            self.operation,
            self.subresource,
        )

    def entry(self, fields: Fields) -> Document:
        written: Document = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": fields_to_json(fields),
        }
        return {**written, "subresource": self.subresource} if self.subresource else written


class ApplyConflict(Exception):
    """Fields that others own would change."""

    def __init__(self, causes: list[Cause]) -> None:
        super().__init__(causes)
        self.causes = causes


def fields_to_json(fields: Iterable[FieldPath]) -> Document:
    """Return a field set as fieldsV1."""
    tree: Document = {}
    for path in sorted(fields):
        place = tree
        for step in path:
            place = place.setdefault(step, {})
    return tree


def fields_from_json(tree: Document, path: FieldPath = ()) -> Fields:
    """Return fieldsV1 as a field set."""
    found: set[FieldPath] = set()
    for step, below in tree.items():
        if below:
            found |= fields_from_json(below, (*path, step))
        else:
            found.add((*path, step))
    return frozenset(found)


def _entry_step(entry: Any, schema: Document) -> str | None:
    """Return the step that names a list's entry, None if the list is atomic."""
    kind = list_type(schema)
    if kind == "set":
        return "v:" + json.dumps(entry, separators=(",", ":"), sort_keys=True)
    if kind != "map" or not isinstance(entry, dict):
        return None
    shapes = as_dict(items_of(schema).get("properties"))
    keys = {key: entry.get(key, resolve(shapes.get(key, {})).get("default", _CORE_DEFAULTS.get(key)))
            for key in map_keys(schema)}  # fmt: skip
    return "k:" + json.dumps(keys, separators=(",", ":"), sort_keys=True)


def leaves(value: Any, schema: Document, path: FieldPath = ()) -> dict[FieldPath, Any]:
    """Return all fields that can have an owner of their own, with their values."""
    if isinstance(value, dict) and value and schema.get("x-kubernetes-map-type") != "atomic":
        found: dict[FieldPath, Any] = {}
        for name, entry in value.items():
            found.update(leaves(entry, child(schema, name) or {}, (*path, f"f:{name}")))
        return found
    if isinstance(value, list) and list_type(schema) != "atomic":
        found = {}
        for entry in value:
            step = _entry_step(entry, schema)
            if step is None:
                return {path: value}
            if step.startswith("v:"):
                found[(*path, step)] = entry
            else:
                found[(*path, step, ".")] = True
                found.update(leaves(entry, items_of(schema), (*path, step)))
        return found or {path: value}
    return {path: value}


def owned_leaves(resource: Resource, document: Document | None, subresource: str) -> dict[FieldPath, Any]:
    """Return the leaves that a manager of this (sub)resource can own."""
    if document is None:
        return {}
    metadata = {k: v for k, v in document["metadata"].items() if k in _OWNED_METADATA}
    visible = {k: v for k, v in document.items() if k not in ("apiVersion", "kind", "metadata")}
    if resource.has_status:
        visible = {k: v for k, v in visible.items() if (k == "status") is (subresource == "status")}
    if metadata and not (subresource == "status" and resource.custom):
        visible["metadata"] = metadata
    return leaves(visible, object_schema(resource.schema)) if visible else {}


def record_update(resource: Resource, old: Document | None, new: Document, manager: Manager) -> None:
    """Write the managedFields of `new`, in place: what differs from `old` is the manager's now."""
    cleared = new["metadata"].pop("managedFields", None) in ([], [{}]) and old is not None
    entries = [] if cleared or old is None else as_list(old["metadata"].get("managedFields"))
    before = owned_leaves(resource, old, manager.subresource)
    after = owned_leaves(resource, new, manager.subresource)
    changed = frozenset(path for path, value in after.items() if before.get(path, _UNSET) != value)
    gone = frozenset(before.keys() - after.keys())
    if not changed and not gone and not cleared:
        if entries:
            new["metadata"]["managedFields"] = entries
        return
    _store(new, entries, manager, changed, gone)


def _store(new: Document, entries: list[Any], manager: Manager, changed: Fields, gone: Fields) -> None:
    written: list[Document] = []
    own = changed
    for entry in entries:
        fields = fields_from_json(as_dict(entry.get("fieldsV1")))
        if manager.owns(entry):
            own = (fields - gone) | changed
            continue
        lost = gone | changed
        kept = {**entry, "fieldsV1": fields_to_json(fields - lost)} if fields & lost else entry
        if kept["fieldsV1"]:
            written.append(kept)
    if own:
        written.append(manager.entry(own))
    if written:
        new["metadata"]["managedFields"] = written


def apply_configuration(
    resource: Resource, live: Document | None, applied: Document, manager: Manager, force: bool
) -> Document:
    """Return the live object merged with what the manager applies, its managedFields written. Raises ApplyConflict."""
    schema = object_schema(resource.schema)
    wanted = owned_leaves(resource, applied, manager.subresource)
    if live is None:
        merged = copy_of(applied)
        merged["metadata"]["managedFields"] = [manager.entry(frozenset(wanted))]
        return dict(merged)
    seen = owned_leaves(resource, live, manager.subresource)
    entries = as_list(live["metadata"].get("managedFields"))
    others = [entry for entry in entries if not manager.owns(entry)]
    changing = frozenset(path for path, value in wanted.items() if path in seen and seen[path] != value)
    if not force:
        _refuse_conflicts(others, changing)
    previous = next((fields_from_json(entry["fieldsV1"]) for entry in entries if manager.owns(entry)), frozenset())
    held = frozenset[FieldPath]().union(*(fields_from_json(as_dict(entry.get("fieldsV1"))) for entry in others))
    abandoned = previous - frozenset(wanted) - held
    merged = _merge(live, {k: v for k, v in applied.items() if k != "metadata"}, schema)
    shown = {k: v for k, v in applied["metadata"].items() if k in _OWNED_METADATA}
    merged["metadata"] = _merge(live["metadata"], shown, resolve(schema["properties"]["metadata"]))
    merged = as_dict(_without(merged, abandoned, schema))
    merged["metadata"]["managedFields"] = _applied_entries(entries, manager, frozenset(wanted), changing)
    return merged


def _refuse_conflicts(others: list[Any], changing: Fields) -> None:
    causes: list[Cause] = []
    for entry in others:
        for path in sorted(fields_from_json(as_dict(entry.get("fieldsV1"))) & changing):
            via = f' with subresource "{entry["subresource"]}"' if entry.get("subresource") else ""
            using = f" using {entry.get('apiVersion')}" if entry.get("operation") == "Update" else ""
            message = f'conflict with "{entry.get("manager")}"{via}{using}'
            causes.append(Cause("FieldManagerConflict", path_text(path), message))
    if causes:
        raise ApplyConflict(causes)


def path_text(path: FieldPath) -> str:
    """Return a path as people read it: `.spec.containers[name="a"].image`."""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            keys = ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(step[2:]).items())
            text += f"[{keys}]"
        elif step.startswith("v:"):
            text += f"[={step[2:]}]"
    return text


def _applied_entries(entries: list[Any], manager: Manager, wanted: Fields, taken: Fields) -> list[Any]:
    written: list[Any] = []
    own: Document | None = None
    for entry in entries:
        fields = fields_from_json(as_dict(entry.get("fieldsV1")))
        if manager.owns(entry):
            own = entry if fields == wanted and not taken else None
            if own is not None:
                written.append(own)
            continue
        kept = {**entry, "fieldsV1": fields_to_json(fields - taken)} if fields & taken else entry
        if kept.get("fieldsV1"):
            written.append(kept)
    if own is None:
        written.append(manager.entry(wanted))
    return written


def _merge(live: Any, applied: Any, schema: Document) -> Any:
    if isinstance(applied, dict) and isinstance(live, dict) and schema.get("x-kubernetes-map-type") != "atomic":
        result = dict(live)
        for name, entry in applied.items():
            result[name] = _merge(live.get(name), entry, child(schema, name) or {})
        return result
    if isinstance(applied, list) and isinstance(live, list) and list_type(schema) != "atomic":
        merged = {_entry_step(entry, schema): entry for entry in live}
        for entry in applied:
            step = _entry_step(entry, schema)
            merged[step] = _merge(merged.get(step), entry, items_of(schema))
        return list(merged.values())
    return copy_of(applied)


def _without(value: Any, paths: Fields, schema: Document) -> Any:
    """Return the value without the fields at these paths; objects that become empty go too."""
    if not paths:
        return value
    below: dict[str, set[FieldPath]] = {}
    for path in paths:
        below.setdefault(path[0], set()).add(path[1:])
    if isinstance(value, dict):
        return _object_without(value, below, schema)
    if isinstance(value, list):
        kept = []
        for entry in value:
            rest = below.get(_entry_step(entry, schema) or "", set())
            if () in rest or (".",) in rest:
                continue
            kept.append(_without(entry, frozenset(rest), items_of(schema)))
        return kept
    return value


def _object_without(value: Document, below: dict[str, set[FieldPath]], schema: Document) -> Document:
    result: Document = {}
    for name, entry in value.items():
        rest = below.get(f"f:{name}")
        if rest is None:
            result[name] = entry
        elif () not in rest:
            left = _without(entry, frozenset(rest), child(schema, name) or {})
            if left not in ({}, []) or entry in ({}, []):
                result[name] = left
    return result
