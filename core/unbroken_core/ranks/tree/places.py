"""What the tree is built from: places, each with the names of its domains."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unbroken_core.vocabulary.layers import Layer

OrderKey = tuple[object, ...]
Order = Callable[[str], OrderKey]
"""Sort key of a domain's name among its siblings."""


@dataclass(frozen=True)
class Place:
    """A group of workers that share their innermost domain: a pod."""

    key: str
    """Identity, unique in the tree: the pod's uid."""
    path: tuple[str, ...]
    """Names of the domains, one a layer below the root, outermost first; the last is the place itself and unique under
    its parent. "" is the unknown domain: places of which a name is unknown are together, after all others."""
    num_workers: int


_CHUNKS = re.compile(r"\d+|\D+")


@lru_cache(maxsize=65_536)
def natural_key(name: str) -> OrderKey:
    """Return a key that sorts `node-2` before `node-10`, and is different for different names."""
    chunks = [(0, int(chunk), "") if chunk.isdecimal() else (1, 0, chunk) for chunk in _CHUNKS.findall(name)]
    # Names such as a-1 and a-01 have the same numbers: the text itself decides.
    return (*chunks, (0, -1, name))


def natural_order(name: str) -> OrderKey:
    """Sort `node-2` before `node-10`, and "" (unknown) last; names that differ have keys that differ."""
    return (0, natural_key(name)) if name else (1,)


def in_tree_order(places: Iterable[Place], order: Order | None) -> list[Place]:
    """Return the places as the tree lines them up; without `order`, siblings stand as they first appear."""
    if order is None:
        return _in_order_of_appearance(list(places))
    keys: dict[str, OrderKey] = {}

    def key(place: Place) -> list[OrderKey]:
        for name in place.path:
            if name not in keys:
                keys[name] = order(name)
        return [keys[name] for name in place.path]

    return sorted(places, key=key)


def _in_order_of_appearance(places: list[Place]) -> list[Place]:
    appeared: dict[tuple[str, ...], int] = {}
    for place in places:
        for depth in range(len(place.path)):
            appeared.setdefault(place.path[: depth + 1], len(appeared))
    return sorted(places, key=lambda place: [appeared[place.path[: d + 1]] for d in range(len(place.path))])


@dataclass(frozen=True)
class Misplaced:
    """A name that lies in two domains of the layer above."""

    depth: int
    """Index in the path; the layer of the tree is one below."""
    name: str
    above: tuple[str, ...]
    """Domains above the name where it was seen first, outermost first."""
    key: str
    """Key of the first place there."""
    other_above: tuple[str, ...]
    other_key: str


def misplaced_names(places: Iterable[Place]) -> Iterator[Misplaced]:
    """Yield each name, and each further parent of it, that contradicts the labels of an earlier place.

    The tree stays valid: the name then stands for two domains, one under each parent. But labels that contradict each
    other (one host in two racks) make it choose the wrong neighbours. The unknown domain "" is under every parent.
    """
    parents: dict[tuple[int, str], tuple[tuple[str, ...], str]] = {}
    seen: set[tuple[int, str, tuple[str, ...]]] = set()
    for place in places:
        for depth, name in enumerate(place.path):
            above = place.path[:depth]
            first, key = parents.setdefault((depth, name), (above, place.key))
            if name and first != above and (depth, name, above) not in seen:
                seen.add((depth, name, above))
                yield Misplaced(depth, name, first, key, above, place.key)


def nesting_violations(layers: Sequence[Layer], places: Iterable[Place]) -> Iterator[str]:
    """Yield one sentence for each name that lies in two domains of the layer above."""
    for found in misplaced_names(places):
        yield (
            f"{layers[found.depth + 1].name}: want {found.name!r} in one domain, got {'/'.join(found.above)!r} and "
            f"{'/'.join(found.other_above)!r} (place {found.other_key}); it counts as two domains"
        )
