"""Reads values of an input, and says in one line with the field's name what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from unbroken_cli.sizing.spreads import Distribution, Fixed, Histogram, Weibull, histogram, parse_duration
from unbroken_core.vocabulary.errors import InputError

MAX_ITEMS = 64
MAX_SECONDS = 10 * 365 * 86400.0
_MISSING: Any = object()


class Fields:
    """One mapping of the input."""

    def __init__(self, where: str, value: Any, allowed: Sequence[str]) -> None:
        """Take a mapping. Raises InputError for anything else, and for fields that nobody reads."""
        self.where = where
        if not isinstance(value, Mapping):
            refuse(where or "the input", "a mapping", value)
        for key in value:
            if key not in allowed:
                raise InputError(f"{self.path(str(key)[:40])}: unknown; want one of {', '.join(allowed)}")
        self._value = value

    def path(self, key: str) -> str:
        """Return the name of a field for people."""
        return f"{self.where}.{key}" if self.where else key

    def has(self, key: str) -> bool:
        """Return whether a field is there."""
        return self._value.get(key) is not None

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """Return a field as it is. Raises InputError where it is missing and has no default."""
        value = self._value.get(key)
        if value is None:
            if default is _MISSING:
                raise InputError(f"{self.path(key)}: is required")
            return default
        return value

    def whole(self, key: str, low: int, high: int, default: Any = _MISSING) -> int:
        """Return a whole number of a range."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse(self.path(key), f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float, default: Any = _MISSING) -> float:
        """Return a number above `low`, up to `high`."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            refuse(self.path(key), f"a number above {low:g} and up to {high:g}", value)
        return float(value)

    def seconds(self, key: str, default: Any = _MISSING, least: float = 0.0) -> float:
        """Return a duration in seconds."""
        value = self.raw(key, default)
        seconds = parse_duration(value)
        if seconds is None or not least <= seconds <= MAX_SECONDS:
            refuse(self.path(key), f"a duration such as 20s, 8m, 4h or 54d, {least:g} s to 10 years", value)
        return seconds

    def word(self, key: str, allowed: Sequence[str], default: Any = _MISSING) -> str:
        """Return one of these words."""
        value = self.raw(key, default)
        if value not in allowed:
            refuse(self.path(key), f"one of {', '.join(allowed)}", value)
        return str(value)

    def items(self, key: str) -> list[Any]:
        """Return a list, empty where the field is missing."""
        value = self.raw(key, [])
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            refuse(self.path(key), f"a list of at most {MAX_ITEMS}", value)
        return value

    def spread(self, key: str, default: Any = _MISSING) -> Distribution:
        """Return how a duration is distributed."""
        return read_spread(self.path(key), self.raw(key, default))


def read_spread(where: str, value: Any) -> Distribution:
    """Return a duration (always the same), `exponential: MEAN`, `weibull: {mean, shape}` or `histogram: {...}`."""
    if not isinstance(value, Mapping):
        seconds = parse_duration(value)
        if seconds is None or not 0 <= seconds <= MAX_SECONDS:
            refuse(where, "a duration such as 8m, or one of exponential, weibull, histogram", value)
        return Fixed(seconds)
    fields = Fields(where, value, ("exponential", "weibull", "histogram"))
    if len(value) != 1:
        refuse(where, "one of exponential, weibull, histogram", value)
    if fields.has("exponential"):
        return Weibull(fields.seconds("exponential", least=1e-6))
    if fields.has("weibull"):
        inner = Fields(fields.path("weibull"), value["weibull"], ("mean", "shape"))
        return Weibull(inner.seconds("mean", least=1e-6), inner.number("shape", 0.05, 20))
    return _histogram(fields.path("histogram"), fields.raw("histogram"))


def _histogram(where: str, value: Any) -> Histogram:
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_ITEMS:
        refuse(where, f"1 to {MAX_ITEMS} counts by the upper bound of their bucket, such as {{5s: 3, 10s: 20}}", value)
    bounds: list[float] = []
    counts: list[float] = []
    for bound, count in value.items():
        seconds = parse_duration(bound)
        if seconds is None or not 0 < seconds <= MAX_SECONDS or seconds <= (bounds[-1] if bounds else 0):
            refuse(where, "ascending durations above 0 as upper bounds", bound)
        if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count <= 1e12:
            refuse(f"{where}.{bound}", "a count from 0 to 1e12", count)
        bounds.append(seconds)
        counts.append(float(count))
    if not sum(counts):
        refuse(where, "a count above 0", value)
    return histogram(bounds, counts)


def refuse(where: str, wanted: str, seen: Any) -> NoReturn:
    """Raise InputError."""
    text = " ".join(repr(seen).split())
    raise InputError(f"{where}: want {wanted}, got {text if len(text) <= 80 else text[:77] + '...'}")
