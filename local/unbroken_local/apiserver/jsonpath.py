"""The part of JSONPath that printer columns use: `.a.b`, `['a']`, `[0]`, `[*]`, `[?(@.a=="b")]`."""

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

_STEP = re.compile(
    r"""\.\.?(?P<field>[^.\[\]'"]+(?:\\\.[^.\[\]]+)*)"""
    r"""|\[['"](?P<quoted>[^'"]+)['"]\]"""
    r"""|\[(?P<index>-?\d+|\*)\]"""
    r"""|\[\?\(\s*@\.(?P<key>[\w.\-]+)\s*(?P<operator>==|!=)\s*(?P<value>"[^"]*"|'[^']*'|[^)\s]+)\s*\)\]"""
)


class Step(NamedTuple):
    """One step: kind is field, index, all or filter."""

    kind: str
    name: str
    equal: bool = True
    value: Any = None


@lru_cache(maxsize=512)
def parse(path: str) -> tuple[Step, ...] | None:
    """Return the steps of a path, None if it is not of the supported form."""
    text = path.strip().removeprefix("{").removesuffix("}").removeprefix("$").replace("\\.", "\0")
    steps: list[Step] = []
    position = 0
    while position < len(text):
        found = _STEP.match(text, position)
        if found is None:
            return None
        steps.append(_step(found))
        position = found.end()
    return tuple(steps)


def _step(found: "re.Match[str]") -> Step:
    if found["key"]:
        raw = found["value"]
        value = raw[1:-1] if raw[0] in "'\"" else json.loads(raw)
        return Step("filter", found["key"], found["operator"] == "==", value)
    if found["index"]:
        return Step("all", "*") if found["index"] == "*" else Step("index", found["index"])
    name = (found["field"] or found["quoted"]).replace("\0", ".")
    return Step("all", "*") if name == "*" else Step("field", name)


def find(document: Any, path: str) -> list[Any]:
    """Return all values at the path; empty if there are none or the path is not supported."""
    values = [document]
    for step in parse(path) or (Step("index", "no"),):
        values = [entry for value in values for entry in _take(value, step)]
    return values


def _take(value: Any, step: Step) -> list[Any]:
    if step.kind == "field":
        return [value[step.name]] if isinstance(value, dict) and step.name in value else []
    if step.kind == "all":
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    if not isinstance(value, list):
        return []
    if step.kind == "filter":
        return [entry for entry in value if (find(entry, "." + step.name) == [step.value]) is step.equal]
    try:
        return [value[int(step.name)]]
    except (IndexError, ValueError):
        return []
