"""Rank assignment and filter of a wrapper, held against what the job's coordinator assigns.

The coordinator decides, from the job's spec, before this process is asked. So a policy is accepted when every plan of
the coordinator either follows it by construction or can be seen not to.
"""

from collections.abc import Callable, Iterator
from typing import Any

from unbroken.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    ShiftRanks,
    Tree,
    steps_of,
)

_INSTEAD: dict[type[RankAssignment], str] = {
    Tree: "topology.layers, world.maxRanks and world.divisibleBy",
    FilterCountGroupedByKey: "minRanks of a layer in topology.layers",
    FillGaps: "closeGaps of a layer in topology.layers",
}
"""Where the spec says what a policy of this class says."""


def refuse_policy(name: str, policy: RankAssignment | None) -> None:
    """Raises ValueError for a policy that the coordinator cannot be held to."""
    for step in _steps(policy):
        # Not isinstance: what a subclass decides, nobody knows.
        if type(step) not in _CHECKS:
            instead = next((text for kind, text in _INSTEAD.items() if isinstance(step, kind)), "")
            instead = instead or "minReplicas, world and topology"
            raise ValueError(
                f"{name}: ranks are assigned by the job's coordinator; want None, one of "
                f"{', '.join(sorted(kind.__name__ for kind in _CHECKS))} or a composition of them, "
                f"and {instead} in the job's spec, got {step!r}"
            )


def violation(policy: RankAssignment | None, active_world_size: int) -> str:
    """Return what the size of the active world has against the policy, and what to change; "" when it follows."""
    found = (_CHECKS[type(step)](step, active_world_size) for step in _steps(policy))
    return next(filter(None, found), "")


def _follows(_step: Any, _size: int) -> str:
    # Survivors keep their order: spares take the place of the lost, what they cannot take is closed by shifting. Who
    # has no rank is a spare that the spec asks for, or one too many for its limits.
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
    ActivateAllRanks: _follows,
    MaxActiveWorldSize: _check_maximum,
    ActiveWorldSizeDivisibleBy: _check_divisor,
}


def _steps(policy: RankAssignment | None) -> Iterator[Any]:
    return iter(()) if policy is None else iter(steps_of(policy))
