"""Messages from a source of randomness: mostly sound, often at an edge, sometimes nonsense.

The source is any `random.Random`, so that Hypothesis, atheris and a seed can each be one.
"""

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from random import Random
from typing import Any

from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import Bound, Items, Number, Text, bound_of

_NONSENSE: tuple[Any, ...] = (None, True, -1, 1 << 70, -(1 << 63), 1e308, "", "x", "\0", "\udcff", "a\nb", [], [[]], {})
_TEXTS = ("", "a", "rack-1", "10.0.0.1", "é", "\x1b[31m", "x" * 40)


def spoilt_json(source: Random, data: Any) -> Any:
    """Return JSON of which one part, however deep, is something else, missing, or more; it is changed in place."""
    if not isinstance(data, (dict, list)) or not data or source.random() < 0.2:
        return source.choice(_NONSENSE)
    key: Any = source.choice(list(data)) if isinstance(data, dict) else source.randrange(len(data))
    change = source.random()
    if change < 0.6:
        data[key] = spoilt_json(source, data[key])
    elif change < 0.8:
        del data[key]
    elif isinstance(data, dict):
        data[source.choice(_TEXTS)] = source.choice(_NONSENSE)
    else:
        data.extend([data[key]] * source.choice((1, 1, 100)))
    return data


def spoilt_bytes(source: Random, content: bytes) -> bytes:
    """Return it with some bytes that are others, missing, or repeated."""
    data = bytearray(content)
    for _ in range(source.choice((0, 1, 1, 4))):
        place = source.randrange(len(data)) if data else 0
        what = source.random()
        if what < 0.5 and data:
            data[place] = source.randrange(256)
        elif what < 0.75:
            del data[place : place + source.choice((1, 10, 1000))]
        else:
            data[place:place] = data[place : place + 10] * source.choice((1, 50))
    return bytes(data)


class Speaker:
    """Makes messages; `usual` are values that fields have most of the time, by name."""

    def __init__(self, source: Random, usual: Mapping[str, tuple[Any, ...]]) -> None:
        self.source = source
        self.usual = usual

    def say(self, *kinds: type) -> str:
        """Return the text of a message of one of these types."""
        source = self.source
        kind = source.choice(kinds)
        data = {"type": kind.__name__, **self._object(kind)}
        if source.random() < 0.08:
            data = spoilt_json(source, data)
        text = json.dumps(data, ensure_ascii=source.random() < 0.5)
        if source.random() < 0.01:
            return text[: source.randrange(len(text))]
        return text

    def repeat(self, message: object, changes: Mapping[str, Any] | None = None) -> str:
        """Return the text of this message, now and then with a part that is something else."""
        data = {**json.loads(wire.encode(message)), **(changes or {})}
        return json.dumps(spoilt_json(self.source, data) if self.source.random() < 0.1 else data)

    def _object(self, kind: Any) -> dict[str, Any]:
        found = {}
        for name, hint, has_default, bound in _parts(kind):
            usual = self.usual.get(name)
            if usual and self.source.random() < 0.9:
                found[name] = self.source.choice(usual)
            elif not has_default or self.source.random() < 0.3:
                found[name] = self._value(hint, bound)
        return found

    def _value(self, hint: Any, bound: Bound | None) -> Any:
        source = self.source
        if typing.get_args(hint):
            return self._container(typing.get_origin(hint), typing.get_args(hint), bound)
        plain: dict[Any, Callable[[], Any]] = {
            bool: lambda: source.random() < 0.5,
            int: lambda: self._number(bound),
            float: lambda: source.choice((0.0, 0.5, 3.0, 1e9, float(self._number(bound)) % 1e12)),
            str: lambda: self._text(bound),
        }
        if hint in plain:
            return plain[hint]()
        return source.choice(list(hint)).value if issubclass(hint, Enum) else self._object(hint)

    def _number(self, bound: Bound | None) -> int:
        source = self.source
        if isinstance(bound, Number) and source.random() < 0.2:
            return int(source.choice((bound.low, bound.high, bound.low - 1, bound.high + 1, bound.high // 2)))
        return source.choice((-1, 0, 0, 1, 1, 2, 3, source.randrange(100)))

    def _text(self, bound: Bound | None) -> str:
        source = self.source
        if isinstance(bound, Text) and source.random() < 0.03:
            return "x" * (bound.most + source.choice((0, 1)))
        return source.choice(_TEXTS)

    def _container(self, origin: Any, arguments: tuple[Any, ...], bound: Bound | None) -> Any:
        source = self.source
        inner = bound
        if isinstance(bound, Items):
            inner = source.choice(bound.leaves) if bound.leaves else None
        if origin is tuple and arguments[-1] is Ellipsis:
            return [self._value(arguments[0], inner) for _ in range(self._length(bound))]
        if origin is tuple:
            return [self._value(part, inner) for part in arguments]
        if origin is dict:
            return {f"k{n}": self._value(arguments[1], inner) for n in range(self._length(bound))}
        if source.random() < 0.3:
            return None
        return self._value(next(part for part in arguments if part is not type(None)), bound)

    def _length(self, bound: Bound | None) -> int:
        if isinstance(bound, Items) and bound.most <= 64 and self.source.random() < 0.02:
            return bound.most + self.source.choice((0, 1))
        return self.source.choice((0, 1, 1, 2, 2, 3))


@cache
def _parts(kind: Any) -> list[tuple[str, Any, bool, Bound | None]]:
    assert is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    return [
        (field.name, hints[field.name], field.default is not MISSING, bound_of(typing.cast(type, kind), field.name))
        for field in fields(kind)
    ]
