"""Bodies in Kubernetes' protobuf envelope, for the few kinds that kubectl sends in no other form.

Field numbers are those of the kinds' published protobuf definitions; a field that is not listed is refused, not lost.
"""

import base64
from dataclasses import dataclass
from typing import Any

from unbroken_local.apiserver.documents import Document
from unbroken_local.apiserver.problems import ApiProblem, bad_request, unsupported_media_type

MEDIA = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_READABLE = ["application/json", "application/yaml"]


@dataclass(frozen=True, slots=True)
class _Field:
    """`kind`: text, bytes, bool, int, texts (map of strings), blobs (map of bytes), time, or a message's name.
    `many`: the field may repeat."""

    name: str
    kind: str
    many: bool = False


def _fields(**numbers: str) -> dict[int, _Field]:
    """Return a message's fields, given as `_NUMBER="name:kind"`, with `*` behind what repeats."""
    made = {}
    for number, text in numbers.items():
        name, _, kind = text.partition(":")
        made[int(number[1:])] = _Field(name, kind.rstrip("*") or "text", kind.endswith("*"))
    return made


_MESSAGES: dict[str, dict[int, _Field]] = {
    "Meta": _fields(_1="name", _2="generateName", _3="namespace", _4="selfLink", _5="uid", _6="resourceVersion",
                    _7="generation:int", _8="creationTimestamp:time", _11="labels:texts", _12="annotations:texts",
                    _14="finalizers:text*"),
    "Phase": _fields(_1="phase"),
    "Finalizers": _fields(_1="finalizers:text*"),
    "Namespace": _fields(_1="metadata:Meta", _2="spec:Finalizers", _3="status:Phase"),
    "ConfigMap": _fields(_1="metadata:Meta", _2="data:texts", _3="binaryData:blobs", _4="immutable:bool"),
    "Secret": _fields(_1="metadata:Meta", _2="data:blobs", _3="type", _4="stringData:texts", _5="immutable:bool"),
    "ServiceAccount": _fields(_1="metadata:Meta", _4="automountServiceAccountToken:bool"),
    "ResourceAttributes": _fields(_1="namespace", _2="verb", _3="group", _4="version", _5="resource", _6="subresource",
                                  _7="name"),
    "NonResourceAttributes": _fields(_1="path", _2="verb"),
    "AccessSpec": _fields(_1="resourceAttributes:ResourceAttributes", _2="nonResourceAttributes:NonResourceAttributes"),
    "AccessStatus": _fields(_1="allowed:bool", _2="reason", _3="evaluationError", _4="denied:bool"),
    "SelfSubjectAccessReview": _fields(_1="metadata:Meta", _2="spec:AccessSpec", _3="status:AccessStatus"),
}  # fmt: skip
_KINDS = frozenset({"Namespace", "ConfigMap", "Secret", "ServiceAccount", "SelfSubjectAccessReview"})


def decode(raw: bytes) -> Document:
    """Return the body as the JSON form of its kind. Raises ApiProblem: 400 if it is malformed, 415 for other kinds."""
    if not raw.startswith(_MAGIC):
        raise bad_request("the body is not in Kubernetes' protobuf envelope")
    try:
        envelope = dict(_parts(raw[len(_MAGIC) :]))
        kind = dict(_parts(_bytes(envelope.get(1, b""))))
        name, version = _text(kind.get(2, b"")), _text(kind.get(1, b""))
        if name not in _KINDS:
            raise unsupported_media_type(_READABLE)
        return {"apiVersion": version, "kind": name, **_message(_bytes(envelope.get(2, b"")), name)}
    except (IndexError, ValueError) as problem:
        raise bad_request(f"the body is malformed protobuf: {problem}") from problem


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (raw[place] & 0x7F) << shift
        if raw[place] < 0x80:
            return value, place + 1
        place, shift = place + 1, shift + 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _parts(raw: bytes) -> list[tuple[int, int | bytes]]:
    """Return (field number, number or bytes) of each part of a message."""
    found: list[tuple[int, int | bytes]] = []
    place = 0
    while place < len(raw):
        head, place = _varint(raw, place)
        value, place = _varint(raw, place)
        if head & 7 == 0:
            found.append((head >> 3, value))
        elif head & 7 == 2 and place + value <= len(raw):
            found.append((head >> 3, raw[place : place + value]))
            place += value
        else:
            raise ValueError(f"a part of wire type {head & 7} at byte {place}")
    return found


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("want bytes, got a number")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def _message(raw: bytes, name: str) -> Document:
    document: Document = {}
    for number, value in _parts(raw):
        field = _MESSAGES[name].get(number)
        if field is None:
            raise ApiProblem(415, "UnsupportedMediaType", f"{name}: field {number} is read from JSON and YAML only")
        if field.kind in ("texts", "blobs"):
            entry = dict(_parts(_bytes(value)))
            document.setdefault(field.name, {})[_text(entry.get(1, b""))] = _value(entry.get(2, b""), field.kind)
        elif field.many:
            document.setdefault(field.name, []).append(_value(value, field.kind))
        else:
            document[field.name] = _value(value, field.kind)
    # Empty strings, zero times and empty messages are protobuf's way to say nothing.
    return {key: value for key, value in document.items() if value not in ("", None, {}, [])}


def _value(value: int | bytes, kind: str) -> Any:
    if kind in ("text", "texts"):
        return _text(value)
    if kind == "blobs":
        return base64.b64encode(_bytes(value)).decode()
    if kind == "bool":
        return bool(value)
    if kind == "int":
        return value
    if kind == "time":
        return None
    return _message(_bytes(value), kind)
