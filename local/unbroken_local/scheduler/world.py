"""The snapshot that the scheduler decides on, and the scratch copy in which it places one pod after the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from unbroken_local.kube import Json
from unbroken_local.kube.resources import ZERO, read_amounts, requests_of


@dataclass(frozen=True)
class Snapshot:
    """All nodes and pods as the API server shows them."""

    nodes: tuple[Json, ...]
    pods: tuple[Json, ...]
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Pod uid -> node of bindings that were made and are not seen in `pods` yet."""
    namespace_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class Place:
    """One node in the scratch copy."""

    name: str
    labels: Mapping[str, str]
    taints: list[Json]
    is_cordoned: bool
    allocatable: Mapping[str, Fraction]
    used: dict[str, Fraction] = field(default_factory=dict)
    pods: list[Json] = field(default_factory=list)

    def free(self, resource: str) -> Fraction:
        """Return how much of a resource is left."""
        return self.allocatable.get(resource, ZERO) - self.used.get(resource, ZERO)

    def add(self, pod: Json) -> None:
        """Put a pod here."""
        self.pods.append(pod)
        for name, amount in requests_of(pod).items():
            self.used[name] = self.used.get(name, ZERO) + amount


def build_places(snapshot: Snapshot) -> dict[str, Place]:
    """Return all nodes with the pods that hold their resources."""
    places = {node["metadata"]["name"]: _place(node) for node in snapshot.nodes}
    for pod in snapshot.pods:
        node = pod["spec"].get("nodeName") or snapshot.assumed.get(pod["metadata"].get("uid", ""))
        if node in places and not is_over(pod):
            places[node].add(pod)
    return places


def _place(node: Json) -> Place:
    spec = node.get("spec") or {}
    status = node.get("status") or {}
    return Place(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=spec.get("taints") or [],
        is_cordoned=bool(spec.get("unschedulable")),
        allocatable=read_amounts(status.get("allocatable")),
    )


def is_over(pod: Json) -> bool:
    """Return whether the pod will run no more."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def is_pending(pod: Json, assumed: Mapping[str, str]) -> bool:
    """Return whether the pod waits for this scheduler."""
    spec, metadata = pod["spec"], pod["metadata"]
    return (
        not spec.get("nodeName")
        and metadata.get("uid") not in assumed
        and not metadata.get("deletionTimestamp")
        and not spec.get("schedulingGates")
        and (spec.get("schedulerName") or "default-scheduler") == "default-scheduler"
        and not is_over(pod)
    )


def all_pods(places: Iterable[Place]) -> list[tuple[Place, Json]]:
    """Return every placed pod with its place."""
    return [(place, pod) for place in places for pod in place.pods]
