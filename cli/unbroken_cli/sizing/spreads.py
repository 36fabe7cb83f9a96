"""Durations, and how they spread: fixed, exponential, Weibull, or a histogram of what was measured."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(us|ms|s|m|h|d|)")
MAX_DRAWS = 5
"""Uniform numbers that one sample may need."""


def parse_duration(value: Any) -> float | None:
    """Return seconds of a number of seconds, or of a text such as 20s, 8m, 1.5h, 54d; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else None
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    return None if found is None else float(found[1]) * _UNITS[found[2]]


class Distribution(Protocol):
    """How a duration is distributed. Samples are monotone in each draw, so that runs can be compared draw by draw."""

    def sample(self, draws: Floats) -> Floats:
        """Return a sample in seconds for each row of uniform numbers (n, MAX_DRAWS)."""

    @property
    def mean_s(self) -> float:
        """Return the mean."""


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    seconds: float

    def sample(self, draws: Floats) -> Floats:
        """Return it for each row."""
        return np.full(len(draws), self.seconds)

    @property
    def mean_s(self) -> float:
        """Return the value."""
        return self.seconds


@dataclass(frozen=True)
class Weibull:
    """A Weibull distribution by its mean; shape 1 is the exponential distribution."""

    mean_s: float
    shape: float = 1.0

    @property
    def scale_s(self) -> float:
        """Return the scale."""
        return self.mean_s / math.gamma(1 + 1 / self.shape)

    def sample(self, draws: Floats) -> Floats:
        """Return the inverse of the distribution."""
        hazards = -np.log1p(-draws[:, 0])
        return self.scale_s * (hazards if self.shape == 1 else hazards ** (1 / self.shape))


@dataclass(frozen=True)
class Histogram:
    """Counts by bucket, evenly spread within each."""

    edges_s: tuple[float, ...]
    """One more than counts, ascending."""
    counts: tuple[float, ...]

    def sample(self, draws: Floats) -> Floats:
        """Return the inverse of the piecewise linear distribution."""
        shares = np.concatenate(([0.0], np.cumsum(self.counts) / sum(self.counts)))
        # Where a bucket is empty, its edge is never drawn: the distribution stands still there.
        kept = np.concatenate(([True], np.diff(shares) > 0))
        kept[:-1] |= kept[1:]
        found: Floats = np.interp(draws[:, 0], shares[kept], np.asarray(self.edges_s)[kept])
        return found

    @property
    def mean_s(self) -> float:
        """Return the mean."""
        middles = [(low + high) / 2 for low, high in zip(self.edges_s, self.edges_s[1:], strict=False)]
        return sum(count * middle for count, middle in zip(self.counts, middles, strict=True)) / sum(self.counts)


@dataclass(frozen=True)
class Total:
    """The sum of independent parts, at most MAX_DRAWS: the phases of a recovery."""

    parts: tuple[Distribution, ...]

    def sample(self, draws: Floats) -> Floats:
        """Return sums."""
        total = np.zeros(len(draws))
        for number, part in enumerate(self.parts):
            total += part.sample(draws[:, number:])
        return total

    @property
    def mean_s(self) -> float:
        """Return the mean."""
        return sum(part.mean_s for part in self.parts)


@dataclass(frozen=True)
class Scaled:
    """Another one, longer or shorter."""

    base: Distribution
    factor: float

    def sample(self, draws: Floats) -> Floats:
        """Return samples times the factor."""
        return self.base.sample(draws) * self.factor

    @property
    def mean_s(self) -> float:
        """Return the mean."""
        return self.base.mean_s * self.factor


def histogram(bounds_s: Sequence[float], counts: Sequence[float]) -> Histogram:
    """Return a histogram of upper bounds and the counts below each, from 0."""
    return Histogram((0.0, *bounds_s), tuple(counts))
