"""A rank assignment in Python, evaluated by one worker for all of them when the coordinator asks.

Each worker that is not lost gets a ctx of its own, as if it ran the policy itself; the results must fit together.
Steps that count or place all ranks wait until all have reached them; each worker has sent the keys that they read.
The reference's own steps are evaluated for all workers at once.
"""

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from unbroken.inprocess.assignment import roll_call
from unbroken.inprocess.assignment.policy import key_functions
from unbroken.inprocess.assignment.roll_call import NotSentError, RollCall
from unbroken.inprocess.assignment.steps import (
    FillGaps,
    FilterCountGroupedByKey,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
    steps_of,
)
from unbroken.inprocess.assignment.tree import Tree
from unbroken.inprocess.state import Mode, State
from unbroken_core.protocol.messages import Answer, Question
from unbroken_core.ranks.tree.renumbering import filled_ranks, shifted_ranks

logger = logging.getLogger(__name__)

MAX_ERROR = 1500


def answer(assignment: RankAssignment | None, rank_filter: RankAssignment | None, question: Question) -> Answer:
    """Return the worker of each rank, or the error of the policy. Runs in the main thread."""
    steps = [step for policy in (rank_filter, assignment) if policy is not None for step in steps_of(policy)]

    def evaluate() -> list[int]:
        return _evaluate(_in_turn((assignment, rank_filter)), question, _roll_call(steps, question))

    try:
        try:
            workers = evaluate()
        except Exception as error:
            # Code of the script that reads a file, say, may fail once; the job would be over.
            logger.warning(
                "rank assignment failed, and is evaluated once more: error=%s: %s", type(error).__name__, error
            )
            workers = evaluate()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR] + _place(error)
        return Answer(question.term, question.number, (), text)
    return Answer(question.term, question.number, tuple(workers))


def _place(error: Exception) -> str:
    """Return the line that raised it; for what `ctx.store` refuses, the script's, which called that."""
    frames = traceback.extract_tb(error.__traceback__)
    while len(frames) > 1 and frames[-1].filename == roll_call.__file__:
        frames.pop()
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _in_turn(policies: Iterable[RankAssignment | None]) -> list[RankAssignment]:
    """Return the steps in the order in which they run; without a step that renumbers, gaps are closed first."""
    steps = [step for policy in policies if policy is not None for step in reversed(steps_of(policy))]
    return steps if any(not isinstance(step, RankFilter) for step in steps) else [ShiftRanks(), *steps]


def _roll_call(steps: Iterable[RankAssignment], question: Question) -> RollCall:
    """`steps` in the order in which each worker has sent their keys."""
    said = {number: question.names[index] for number, index in enumerate(question.keys) if index >= 0}
    return RollCall(question.active_world_size, said, [(step, len(key_functions(step))) for step in steps])


def _evaluate(steps: Sequence[RankAssignment], question: Question, roll: RollCall) -> list[int]:
    """Return the number of the worker for rank 0, rank 1, ...; empty if the policy activates none."""
    terminated = set(question.terminated)
    # Nothing comes from the previous world: active ranks are computed from healthy ones each time.
    states = {
        number: State(rank=number, world_size=question.world_size, iteration=question.iteration)
        for number in range(question.world_size)
        if number not in terminated
    }
    for group in _groups(steps):
        by_rank = _by_rank({number: _number(state.rank, number) for number, state in states.items()})
        roll.gather(by_rank)
        size = _common_size(states, terminated) if _is_known(group[0]) else None
        if size is None:
            states, terminated = _walk(group, states, terminated, roll)
        elif isinstance(group[0], FilterCountGroupedByKey):
            terminated = terminated | group[0].judge(roll, terminated)
        else:
            order = _ORDERS[type(group[0])](size, terminated)
            states, terminated = _renumber(states, by_rank, order), set()
    if terminated:
        raise ValueError(f"want no terminated ranks after renumbering, got {sorted(terminated)[:20]}")
    ranks = {number: _active_rank(state, number) for number, state in states.items()}
    by_rank = _by_rank({number: rank for number, rank in ranks.items() if rank is not None})
    if sorted(by_rank) != list(range(len(by_rank))):
        raise ValueError(f"want ranks 0 to n-1, got {sorted(by_rank)[:20]}")
    return [by_rank[rank] for rank in range(len(by_rank))]


_ORDERS: dict[type, Callable[[int, set[int]], list[int]]] = {ShiftRanks: shifted_ranks, FillGaps: filled_ranks}


