"""The rules of each level of the tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNLIMITED = 1 << 60
"""Stands for "no maximum" where numbers are compared."""


@dataclass(frozen=True)
class TreeLayer:
    """One level of the tree; level 0 is the root, the last level holds the workers."""

    name: str
    min_ranks: int = 1
    """A domain with fewer healthy workers, spares included, gives up all of them."""
    max_ranks: int | None = None
    """At most so many workers of a domain are active, at any time; None means all."""
    replace_from: bool = False
    """The search for a spare may go up through this layer (RESERVE)."""
    close_gaps: bool = False
    """A gap may be closed by the highest active rank of a domain of this layer (BACKFILL)."""
    unit: int = 1
    """Workers are active by so many: `max_ranks` counts as the next lower multiple."""

    @property
    def maximum(self) -> int:
        """`max_ranks` as a number."""
        return UNLIMITED if self.max_ranks is None else self.max_ranks - self.max_ranks % self.unit


def layer_violations(layers: Sequence[TreeLayer]) -> Iterator[str]:
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


def replacement_depth(layers: Sequence[TreeLayer]) -> int:
    """Return the depth of the highest domain in which a spare may be sought: len(layers) when in none.

    The climb starts at the innermost domain and stops below the first layer that does not allow it.
    """
    depth = len(layers)
    while depth > 0 and layers[depth - 1].replace_from:
        depth -= 1
    return depth


def backfill_depth(layers: Sequence[TreeLayer]) -> int:
    """Return the depth of the domains in which gaps are closed: len(layers) when in none."""
    depth = len(layers)
    while depth > 0 and layers[depth - 1].close_gaps:
        depth -= 1
    return depth
