"""Why torch finds no names for what a state holds: it joins the keys on the way to each value by dots."""

from collections.abc import Mapping
from typing import Any

_TWICE = "duplicated flatten key "
_MOST_SHOWN = 200


def why_without_names(values: Mapping[str, Any], error: Exception) -> str:
    """Return which values torch refuses with this error, and what to do; "" for an error of another kind."""
    if isinstance(error, RecursionError):
        path = _path_into_itself(values)
        if path is None:
            return "state: want dictionaries and lists that are less deep, got ones at which Python's stack ends"
        return f"{_name(path)[:_MOST_SHOWN]}: want values that end, got a dictionary or list that contains itself"
    name = str(error).removeprefix(_TWICE)
    if name == str(error):
        return ""
    paths = [repr(list(path))[:_MOST_SHOWN] for path in _paths_of(values, name)]
    where = f", the keys {' and '.join(paths)}" if len(paths) > 1 else ""
    return f"{name}: want one value of this name, got two{where}: names are keys joined by dots, so rename one of them"


def _path_into_itself(values: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the way to a dictionary or list that lies within itself; None where there is none."""
    left: list[tuple[tuple[Any, ...], Any, frozenset[int]]] = [((), values, frozenset())]
    seen: set[int] = set()
    while left:
        path, one, around = left.pop()
        if id(one) in around:
            return path
        if id(one) not in seen:
            seen.add(id(one))
            inside = around | {id(one)}
            left += [((*path, key), value, inside) for key, value in _parts(one) if isinstance(value, Mapping | list)]
    return None


def _paths_of(values: Mapping[str, Any], name: str) -> list[tuple[Any, ...]]:
    """Return the ways to all that has this name."""
    found: list[tuple[Any, ...]] = []
    left: list[tuple[tuple[Any, ...], Any]] = [((), values)]
    while left:
        path, one = left.pop()
        if path and _name(path) == name:
            found.insert(0, path)
        elif not path or name.startswith(f"{_name(path)}."):
            left += [((*path, key), value) for key, value in _parts(one)]
    return found


def _parts(one: object) -> list[tuple[Any, Any]]:
    if isinstance(one, Mapping):
        return list(one.items())
    return list(enumerate(one)) if isinstance(one, list) else []


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
