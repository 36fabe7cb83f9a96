"""Affinity of pods to nodes and to each other."""

from collections.abc import Mapping
from dataclasses import dataclass

from unbroken_local.kube import Json
from unbroken_local.kube.selectors import matches_labels, matches_node_term
from unbroken_local.scheduler.world import Place


def matches_node(pod: Json, place: Place) -> bool:
    """Return whether a node satisfies the pod's node selector and required node affinity."""
    selector = pod["spec"].get("nodeSelector") or {}
    if any(place.labels.get(key) != value for key, value in selector.items()):
        return False
    required = _node_affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(matches_node_term(term, place.labels, place.name) for term in required.get("nodeSelectorTerms") or [])


def node_preference(pod: Json, place: Place) -> float:
    """Return the sum of the weights of the preferred node terms that a node satisfies."""
    preferred = _node_affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution") or []
    return float(sum(term["weight"] for term in preferred if _matches_preference(term.get("preference") or {}, place)))


def _matches_preference(term: Json, place: Place) -> bool:
    return not term or matches_node_term(term, place.labels, place.name)


def _node_affinity(pod: Json) -> Json:
    return (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}


@dataclass(frozen=True)
class Term:
    """One pod affinity term of one pod."""

    owner: Json
    raw: Json
    weight: int = 0

    @property
    def key(self) -> str:
        """Topology key."""
        return str(self.raw.get("topologyKey") or "")


Namespaces = Mapping[str, Mapping[str, str]]


def terms_of(pod: Json, kind: str, is_required: bool) -> list[Term]:
    """Return the terms of `podAffinity` or `podAntiAffinity`."""
    affinity = (pod["spec"].get("affinity") or {}).get(kind) or {}
    if is_required:
        return [Term(pod, raw) for raw in affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []]
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    return [Term(pod, item["podAffinityTerm"], int(item["weight"])) for item in preferred]


def selects(term: Term, pod: Json, namespaces: Namespaces) -> bool:
    """Return whether a term selects a pod."""
    namespace = pod["metadata"].get("namespace", "default")
    names = term.raw.get("namespaces") or []
    selector = term.raw.get("namespaceSelector")
    if not names and selector is None:
        is_in_scope = namespace == term.owner["metadata"].get("namespace", "default")
    else:
        is_in_scope = namespace in names or (
            selector is not None and matches_labels(selector, namespaces.get(namespace, {}))
        )
    return is_in_scope and matches_labels(term.raw.get("labelSelector"), pod["metadata"].get("labels") or {})


class PodAffinity:
    """Where other pods want, or do not want, one pod to be. Built once a pod, asked for each node."""

    def __init__(self, pod: Json, placed: list[tuple[Place, Json]], namespaces: Namespaces) -> None:
        self._pod = pod
        self._namespaces = namespaces
        self._wanted = [(t, self._domains(t, placed)) for t in terms_of(pod, "podAffinity", True)]
        self._unwanted = [(t, self._domains(t, placed)) for t in terms_of(pod, "podAntiAffinity", True)]
        self._refused = {
            (term.key, place.labels[term.key])
            for place, other in placed
            for term in terms_of(other, "podAntiAffinity", True)
            if term.key in place.labels and selects(term, pod, namespaces)
        }
        self._preferred: dict[tuple[str, str], float] = {}
        for sign, kind in ((1, "podAffinity"), (-1, "podAntiAffinity")):
            self._add_preferences(sign, kind, placed)

    def _domains(self, term: Term, placed: list[tuple[Place, Json]]) -> set[str]:
        return {
            place.labels[term.key]
            for place, other in placed
            if term.key in place.labels and selects(term, other, self._namespaces)
        }

    def _add_preferences(self, sign: int, kind: str, placed: list[tuple[Place, Json]]) -> None:
        own = terms_of(self._pod, kind, False)
        for place, other in placed:
            mutual = [t for t in own if selects(t, other, self._namespaces)]
            mutual += [t for t in terms_of(other, kind, False) if selects(t, self._pod, self._namespaces)]
            for term in mutual:
                if term.key in place.labels:
                    domain = (term.key, place.labels[term.key])
                    self._preferred[domain] = self._preferred.get(domain, 0.0) + sign * term.weight

    def violation(self, place: Place) -> str:
        """Return why the pod may not be on a node, or an empty string."""
        for term, domains in self._wanted:
            value = place.labels.get(term.key)
            # The first pod of a group that wants its own kind near has nobody to be near to.
            is_first = not domains and selects(term, self._pod, self._namespaces)
            if value is None or (value not in domains and not is_first):
                return "node(s) didn't match pod affinity rules"
        for term, domains in self._unwanted:
            if place.labels.get(term.key) in domains:
                return "node(s) didn't match pod anti-affinity rules"
        if any(place.labels.get(key) == value for key, value in self._refused):
            return "node(s) didn't satisfy existing pods anti-affinity rules"
        return ""

    def preference(self, place: Place) -> float:
        """Return the sum of the weights of preferred terms, others' included."""
        return sum(weight for (key, value), weight in self._preferred.items() if place.labels.get(key) == value)
