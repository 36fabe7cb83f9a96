"""Rank assignment as callables on a ctx, for scripts of the reference.

In a job the coordinator assigns ranks; these give the same answers for a ctx of one's own. Each step changes the ctx
that it is given and returns it. `Compose(c, b, a)` runs a, then b, then c: renumbering steps stand to the right of
filters. A user's own policy is a subclass of RankAssignment or RankFilter.

    RankAssignment            renumbers
    ├── ShiftRanks, FillGaps
    ├── FilterCountGroupedByKey   terminates whole groups; does not renumber
    ├── Tree                      renumbers and activates: stands alone
    └── RankFilter                decides who is active
        └── ActivateAllRanks, MaxActiveWorldSize, ActiveWorldSizeDivisibleBy
"""

import abc
import datetime
import enum
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unbroken.inprocess.assignment.exchange import Exchange, exchange_keys
from unbroken.inprocess.assignment.roll_call import RollCall
from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.state import Mode, State
from unbroken_core.errors import InputError
from unbroken_core.ranks.tree import TreeLayer
from unbroken_core.ranks.tree.renumbering import (
    active_rank,
    divisible_active_world_size,
    fill_gap_rank,
    max_active_world_size,
    shift_rank,
)
from unbroken_core.ranks.tree.world import RankedWorld


class RankDiscarded(RestartError):
    """Raised on the worker whose rank was discarded."""


class RootKeyMismatch(RestartError, RuntimeError):
    """The workers do not agree on the key of the root."""


@dataclass
class RankAssignmentCtx:
    """Input and output of every step; steps change it and return it."""

    state: State
    store: Any = None
    """Distributed store of this iteration, for Tree's first call and for FilterCountGroupedByKey; in a wrapper, where
    one worker answers for all, what the others have said."""
    terminated_ranks: set[int] = field(default_factory=set)
    """Empty after a step that renumbers."""
    num_groupings: int = field(default=0, repr=False, compare=False)
    """Steps that exchanged something through the store of this ctx: it tells them apart, the same on every rank."""


class RankAssignment(abc.ABC):
    """Renumbers ranks, computes the world size, and decides who is active."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Check a composition: Compose makes a class with the attribute `instances`. Raises TypeError."""
        super().__init_subclass__(**arguments)
        instances = cls.__dict__.get("instances")
        if isinstance(instances, tuple):
            _check_composition(tuple(_flatten(instances)))

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the ctx that it was given, changed."""


class RankFilter(RankAssignment):
    """Only decides who is active; must run after the steps that renumber."""


class ActivateAllRanks(RankFilter):
    """Every rank is active. Cannot be composed with another filter."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        _activate_below(ctx.state, ctx.state.world_size)
        return ctx


class MaxActiveWorldSize(RankFilter):
    """At most so many ranks are active, the lowest ones; None means all."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None and max_active_world_size < 0:
            raise InputError(f"max_active_world_size: want at least 0 or None, got {max_active_world_size}")
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        state = ctx.state
        size = max_active_world_size(state.world_size, state.active_world_size, self.max_active_world_size)
        _activate_below(state, size)
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of `divisor`; it may be 0."""

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise InputError(f"divisor: want at least 1, got {divisor}")
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        state = ctx.state
        _activate_below(state, divisible_active_world_size(state.world_size, state.active_world_size, self.divisor))
        return ctx


class ShiftRanks(RankAssignment):
    """Survivors keep their order and close the gaps. Raises RankDiscarded on a terminated rank."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set rank and world size; leaves no terminated ranks."""
        rank = _checked_rank(ctx)
        return _renumber(ctx, shift_rank(rank, ctx.terminated_ranks))


class FillGaps(RankAssignment):
    """The highest ranks move into the gaps, the others stay. Raises RankDiscarded on a terminated rank."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set rank and world size; leaves no terminated ranks."""
        rank = _checked_rank(ctx)
        return _renumber(ctx, fill_gap_rank(rank, ctx.state.world_size, ctx.terminated_ranks))


