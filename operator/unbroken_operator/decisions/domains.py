"""Pure: in which domain of each layer a pod is, by labels of the pod and of its node (`topology.layers[].source`).

    Auto    the pod's label, else the pod's annotation, else the node's label
    Pod     the pod's label, else the pod's annotation
    Node    the node's label

Labels of pods are the job's own business: they move ranks of this job only. Where pod and node differ the pod's counts,
and a condition says so.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unbroken_core.ranks.tree.places import Misplaced, Place, misplaced_names, natural_key
from unbroken_operator.api.model_base import LABEL_VALUE
from unbroken_operator.api.models import LabelSource, Spec, TopologyLayer
from unbroken_operator.decisions.snapshot import MAX_DOMAIN, PodView, Snapshot

_IS_DOMAIN = re.compile(LABEL_VALUE)


@dataclass(frozen=True)
class Domains:
    """Of the training pods that have a node."""

    by_pod: Mapping[str, tuple[str, ...]]
    """Domains by the pod's uid, outermost first; "" where no label says it."""
    missing: Mapping[str, tuple[str, ...]]
    """Nodes, or pods, that lack a layer's label, by label."""
    differing: tuple[str, ...]
    """Sentences about pods whose node says another domain."""
    misplaced: tuple[Misplaced, ...]
    """Domains in two domains of the layer above; keys are "node NAME" or "pod NAME"."""


def find_domains(snapshot: Snapshot, spec: Spec, trainers: Iterable[PodView], alive: Iterable[PodView]) -> Domains:
    """Return the domains of all training pods, and what is wrong with those of the present ones."""
    layers = spec.topology.all_layers
    placed = [pod for pod in trainers if pod.node in snapshot.nodes]
    by_pod = {pod.uid: tuple(_domain(snapshot, pod, layer) for layer in layers) for pod in placed}
    present = sorted((pod for pod in alive if pod.uid in by_pod), key=lambda pod: natural_key(pod.node))
    missing: dict[str, dict[str, None]] = {}
    differing: dict[str, None] = {}
    places: dict[str, Place] = {}
    for pod in present:
        domains = by_pod[pod.uid]
        for layer, name in zip(layers, domains, strict=True):
            if not name:
                who = f"pod {pod.name}" if layer.source is LabelSource.POD else f"node {pod.node}"
                missing.setdefault(layer.label, {})[who] = None
            on_node = snapshot.nodes[pod.node].labels.get(layer.label, "")
            if layer.source is LabelSource.AUTO and name and on_node and name != on_node:
                differing[
                    f"{layer.label}={name} on pod {pod.name}, but {on_node} on its node {pod.node}: the pod's counts"
                ] = None
        key = f"node {pod.node}" if domains == _of_node(snapshot, pod, layers) else f"pod {pod.name}"
        # With a label missing, labels only seem to contradict each other: the missing one is reported.
        if all(domains):
            places.setdefault(key, Place(key, domains, spec.ranks_per_pod))
    return Domains(
        by_pod,
        {label: tuple(found) for label, found in missing.items()},
        tuple(differing),
        tuple(misplaced_names(places.values())),
    )


def _domain(snapshot: Snapshot, pod: PodView, layer: TopologyLayer) -> str:
    if layer.source is not LabelSource.NODE:
        for said in (pod.labels.get(layer.label), pod.annotations.get(layer.label)):
            # An annotation may be anything.
            if said and len(said) <= MAX_DOMAIN and _IS_DOMAIN.match(said):
                return said
    if layer.source is LabelSource.POD:
        return ""
    return snapshot.nodes[pod.node].labels.get(layer.label, "")


def _of_node(snapshot: Snapshot, pod: PodView, layers: Iterable[TopologyLayer]) -> tuple[str, ...]:
    return tuple(snapshot.nodes[pod.node].labels.get(layer.label, "") for layer in layers)