def _is_known(step: RankAssignment) -> bool:
    """Whether the step can be evaluated for all at once: with thousands of losses, one by one would take minutes."""
    return type(step) in _ORDERS or type(step) is FilterCountGroupedByKey


def _groups(steps: Sequence[RankAssignment]) -> Iterator[list[RankAssignment]]:
    """Yield groups of steps that each worker takes in a row; a step that looks at all ranks begins a group."""
    group: list[RankAssignment] = []
    for step in steps:
        is_meeting = _is_known(step) or isinstance(step, (FilterCountGroupedByKey, Tree))
        if group and (is_meeting or _is_known(group[0])):
            yield group
            group = []
        group.append(step)
    yield group


def _common_size(states: Mapping[int, State], terminated: Collection[int]) -> int | None:
    """Return the world size on which all agree; None if a user's step has left the states inconsistent."""
    sizes = {state.world_size for state in states.values()}
    size = sizes.pop() if len(sizes) == 1 else 0
    ranks = [state.rank for state in states.values() if state.rank is not None]
    return size if all(0 <= rank < size for rank in (*ranks, *terminated)) else None


def _renumber(states: Mapping[int, State], by_rank: Mapping[int, int], order: Sequence[int]) -> dict[int, State]:
    """Give each worker its new rank; `order` has the previous rank of each."""
    left: dict[int, State] = {}
    for rank, previous in enumerate(order):
        if previous in by_rank:
            left[by_rank[previous]] = replace(states[by_rank[previous]], rank=rank, world_size=len(order))
    return left


def _walk(
    steps: Sequence[RankAssignment], states: Mapping[int, State], terminated: set[int], roll: RollCall
) -> tuple[dict[int, State], set[int]]:
    """Let each worker take these steps; return the states of those that are left, and the terminated ranks."""
    left: dict[int, State] = {}
    shared: set[int] | None = None
    for number, ctx in _walked(steps, states, terminated, roll):
        if ctx is None:
            continue
        # One set for all: for 100,000 workers with a thousand lost ranks, copies would take gigabytes.
        shared = ctx.terminated_ranks if shared is None else shared
        if ctx.terminated_ranks != shared:
            seen = sorted(ctx.terminated_ranks ^ shared)[:20]
            raise ValueError(f"want the same terminated ranks on all workers, got a difference on {number}: {seen}")
        left[number] = ctx.state
    return left, shared or set()


def _walked(
    steps: Sequence[RankAssignment], states: Mapping[int, State], terminated: set[int], roll: RollCall
) -> Iterator[tuple[int, RankAssignmentCtx | None]]:
    """Yield what each worker has made of its ctx, None for one that was discarded.

    One that wants what others have not sent yet begins again from its former state when they have had their turn.
    Raises ValueError when none of them can go on.
    """
    waiting = dict(states)
    while waiting:
        reason, num_sent, later = "", roll.num_sent, {}
        for number, state in waiting.items():
            former = replace(state)
            try:
                yield number, _step(steps, RankAssignmentCtx(state, roll, set(terminated)), number)
            except NotSentError as error:
                reason = str(error)
                later[number] = former
        if later and roll.num_sent == num_sent and len(later) == len(waiting):
            raise ValueError(f"ctx.store: {reason}, and no other rank can go on")
        waiting = later


def _step(steps: Sequence[RankAssignment], ctx: RankAssignmentCtx, number: int) -> RankAssignmentCtx | None:
    for step in steps:
        if isinstance(ctx.store, RollCall):
            ctx.store.step = step
        try:
            made = step(ctx)
        except RankDiscarded:
            return None
        if not isinstance(made, RankAssignmentCtx):
            raise TypeError(f"{step!r}: want the ctx returned, got {made!r} for rank {number}")
        ctx = made
    return ctx


def _active_rank(state: State, number: int) -> int | None:
    """Return the active rank that the steps gave to a worker; None for none."""
    if state.mode in (Mode.INACTIVE, Mode.TERMINATED):
        return None
    return _number(state.rank if state.mode is Mode.INITIALIZED else state.active_rank, number)


def _number(rank: object, number: int) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"want a number as rank, got {rank!r} for rank {number}")
    return rank


def _by_rank(ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the number of the worker by rank."""
    by_rank: dict[int, int] = {}
    for number, rank in ranks.items():
        other = by_rank.setdefault(rank, number)
        if other != number:
            raise ValueError(f"want each rank once, got rank {rank} for ranks {other} and {number}")
    return by_rank
