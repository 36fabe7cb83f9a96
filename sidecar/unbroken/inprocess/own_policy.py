"""A rank assignment in Python, evaluated by one worker for all of them when the coordinator asks.

Each worker that is not lost gets a ctx of its own, as if it ran the policy itself; what comes out must fit together.
"""

import traceback
from collections.abc import Iterable, Sequence

from unbroken.inprocess.rank_assignment import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
    steps_of,
)
from unbroken.inprocess.state import Mode, State
from unbroken_core.messages import Answer, Question

MAX_ERROR = 1500


def answer(assignment: RankAssignment | None, rank_filter: RankAssignment | None, question: Question) -> Answer:
    """Return who shall be which rank, or the error of the policy. Runs in the main thread."""
    try:
        workers = _evaluate(_in_turn((assignment, rank_filter)), question)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR] + where
        return Answer(question.generation, question.number, (), text)
    return Answer(question.generation, question.number, tuple(workers))


def _in_turn(policies: Iterable[RankAssignment | None]) -> list[RankAssignment]:
    """Return the steps in the order in which they run; gaps are closed first where nobody renumbers."""
    steps = [step for policy in policies if policy is not None for step in reversed(steps_of(policy))]
    return steps if any(not isinstance(step, RankFilter) for step in steps) else [ShiftRanks(), *steps]


def _evaluate(steps: Sequence[RankAssignment], question: Question) -> list[int]:
    lost = set(question.terminated)
    by_rank: dict[int, int] = {}
    for number in range(question.world_size):
        if number in lost:
            continue
        # Nothing of the world before: what is active is computed from what is healthy each time.
        state = State(rank=number, world_size=question.world_size, iteration=question.iteration)
        rank = _rank_of(steps, RankAssignmentCtx(state, None, set(lost)))
        if rank is None:
            continue
        other = by_rank.setdefault(rank, number)
        if other != number:
            raise ValueError(f"want each rank once, got rank {rank} for ranks {other} and {number}")
    if sorted(by_rank) != list(range(len(by_rank))) or not by_rank:
        raise ValueError(f"want ranks 0 to n-1, at least one, got {sorted(by_rank)[:20]}")
    return [by_rank[rank] for rank in range(len(by_rank))]


def _rank_of(steps: Sequence[RankAssignment], ctx: RankAssignmentCtx) -> int | None:
    """Return the active rank that the steps give to the rank of a ctx; None for none."""
    former = ctx.state.rank
    for step in steps:
        try:
            made = step(ctx)
        except RankDiscarded:
            return None
        if not isinstance(made, RankAssignmentCtx):
            raise TypeError(f"{step!r}: want the ctx returned, got {made!r} for rank {former}")
        ctx = made
    if ctx.terminated_ranks:
        raise ValueError(f"want no terminated ranks after renumbering, got {sorted(ctx.terminated_ranks)[:20]}")
    state = ctx.state
    if state.mode in (Mode.INACTIVE, Mode.TERMINATED):
        return None
    rank = state.rank if state.mode is Mode.INITIALIZED else state.active_rank
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"want a number as rank, got {rank!r} for rank {former}")
    return rank
