"""Strategies for messages: any value of their types that is within the bounds, the outermost ones included."""

import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from unbroken_core.protocol.bounds import Bound, Items, Number, Text, bound_of

_UNBOUNDED: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63),
    str: st.text(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def values_of(kind: Any, *bounds: Bound) -> st.SearchStrategy[Any]:
    """Return a strategy for any type that messages are made of."""
    if kind in _UNBOUNDED:
        return _plain_values(kind, bounds)
    if typing.get_args(kind):
        return _containers(typing.get_origin(kind), typing.get_args(kind), bounds)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    assert isinstance(kind, type)
    assert is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    build: Callable[..., Any] = kind
    parts = {}
    for field in fields(kind):
        bound = bound_of(kind, field.name)
        parts[field.name] = values_of(hints[field.name], *([bound] if bound is not None else []))
    return st.builds(build, **parts)


def _plain_values(kind: Any, bounds: tuple[Bound, ...]) -> st.SearchStrategy[Any]:
    for bound in bounds:
        if isinstance(bound, Number) and kind is int:
            return st.integers(int(bound.low), int(bound.high))
        if isinstance(bound, Number) and kind is float:
            return st.floats(bound.low, bound.high)
        if isinstance(bound, Text) and kind is str:
            return st.from_regex(bound.pattern, fullmatch=True) if bound.pattern else st.text(max_size=8)
    return _UNBOUNDED[kind]


def _containers(origin: Any, arguments: tuple[Any, ...], bounds: tuple[Bound, ...]) -> st.SearchStrategy[Any]:
    leaves = tuple(leaf for bound in bounds if isinstance(bound, Items) for leaf in bound.leaves)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0], *(leaves or bounds)), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(part, *(leaves or bounds)) for part in arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=4), values_of(arguments[1], *leaves), max_size=2)
    return st.one_of(st.none(), *(values_of(part, *bounds) for part in arguments if part is not type(None)))
