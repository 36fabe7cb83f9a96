"""The tree as workers number themselves: by initial rank, and by rank among the living, in the order of the tree."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unbroken_core.ranks.tree.places import Place
from unbroken_core.ranks.tree.plan import TreePlan
from unbroken_core.ranks.tree.tree import RankTree
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer


@dataclass(frozen=True)
class WorkerStanding:
    """What one worker is after a step."""

    rank: int
    """Among the living, 0-based, in the order of the tree."""
    world_size: int
    active_rank: int | None
    active_world_size: int


class RankedWorld:
    """A tree of workers that never come back; a domain below its minimum takes all of its workers with it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        paths: Mapping[int, tuple[Hashable, ...]],
        world_rule: Callable[[int], int] | None = None,
    ) -> None:
        """Build from the domain names of each initial rank, one a layer below the root, outermost first.

        Siblings stand in the order in which they first appear in `paths`. Raises InputError as RankTree does.
        """
        members: dict[tuple[str, ...], list[int]] = {}
        for initial_rank, path in paths.items():
            members.setdefault(tuple(map(str, path)), []).append(initial_rank)
        places = [Place("/".join(map(repr, path)), path, len(ranks)) for path, ranks in members.items()]
        self.tree = RankTree(layers, places, world_rule, order=None)
        self._initial_rank: list[int] = []
        """Initial rank of each leaf."""
        for host in self.tree.root.innermost():
            self._initial_rank += members[host.path]
        self._leaf = {initial_rank: leaf for leaf, initial_rank in enumerate(self._initial_rank)}
        self._living = list(range(len(paths)))
        self._is_started = False

    def __contains__(self, initial_rank: object) -> bool:
        return initial_rank in self._leaf

    @property
    def world_size(self) -> int:
        """Living workers."""
        return len(self._living)

    def order_of_tree(self) -> tuple[int, ...]:
        """Return the initial ranks in the order of the tree."""
        return tuple(self._initial_rank)

    def adopt(self, num_active: int) -> None:
        """Take over a world in which the lowest initial ranks are active, each as the rank of its number.

        Comes before the first step. All others may be appended: they came later, or were active once.
        """
        ranks: dict[str, dict[int, int]] = {}
        for rank in range(num_active):
            key, local_rank = self.tree.worker(self._leaf[rank])
            ranks.setdefault(key, {})[local_rank] = rank
        if ranks:
            self.tree.adopt(ranks)
            self.tree.let_spares_grow()

    def step(self, terminated_ranks: Iterable[int]) -> TreePlan:
        """Take out these workers, by their rank among the living, and cut the plan; the first step hands out ranks.

        In the first step they are initial ranks. Raises InputError, and changes nothing, for a rank that nobody has and
        for a world rule that fails.
        """
        leaves = [self._leaf_of(rank) for rank in terminated_ranks]
        tree = self.tree
        if not self._is_started and not tree.by_rank:
            tree.activate(only_usable=False)
        self._is_started = True
        tree.lose_leaves(leaves)
        try:
            plan = tree.plan()
        except InputError:
            tree.restore_leaves(leaves)
            raise
        barred = (tree.root,) if plan.shortfall else plan.barred
        tree.lose_leaves([leaf for domain in barred for leaf in tree.leaves_below(domain)])
        self._living = [leaf for leaf in self._living if not tree.is_lost[leaf]]
        return plan

    def standing(self, initial_rank: int) -> WorkerStanding | None:
        """Return what this worker is; None when it was taken out. Raises InputError for an unknown initial rank."""
        leaf = self._leaf.get(initial_rank)
        if leaf is None:
            raise InputError(f"initial_rank: want one of the {len(self._leaf)} ranks of the tree, got {initial_rank}")
        if self.tree.is_lost[leaf]:
            return None
        active_rank = self.tree.rank_of[leaf]
        return WorkerStanding(
            rank=bisect_left(self._living, leaf),
            world_size=len(self._living),
            active_rank=None if active_rank < 0 else active_rank,
            active_world_size=self.tree.world_size,
        )

    def _leaf_of(self, rank: int) -> int:
        if self._is_started and 0 <= rank < len(self._living):
            return self._living[rank]
        if not self._is_started and rank in self._leaf:
            return self._leaf[rank]
        raise InputError(f"terminated_ranks: want ranks from 0 to {len(self._living) - 1}, got {rank}")