class FilterCountGroupedByKey(RankAssignment):
    """Terminates all ranks of each group whose count of healthy ranks does not meet the condition.

    Groups are the ranks with the same key. Every rank runs it, at the same place of its steps; a step that renumbers
    must follow. Raises TimeoutError when the healthy ranks have not all come within `timeout`.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[[State], str],
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
        *,
        name: str | None = None,
    ) -> None:
        """`name` tells two of them apart in the store; None: the place among the steps of the ctx."""
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self.name = name

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Add to the terminated ranks."""
        rank = _checked_rank(ctx)
        if isinstance(ctx.store, RollCall):
            judge = partial(self.judge, ctx.store, ctx.terminated_ranks)
            ctx.terminated_ranks = ctx.terminated_ranks | ctx.store.once(self, ctx.terminated_ranks, judge)
            return ctx
        place = str(ctx.num_groupings) if self.name is None else f"name-{self.name}"
        ctx.num_groupings += 1
        exchange = Exchange(ctx.store, f"unbroken/group/{ctx.state.iteration}/{place}", self.timeout)
        if rank not in ctx.terminated_ranks:
            self._count(ctx, exchange, rank)
        ctx.terminated_ranks = ctx.terminated_ranks | set(map(int, exchange.items("terminate")))
        return ctx

    def _count(self, ctx: RankAssignmentCtx, exchange: Exchange, rank: int) -> None:
        num_healthy = ctx.state.world_size - len(ctx.terminated_ranks)
        key = _key(self.key_or_fn, ctx.state)
        exchange.add(f"count/{key}")
        exchange.barrier("counted", num_healthy)
        if not self.condition(exchange.count(f"count/{key}")):
            exchange.append("terminate", str(rank))
        exchange.barrier("judged", num_healthy)

    def judge(self, roll: RollCall, terminated: set[int]) -> set[int]:
        """Return the ranks of groups that do not meet the condition, as one worker sees it that answers for all."""
        keys = roll.keys_of_healthy(self, terminated)
        is_enough = {key: self.condition(count) for key, count in Counter(keys.values()).items()}
        return {rank for rank, key in keys.items() if not is_enough[key]}


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
    """Assigns ranks on a tree of domains: spares take lost ranks from near, gaps are closed, limits are kept.

    The first call exchanges the keys of all ranks through `ctx.store`; afterwards each call is a function of the
    terminated ranks. Stands alone: it cannot be composed. Raises RankDiscarded on a worker that is taken out,
    RootKeyMismatch when the root's keys differ, InputError for limits that contradict themselves, terminated ranks that
    nobody has, and a `world_size_filter` that raises or returns more than it got.
    """

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
        # A shallow copy: the exception belongs to the caller, and neither is copied nor kept.
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
        """Return the world after these losses; in the first call those are added who never said where they are."""
        if self._world is not None:
            self._world.step(sorted(terminated))
            return self._world
        rank = _checked_rank(ctx)
        keys_by_rank = self._exchange(ctx, rank)
        self._world = self._build(keys_by_rank)
        _warn_of_another_order(self._world, [int(keys[0]) for _rank, keys in sorted(keys_by_rank.items())])
        leaving = [int(keys_by_rank[rank][0]) for rank in sorted(terminated) if rank in keys_by_rank]
        terminated |= set(range(ctx.state.world_size)) - keys_by_rank.keys()
        self._world.step(leaving)
        return self._world

    def _consider(self, roll: RollCall, world_size: int, terminated: set[int]) -> RankedWorld:
        """Return the world after these losses, as one worker sees it that was told what all others are."""
        said = roll.keys_of_all(self, world_size, terminated)
        root_key = next((keys[0] for keys in said.values() if keys is not None), "")
        keys_by_rank = {
            # Nobody knows any more where the lost one was: near to nobody.
            number: [str(number), *(keys or (root_key, *(f"lost-{number}" for _ in self.layers[1:])))]
            for number, keys in said.items()
        }
        world = self._build(keys_by_rank)
        world.adopt(roll.num_active)
        world.step(sorted(terminated))
        return world

    def _exchange(self, ctx: RankAssignmentCtx, rank: int) -> dict[int, list[str]]:
        """Return (initial rank, key of each layer) by rank; ranks that never said where they are, are missing."""
        state = ctx.state
        keys = [str(state.initial_rank), *(_key(layer.key_or_fn, state) for layer in self.layers)]
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
            TreeLayer(
                root_keys[0] if depth == 0 else "",
                layer.min_ranks,
                layer.max_ranks,
                replace_from=bool(layer.flag and layer.flag & LayerFlag.RESERVE),
                close_gaps=bool(layer.flag and layer.flag & LayerFlag.BACKFILL),
            )
            for depth, layer in enumerate(self.layers)
        ]
        paths = {int(keys[0]): tuple(keys[2:]) for _rank, keys in sorted(keys_by_rank.items())}
        return RankedWorld(layers, paths, self.world_size_filter)


