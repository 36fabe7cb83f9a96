"""Layers of domains above the pods, outermost first: the one type that spec, script and tree of ranks speak of.

The operator makes it of `spec.topology.layers`, the library of the layers of a script's Tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNLIMITED = 1 << 60
"""Stands for "no maximum" where numbers are compared."""


@dataclass(frozen=True)
class Layer:
    """One level; in a tree, level 0 is the root and the last level holds the workers."""

    name: str = ""
    label: str = ""
    """Node label whose value names the domain; "" where the script or the tree names it."""
    min_ranks: int = 1
    """A domain with fewer healthy workers, spares included, gives up all of them."""
    max_ranks: int | None = None
    """At most so many workers of a domain are active, at any time; None means all."""
    replace_from: bool = True
    """The search for a spare may go up through this layer (RESERVE); it stops below the first that forbids it."""
    close_gaps: bool = False
    """A gap may be closed by the highest active rank of a domain of this layer (BACKFILL), before all above shift."""

    @property
    def maximum(self) -> int:
        """`max_ranks` as a number."""
        return UNLIMITED if self.max_ranks is None else self.max_ranks


def layer_violations(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield one message for each broken rule; nothing when the layers are sound."""
    if not layers:
        yield "layers: want at least the root, got none"
    for index, layer in enumerate(layers):
        where = f"layers[{index}] ({layer.name})" if layer.name else f"layers[{index}]"
        if layer.min_ranks < 0:
            yield f"{where}.min_ranks: want at least 0, got {layer.min_ranks}"
        if layer.max_ranks is not None and layer.max_ranks < max(layer.min_ranks, 1):
            yield (
                f"{where}.max_ranks: want at least min_ranks ({layer.min_ranks}) and 1, or None for no limit, "
                f"got {layer.max_ranks}"
            )


def replacement_depth(layers: Sequence[Layer]) -> int:
    """Return the depth of the highest domain in which a spare may be sought: len(layers) when in none.

    The climb starts at the innermost domain and stops below the first layer that does not allow it.
    """
    depth = len(layers)
    while depth > 0 and layers[depth - 1].replace_from:
        depth -= 1
    return depth


def backfill_depth(layers: Sequence[Layer]) -> int:
    """Return the depth of the domains in which gaps are closed: len(layers) when in none."""
    depth = len(layers)
    while depth > 0 and layers[depth - 1].close_gaps:
        depth -= 1
    return depth
