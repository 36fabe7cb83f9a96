"""A plan: who changed rank, why, and where the rank was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.vocabulary.reasons import RankReason


@dataclass(frozen=True)
class RankChange:
    """One worker whose active rank changed."""

    place: str
    """Key of the worker's place."""
    local_rank: int
    before: int | None
    after: int | None
    reason: RankReason
    domains: tuple[str, ...]
    """Names of the worker's domains, outermost first."""
    origin: tuple[str, ...]
    """Names of the domains where the rank `after` was in the plan before; the worker's own where it simply moved."""


@dataclass(frozen=True)
class TreePlan:
    """What changed, in columns, so that a shift of 100,000 ranks costs milliseconds; iterate for `RankChange`s.

    Only workers whose rank is another than before are in it. Its numbers never change; the domains' names are those of
    the tree at the time of reading.
    """

    number: int
    """Counts plans of a tree from 0."""
    world_size: int
    spare_ranks: int
    """Healthy workers without a rank, also those of domains that are barred."""
    lost_ranks: int
    leaves: list[int] = field(default_factory=list, repr=False)
    hosts: list[Domain] = field(default_factory=list, repr=False)
    before: list[int] = field(default_factory=list, repr=False)
    after: list[int] = field(default_factory=list, repr=False)
    """Active ranks; -1 means none."""
    reasons: list[RankReason] = field(default_factory=list, repr=False)
    origins: dict[int, Domain] = field(default_factory=dict, repr=False)
    """Innermost domain from which a replaced, filled or lost rank came, by leaf; others stayed where they were."""
    barred: tuple[Domain, ...] = field(default=(), repr=False)
    """Domains that changed since the last plan and are below their minimum."""
    barred_healthy: tuple[int, ...] = field(default=(), repr=False)
    """How many workers of each of them are healthy."""
    broken_spares: tuple[tuple[str, ...], ...] = ()
    """Paths of the innermost domains that were wholly spare, and of which this plan used a part."""
    shortfall: str = ""
    """Why no plan is possible; "" when one is."""
    take_back: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Puts the tree back as it was; None where the plan changed nothing, or cannot be undone."""

    def __len__(self) -> int:
        return len(self.leaves)

    def __iter__(self) -> Iterator[RankChange]:
        for leaf, host, before, after, reason in zip(
            self.leaves, self.hosts, self.before, self.after, self.reasons, strict=True
        ):
            yield RankChange(
                host.key,
                leaf - host.first,
                None if before < 0 else before,
                None if after < 0 else after,
                reason,
                host.path,
                self.origins.get(leaf, host).path,
            )
