"""Pure: where spare pods are missed, and what a new one is to prefer (spares.spread).

A domain is served when a spare pod stands in it. Domains are named by their path, outermost first; a pod on a node
that lacks a label counts for the layers above that label only. A layer of single nodes takes no part: a node that one
pod fills can have no spare.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree.places import natural_key
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout
from unbroken_operator.decisions.assessment import Assessment
from unbroken_operator.decisions.objects.affinity import Preference
from unbroken_operator.decisions.snapshot import PodView

Path = tuple[str, ...]
MAX_CHOICES = 8
"""How many domains one spare pod prefers: the neediest may have no room."""
_BEST, _FALLING, _LEAST, _AROUND = 100, 0.8, 20, 10


@dataclass(frozen=True)
class Unserved:
    """Domains of one layer that have active pods and no spare."""

    layer: str
    domains: tuple[str, ...]
    num_domains: int
    """All domains of the layer that have active pods."""


def unserved(settings: JobSettings, assessment: Assessment) -> Iterator[Unserved]:
    """Yield the layers of which not every domain with active pods has a spare pod, outermost first."""
    active = _counted(_paths(settings, assessment, _with_role(assessment, Role.ACTIVE)))
    spare = _counted(_paths(settings, assessment, _with_role(assessment, Role.SPARE)))
    for depth, layer in enumerate(_layers(settings), start=1):
        wanting = [path for path in active if len(path) == depth]
        bare = sorted((path for path in wanting if path not in spare), key=_order)
        if bare:
            yield Unserved(layer.name, tuple(path[-1] for path in bare), len(wanting))


def spare_preferences(
    settings: JobSettings, assessment: Assessment, lost: Iterable[PodView], num_new: int
) -> list[tuple[Preference, ...]]:
    """Return what each of so many new spare pods is to prefer; nothing where no active pod has a known place.

    `lost` are the pods whose ranks are about to go to spares: the nearest spare that the layers allow counts as active
    already. Where there is none, the lost pod's domain is the one that misses a pod.
    """
    if num_new == 0:
        return []
    active = _paths(settings, assessment, _with_role(assessment, Role.ACTIVE))
    spare = _paths(settings, assessment, _with_role(assessment, Role.SPARE))
    depth = _search_depth(_layers(settings))
    for path in _paths(settings, assessment, lost):
        near = [other for other in spare if _num_common(path, other) >= depth]
        if near:
            nearest = min(near, key=lambda other: (-_num_common(path, other), _order(other)))
            spare.remove(nearest)
            active.append(nearest)
        else:
            active.append(path)
    layers, num_active, num_spare = _layers(settings), _counted(active), _counted(spare)
    needs = {path: _need(path, num_active, num_spare) for path in sorted(set(active), key=_order)}
    neighbours: dict[str, list[Path]] = {}
    for path in needs:
        neighbours.setdefault(path[0], []).append(path)
    chosen = []
    for _ in range(num_new):
        # Among equals the first in natural order: nsmallest keeps their order.
        ranked = heapq.nsmallest(MAX_CHOICES, needs, key=needs.__getitem__)
        chosen.append(tuple(_preferences(layers, ranked)))
        num_spare.update(_counted(ranked[:1]))
        changed = neighbours[ranked[0][0]] if ranked else []
        needs.update({path: _need(path, num_active, num_spare) for path in changed})
    return chosen


def _need(path: Path, num_active: Counter[Path], num_spare: Counter[Path]) -> tuple[float, ...]:
    """Return the sort key of a domain: unserved outer domains first, then unserved inner ones, then fewest a pod."""
    domains = [path[:depth] for depth in range(1, len(path) + 1)]
    shares = [num_spare[domain] / num_active[domain] for domain in domains]
    return (*(share > 0 for share in shares), *shares)


def _preferences(layers: list[Layer], ranked: list[Path]) -> Iterator[Preference]:
    weight = float(_BEST)
    around: dict[Path, None] = {}
    for path in ranked:
        yield Preference(_labels(layers, path), max(int(weight), _LEAST))
        weight *= _FALLING
        around.update(dict.fromkeys(path[:depth] for depth in range(1, len(path))))
    for path in around:
        # Beside the domain is nearer than anywhere.
        yield Preference(_labels(layers, path), _AROUND)


def _labels(layers: list[Layer], path: Path) -> tuple[tuple[str, str], ...]:
    return tuple((layer.label, name) for layer, name in zip(layers, path, strict=False))


def _layers(settings: JobSettings) -> list[Layer]:
    return [layer for layer in settings.layers if layer.label != layout.HOSTNAME_LABEL]


def _search_depth(layers: list[Layer]) -> int:
    """Return how many outer domains a spare must share with a lost pod; more than there are layers: none may help."""
    refusing = [depth for depth, layer in enumerate(layers, start=1) if not layer.replace_from]
    return refusing[-1] + 1 if refusing else 0


def _with_role(assessment: Assessment, role: Role) -> list[PodView]:
    return [pod for pod in assessment.alive if assessment.role(pod) is role]


def _paths(settings: JobSettings, assessment: Assessment, pods: Iterable[PodView]) -> list[Path]:
    """Return the path of each pod that is known to be somewhere."""
    kept = [index for index, layer in enumerate(settings.layers) if layer.label != layout.HOSTNAME_LABEL]
    found = []
    for pod in pods:
        domains = assessment.domains.by_pod.get(pod.uid)
        names = () if domains is None else tuple(domains[index] for index in kept)
        path = names[: names.index("")] if "" in names else names
        if path:
            found.append(path)
    return found


def _counted(paths: Iterable[Path]) -> Counter[Path]:
    """Return how many of the paths lead into each domain."""
    return Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))


def _num_common(path: Path, other: Path) -> int:
    pairs = zip(path, other, strict=False)
    return next((depth for depth, (left, right) in enumerate(pairs) if left != right), min(len(path), len(other)))


def _order(path: Path) -> tuple[object, ...]:
    return tuple(natural_key(name) for name in path)
