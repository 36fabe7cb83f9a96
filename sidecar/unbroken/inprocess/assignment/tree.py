"""Rank assignment on a tree of domains, as a step for scripts."""

import datetime
import enum
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from unbroken.inprocess.assignment.exchange import Exchange, exchange_keys
from unbroken.inprocess.assignment.roll_call import RollCall
from unbroken.inprocess.assignment.steps import RankAssignment, RankAssignmentCtx, RankDiscarded, checked_rank, key_of
from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.state import Mode, State
from unbroken_core.ranks.tree.world import RankedWorld
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer as CoreLayer


class RootKeyMismatch(RestartError, RuntimeError):
    """The workers do not agree on the key of the root."""


class LayerFlag(enum.Flag):
    """What a layer allows when an active rank was lost."""

    RESERVE = enum.auto()
    """The search for a spare may go up through this layer."""
    BACKFILL = enum.auto()
    """The gap may be closed by the highest active rank of a domain of this layer."""


@dataclass
class Layer:
    """One level of a Tree; the first is the root."""

    min_ranks: int = 1
    """A domain with fewer healthy ranks, spares included, is terminated."""
    max_ranks: int | None = None
    """At most so many ranks of a domain are active, always; None means all."""
    key_or_fn: str | Callable[[State], str] = ""
    """Names the domain of a rank."""
    flag: LayerFlag | None = None


class Tree(RankAssignment):
    """Assigns ranks on a tree of domains: lost ranks go to near spares, gaps are closed, limits are kept.

    The first call exchanges the keys of all ranks through `ctx.store`; afterwards each call is a function of the
    terminated ranks. Stands alone: it cannot be composed. Raises RankDiscarded on a worker that is taken out,
    RootKeyMismatch when the root's keys differ, InputError for limits that contradict themselves, terminated ranks that
    do not exist, and a `world_size_filter` that raises or returns more than it got.
    """

    stands_alone = True

    def __init__(
        self,
        layers: list[Layer],
        world_size_filter: Callable[[int], int] | None = None,
        *,
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        """`timeout` bounds the exchange of the first call: ranks whose keys are missing then are terminated."""
        self.layers = list(layers)
        self.world_size_filter = world_size_filter
        self.timeout = timeout
        self._world: RankedWorld | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set rank, world size, mode, active rank and active world size in a new state."""
        state, terminated = ctx.state, set(ctx.terminated_ranks)
        if isinstance(ctx.store, RollCall):
            world = ctx.store.once(self, terminated, partial(self._consider, ctx.store, state.world_size, terminated))
        else:
            world = self._follow(ctx, terminated)
        initial_rank = state.initial_rank
        standing = None
        if initial_rank is not None and initial_rank in world:
            standing = world.standing(initial_rank)
        if standing is None:
            raise RankDiscarded(f"rank {state.rank} was discarded: terminated ranks are {sorted(terminated)}")
        # A shallow copy: the exception belongs to the caller and is neither copied nor kept.
        ctx.state = replace(
            state,
            rank=standing.rank,
            world_size=standing.world_size,
            mode=Mode.INACTIVE if standing.active_rank is None else Mode.ACTIVE,
            active_rank=standing.active_rank,
            active_world_size=standing.active_world_size,
        )
        ctx.terminated_ranks = set()
        return ctx

    def _follow(self, ctx: RankAssignmentCtx, terminated: set[int]) -> RankedWorld:
        """Return the world after these losses; the first call adds the ranks that never sent their keys."""
        if self._world is not None:
            self._world.step(sorted(terminated))
            return self._world
        rank = checked_rank(ctx)
        keys_by_rank = self._exchange(ctx, rank)
        self._world = self._build(keys_by_rank)
        _warn_of_another_order(self._world, [int(keys[0]) for _rank, keys in sorted(keys_by_rank.items())])
        leaving = [int(keys_by_rank[rank][0]) for rank in sorted(terminated) if rank in keys_by_rank]
        terminated |= set(range(ctx.state.world_size)) - keys_by_rank.keys()
        self._world.step(leaving)
        return self._world

    def _consider(self, roll: RollCall, world_size: int, terminated: set[int]) -> RankedWorld:
        """Return the world after these losses, for a worker that answers for all."""
        said = roll.keys_of_all(self, world_size, terminated)
        root_key = next((keys[0] for keys in said.values() if keys is not None), "")
        keys_by_rank = {
            # Where a lost worker was is unknown: it is near no other.
            number: [str(number), *(keys or (root_key, *(f"lost-{number}" for _ in self.layers[1:])))]
            for number, keys in said.items()
        }
        world = self._build(keys_by_rank)
        world.adopt(roll.num_active)
        world.step(sorted(terminated))
        return world

    def _exchange(self, ctx: RankAssignmentCtx, rank: int) -> dict[int, list[str]]:
        """Return (initial rank, key of each layer) by rank, without ranks that never sent their keys."""
        state = ctx.state
        keys = [str(state.initial_rank), *(key_of(layer.key_or_fn, state) for layer in self.layers)]
        exchange = Exchange(ctx.store, f"unbroken/tree/{state.iteration}/{ctx.num_groupings}", self.timeout)
        ctx.num_groupings += 1
        return exchange_keys(exchange, rank, keys, state.world_size, ctx.terminated_ranks)

    def _build(self, keys_by_rank: dict[int, list[str]]) -> RankedWorld:
        if not self.layers:
            raise InputError("layers: want at least the root, got none")
        root_keys = sorted({keys[1] for keys in keys_by_rank.values()})
        if len(root_keys) > 1:
            raise RootKeyMismatch(f"layers[0].key_or_fn: want the same key on all ranks, got {root_keys}")
        layers = [
            CoreLayer(
                root_keys[0] if depth == 0 else "",
                min_ranks=layer.min_ranks,
                max_ranks=layer.max_ranks,
                replace_from=bool(layer.flag and layer.flag & LayerFlag.RESERVE),
                close_gaps=bool(layer.flag and layer.flag & LayerFlag.BACKFILL),
            )
            for depth, layer in enumerate(self.layers)
        ]
        paths = {int(keys[0]): tuple(keys[2:]) for _rank, keys in sorted(keys_by_rank.items())}
        return RankedWorld(layers, paths, self.world_size_filter)


def _warn_of_another_order(world: RankedWorld, environment: Iterable[int]) -> None:
    for topology_rank, (by_tree, environment_rank) in enumerate(zip(world.order_of_tree(), environment, strict=True)):
        if by_tree != environment_rank:
            warnings.warn(
                f"Tree: the ranks given by the environment do not follow the topology, which decides: "
                f"topology_rank={topology_rank} environment_rank={by_tree}",
                stacklevel=4,
            )
