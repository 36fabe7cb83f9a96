"""Which pod goes to which node: a pure function of a snapshot, deterministic, one pod after the other.

Filters are those of the real scheduler, with its words. Scores: preferred node and pod affinity, PreferNoSchedule
taints, then the emptier node (relative to what it has), then the name in natural order.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from unbroken_local.kube import Json
from unbroken_local.kube.resources import requests_of
from unbroken_local.kube.taints import untolerated
from unbroken_local.scheduler.affinity import PodAffinity, matches_node, node_preference
from unbroken_local.scheduler.world import Place, Snapshot, all_pods, build_places, is_pending


@dataclass(frozen=True)
class Binding:
    """This pod runs on this node."""

    pod: Json
    node: str


@dataclass(frozen=True)
class Refusal:
    """No node takes this pod now; `message` says why, in the real scheduler's wording."""

    pod: Json
    message: str


@dataclass(frozen=True)
class Decision:
    """What to do about the pods that wait."""

    bindings: tuple[Binding, ...]
    refusals: tuple[Refusal, ...]


def decide(snapshot: Snapshot) -> Decision:
    """Place every pod that waits: by priority, then age, then name."""
    pending = [pod for pod in snapshot.pods if is_pending(pod, snapshot.assumed)]
    if not pending:
        return Decision((), ())
    places = build_places(snapshot)
    bindings, refusals = [], []
    for pod in sorted(pending, key=_queue_key):
        place, message = _choose(pod, places, snapshot)
        if place is None:
            refusals.append(Refusal(pod, message))
        else:
            place.add(pod)
            bindings.append(Binding(pod, place.name))
    return Decision(tuple(bindings), tuple(refusals))


def _queue_key(pod: Json) -> tuple[int, str, list[tuple[int, str]]]:
    metadata = pod["metadata"]
    return -int(pod["spec"].get("priority") or 0), metadata.get("creationTimestamp") or "", natural(metadata["name"])


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key in which node-2 comes before node-10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", text) if word]


def _choose(pod: Json, places: dict[str, Place], snapshot: Snapshot) -> tuple[Place | None, str]:
    affinity = PodAffinity(pod, all_pods(places.values()), snapshot.namespace_labels)
    requests = requests_of(pod)
    reasons: Counter[str] = Counter()
    fitting = []
    for place in places.values():
        found = violations(pod, place, affinity, requests)
        reasons.update(found)
        if not found:
            fitting.append(place)
    if not fitting:
        return None, _explain(len(places), reasons)
    return max(_scored(pod, fitting, affinity, requests))[-1].place, ""


def violations(pod: Json, place: Place, affinity: PodAffinity, requests: dict[str, Fraction]) -> list[str]:
    """Return why a node does not take a pod; several only when resources are short."""
    for check in _CHECKS:
        reason = check(pod, place)
        if reason:
            return [reason]
    short = _short_of(place, requests)
    if short:
        return short
    reason = affinity.violation(place)
    return [reason] if reason else []


def _cordoned(pod: Json, place: Place) -> str:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    return "node(s) were unschedulable" if place.is_cordoned and untolerated(pod, [taint], ("NoSchedule",)) else ""


def _tainted(pod: Json, place: Place) -> str:
    left = untolerated(pod, place.taints, ("NoSchedule", "NoExecute"))
    return f"node(s) had untolerated taint {{{left[0]['key']}: {left[0].get('value') or ''}}}" if left else ""


def _unmatched(pod: Json, place: Place) -> str:
    return "" if matches_node(pod, place) else "node(s) didn't match Pod's node affinity/selector"


def _ports_taken(pod: Json, place: Place) -> str:
    wanted = _host_ports(pod)
    taken = {port for other in place.pods for port in _host_ports(other)} if wanted else set()
    return "node(s) didn't have free ports for the requested pod ports" if wanted & taken else ""


def _host_ports(pod: Json) -> set[tuple[str, int]]:
    return {
        (port.get("protocol") or "TCP", int(port["hostPort"]))
        for container in pod["spec"].get("containers") or []
        for port in container.get("ports") or []
        if port.get("hostPort")
    }


_CHECKS: tuple[Callable[[Json, Place], str], ...] = (_cordoned, _tainted, _unmatched, _ports_taken)


def _short_of(place: Place, requests: dict[str, Fraction]) -> list[str]:
    short = sorted(name for name, amount in requests.items() if amount > 0 and amount > place.free(name))
    return ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in short]


def _explain(num_nodes: int, reasons: Counter[str]) -> str:
    if not num_nodes:
        return "no nodes available to schedule pods"
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    return f"0/{num_nodes} nodes are available: {listed}."


@dataclass(frozen=True)
class _Last:
    """Compares by name in reverse, so that `max` takes the first name among equals."""

    place: Place

    def __lt__(self, other: "_Last") -> bool:
        return natural(self.place.name) > natural(other.place.name)


def _scored(
    pod: Json, places: list[Place], affinity: PodAffinity, requests: dict[str, Fraction]
) -> list[tuple[float, float, _Last]]:
    node_scores = _normalized([node_preference(pod, place) for place in places])
    pod_scores = _normalized([affinity.preference(place) for place in places])
    taints = [-float(len(untolerated(pod, place.taints, ("PreferNoSchedule",)))) for place in places]
    taint_scores = _normalized(taints)
    return [
        (2 * node + 2 * near + 3 * taint, _emptiness(place, requests), _Last(place))
        for node, near, taint, place in zip(node_scores, pod_scores, taint_scores, places, strict=True)
    ]


def _normalized(scores: list[float]) -> list[float]:
    low, high = min(scores), max(scores)
    return [0.0 if high == low else 100 * (score - low) / (high - low) for score in scores]


def _emptiness(place: Place, requests: dict[str, Fraction]) -> float:
    """Return the mean free share, after the pod, of every resource that it asks for."""
    shares = [
        float((place.free(name) - amount) / place.allocatable[name])
        for name, amount in requests.items()
        if place.allocatable.get(name)
    ]
    return sum(shares) / len(shares) if shares else 0.0
