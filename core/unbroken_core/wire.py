"""Messages as JSON text and back. Strict: whatever is not exactly a known message is refused with WireError."""

import json
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast

from unbroken_core import messages
from unbroken_core.errors import InputError, WireError
from unbroken_core.settings import JobSettings

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message that is read. An Observation of 16,384 pods is 2.5 MB."""

T = TypeVar("T")


def encode(message: object) -> str:
    """Return one line of JSON: {"type": class name, field: value, ...}."""
    return json.dumps({"type": type(message).__name__, **_to_json(message)}, separators=(",", ":"))


def decode(text: str | bytes, expected: Any) -> Any:
    """Read one message.

    `expected` is a message class or a Union of them; a message of another type is refused.
    Raises WireError that says where and what was seen and wanted.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise WireError(f"message: want at most {MAX_MESSAGE_BYTES} bytes, got {len(text)}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message: want JSON, got {_shorten(text)}") from error
    if not isinstance(data, dict):
        raise WireError(f"message: want a JSON object, got {_shorten(text)}")
    kinds = {kind.__name__: kind for kind in _union_members(expected)}
    name = data.pop("type", None)
    if not isinstance(name, str) or name not in kinds:
        raise WireError(f"type: want one of {sorted(kinds)}, got {_shorten(name)}")
    return _from_json(data, kinds[name], name)


def settings_to_json(settings: JobSettings) -> str:
    """Return the text of UNBROKEN_SETTINGS."""
    return json.dumps(_to_json(settings), separators=(",", ":"))


def settings_from_json(text: str) -> JobSettings:
    """Read UNBROKEN_SETTINGS. Raises InputError that names the field."""
    try:
        return cast(JobSettings, _from_json(json.loads(text), JobSettings, "settings"))
    except (ValueError, WireError) as error:
        raise InputError(f"UNBROKEN_SETTINGS: {error}") from error


def _to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value


def _from_json(data: Any, kind: Any, where: str) -> Any:
    if kind in (int, str, bool, float):
        return _plain(data, kind, where)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional(data, kind, where)
    if origin is tuple:
        return _tuple(data, typing.get_args(kind), where)
    if origin is dict:
        _want(isinstance(data, dict), "an object", data, where)
        value_kind = typing.get_args(kind)[1]
        return {key: _from_json(item, value_kind, f"{where}[{key}]") for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = {word.value: word for word in kind}
        _want(isinstance(data, str) and data in words, f"one of {sorted(words)}", data, where)
        return words[data]
    if is_dataclass(kind):
        return _object(data, kind, where)
    raise TypeError(f"{where}: {kind!r} is not a message type")


def _plain(data: Any, kind: Any, where: str) -> Any:
    is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if kind is float:
        _want(is_number and abs(data) < float("inf"), "a finite number", data, where)
        return float(data)
    is_right = (is_number and isinstance(data, int)) if kind is int else isinstance(data, kind)
    _want(is_right, f"a JSON {kind.__name__}", data, where)
    return data


def _optional(data: Any, kind: Any, where: str) -> Any:
    if data is None:
        return None
    (inner,) = (member for member in typing.get_args(kind) if member is not type(None))
    return _from_json(data, inner, where)


def _tuple(data: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _want(isinstance(data, list), "a list", data, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_from_json(item, kinds[0], f"{where}[{index}]") for index, item in enumerate(data))
    _want(len(data) == len(kinds), f"a list of {len(kinds)}", data, where)
    return tuple(
        _from_json(item, kind, f"{where}[{index}]") for index, (item, kind) in enumerate(zip(data, kinds, strict=True))
    )


def _object(data: Any, kind: Any, where: str) -> Any:
    _want(isinstance(data, dict), "an object", data, where)
    hints = _hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise WireError(f"{where}.{unknown[0]}: unknown field; want only {sorted(hints)}")
    values = {name: _from_json(item, hints[name], f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise WireError(f"{where}: {str(error).replace(f'{kind.__name__}.__init__() ', '')}") from error


def _want(is_right: bool, wanted: str, data: Any, where: str) -> None:
    if not is_right:
        raise WireError(f"{where}: want {wanted}, got {_shorten(data)}")


def _shorten(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _union_members(kind: Any) -> tuple[type, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return {field.name: typing.get_type_hints(kind, vars(messages))[field.name] for field in fields(kind)}
