"""Pure: a status that the API server accepts, made from one with values that came from a rendezvous.

The API server refuses a whole status for one wrong value in it. So what is too long is cut, what is out of range is
moved to its edge, and what is of another kind is left out, with the object that cannot be without it. Fields that the
schema does not have stay: another release of the operator may have written them.
"""

import datetime
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from unbroken_operator.api.schema import structural_schema
from unbroken_operator.api.status_models import Status

MAX_INTEGER = 2**53 - 1
"""Beyond it, readers that take numbers for floats (JavaScript, Go's map of any) see another one."""
_LEFT_OUT: Any = object()
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)


def fitted(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status as the CRD's schema allows it; the same one when it does already."""
    result = _fitted_object(status, _schema())
    return {} if result is _LEFT_OUT else dict(result)


@cache
def _schema() -> Mapping[str, Any]:
    return structural_schema(Status)


def _fitted(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return what fits of a value, _LEFT_OUT for nothing."""
    match schema.get("type"):
        case "object":
            return _fitted_object(value, schema) if isinstance(value, Mapping) else _LEFT_OUT
        case "array":
            return _fitted_list(value, schema) if isinstance(value, list | tuple) else _LEFT_OUT
        case "string":
            return _fitted_text(value, schema) if isinstance(value, str) else _LEFT_OUT
        case "boolean":
            return value if isinstance(value, bool) else _LEFT_OUT
        case "integer" | "number":
            return _fitted_number(value, schema)
        case _:
            return value


def _fitted_object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    fields: Mapping[str, Any] = schema.get("properties", {})
    others = schema.get("additionalProperties")
    result = {}
    for key, item in value.items():
        inner = fields.get(key, others)
        found = item if inner is None else _fitted(item, inner)
        if found is not _LEFT_OUT:
            result[key] = found
    if any(key not in result for key in schema.get("required", ())):
        return _LEFT_OUT
    most = schema.get("maxProperties")
    return result if most is None or len(result) <= most else dict(sorted(result.items())[:most])


def _fitted_list(value: list[Any] | tuple[Any, ...], schema: Mapping[str, Any]) -> Any:
    found = [item for item in (_fitted(item, schema["items"]) for item in value) if item is not _LEFT_OUT]
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys:
        # Two of the same key are refused: the later one counts, at the place of the first.
        found = list({tuple(item.get(key) for key in keys): item for item in found}.values())
    # The newest are last.
    return found[-schema["maxItems"] :] if "maxItems" in schema else found


def _fitted_text(value: str, schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return value if value in schema["enum"] else _LEFT_OUT
    if schema.get("format") == "date-time":
        return value if is_time(value) and len(value) <= schema.get("maxLength", len(value)) else _LEFT_OUT
    if len(value) < schema.get("minLength", 0):
        return _LEFT_OUT
    return value[: schema.get("maxLength", len(value))]


def _fitted_number(value: Any, schema: Mapping[str, Any]) -> Any:
    is_whole = schema["type"] == "integer"
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        return _LEFT_OUT
    if isinstance(value, float) and not math.isfinite(value):
        return _LEFT_OUT
    least, most = schema.get("minimum", -MAX_INTEGER), schema.get("maximum", MAX_INTEGER)
    return min(max(value, least), most)


def is_time(text: str) -> bool:
    """Whether it is a time of RFC 3339."""
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
