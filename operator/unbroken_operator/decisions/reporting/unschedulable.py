"""Pure: why no node takes the job's pods, as far as labels, readiness and size tell, in words that say what would help.

The scheduler's own message counts nodes; it names neither the label nor the number that it missed.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.api.quantities import quantity
from unbroken_operator.decisions.reporting.condition_state import listed
from unbroken_operator.decisions.snapshot import NodeView

_MAX_SEEN = 5


def missing_on_nodes(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView], checkpoints: object = None) -> str:
    """Return what a pod of this spec requests and no node has; "" if some node meets each request by itself.

    `checkpoints`: the size limit of its checkpoints in memory, which its agent requests.
    """
    if not nodes:
        return "the cluster has no nodes"
    sizes = _sizes(pod_spec, nodes, checkpoints)
    return "; ".join((*_labels(pod_spec, nodes), *sizes, *_readiness(nodes), *_held(nodes)))


def _labels(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView]) -> Iterator[str]:
    for label, value in sorted(_mapping(pod_spec.get("nodeSelector")).items()):
        values = sorted({node.labels[label] for node in nodes.values() if label in node.labels})
        if value not in values:
            seen = f"seen {', '.join(values[:_MAX_SEEN])}" if values else "seen none"
            yield f"no node has the label {label}={value} ({seen})"


def _sizes(pod_spec: Mapping[str, Any], nodes: Mapping[str, NodeView], checkpoints: object) -> Iterator[str]:
    requests = _requests(pod_spec)
    if checkpoints is not None:
        requests["memory"] = requests.get("memory", Fraction(0)) + (quantity(checkpoints) or Fraction(0))
    for name, wanted in sorted(requests.items()):
        sizes = [node.allocatable[name] for node in nodes.values() if quantity(node.allocatable.get(name)) is not None]
        largest = max(sizes, key=lambda size: quantity(size) or Fraction(0), default="none")
        if wanted > (quantity(largest) or Fraction(0)):
            yield f"each pod needs {_number(wanted)} {name}, the largest node has {largest}"


def _readiness(nodes: Mapping[str, NodeView]) -> Iterator[str]:
    away = sorted(node.name for node in nodes.values() if not node.is_ready)
    if away:
        yield f"not ready: {listed(away)}"


def _held(nodes: Mapping[str, NodeView]) -> Iterator[str]:
    """Say which nodes the operator itself keeps pods off, and which a person does."""
    keys = {name: {key for key, _effect in node.taints} for name, node in nodes.items()}
    quarantined = sorted(name for name in nodes if layout.QUARANTINE in keys[name])
    if quarantined:
        yield f"in quarantine ({layout.QUARANTINE}): {listed(quarantined)}"
    cordoned = sorted(node.name for node in nodes.values() if node.is_cordoned)
    if cordoned:
        yield f"cordoned: {listed(cordoned)}"


def _requests(pod_spec: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return what all of the user's containers request together."""
    total: dict[str, Fraction] = {}
    containers = pod_spec.get("containers")
    for container in containers if isinstance(containers, list) else ():
        resources = _mapping(_mapping(container).get("resources"))
        # What has a limit and no request is requested as limited.
        for name, text in {**_mapping(resources.get("limits")), **_mapping(resources.get("requests"))}.items():
            total[name] = total.get(name, Fraction(0)) + (quantity(text) or Fraction(0))
    return total


def _mapping(value: object) -> Mapping[str, Any]:
    """Return what should be an object; what is another thing stays for the API server to refuse."""
    return value if isinstance(value, Mapping) else {}


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
