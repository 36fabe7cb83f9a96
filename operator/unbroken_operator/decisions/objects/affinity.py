"""Where a pod is to run: close to others, where spares are missed, and away from nodes that failed."""

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout
from unbroken_operator.api.models import LabelSource, Spec, Spread
from unbroken_operator.decisions.objects.manifests import (
    Manifest,
)


@dataclass(frozen=True)
class Preference:
    """Labels of nodes that suit a pod, and how well: a weight from 1 to 100."""

    labels: tuple[tuple[str, str], ...]
    weight: int


@dataclass(frozen=True)
class AvoidedNodes:
    """Values of the label kubernetes.io/hostname of nodes where new pods are not to run."""

    avoided: tuple[str, ...] = ()
    """Only where there is no other."""
    forbidden: tuple[str, ...] = ()
    """Not at all."""


NO_AVOIDED_NODES = AvoidedNodes()


def with_affinity(
    affinity: Manifest, spec: Spec, job: str, role: Role, preferences: Sequence[Preference] = ()
) -> Manifest:
    """Return the user's affinity and ours: active pods close together, spares apart, or where they are missed."""
    if role is Role.ACTIVE:
        return _preferring(affinity, "podAffinity", _near(job, role, _node_labels(spec)))
    if spec.spares.spread is Spread.ANYWHERE:
        return affinity
    # Where it is known what a spare is to serve, others must not keep it away: one of them may be active in a moment.
    labels = [] if preferences else _node_labels(spec)
    labels = [label for label in labels if label != layout.HOSTNAME_LABEL]
    apart = _preferring(affinity, "podAntiAffinity", _near(job, role, [*labels, layout.HOSTNAME_LABEL]))
    return _preferring(apart, "nodeAffinity", [_on_nodes(item) for item in preferences])


def _node_labels(spec: Spec) -> list[str]:
    """Return the layers' labels that nodes may have: the scheduler knows no others before it places a pod."""
    return [layer.label for layer in spec.topology.all_layers if layer.source is not LabelSource.POD]


def away_from(affinity: Manifest, avoided_nodes: AvoidedNodes) -> Manifest:
    """Return the affinity with the nodes in it that a pod is not to run on."""
    if avoided_nodes.avoided:
        others = {"matchExpressions": [_not_on(avoided_nodes.avoided)]}
        affinity = _preferring(affinity, "nodeAffinity", [{"weight": 100, "preference": others}])
    if not avoided_nodes.forbidden:
        return affinity
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    part = affinity.get("nodeAffinity") or {}
    # One of the terms must hold: each of the user's gets ours.
    terms = (part.get(key) or {}).get("nodeSelectorTerms") or [{}]
    ours = _not_on(avoided_nodes.forbidden)
    narrowed = [{**term, "matchExpressions": [*(term.get("matchExpressions") or []), ours]} for term in terms]
    return {**affinity, "nodeAffinity": {**part, key: {"nodeSelectorTerms": narrowed}}}


def _not_on(hostnames: Sequence[str]) -> Manifest:
    return {"key": layout.HOSTNAME_LABEL, "operator": "NotIn", "values": list(hostnames)}


def _near(job: str, role: Role, labels: Sequence[str]) -> list[Manifest]:
    """Return terms that select the job's pods of this role; the innermost domain, the fastest link, weighs most."""
    selector = {"matchLabels": {layout.JOB_LABEL: job, layout.ROLE_LABEL: role.value}}
    return [
        {"weight": 10 * (index + 1), "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}
        for index, label in enumerate(labels)
    ]


def _on_nodes(item: Preference) -> Manifest:
    expressions = [{"key": label, "operator": "In", "values": [name]} for label, name in item.labels]
    return {"weight": item.weight, "preference": {"matchExpressions": expressions}}


def _preferring(affinity: Manifest, kind: str, terms: list[Manifest]) -> Manifest:
    if not terms:
        return affinity
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    part = affinity.get(kind) or {}
    return {**affinity, kind: {**part, key: [*(part.get(key) or []), *terms]}}
