"""Fields of the template that the operator reads, and that no schema types: each must have the type that a pod's has.

The API server checks them only when a pod is made, and the operator makes pods by them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken_operator.api.quantities import is_quantity

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
_RESOURCES = (
    "resources",
    "containers[].resources",
    "initContainers[].resources",
    "volumes[].ephemeral.volumeClaimTemplate.spec.resources",
)
QUANTITIES = (
    *(f"{where}.{kind}{{}}" for where in _RESOURCES for kind in ("limits", "requests")),
    "overhead{}",
    "volumes[].emptyDir.sizeLimit",
)
"""Where a pod's spec has quantities; `{}` stands for each value of a map. With one that is none no pod can be made."""
_WORDS = {int: "a whole number", dict: "an object", list: "a list"}
_MAX_SHOWN = 40


def misshapen(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a pod's spec that has another type."""
    for path, wanted in SHAPES.items():
        for where, value in _values(pod, path):
            # To Python, true is a number.
            if not isinstance(value, wanted) or isinstance(value, bool):
                yield f"{where}: must be {_WORDS[wanted]}, got {_shown(value)}"
    for path in QUANTITIES:
        for where, value in _values(pod, path):
            yield from not_a_quantity(where, value)


def not_a_quantity(where: str, value: Any) -> Iterator[str]:
    """Yield a sentence if this is no quantity."""
    if not is_quantity(value):
        yield f'{where}: must be a quantity such as "500m", "8" or "2Gi", got {_shown(value)}'


def _shown(value: Any) -> str:
    seen = repr(value)
    return seen if len(seen) <= _MAX_SHOWN else f"{seen[:_MAX_SHOWN]}..."


def _values(pod: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield what lies at a path, with its place; nothing where it, or what it would be in, is missing or of no use."""
    found: list[tuple[str, Any]] = [("", pod)]
    for part in path.split("."):
        name = part.removesuffix("[]").removesuffix("{}")
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
        if part.endswith("{}"):
            found = [
                (f"{where}.{key[:_MAX_SHOWN]}", item)
                for where, items in found
                if isinstance(items, Mapping)
                for key, item in items.items()
                if item is not None
            ]
    yield from found
