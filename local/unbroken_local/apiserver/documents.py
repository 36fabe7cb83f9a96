"""JSON documents as Python values, and the few ways in which all modules read them."""

import json
from datetime import datetime, timezone
from typing import Any

Document = dict[str, Any]


def copy_of(value: Any) -> Any:
    """Return a deep copy of a JSON value (faster than copy.deepcopy)."""
    if isinstance(value, dict):
        return {key: copy_of(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [copy_of(entry) for entry in value]
    return value


def look_up(document: Any, *keys: str) -> Any:
    """Return the value below nested objects, None where a key is missing or its parent is no object."""
    for key in keys:
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return document


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> Document:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def encode(value: Any) -> bytes:
    """Return the compact JSON text in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def time_text(moment_s: float) -> str:
    """Return RFC 3339 in UTC with whole seconds, as metav1.Time is written. `moment_s`: seconds since the epoch."""
    return datetime.fromtimestamp(moment_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_value(text: str) -> float:
    """Return seconds since the epoch. Raises ValueError if the text is no RFC 3339 time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
