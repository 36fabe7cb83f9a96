"""What the steps of a plan need of a tree."""

from collections.abc import Callable, Iterable
from typing import Protocol

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.vocabulary.layers import Layer


class Ranked(Protocol):
    """The state of a `RankTree`; see there."""

    layers: tuple[Layer, ...]
    world_rule: Callable[[int], int] | None
    root: Domain
    host_of: list[Domain]
    rank_of: list[int]
    by_rank: list[int]
    is_lost: bytearray
    is_spare: bytearray
    may_grow: bytearray
    growable: dict[int, None]
    suspects: dict[Domain, None]
    vacating: dict[int, None]
    num_lost: int
    num_plans: int
    keeps_whole: bool
    fills_gaps: bool

    def __len__(self) -> int: ...

    def mark_spare(self, leaf: int, is_spare: bool) -> None:
        """Write the leaf's flag."""

    def in_order(self, leaves: Iterable[int]) -> list[int]:
        """Return the leaves in the order of the tree."""
