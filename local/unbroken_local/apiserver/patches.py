"""The three kinds of PATCH that change a document: JSON patch, merge patch, strategic merge patch."""

from typing import Any

import jsonpatch

from unbroken_local.apiserver.documents import Document, copy_of
from unbroken_local.apiserver.problems import ApiProblem, bad_request
from unbroken_local.apiserver.schema import child, items_of

_ORDER = "$setElementOrder/"
_DELETE_FROM = "$deleteFromPrimitiveList/"
_RETAIN = "$retainKeys"
_DIRECTIVE = "$patch"


def json_patch(document: Document, operations: Any) -> Document:
    """Return the patched document. Raises ApiProblem: 400 for a malformed patch, 422 for one that does not apply."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    if len(operations) > 10_000:
        raise ApiProblem(413, "RequestEntityTooLarge", "The allowed maximum operations in a JSON patch is 10000")
    try:
        patched = jsonpatch.JsonPatch(operations).apply(copy_of(document))
    except jsonpatch.InvalidJsonPatch as problem:
        raise bad_request(f"error decoding patch: {problem}") from problem
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError) as problem:
        message = f"the server rejected our request due to an error in our request: {problem}"
        raise ApiProblem(422, "Invalid", message) from problem
    if not isinstance(patched, dict):
        raise bad_request("error decoding patch: the result is not an object")
    return patched


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the target merged with an RFC 7386 patch."""
    if not isinstance(patch, dict):
        return copy_of(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, entry in patch.items():
        if entry is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), entry)
    return result


def strategic_merge(target: Document, patch: Document, schema: Document) -> Document:
    """Return the target merged with the patch, lists by the merge keys of the schema. Raises ApiProblem (400)."""
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {name: copy_of(entry) for name, entry in patch.items() if name != _DIRECTIVE}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"unknown patch type found: {directive}")
    result = dict(target)
    retained = patch.get(_RETAIN)
    if isinstance(retained, list):
        result = {name: entry for name, entry in result.items() if name in retained}
    for name, entry in patch.items():
        if name in (_DIRECTIVE, _RETAIN):
            continue
        if name.startswith(_DELETE_FROM):
            field = name.removeprefix(_DELETE_FROM)
            result[field] = [value for value in result.get(field) or () if value not in entry]
        elif not name.startswith(_ORDER):
            _merge_field(result, name, entry, child(schema, name) or {})
    for name in filter(lambda name: name.startswith(_ORDER), patch):
        field = name.removeprefix(_ORDER)
        _reorder(result, field, patch[name], (child(schema, field) or {}).get("x-kubernetes-patch-merge-key"))
    return result


def _merge_field(result: Document, name: str, entry: Any, shape: Document) -> None:
    current = result.get(name)
    if entry is None:
        result.pop(name, None)
    elif isinstance(entry, dict):
        merged = strategic_merge(current if isinstance(current, dict) else {}, entry, shape)
        if entry.get(_DIRECTIVE) == "delete":
            result.pop(name, None)
        else:
            result[name] = merged
    elif isinstance(entry, list) and "merge" in str(shape.get("x-kubernetes-patch-strategy", "")):
        result[name] = _merge_list(current if isinstance(current, list) else [], entry, shape)
    else:
        result[name] = copy_of(entry)


def _merge_list(current: list[Any], patch: list[Any], shape: Document) -> list[Any]:
    key = shape.get("x-kubernetes-patch-merge-key")
    if key is None:
        return [*current, *(entry for entry in patch if entry not in current)]
    if any(isinstance(entry, dict) and entry.get(_DIRECTIVE) == "replace" for entry in patch):
        return [copy_of(entry) for entry in patch if entry.get(_DIRECTIVE) != "replace"]
    items = items_of(shape)
    merged = list(current)
    for entry in patch:
        if not isinstance(entry, dict) or key not in entry:
            raise bad_request(f"map: {entry} does not contain declared merge key: {key}")
        place = next((index for index, old in enumerate(merged) if old.get(key) == entry[key]), None)
        if entry.get(_DIRECTIVE) == "delete":
            merged = [old for old in merged if old.get(key) != entry[key]]
        elif place is None:
            merged.append(strategic_merge({}, entry, items))
        else:
            merged[place] = strategic_merge(merged[place], entry, items)
    return merged


def _reorder(result: Document, field: str, order: Any, key: str | None) -> None:
    current = result.get(field)
    if not isinstance(current, list) or not isinstance(order, list):
        return
    wanted = [entry.get(key) if key and isinstance(entry, dict) else entry for entry in order]
    place = {value: number for number, value in enumerate(wanted) if not isinstance(value, (dict, list))}

    def identity(entry: Any) -> Any:
        return entry.get(key) if key and isinstance(entry, dict) else entry

    named = sorted((entry for entry in current if identity(entry) in place), key=lambda entry: place[identity(entry)])
    others = [entry for entry in current if identity(entry) not in place]
    result[field] = [*named, *others]
