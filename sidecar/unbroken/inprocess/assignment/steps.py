"""One step of rank assignment: what it gets and returns, and those that look at ranks alone. Pure but for the store.

RankAssignment            renumbers
├── ShiftRanks, FillGaps
├── FilterCountGroupedByKey   terminates whole groups; does not renumber
├── Tree                      renumbers and activates: stands alone (`tree`)
└── RankFilter                decides who is active
    └── ActivateAllRanks, MaxActiveWorldSize, ActiveWorldSizeDivisibleBy
"""

import abc
import datetime
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from unbroken.inprocess.assignment.exchange import Exchange
from unbroken.inprocess.assignment.roll_call import RollCall
from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.state import Mode, State
from unbroken_core.ranks.tree.renumbering import (
    active_rank,
    divisible_active_world_size,
    fill_gap_rank,
    max_active_world_size,
    shift_rank,
)
from unbroken_core.vocabulary.errors import InputError


class RankDiscarded(RestartError):
    """Raised on the worker whose rank was discarded."""


@dataclass
class RankAssignmentCtx:
    """Input and output of every step; steps change it and return it."""

    state: State
    store: Any = None
    """Distributed store of this iteration, for Tree's first call and for FilterCountGroupedByKey; a RollCall in a
    wrapper, where one worker answers for all."""
    terminated_ranks: set[int] = field(default_factory=set)
    """Empty after a step that renumbers."""
    num_groupings: int = field(default=0, repr=False, compare=False)
    """Number of steps that have used the store of this ctx, the same on every rank: it tells them apart."""


class RankAssignment(abc.ABC):
    """Renumbers ranks, computes the world size, and decides who is active."""

    stands_alone: ClassVar[bool] = False
    """Whether it cannot be composed with other steps."""

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
        rank = checked_rank(ctx)
        return _renumber(ctx, shift_rank(rank, ctx.terminated_ranks))


class FillGaps(RankAssignment):
    """The highest ranks move into the gaps, the others stay. Raises RankDiscarded on a terminated rank."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set rank and world size; leaves no terminated ranks."""
        rank = checked_rank(ctx)
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
        rank = checked_rank(ctx)
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
        key = key_of(self.key_or_fn, ctx.state)
        exchange.add(f"count/{key}")
        exchange.barrier("counted", num_healthy)
        if not self.condition(exchange.count(f"count/{key}")):
            exchange.append("terminate", str(rank))
        exchange.barrier("judged", num_healthy)

    def judge(self, roll: RollCall, terminated: set[int]) -> set[int]:
        """Return the ranks of groups that do not meet the condition, for a worker that answers for all."""
        keys = roll.keys_of_healthy(self, terminated)
        is_enough = {key: self.condition(count) for key, count in Counter(keys.values()).items()}
        return {rank for rank, key in keys.items() if not is_enough[key]}


def steps_of(policy: RankAssignment) -> tuple[Any, ...]:
    """Return the steps of a composition, from left to right; a single step by itself."""
    return tuple(_flatten((policy,)))


def key_of(key_or_fn: str | Callable[[State], str], state: State) -> str:
    """Return the key of a worker in this state."""
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
    if len(steps) > 1 and any(step.stands_alone for step in steps):
        raise TypeError(f"Compose: want Tree alone, because it renumbers and activates in one step, got {names}")
    filters = [step for step in steps if isinstance(step, RankFilter)]
    if len(filters) > 1 and any(isinstance(step, ActivateAllRanks) for step in filters):
        raise TypeError(f"Compose: want ActivateAllRanks as the only filter, got {names}")
    is_filter = [isinstance(step, RankFilter) for step in steps]
    if is_filter != sorted(is_filter, reverse=True):
        raise TypeError(f"Compose: want filters to the left of the steps that renumber, got {names}")


def checked_rank(ctx: RankAssignmentCtx) -> int:
    """Return the ctx's rank; raise InputError when rank, world size and terminated ranks contradict each other."""
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
