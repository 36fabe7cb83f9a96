"""Which ranks hold all others up, by how long each is busy in a step. Pure.

In a synchronous job the steps of all ranks take equally long: what tells is the busy time, the step without waiting.
A rank is slow in a window if its busy time is above the median of its stage by more than the larger of

    5 x 1.4826 x MAD      what ranks differ by anyway: the median of their distances from the median, as a deviation
    3 % of a step         less is not worth a word: without it the job would be faster by that at most

and a straggler once it was slow in two windows in a row. It is none any more after two in which it was not.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

MIN_RANKS = 4
"""With fewer there is no telling which of them is unusual."""
_DEVIATIONS = 5 * 1.4826
_SHARE = 0.03

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Slow:
    """By how much a rank is slower than usual in its stage."""

    busy_s: float
    usual_s: float
    step_s: float

    @property
    def percent(self) -> float:
        """How much longer it is busy than usual."""
        return 100 * (self.busy_s / self.usual_s - 1) if self.usual_s > 0 else 100.0


def find_slow(paces: Mapping[Key, tuple[float, float]]) -> dict[Key, Slow]:
    """Return who is slow in one window, of one stage: seconds busy and seconds in all of a step."""
    if len(paces) < MIN_RANKS:
        return {}
    usual_s = median(busy_s for busy_s, _step_s in paces.values())
    step_s = median(step_s for _busy_s, step_s in paces.values())
    spread_s = median(abs(busy_s - usual_s) for busy_s, _step_s in paces.values())
    limit_s = usual_s + max(_DEVIATIONS * spread_s, _SHARE * step_s)
    return {key: Slow(busy_s, usual_s, step_s) for key, (busy_s, _step_s) in paces.items() if busy_s > limit_s}


def stage_of(rank: int, world_size: int, num_stages: int) -> int:
    """Return the pipeline stage of a rank: neighbouring ranks, as Megatron and torchtitan number them."""
    return rank * num_stages // max(world_size, 1)
