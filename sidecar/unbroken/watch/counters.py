"""What counters have gained, and how often something was seen lately. Pure.

An absolute number says nothing: it may be years old. One sample says little: it may be a blip.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Key = tuple[str, str]
"""What was looked at, and what was found there: ("mlx5_0/1", "link_downed")."""
MOST = 3
MAX_KEYS = 512
"""Things that one check remembers: a driver, or a folder, may name any number. What built-in checks read fits."""


def gains(before: Mapping[Key, int], now: Mapping[Key, int]) -> dict[Key, int]:
    """Return by how much each counter has risen. One that was not there before, or is lower, has begun anew."""
    return {key: value - before[key] for key, value in now.items() if key in before and value > before[key]}


@dataclass(frozen=True)
class Rises:
    """The last value of each counter, and when it has risen lately."""

    values: Mapping[Key, int] = field(default_factory=dict)
    times_s: Mapping[Key, tuple[float, ...]] = field(default_factory=dict)

    def follow(self, now: Mapping[Key, int], least: Mapping[str, int], at_s: float, hold_s: float) -> "Rises":
        """Return what is known after a sample. `least`, by name: smaller rises are passed over.

        A counter that could not be read this time keeps its value: what it gains meanwhile counts at the next look.
        """
        times = note_times(
            self.times_s,
            [key for key, gain in gains(self.values, now).items() if gain >= least.get(key[1], 1)],
            at_s,
            hold_s,
        )
        values = {**now, **{key: value for key, value in self.values.items() if key not in now}}
        return Rises(dict(list(values.items())[:MAX_KEYS]), times)

    def without(self, keys: Collection[Key]) -> "Rises":
        """Return it without the last values of these counters: they begin anew."""
        return Rises({key: value for key, value in self.values.items() if key not in keys}, self.times_s)

    def seen(self, key: Key) -> int:
        """Return how often a counter has risen lately."""
        return len(self.times_s.get(key, ()))


def note_times(
    before: Mapping[Key, tuple[float, ...]], seen: Collection[Key], at_s: float, hold_s: float
) -> dict[Key, tuple[float, ...]]:
    """Return when each thing was seen in the last `hold_s` seconds, the last three times of each."""
    kept = {key: recent for key, times in before.items() if (recent := tuple(t for t in times if at_s - t < hold_s))}
    for key in seen:
        if key in kept or len(kept) < MAX_KEYS:
            kept[key] = (*kept.get(key, ()), at_s)[-MOST:]
    return kept


Looks = Mapping[Key, tuple[bool, ...]]
"""Whether each thing was seen, in the last three samples."""


def look_again(before: Looks, seen: Collection[Key]) -> dict[Key, tuple[bool, ...]]:
    """Return the looks after a sample; what was seen in none of the last three is forgotten."""
    keys = list(dict.fromkeys([*before, *seen]))[:MAX_KEYS]
    looks = {key: (*before.get(key, ()), key in seen)[-MOST:] for key in keys}
    return {key: look for key, look in looks.items() if any(look)}
