"""What a node's health daemon is asked, and what its answer means. Pure: bytes in, a verdict and its words out.

The contract is that of `nvhcd`, which NVIDIA's resiliency extension asks, in Protocol Buffers:

    service nvhcd.HealthCheckService { rpc RunHealthCheck(request) returns (response) }
    request:  1 args, repeated string
    response: 1 success, bool    2 exit_code, int32    3 output, string (JSON, with fail_count and error)

The fields are read and written here rather than by the library protobuf: there are four, grpcio does not need that
library, and a training image has a release of it that other packages chose.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from unbroken.watch.errors import NotCheckedError
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError

METHOD: Final = "/nvhcd.HealthCheckService/RunHealthCheck"
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_LINE: Final = 200
"""Characters of one line; the watch reads no more of a probe."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_WANTED: Final = {1: ("success", _VARINT), 2: ("exit_code", _VARINT), 3: ("output", _BYTES)}
_NAMES: Final = {_VARINT: "a number", _FIXED64: "8 bytes", _BYTES: "a length and bytes", _FIXED32: "4 bytes"}


@dataclass(frozen=True)
class DaemonAnswer:
    """A response. What it leaves out has the usual values of Protocol Buffers."""

    success: bool = False
    exit_code: int = 0
    output: str = ""


@dataclass(frozen=True)
class DaemonVerdict:
    """What an answer says of the node."""

    is_healthy: bool
    message: str
    """One printable line, of at most MAX_LINE characters."""


def encode_request(arguments: Sequence[str]) -> bytes:
    """Return a request with these arguments of the check. Raises InputError for what is no text."""
    parts = []
    for word in arguments:
        try:
            data = word.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"ARG: want UTF-8, got {word!r}") from error
        parts.append(bytes([1 << 3 | _BYTES]) + _varint(len(data)) + data)
    return b"".join(parts)


def decode_answer(data: bytes) -> DaemonAnswer:
    """Read a response. Fields of later versions are skipped, and the last of several counts. Raises NotCheckedError."""
    if len(data) > MAX_ANSWER_BYTES:
        raise NotCheckedError(f"the daemon's answer: want at most {MAX_ANSWER_BYTES} bytes, got {len(data)}")
    success, exit_code, output = 0, 0, b""
    for field, value in _fields(data):
        match field, value:
            case 1, int():
                success = value
            case 2, int():
                exit_code = value
            case 3, bytes():
                output = value
    # As int32 is sent: its sign is that of the lower half.
    exit_code &= 0xFFFFFFFF
    return DaemonAnswer(bool(success), exit_code - (exit_code >> 31 << 32), output.decode(errors="replace"))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        field, kind = tag >> 3, tag & 7
        if not 0 < field < 1 << 29:
            raise NotCheckedError(f"the daemon's answer: want a field's number before byte {at}, got {field}")
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32, _BYTES):
            size, at = _read_varint(data, at) if kind == _BYTES else (8 if kind == _FIXED64 else 4, at)
            if size > len(data) - at:
                raise NotCheckedError(
                    f"the daemon's answer ends in field {field}: want {size} bytes, got {len(data) - at}"
                )
            value, at = data[at : at + size], at + size
        else:
            raise NotCheckedError(f"the daemon's answer: field {field} has the unknown wire type {kind}")
        name, wanted = _WANTED.get(field, ("", kind))
        if kind != wanted:
            raise NotCheckedError(
                f"the daemon's answer: want {_NAMES[wanted]} as field {field} ({name}), got {_NAMES[kind]}"
            )
        yield field, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise NotCheckedError(f"the daemon's answer: want a number at byte {at} of {len(data)}, got one without an end")


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def judge_answer(answer: DaemonAnswer) -> DaemonVerdict:
    """Return what the extension would make of it: a node is healthy if the check succeeded and counted no failure.
    Output that cannot be used changes nothing, and is said."""
    output, unused = _read_output(answer.output)
    count = output.get("fail_count")
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        if count is not None:
            unused = f"its fail_count {str(count)[:40]!r} is no number"
        count = None
    is_healthy = answer.success and not (count is not None and count > 0)
    facts = [f"exit code {answer.exit_code}"]
    facts += [] if count is None else [f"fail_count {str(count)[:20]}"]
    facts += [unused] if unused else []
    error = output.get("error")
    words = error if isinstance(error, str) else "" if is_healthy else answer.output
    text = f"the daemon's check {'passed' if is_healthy else 'failed'}: {', '.join(facts)}"
    return DaemonVerdict(is_healthy, line_of(f"{text}: {words.strip()}" if words.strip() else text))


def line_of(text: str) -> str:
    """Return text as one line that may be shown, of at most MAX_LINE characters."""
    line = printable(text[: 4 * MAX_LINE])
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}..."


def _read_output(text: str) -> tuple[dict[str, Any], str]:
    """Return the object that a check printed, and why there is none."""
    if not text.strip():
        return {}, ""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}, "its output is no JSON"
    return (found, "") if isinstance(found, dict) else ({}, "its output is no JSON object")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"want JSON, got {constant}")
