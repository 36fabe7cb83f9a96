"""What a preflight knows: the state of each host, and how each pair has done. Pure.

Hosts are numbered from 0 in the order of the topology: neighbours share a rack.
"""

from dataclasses import dataclass
from typing import NamedTuple

from unbroken_core.vocabulary.reasons import Word


class HostState(Word):
    """What is known of a host without any pair."""

    ABLE = "able"
    """Its own checks have passed."""
    BROKEN = "broken"
    """Its own checks have failed."""
    SILENT = "silent"
    """It has not answered: nothing is known of it."""


class Pair(NamedTuple):
    """Two hosts that test with each other, the lower number first."""

    left: int
    right: int


def pair_of(one: int, other: int) -> Pair:
    """Return the pair of two hosts."""
    return Pair(min(one, other), max(one, other))


@dataclass(frozen=True)
class Trial:
    """How one test of a pair has ended."""

    pair: Pair
    has_passed: bool
    silent: tuple[int, ...] = ()
    """Who of the two has not said how it ended: the test then says nothing of the other one either."""

    @property
    def is_conclusive(self) -> bool:
        """Whether both have spoken."""
        return not self.silent


@dataclass(frozen=True)
class Round:
    """Pairs that test at the same time; no host is in two of them."""

    number: int
    """From 1; numbers may be left out."""
    pairs: tuple[Pair, ...]
