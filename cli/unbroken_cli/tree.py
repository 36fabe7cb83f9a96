"""Pure: where a job's pods stand, as a tree of domains, from the cluster's objects or from the rendezvous."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.plurals import agreed

JsonObject = Mapping[str, Any]
NOWHERE = "(not known)"
"""Domain of a pod that stands on no node yet, or on one without the layer's label."""
_ROLE_LABEL = "unbroken.dev/role"
_TOPOLOGY_ANNOTATION = "unbroken.dev/topology"


@dataclass(frozen=True)
class PodPlace:
    """One training pod and where it stands. Also the shape of `-o json`."""

    pod: str
    role: str
    """active or spare."""
    state: str
    """Running, Pending, ending, ... as far as the source tells."""
    node: str
    domains: tuple[str, ...]
    """Outermost first."""
    ranks: tuple[int, ...] | None
    """Active ranks in local order; None where the source does not know: only the rendezvous does."""

    @property
    def is_whole(self) -> bool:
        """Whether it does its part, or can take over."""
        return self.state == "Running"


@dataclass(frozen=True)
class DomainTree:
    """The pods of a job at one moment, in the order of their domains."""

    title: str
    layers: tuple[str, ...]
    """Names of the layers, outermost first; empty names where the source does not tell them."""
    places: tuple[PodPlace, ...]
    stale: str = ""
    unwatched: str = ""
    deleting: str = ""
    """Whether roles are up to date: as in JobRecord."""


def tree_from_objects(item: JsonObject, pods: Sequence[JsonObject]) -> DomainTree:
    """Return the tree from the job and its training pods, as the API server has them."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    layers = tuple(str(layer.get("name", "")) for layer in (spec.get("topology") or {}).get("layers") or ())
    places = tuple(_place(pod, layers) for pod in pods)
    return _sorted(f"{metadata['name']} in namespace {metadata.get('namespace', '')}", layers, places)


def tree_from_status(status: JobStatus) -> DomainTree:
    """Return the tree as the rendezvous knows it, with ranks."""
    depth = max((len(pod.domains) for pod in status.pods), default=0)
    places = tuple(
        PodPlace(
            pod.pod,
            pod.role.value,
            "Running" if pod.is_connected else "not connected",
            pod.node,
            (*pod.domains, *[NOWHERE] * (depth - len(pod.domains))),
            pod.ranks,
        )
        for pod in status.pods
    )
    return _sorted(status.job, ("",) * depth, places)


def tree_lines(tree: DomainTree) -> list[str]:
    """Return a line for each domain, with counts, and one for each pod below the innermost."""
    lines = [f"{tree.title}: {_counts(tree.places)}"]
    if not tree.places:
        return [*lines, "  no training pods"]
    rows = list(_rows(tree, tree.places, 0))
    width = max(len(name) for name, _ in rows)
    return lines + [f"  {name:<{width}}  {text}".rstrip() for name, text in rows]


def _rows(tree: DomainTree, places: Sequence[PodPlace], depth: int) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    if depth == len(tree.layers):
        for place in places:
            ranks = "" if not place.ranks else f"  {agreed(len(place.ranks), 'rank', 'ranks')} {_ranges(place.ranks)}"
            yield indent + place.pod, f"{place.role:<6}  {place.state:<8}  {place.node}{ranks}".rstrip()
        return
    for domain, inside in groupby(places, key=lambda place: place.domains[depth]):
        here = tuple(inside)
        yield indent + f"{tree.layers[depth]} {domain}".strip(), _counts(here)
        yield from _rows(tree, here, depth + 1)


def _counts(places: Sequence[PodPlace]) -> str:
    whole = [place for place in places if place.is_whole]
    active = sum(place.role == "active" for place in whole)
    words = [f"{active} active", f"{len(whole) - active} spare"]
    if len(whole) < len(places):
        words.append(f"{len(places) - len(whole)} not running")
    return ", ".join(words)


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-3, 8 for 0, 1, 2, 3, 8."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts)


def _place(pod: JsonObject, layers: Sequence[str]) -> PodPlace:
    metadata, status = pod["metadata"], pod.get("status") or {}
    domains = _domains((metadata.get("annotations") or {}).get(_TOPOLOGY_ANNOTATION, ""))
    return PodPlace(
        pod=metadata["name"],
        role=(metadata.get("labels") or {}).get(_ROLE_LABEL, ""),
        state="ending" if metadata.get("deletionTimestamp") else status.get("phase") or "Pending",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        domains=tuple(str(domains.get(layer) or NOWHERE) for layer in layers),
        ranks=None,
    )


def _domains(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _sorted(title: str, layers: tuple[str, ...], places: Sequence[PodPlace]) -> DomainTree:
    def key(place: PodPlace) -> tuple[Any, ...]:
        stem, _, number = place.pod.rpartition("-")
        known = [(domain == NOWHERE, domain) for domain in place.domains]
        return (*known, place.role, stem, int(number) if number.isdecimal() else -1, place.pod)

    return DomainTree(title, layers, tuple(sorted(places, key=key)))
