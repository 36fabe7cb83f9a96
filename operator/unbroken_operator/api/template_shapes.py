"""Fields of the template that the operator reads, and that no schema types: each must have the type that a pod's has.

The API server checks them only when a pod is made, and the operator makes pods by them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_TERMS = f"affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms"
SHAPES: Mapping[str, type] = {
    "terminationGracePeriodSeconds": int,
    "affinity": dict,
    "affinity.nodeAffinity": dict,
    f"affinity.nodeAffinity.{_REQUIRED}": dict,
    _TERMS: list,
    f"{_TERMS}[]": dict,
    f"{_TERMS}[].matchExpressions": list,
    f"affinity.nodeAffinity.{_PREFERRED}": list,
    "affinity.podAffinity": dict,
    f"affinity.podAffinity.{_PREFERRED}": list,
    "affinity.podAntiAffinity": dict,
    f"affinity.podAntiAffinity.{_PREFERRED}": list,
    **{f"{kind}[].resources": dict for kind in ("containers", "initContainers")},
    **{f"{kind}[].resources.limits": dict for kind in ("containers", "initContainers")},
    **{f"{kind}[].resources.requests": dict for kind in ("containers", "initContainers")},
}
"""Type of each by its path in a pod's spec; `[]` stands for each item of a list."""
_WORDS = {int: "a whole number", dict: "an object", list: "a list"}
_MAX_SHOWN = 40


def misshapen(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a pod's spec that has another type."""
    for path, wanted in SHAPES.items():
        for where, value in _values(pod, path):
            # To Python, true is a number.
            if not isinstance(value, wanted) or isinstance(value, bool):
                seen = repr(value)
                shown = seen if len(seen) <= _MAX_SHOWN else f"{seen[:_MAX_SHOWN]}..."
                yield f"{where}: must be {_WORDS[wanted]}, got {shown}"


def _values(pod: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield what lies at a path, with its place; nothing where it, or what it would be in, is missing or of no use."""
    found: list[tuple[str, Any]] = [("", pod)]
    for part in path.split("."):
        name = part.removesuffix("[]")
        found = [
            (f"{where}.{name}" if where else name, value[name])
            for where, value in found
            if isinstance(value, Mapping) and value.get(name) is not None
        ]
        if part.endswith("[]"):
            found = [
                (f"{where}[{index}]", item)
                for where, items in found
                if isinstance(items, list)
                for index, item in enumerate(items)
            ]
    yield from found
