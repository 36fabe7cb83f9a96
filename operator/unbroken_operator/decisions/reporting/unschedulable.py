"""Pure: why no node takes the job's pods, as far as labels, readiness and size tell, in words that say what would help.

The scheduler's own message counts nodes; it names neither the label nor the number that it missed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from unbroken_operator.decisions.snapshot import NodeView

_MAX_SEEN = 5
_UNITS = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_UNITS = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([a-zA-Z]{0,2})")


def missing_on_nodes(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView]) -> str:
    """Return what a pod of this spec requests and no node has; "" if some node meets each request by itself."""
    if not nodes:
        return "the cluster has no nodes"
    return "; ".join((*_labels(pod_spec, nodes), *_sizes(pod_spec, nodes), *_readiness(nodes)))


def _labels(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView]) -> Iterator[str]:
    for label, value in sorted((pod_spec.get("nodeSelector") or {}).items()):
        values = sorted({node.labels[label] for node in nodes.values() if label in node.labels})
        if value not in values:
            seen = f"seen {', '.join(values[:_MAX_SEEN])}" if values else "seen none"
            yield f"no node has the label {label}={value} ({seen})"


def _sizes(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView]) -> Iterator[str]:
    for name, wanted in sorted(_requests(pod_spec).items()):
        sizes = [node.allocatable[name] for node in nodes.values() if quantity(node.allocatable.get(name)) is not None]
        largest = max(sizes, key=lambda size: quantity(size) or Fraction(0), default="none")
        if wanted > (quantity(largest) or Fraction(0)):
            yield f"each pod needs {_number(wanted)} {name}, the largest node has {largest}"


def _readiness(nodes: Mapping[str, NodeView]) -> Iterator[str]:
    away = sorted(node.name for node in nodes.values() if not node.is_ready)
    if away:
        more = f" and {len(away) - _MAX_SEEN} more" if len(away) > _MAX_SEEN else ""
        yield f"not ready: {', '.join(away[:_MAX_SEEN])}{more}"


def _requests(pod_spec: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return what all of the user's containers request together."""
    total: dict[str, Fraction] = {}
    containers: Sequence[Mapping[str, Any]] = pod_spec.get("containers") or ()
    for container in containers:
        resources = container.get("resources") or {}
        # What has a limit and no request is requested as limited.
        for name, text in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, Fraction(0)) + (quantity(text) or Fraction(0))
    return total


def quantity(text: object) -> Fraction | None:
    """Return the value of a Kubernetes quantity such as "500m" or "2Gi"; None for what is none."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, unit = Fraction(match[1]), match[2]
    if unit in _BINARY_UNITS:
        return number * Fraction(1024) ** (_BINARY_UNITS.index(unit) + 1)
    return number * Fraction(10) ** _UNITS[unit] if unit in _UNITS else None


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