def steps_of(policy: RankAssignment) -> tuple[Any, ...]:
    """Return the steps of a composition, from left to right; of anything else itself."""
    return tuple(_flatten((policy,)))


def key_functions(step: object) -> tuple[tuple[str, str | Callable[[State], str]], ...]:
    """Return what a step asks of each rank: (where, key or function), in an order that is the same on all ranks."""
    name = type(step).__name__
    if isinstance(step, FilterCountGroupedByKey):
        return ((f"{name}: key_or_fn", step.key_or_fn),)
    if isinstance(step, Tree):
        return tuple((f"{name}: layers[{depth}].key_or_fn", layer.key_or_fn) for depth, layer in enumerate(step.layers))
    return ()


def _warn_of_another_order(world: RankedWorld, environment: Iterable[int]) -> None:
    for topology_rank, (by_tree, environment_rank) in enumerate(zip(world.order_of_tree(), environment, strict=True)):
        if by_tree != environment_rank:
            warnings.warn(
                f"Tree: the ranks given by the environment do not follow the topology, which decides: "
                f"topology_rank={topology_rank} environment_rank={by_tree}",
                stacklevel=4,
            )


def _key(key_or_fn: str | Callable[[State], str], state: State) -> str:
    return str(key_or_fn(state)) if callable(key_or_fn) else key_or_fn


def _flatten(instances: tuple[Any, ...]) -> Iterable[Any]:
    for instance in instances:
        inner = getattr(type(instance), "instances", None)
        if isinstance(inner, tuple):
            yield from _flatten(inner)
        else:
            yield instance


def _check_composition(steps: tuple[Any, ...]) -> None:
    """Raise TypeError for steps that cannot work together; `steps` run from right to left."""
    names = [type(step).__name__ for step in steps]
    if len(steps) > 1 and any(isinstance(step, Tree) for step in steps):
        raise TypeError(f"Compose: want Tree alone, because it renumbers and activates in one step, got {names}")
    filters = [step for step in steps if isinstance(step, RankFilter)]
    if len(filters) > 1 and any(isinstance(step, ActivateAllRanks) for step in filters):
        raise TypeError(f"Compose: want ActivateAllRanks as the only filter, got {names}")
    is_filter = [isinstance(step, RankFilter) for step in steps]
    if is_filter != sorted(is_filter, reverse=True):
        raise TypeError(f"Compose: want filters to the left of the steps that renumber, got {names}")


def _checked_rank(ctx: RankAssignmentCtx) -> int:
    """Return the ctx's rank; raise InputError when rank, world size and terminated ranks do not fit together."""
    state = ctx.state
    if state.world_size < 1:
        raise InputError(f"state.world_size: want at least 1, got {state.world_size}")
    rank = _rank(state)
    for other in (rank, *ctx.terminated_ranks):
        if not 0 <= other < state.world_size:
            name = "state.rank" if other == rank else "terminated_ranks"
            raise InputError(f"{name}: want ranks from 0 to {state.world_size - 1}, got {other}")
    return rank


def _rank(state: State) -> int:
    if state.rank is None:
        raise RankDiscarded("state.rank: want a rank, got None (this worker was discarded)")
    return state.rank


def _renumber(ctx: RankAssignmentCtx, new_rank: int | None) -> RankAssignmentCtx:
    state = ctx.state
    if new_rank is None:
        terminated = sorted(ctx.terminated_ranks)
        rank, state.rank, state.active_rank, state.mode = state.rank, None, None, Mode.TERMINATED
        raise RankDiscarded(f"rank {rank} was discarded: terminated ranks are {terminated}")
    state.world_size -= len(ctx.terminated_ranks)
    state.rank = new_rank
    ctx.terminated_ranks = set()
    return ctx


def _activate_below(state: State, size: int) -> None:
    state.active_world_size = size
    state.active_rank = active_rank(_rank(state), size)
    state.mode = Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE
