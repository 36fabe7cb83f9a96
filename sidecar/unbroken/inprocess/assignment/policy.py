"""Rank assignment and filter of a wrapper, as settings that the job's coordinator plans with.

The coordinator decides about ranks and runs no code of the script. So a wrapper sends what it asks for as numbers. For
a policy in Python it sends the name, and one worker evaluates it for each plan (`evaluation`). Wrapped functions inside
another one come too late for that: each plan is checked against what they ask for.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from unbroken.inprocess.assignment.sent_keys import sends_key, sent_key
from unbroken.inprocess.assignment.size_filter import NO_FILTER, tabulate
from unbroken.inprocess.assignment.steps import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
    steps_of,
)
from unbroken.inprocess.assignment.tree import Layer, LayerFlag, Tree
from unbroken.inprocess.pod.environment import PodContext
from unbroken.inprocess.state import State
from unbroken_core.protocol.bounds import MAX_KEYS, MAX_SENTENCE
from unbroken_core.protocol.messages import Policy
from unbroken_core.vocabulary.layers import Layer as CoreLayer

_FIRST_PLAN = (
    "state.rank is the worker's number before the first plan: RANK, or else the pod's number and LOCAL_RANK; None "
    "where neither is known"
)
_MAX_SHOWN = 60
"""Characters of a key in an error."""


@dataclass(frozen=True)
class Asked:
    """What one worker asks of the coordinator."""

    policy: Policy | None = None
    keys: tuple[str, ...] = ()
    """Names of its domains in the layers of a Tree below the root; for code, the results of its key functions."""


def refuse_policy(name: str, policy: RankAssignment | None) -> None:
    """Raises ValueError for a policy that would fail at the first loss."""
    steps = list(_steps(policy))
    for place, step in enumerate(steps):
        if isinstance(step, Tree) and not step.layers:
            raise ValueError(f"{name}: Tree: layers: want at least the root, got none")
        is_renumbered = any(not isinstance(other, (RankFilter, FilterCountGroupedByKey)) for other in steps[:place])
        if isinstance(step, FilterCountGroupedByKey) and not is_renumbered:
            raise ValueError(
                f"{name}: {type(step).__name__}: want ShiftRanks or another step that renumbers to the left of it, "
                f"because it terminates ranks, got {[type(other).__name__ for other in steps]}"
            )


def refuse_beside_tree(assignment: RankAssignment | None, rank_filter: RankAssignment | None) -> None:
    """Raises ValueError for a filter beside a Tree, which renumbers and activates in one step."""
    if rank_filter is not None and any(isinstance(step, Tree) for step in _steps(assignment)):
        raise ValueError(f"rank_filter: want None, because Tree decides who is active, got {rank_filter!r}")


def refuse_inside(assignment: RankAssignment | None) -> None:
    """Raises ValueError for steps that only the outermost of several wrapped functions may use."""
    for step in _steps(assignment):
        if isinstance(step, (Tree, FillGaps)) or _is_own(step):
            raise ValueError(
                f"rank_assignment: {type(step).__name__} must be on the outermost wrapped function, because ranks are "
                "assigned before it begins; it is inside another one"
            )


def ask(assignment: RankAssignment | None, rank_filter: RankAssignment | None, state: State) -> Asked:
    """Return what a wrapper asks for; `state` is this worker before the first plan.

    Raises ValueError that names the step when a key function fails or its key is too long for messages, and what the
    world_size_filter of a Tree did.
    """
    steps = [*_steps(rank_filter), *_steps(assignment)]
    said = tuple(_key(where, key, state) for step in steps for where, key in key_functions(step))
    if len(said) > MAX_KEYS:
        raise ValueError(f"rank_assignment: want at most {MAX_KEYS} keys of all its steps together, got {len(said)}")
    if any(map(_is_own, steps)):
        code = ", ".join(f"{type(step).__module__}.{type(step).__qualname__}" for step in steps)
        return Asked(Policy(code=code), said)
    tree = next((step for step in steps if isinstance(step, Tree)), None)
    sizes = NO_FILTER if tree is None or tree.world_size_filter is None else tabulate(tree.world_size_filter)
    limits = [step.max_active_world_size for step in steps if isinstance(step, MaxActiveWorldSize)] + [sizes.max_ranks]
    divisors = [step.divisor for step in steps if isinstance(step, ActiveWorldSizeDivisibleBy)] + [sizes.divisible_by]
    policy = Policy(
        max_ranks=min((limit for limit in limits if limit is not None), default=None),
        divisible_by=math.lcm(*divisors),
        # The first step that renumbers, the rightmost, leaves no gaps to the others.
        fills_gaps=any(isinstance(step, FillGaps) for step in _renumbering(steps)[-1:]),
        layers=() if tree is None else tuple(_layer(layer) for layer in tree.layers),
        root_key=said[0] if said else "",
        sizes=sizes.steps,
    )
    return Asked(None if policy == Policy() else policy, said[1:])


def key_functions(step: object) -> tuple[tuple[str, str | Callable[[State], str]], ...]:
    """Return the keys that a step reads of each rank: (where, key or function), in the same order on all ranks."""
    name = type(step).__name__
    if isinstance(step, FilterCountGroupedByKey):
        return ((f"{name}: key_or_fn", step.key_or_fn),)
    if isinstance(step, Tree):
        return tuple((f"{name}: layers[{depth}].key_or_fn", layer.key_or_fn) for depth, layer in enumerate(step.layers))
    if sends_key(step):
        return ((f"{name}: ctx.store.send_key", partial(sent_key, step)),)
    return ()


def first_state(environment: Mapping[str, str], place: PodContext) -> State:
    """Return this worker's state before the first plan. Unknown values are None, or 0 for the size of the world."""
    text, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    rank = int(text) if text.isdecimal() else None
    # Pods are NAME-NUMBER, as ranks are in their first order.
    numbered = re.search(r"-(\d+)$", environment.get("UNBROKEN_POD", ""))
    if rank is None and numbered is not None:
        rank = int(numbered[1]) * place.local_world_size + place.local_rank
    return State(rank=rank, world_size=int(size) if size.isdecimal() else 0)


def violation(policy: RankAssignment | None, active_world_size: int) -> str:
    """Return how the size of the active world violates the policy, and what to change; "" if it does not."""
    found = (_CHECKS.get(type(step), _follows)(step, active_world_size) for step in _steps(policy))
    return next(filter(None, found), "")


def _key(where: str, key_or_fn: str | Callable[[State], str], state: State) -> str:
    try:
        key = str(key_or_fn(state)) if callable(key_or_fn) else key_or_fn
    except Exception as error:
        raise ValueError(
            f"rank_assignment: {where}: want a name for {state}, got {type(error).__name__}: {error} ({_FIRST_PLAN})"
        ) from error
    # The agent would refuse it in each report, and the worker would take that for an agent that does not answer.
    if len(key) > MAX_SENTENCE:
        raise ValueError(
            f"rank_assignment: {where}: want at most {MAX_SENTENCE:,} characters, which every rank can be sent, "
            f"got {len(key):,}: {key[:_MAX_SHOWN]}..."
        )
    return key


def _layer(layer: Layer) -> CoreLayer:
    flag = layer.flag or LayerFlag(0)
    return CoreLayer(
        min_ranks=layer.min_ranks,
        max_ranks=layer.max_ranks,
        replace_from=bool(flag & LayerFlag.RESERVE),
        close_gaps=bool(flag & LayerFlag.BACKFILL),
    )


def _renumbering(steps: list[Any]) -> list[Any]:
    return [step for step in steps if isinstance(step, (ShiftRanks, FillGaps))]


def _follows(_step: Any, _size: int) -> str:
    return ""


def _check_maximum(step: MaxActiveWorldSize, size: int) -> str:
    limit = step.max_active_world_size
    if limit is None or size <= limit:
        return ""
    return f"MaxActiveWorldSize: want at most {limit} active ranks, got {size}; set world.maxRanks to {limit}"


def _check_divisor(step: ActiveWorldSizeDivisibleBy, size: int) -> str:
    divisor = step.divisor
    if size % divisor == 0:
        return ""
    return (
        f"ActiveWorldSizeDivisibleBy: want a multiple of {divisor} active ranks, got {size}; "
        f"set world.divisibleBy to {divisor}"
    )


_CHECKS: dict[type[Any], Callable[[Any, int], str]] = {
    ShiftRanks: _follows,
    FillGaps: _follows,
    Tree: _follows,
    ActivateAllRanks: _follows,
    MaxActiveWorldSize: _check_maximum,
    ActiveWorldSizeDivisibleBy: _check_divisor,
}


def _is_own(step: RankAssignment) -> bool:
    # Not isinstance: a subclass may decide otherwise. One that only adds methods to Tree decides as Tree does.
    is_as_tree = isinstance(step, Tree) and all(
        getattr(type(step), name) is member
        for name, member in vars(Tree).items()
        if inspect.isfunction(member) and name != "__init__"
    )
    return type(step) not in _CHECKS and not is_as_tree


def _steps(policy: RankAssignment | None) -> Iterator[Any]:
    return iter(()) if policy is None else iter(steps_of(policy))
