"""Messages as JSON text and back. Strict: whatever is not a known message, within the bounds of
`unbroken_core.protocol.bounds`, is refused with WireError.

Only a field that is not known is passed over, since the other side may be one minor release newer: what it adds, it may
leave out as well (docs/design/0009-version-skew.md). Settings are stricter: one that is not known cannot be obeyed.
"""

import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any, TypeVar, Union, cast

from unbroken_core.protocol import messages
from unbroken_core.protocol.bounds import Bound, bound_of
from unbroken_core.protocol.log_rules.rules import LogRanks, LogRule
from unbroken_core.protocol.settings import USUAL_PREFLIGHT_S, HealthMode, JobSettings, StragglerMode
from unbroken_core.vocabulary.checkpoints import Candidate, Held, MemoryStatus, Restore
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_core.vocabulary.layers import Layer

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message that is read. An Observation of 16,384 pods is 2.5 MB."""

T = TypeVar("T")


def _parts(message: object) -> dict[str, Any]:
    """Return what is written of a message within another one.

    Most of a worker's fields say nothing most of the time, and 64 of them come with each report of a pod. So fields at
    their default are left out; the reader fills them in.
    """
    values = vars(message)
    usual = _USUAL.get(type(message))
    if usual is None:
        return values
    return {name: value for name, value in values.items() if name not in usual or value != usual[name]}


_USUAL: dict[type, dict[str, Any]] = {
    kind: {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for kind in (messages.WorkerState, messages.Fault, messages.Activity, messages.GroupState)
}
_USUAL[Layer] = {"name": "", "label": ""}
"""The layers of a script have neither; all else is always written.

A field that a release adds to settings (JobSettings, Timeouts, RungBudget, Layer) belongs here, with its default: an
image of the release before knows no such field, and refuses it.
"""
_STRAGGLERS = {"stragglers": StragglerMode.REPORT, "straggler_window_s": 60.0, "pipeline_stages": 1}
_PREFLIGHT = {"preflight": HealthMode.OFF, "preflight_s": float(USUAL_PREFLIGHT_S), "preflight_pairs": False}
_USUAL |= {
    LogRule: {"within_s": None, "every_s": None, "ranks": LogRanks.FIRST},
    JobSettings: {"copies": 0, "across": "", "health": HealthMode.OBSERVE, "log_rules": ()} | _STRAGGLERS | _PREFLIGHT,
    messages.Welcome: {"copies": 0},
    Held: {"copies": (), "host": "", "port": 0, "problems": (), "disk": None, "no_room": ""},
    Candidate: {"fetches": ()},
    Restore: {"peers": ()},
    MemoryStatus: {"across": "", "disk_step": -1, "disk_every": 0, "disk_problem": ""},
    messages.PodStatus: {"unfit": ""},
    messages.Recovery: {"others": (), "taken_by": ""},
    messages.Hello: {"checkpoint_s": 0.0, "step_ago_s": 0.0, "pairs": None},
    messages.Report: {"checkpoint_s": 0.0, "paces": (), "step_ago_s": 0.0, "checkpoint_after_s": 0.0, "pairs": None},
    messages.Heartbeat: {"checkpoint_s": 0.0, "paces": (), "step_ago_s": 0.0, "checkpoint_after_s": 0.0},
    messages.TimeSpent: {"checkpoint_s": 0.0},
    messages.JobStatus: {"health": None},
}
"""Jobs without copies of checkpoints, without checkpoints on the disk, or without any, say not one byte of them."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_parts, check_circular=False)
"""Messages are dataclasses of JSON types, words that are strings, and other such dataclasses; none contains itself."""


def encode(message: object) -> str:
    """Return one line of JSON: {"type": class name, field: value, ...}."""
    parts = {"type": type(message).__name__, **_parts(message)}
    if type(message) is not messages.Plan or message.repair is None:
        return _ENCODER.encode(parts)
    del parts["repair"]
    return f'{_ENCODER.encode(parts)[:-1]},"repair":{_encode_repair(message.repair)}}}'


@lru_cache(maxsize=1)
def _encode_repair(repair: messages.Repair) -> str:
    """Return the JSON of what is the same in the plans of all pods."""
    return _ENCODER.encode(_parts(repair))


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
        return _reader(kinds[name], False)(data)
    except _Refused as refused:
        raise WireError(f"{name}{refused.where}: {refused.text}") from None


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
        _reader(kind, False)


def settings_to_json(settings: JobSettings) -> str:
    """Return the text of UNBROKEN_SETTINGS."""
    return _ENCODER.encode(_parts(settings))


