"""Rank assignment as callables on a ctx, for scripts of the reference.

In a job the coordinator assigns ranks; these give the same answers for a ctx of one's own.
"""

import abc
from dataclasses import dataclass, field
from typing import Any

from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.state import Mode, State


class RankDiscarded(RestartError):
    """Raised on the worker whose rank was discarded."""


@dataclass
class RankAssignmentCtx:
    """Input and output of every step; steps change it and return it."""

    state: State
    store: Any = None
    """Distributed store of the iteration, for steps that group ranks by key."""
    terminated_ranks: set[int] = field(default_factory=set)


class RankAssignment(abc.ABC):
    """Renumbers ranks, computes the world size, and decides who is active."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the ctx that it was given, changed."""


class RankFilter(RankAssignment):
    """Only decides who is active; must run after the steps that renumber."""


def _rank(state: State) -> int:
    if state.rank is None:
        raise RankDiscarded("state.rank: want a rank, got None (this worker was discarded)")
    return state.rank


def _activate_below(state: State, active_world_size: int) -> None:
    rank = _rank(state)
    state.active_world_size = active_world_size
    state.mode, state.active_rank = (Mode.ACTIVE, rank) if rank < active_world_size else (Mode.INACTIVE, None)


def _base_size(state: State) -> int:
    return state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)


class ActivateAllRanks(RankAssignment):
    """Every rank is active."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        state = ctx.state
        state.mode, state.active_rank, state.active_world_size = Mode.ACTIVE, _rank(state), state.world_size
        return ctx


class MaxActiveWorldSize(RankFilter):
    """At most so many ranks are active, the lowest ones; None means all."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        size = _base_size(ctx.state)
        limit = self.max_active_world_size
        _activate_below(ctx.state, size if limit is None else min(size, limit))
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of `divisor`; it may be 0."""

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"divisor: want at least 1, got {divisor}")
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set mode, active rank and active world size."""
        _activate_below(ctx.state, _base_size(ctx.state) // self.divisor * self.divisor)
        return ctx


class ShiftRanks(RankAssignment):
    """Survivors keep their order and close the gaps. Raises RankDiscarded on a terminated rank."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Set rank and world size; leaves no terminated ranks."""
        state, terminated = ctx.state, ctx.terminated_ranks
        rank = _rank(state)
        state.world_size -= len(terminated)
        if rank in terminated:
            state.rank = state.active_rank = None
            state.mode = Mode.TERMINATED
            raise RankDiscarded(f"rank {rank} was discarded: terminated ranks are {sorted(terminated)}")
        state.rank = rank - sum(dead < rank for dead in terminated)
        ctx.terminated_ranks = set()
        return ctx
