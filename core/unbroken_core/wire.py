"""Messages as JSON text and back. Strict: whatever is not exactly a known message is refused with WireError."""

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast

from unbroken_core import messages
from unbroken_core.errors import InputError, WireError
from unbroken_core.layers import Layer
from unbroken_core.settings import JobSettings

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message that is read. An Observation of 16,384 pods is 2.5 MB."""

T = TypeVar("T")


def _parts(message: object) -> dict[str, Any]:
    """Return what is written of a message within another one.

    Most of a worker's fields say nothing most of the time, and 64 of them come with each report of a pod: what has its
    default is left out, for whoever reads it fills it in.
    """
    values = vars(message)
    usual = _USUAL.get(type(message))
    if usual is None:
        return values
    return {name: value for name, value in values.items() if name not in usual or value != usual[name]}


_USUAL: dict[type, dict[str, Any]] = {
    kind: {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for kind in (messages.WorkerState, messages.Fault)
}
_USUAL[Layer] = {"name": "", "label": ""}
"""The layers of a script have neither; all else is always written."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_parts, check_circular=False)
"""Messages are dataclasses of JSON types, words that are strings, and other such dataclasses; none contains itself."""


def encode(message: object) -> str:
    """Return one line of JSON: {"type": class name, field: value, ...}."""
    return _ENCODER.encode({"type": type(message).__name__, **vars(message)})


def decode(text: str | bytes, expected: Any) -> Any:
    """Read one message.

    `expected` is a message class or a Union of them; a message of another type is refused.
    Raises WireError that says where and what was seen and wanted.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise WireError(f"message: want at most {MAX_MESSAGE_BYTES} bytes, got {len(text)}")
    try:
        data = _load(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message: want JSON, got {_shorten(text)}") from error
    if not isinstance(data, dict):
        raise WireError(f"message: want a JSON object, got {_shorten(text)}")
    kinds = _kinds(expected)
    name = data.pop("type", None)
    if not isinstance(name, str) or name not in kinds:
        raise WireError(f"type: want one of {sorted(kinds)}, got {_shorten(name)}")
    try:
        return _reader(kinds[name])(data)
    except _Refused:
        # Once more, to say what is wrong where.
        return _from_json(data, kinds[name], name)


def _load(text: str | bytes) -> Any:
    """Read JSON. Halves of characters, as file names that are no text have them, become question marks.

    Whatever a worker says must not break those who log it, write it down or show it.
    """
    data = json.loads(text)
    is_half_possible = b"\\ud" in text.lower() if isinstance(text, bytes) else "\\ud" in text.lower()
    if text.isascii() and not is_half_possible:
        return data
    return json.loads(json.dumps(data, ensure_ascii=False).encode(errors="replace"))


def prepare(expected: Any) -> None:
    """Do now what the first `decode` of each of these messages would do: a millisecond in the first recovery."""
    for kind in _kinds(expected).values():
        _reader(kind)


def settings_to_json(settings: JobSettings) -> str:
    """Return the text of UNBROKEN_SETTINGS."""
    return _ENCODER.encode(vars(settings))


def settings_from_json(text: str) -> JobSettings:
    """Read UNBROKEN_SETTINGS. Raises InputError that names the field."""
    try:
        return cast(JobSettings, _from_json(_load(text), JobSettings, "settings"))
    except (ValueError, RecursionError, WireError) as error:
        raise InputError(f"UNBROKEN_SETTINGS: {error}") from error


# A restart is mostly waiting for messages, so reading one is prepared once for each of its types.


class _Refused(Exception):
    """Not what was expected."""


@cache
def _kinds(expected: Any) -> dict[str, type]:
    return {kind.__name__: kind for kind in _union_members(expected)}


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what reads a value of this type, or raises _Refused; the same as `_from_json` but for the words."""
    if kind is float:
        return _read_float
    if kind in (int, str, bool):
        return _plain_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _word_reader(kind)
    return _object_reader(kind) if is_dataclass(kind) else _reader_of_parts(kind)


def _reader_of_parts(kind: Any) -> Callable[[Any], Any]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_reader(parts)
    if origin is dict:
        return _dict_reader(_reader(parts[1]))
    if origin not in (Union, types.UnionType):
        raise TypeError(f"{kind!r} is not a message type")
    (inner,) = (_reader(member) for member in parts if member is not type(None))
    return lambda data: None if data is None else inner(data)


def _plain_reader(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not kind:
            raise _Refused
        return data

    return read


def _read_float(data: Any) -> float:
    if type(data) not in (int, float) or not abs(data) < float("inf"):
        raise _Refused
    return float(data)


def _tuple_reader(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    is_uniform = len(kinds) == 2 and kinds[1] is Ellipsis
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(data: Any) -> Any:
        if type(data) is not list or not (is_uniform or len(data) == len(readers)):
            raise _Refused
        if is_uniform:
            return tuple(map(readers[0], data))
        return tuple(reader(item) for reader, item in zip(readers, data, strict=True))

    return read


def _dict_reader(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _Refused
        return {key: reader(item) for key, item in data.items()}

    return read


def _word_reader(kind: type[Enum]) -> Callable[[Any], Any]:
    words = {word.value: word for word in kind}

    def read(data: Any) -> Any:
        word = words.get(data) if type(data) is str else None
        if word is None:
            raise _Refused
        return word

    return read


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    readers = {name: _reader(hint) for name, hint in _hints(kind).items()}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _Refused
        try:
            return kind(**{name: readers[name](item) for name, item in data.items()})
        except (KeyError, TypeError):
            raise _Refused from None

    return read


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
