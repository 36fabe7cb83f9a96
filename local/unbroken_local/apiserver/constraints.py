"""Validation of a custom resource's values by its structural schema (CEL rules are in `rules`)."""

import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

from unbroken_local.apiserver import problems
from unbroken_local.apiserver.documents import Document, as_list, encode
from unbroken_local.apiserver.problems import Cause
from unbroken_local.apiserver.schema import child, items_of, list_type, map_keys, resolve

_WORDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def violations(value: Any, schema: Document, path: str) -> Iterator[Cause]:
    """Yield everything that the schema forbids in the value. `path` as in spec.replicas."""
    if value is None:
        if not schema.get("nullable") and schema.get("type") and not _is_free(schema):
            yield _wrong_type(value, schema, path)
        return
    if not _has_type(value, schema):
        yield _wrong_type(value, schema, path)
        return
    wanted = schema.get("enum")
    if wanted is not None and value not in wanted:
        yield problems.unsupported(path, value, wanted)
    if isinstance(value, str):
        yield from _string(value, schema, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _number(value, schema, path)
    elif isinstance(value, list):
        yield from _array(value, schema, path)
    elif isinstance(value, dict):
        yield from _object(value, schema, path)
    yield from _combined(value, schema, path)


def _is_free(schema: Document) -> bool:
    return bool(schema.get("x-kubernetes-preserve-unknown-fields")) and "type" not in schema


def _has_type(value: Any, schema: Document) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, (int, str)) and not isinstance(value, bool)
    wanted = schema.get("type")
    seen = _WORDS[type(value)]
    if wanted is None or seen == wanted:
        return True
    if wanted == "number":
        return seen == "integer"
    return wanted == "integer" and isinstance(value, float) and value.is_integer()


def _wrong_type(value: Any, schema: Document, path: str) -> Cause:
    wanted = "integer,string" if schema.get("x-kubernetes-int-or-string") else schema.get("type", "object")
    seen = "null" if value is None else _WORDS[type(value)]
    return problems.wrong_type(path, seen, f'{path} in body must be of type {wanted}: "{seen}"')


def _body(path: str, value: Any, detail: str) -> Cause:
    return problems.invalid_value(path, value, f"{path} in body {detail}")


@lru_cache(maxsize=512)
def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error:
        return None


def _string(value: str, schema: Document, path: str) -> Iterator[Cause]:
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    if longest is not None and len(value) > longest:
        yield problems.too_long(path, longest)
    if shortest is not None and len(value) < shortest:
        yield _body(path, value, f"should be at least {shortest} chars long")
    pattern = schema.get("pattern")
    if pattern is not None:
        compiled = _pattern(pattern)
        if compiled is not None and not compiled.search(value):
            yield _body(path, value, f"should match '{pattern}'")
    style = schema.get("format")
    if style in _FORMATS and not _FORMATS[style](value):
        yield problems.wrong_type(path, value, f'{path} in body must be of type {style}: "{value}"')


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00").replace("z", "+00:00")).tzinfo is not None
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        return False
    return True


def _parses(parser: Any) -> Any:
    def parses(text: str) -> bool:
        try:
            parser(text)
        except (ValueError, AddressValueError):
            return False
        return True

    return parses


_FORMATS: dict[str, Any] = {
    "date-time": _is_time,
    "date": _is_date,
    "ipv4": _parses(IPv4Address),
    "ipv6": _parses(IPv6Address),
    "uuid": _parses(UUID),
    "duration": re.compile(r"^([0-9]+(\.[0-9]*)?\s*(ns|us|µs|ms|s|m|h|d|w))+$|^0$").match,
}


def _number(value: float, schema: Document, path: str) -> Iterator[Cause]:
    low, high, step = schema.get("minimum"), schema.get("maximum"), schema.get("multipleOf")
    if low is not None and (value <= low if schema.get("exclusiveMinimum") else value < low):
        words = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        yield _body(path, value, f"should be {words} {low}")
    if high is not None and (value >= high if schema.get("exclusiveMaximum") else value > high):
        words = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        yield _body(path, value, f"should be {words} {high}")
    if step and value % step:
        yield _body(path, value, f"should be a multiple of {step}")
    bits = {"int32": 31, "int64": 63}.get(str(schema.get("format")))
    if bits and not -(2**bits) <= value < 2**bits:
        yield _body(path, value, f"should be of type {schema['format']}")


def _too_many(path: str, count: int, limit: int) -> Cause:
    return Cause("FieldValueTooMany", path, f"Too many: {count}: must have at most {limit} items")


def _array(value: list[Any], schema: Document, path: str) -> Iterator[Cause]:
    fewest, most = schema.get("minItems"), schema.get("maxItems")
    if most is not None and len(value) > most:
        yield _too_many(path, len(value), most)
    if fewest is not None and len(value) < fewest:
        yield _body(path, len(value), f"should have at least {fewest} items")
    items = items_of(schema)
    for number, entry in enumerate(value):
        yield from violations(entry, items, f"{path}[{number}]")
    yield from _repeated(value, schema, path)


def _repeated(value: list[Any], schema: Document, path: str) -> Iterator[Cause]:
    kind = "set" if schema.get("uniqueItems") else list_type(schema)
    if kind == "atomic":
        return
    shapes = items_of(schema).get("properties") or {}
    seen: set[bytes] = set()
    for number, entry in enumerate(value):
        identity = entry
        if kind == "map" and isinstance(entry, dict):
            identity = {key: entry.get(key, resolve(shapes.get(key, {})).get("default")) for key in map_keys(schema)}
            identity = {key: found for key, found in identity.items() if found is not None}
        text = encode(identity)
        if text in seen:
            shown = problems.shown(identity) if not isinstance(identity, dict) else text.decode()
            yield Cause("FieldValueDuplicate", f"{path}[{number}]", f"Duplicate value: {shown}")
        seen.add(text)


def _object(value: Document, schema: Document, path: str) -> Iterator[Cause]:
    for name in as_list(schema.get("required")):
        if name not in value:
            yield problems.required(f"{path}.{name}" if path else name)
    fewest, most = schema.get("minProperties"), schema.get("maxProperties")
    if most is not None and len(value) > most:
        yield _too_many(path, len(value), most)
    if fewest is not None and len(value) < fewest:
        yield _body(path, len(value), f"should have at least {fewest} properties")
    for name, entry in value.items():
        shape = child(schema, name)
        if shape is not None and not (name == "metadata" and not path):
            named = name in (schema.get("properties") or {})
            below = f"{path}.{name}" if path else name
            yield from violations(entry, shape, below if named else _map_path(path, name))


def _map_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _combined(value: Any, schema: Document, path: str) -> Iterator[Cause]:
    for part in as_list(schema.get("allOf")):
        yield from violations(value, part, path)
    alternatives = as_list(schema.get("anyOf"))
    if alternatives and not any(_fits(value, part, path) for part in alternatives):
        yield _body(path, _shown_short(value), "must validate at least one schema (anyOf)")
    exclusive = as_list(schema.get("oneOf"))
    if exclusive and sum(_fits(value, part, path) for part in exclusive) != 1:
        yield _body(path, _shown_short(value), "must validate one and only one schema (oneOf)")
    if isinstance(schema.get("not"), dict) and _fits(value, schema["not"], path):
        yield _body(path, _shown_short(value), "must not validate the schema (not)")


def _fits(value: Any, schema: Document, path: str) -> bool:
    return next(violations(value, schema, path), None) is None


def _shown_short(value: Any) -> Any:
    return _WORDS[type(value)] if isinstance(value, (dict, list)) else value