def settings_from_json(text: str) -> JobSettings:
    """Read UNBROKEN_SETTINGS. Raises InputError that names the field."""
    try:
        return cast(JobSettings, _reader(JobSettings, True)(_load(text)))
    except _Refused as refused:
        raise InputError(f"UNBROKEN_SETTINGS: settings{refused.where}: {refused.text}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"UNBROKEN_SETTINGS: {error}") from error


# A restart is mostly waiting for messages, so reading one is prepared once for each of its types. Where something is
# wrong is found by looking again: nothing is noted on the way while all is well.


class _Refused(Exception):
    """Not what was wanted: why, and where in the message."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.where = where
        """Path from the value that was read, such as `.workers[3].phase`; "" for the value itself."""


def _unlike(wanted: str, data: Any) -> _Refused:
    return _Refused(f"want {wanted}, got {_shorten(data)}")


@cache
def _kinds(expected: Any) -> dict[str, type]:
    return {kind.__name__: kind for kind in _union_members(expected)}


@cache
def _reader(kind: Any, refuses_unknown: bool) -> Callable[[Any], Any]:
    """Return what reads a value of this type, or raises _Refused; unknown fields are refused, or passed over."""
    if kind is float:
        return _read_float
    if kind in (int, str, bool):
        return _plain_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _word_reader(kind)
    if is_dataclass(kind):
        return _object_reader(kind, refuses_unknown)
    return _reader_of_parts(kind, refuses_unknown)


def _reader_of_parts(kind: Any, refuses_unknown: bool) -> Callable[[Any], Any]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        is_uniform = len(parts) == 2 and parts[1] is Ellipsis
        return _tuple_reader([_reader(part, refuses_unknown) for part in parts if part is not Ellipsis], is_uniform)
    if origin is dict:
        return _dict_reader(_reader(parts[1], refuses_unknown))
    if origin not in (Union, types.UnionType):
        raise TypeError(f"{kind!r} is not a message type")
    (inner,) = (_reader(member, refuses_unknown) for member in parts if member is not type(None))
    return lambda data: None if data is None else inner(data)


def _plain_reader(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not kind:
            raise _unlike(f"a JSON {kind.__name__}", data)
        return data

    return read


def _read_float(data: Any) -> float:
    if type(data) not in (int, float) or not abs(data) <= sys.float_info.max:
        raise _unlike("a finite number", data)
    return float(data)


def _tuple_reader(readers: list[Callable[[Any], Any]], is_uniform: bool) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _unlike("a list", data)
        if not is_uniform and len(data) != len(readers):
            raise _unlike(f"a list of {len(readers)}", data)
        try:
            if is_uniform:
                return tuple(map(readers[0], data))
            return tuple(reader(item) for reader, item in zip(readers, data, strict=True))
        except _Refused as refused:
            steps = (f"[{index}]" for index in range(len(data)))
            present = readers * len(data) if is_uniform else readers
            raise _located(refused, zip(steps, present, data, strict=True)) from None

    return read


def _dict_reader(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _unlike("an object", data)
        try:
            return {key: reader(item) for key, item in data.items()}
        except _Refused as refused:
            raise _located(refused, ((f"[{key}]", reader, item) for key, item in data.items())) from None

    return read


def _bounded(reader: Callable[[Any], Any], bound: Bound | None) -> Callable[[Any], Any]:
    if bound is None:
        return reader
    fault_of: Callable[[Any], str] = bound.fault

    def read(data: Any) -> Any:
        value = reader(data)
        if value is None:
            return None
        # Words are texts from a closed list.
        wanted = "" if isinstance(value, Enum) else fault_of(value)
        if wanted:
            raise _unlike(wanted, len(data) if isinstance(data, (list, dict)) else data)
        return value

    return read


def _word_reader(kind: type[Enum]) -> Callable[[Any], Any]:
    words = {word.value: word for word in kind}

    def read(data: Any) -> Any:
        word = words.get(data) if type(data) is str else None
        if word is None:
            raise _unlike(f"one of {sorted(words)}", data)
        return word

    return read


def _object_reader(kind: Any, refuses_unknown: bool) -> Callable[[Any], Any]:
    readers = {
        name: _bounded(_reader(hint, refuses_unknown), bound_of(kind, name)) for name, hint in _hints(kind).items()
    }

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _unlike("an object", data)
        if not data.keys() <= readers.keys():
            if refuses_unknown:
                unknown = min(data.keys() - readers.keys())
                raise _Refused(f"unknown field; want only {sorted(readers)}", f".{unknown[:80]}")
            data = {name: item for name, item in data.items() if name in readers}
        try:
            return kind(**{name: readers[name](item) for name, item in data.items()})
        except _Refused as error:
            raise _located(error, ((f".{name}", readers[name], item) for name, item in data.items())) from None
        except TypeError as error:
            raise _Refused(str(error).replace(f"{kind.__name__}.__init__() ", "")) from None

    return read


def _located(error: Exception, parts: Iterable[tuple[str, Callable[[Any], Any], Any]]) -> Exception:
    """Return the refusal of the first part that is refused, with the way to it; `parts`: step, reader and data."""
    for step, reader, item in parts:
        try:
            reader(item)
        except _Refused as refused:
            return _Refused(refused.text, f"{step}{refused.where}")
    return error


def _shorten(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _union_members(kind: Any) -> tuple[type, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return {field.name: typing.get_type_hints(kind, vars(messages))[field.name] for field in fields(kind)}
