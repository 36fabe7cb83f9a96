"""Where the time of a job went, since it first ran: every picosecond is in one term, and is there once.

    training ──a step that is new──> progress          stopped ──until all are in it again──> restart
             ──a step again────────> redo                      ──too few pods──────────────> waiting
             ──its first step──────> restart, but for one step
             ──a fault─────────────> redo until the fault (restart before the first step), then detect
             ──of all of that──────> checkpoint, as far as workers say that they stood still for one

Sums are of whole picoseconds, so that the terms are the time that has passed, exactly. What follows the last step is
`open` until the next step or a fault says what it was.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Union

from unbroken_core.protocol.messages import TimeSpent
from unbroken_core.vocabulary.reasons import Spent

_PS = 10**12
_FIELDS = {term: f"{term.value}_s" for term in Spent}
"""Of TimeSpent. Made once: Python keeps thousands of names under which attributes were looked up, each copy anew."""


def _ps(seconds: float) -> int:
    return round(seconds * _PS)


class Account:
    """The terms of one job; `Progress` and the coordinator tell it what happens."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Spent, 0)
        self._first: Union[int, None] = None
        """When the job first ran, as far as is known; None: never."""
        self._mark = 0
        """Until then all is in a term."""
        self._term: Union[Spent, None] = None
        """What the time since then is for; None while it is not known."""
        self._end: Union[int, None] = None
        self._world_size = 0
        self._held = self._wanted = 0
        self._weighed = 0
        """Until then the ranks that were held and wanted are counted."""
        self._progress_ranks = self._held_ranks = self._wanted_ranks = 0
        """Picoseconds times ranks."""
        self._unproven = self._unproven_ranks = 0
        """Of that progress, what is it only as long as nobody reports steps."""
        self._taken: Union[tuple[int, int, int], None] = None
        """Of an iteration that was taken over: its beginning, its end or loss, and when it was taken over."""
        self._taken_size = self._taken_held = self._taken_wanted = 0
        """Its ranks, and those that were held and wanted meanwhile."""
        self._earlier: Union[TimeSpent, None] = None
        self._reported = self._suspended = 0

    def begin(self, at_s: float) -> None:
        """The job runs for the first time."""
        if self._first is None:
            self._first = self._mark = self._weighed = _ps(at_s)
            self._held, self._wanted = self._taken_held, self._taken_wanted

    def settle(self, until_s: float, term: Spent) -> None:
        """What has not been judged until then was for this."""
        until = _ps(until_s)
        if self._first is None or self._end is not None or until <= self._mark:
            return
        passed = until - self._mark
        self._spent[term] += passed
        if term is Spent.PROGRESS:
            self._progress_ranks += passed * self._world_size
            if self._term is Spent.PROGRESS:
                self._unproven += passed
                self._unproven_ranks += passed * self._world_size
        self._mark = until

    def run(self, now_s: float, world_size: int, counts_now: bool) -> None:
        """All workers train from now on; `counts_now`: all of that is progress, as nobody will report steps."""
        self.close(now_s)
        self._world_size = world_size
        if self._first is None:
            self._taken_held = self._taken_wanted = world_size
        self.begin(now_s)
        self._term = Spent.PROGRESS if counts_now else None

    def close(self, now_s: float) -> None:
        """Put what is not judged into the term that it is for."""
        if self._term is not None:
            self.settle(now_s, self._term)

    def judge(self, now_s: float, term: Spent) -> None:
        """A step tells what the time before it was for, and steps will tell from now on."""
        self.settle(now_s, term)
        self._term = None

    def await_step(self) -> None:
        """Steps will tell what the time is for that has not been judged."""
        self._term = None

    def expect_steps(self) -> None:
        """The first step of the job is known: iterations that have ended without one were getting ready."""
        self._spent[Spent.PROGRESS] -= self._unproven
        self._spent[Spent.RESTART] += self._unproven
        self._progress_ranks -= self._unproven_ranks
        self._unproven = self._unproven_ranks = 0

    def stop(self, now_s: float, fault_s: float) -> None:
        """The iteration is over since a fault."""
        self.settle(min(fault_s, now_s), self._term or Spent.REDO)
        self.settle(now_s, Spent.DETECT)
        self._term = Spent.RESTART

    def take_over(
        self, entered_s: float, until_s: float, now_s: float, world_size: int, *, held: int = 0, wanted: int = 0
    ) -> None:
        """An iteration of another coordinator trained from `entered_s` until `until_s`.

        `held` and `wanted` ranks, or those of the world where they are fewer: nobody else can be asked who was there.
        """
        self._world_size = self._taken_size = world_size
        self._taken_held, self._taken_wanted = max(held, world_size), max(wanted, world_size)
        self.begin(entered_s)
        self.settle(until_s, Spent.PROGRESS)
        self.settle(now_s, Spent.DETECT)
        self._term = Spent.RESTART
        self._taken = _ps(entered_s), _ps(until_s), _ps(now_s)

    def look(self, now_s: float, term: Union[Spent, None], held: int, wanted: int) -> None:
        """Note what the job does now; `term` None: it trains. To be called after each event."""
        if self._first is None or self._end is not None:
            self._held, self._wanted = held, wanted
            return
        if held != self._held or wanted != self._wanted:
            self._weigh(_ps(now_s))
            self._held, self._wanted = held, wanted
        if term is not None and term is not self._term:
            self.close(now_s)
            self._term = term

    def end(self, now_s: float) -> None:
        """The job is over."""
        if self._end is None and self._first is not None:
            self.close(now_s)
            self._weigh(_ps(now_s))
            self._end = max(_ps(now_s), self._mark)

    def _weigh(self, until: int) -> None:
        passed = max(until - self._weighed, 0)
        self._held_ranks += passed * self._held
        self._wanted_ranks += passed * self._wanted
        self._weighed = max(until, self._weighed)

    def follow(self, earlier: TimeSpent, at_s: float, suspended_s: float) -> None:
        """Note what the coordinator before this one had reported at `at_s`, and the suspension since then."""
        self._earlier = earlier
        self._reported, self._suspended = _ps(at_s), _ps(suspended_s)

    def spent(self, now_s: float) -> Union[TimeSpent, None]:
        """Return the terms under all coordinators; None before the job ran."""
        if self._first is None:
            return None
        now = max(_ps(now_s), self._mark) if self._end is None else self._end
        own, still_open = dict(self._spent), now - self._mark
        progress_ranks = self._progress_ranks
        if self._term is not None:
            own[self._term] += still_open
            progress_ranks += still_open * self._world_size * (self._term is Spent.PROGRESS)
            still_open = 0
        unweighed = now - self._weighed
        held, wanted = self._held_ranks + unweighed * self._held, self._wanted_ranks + unweighed * self._wanted
        found = _Sums(own, progress_ranks, held, wanted)
        if self._earlier is not None:
            found = self._with_earlier(found, self._earlier, self._first)
        return TimeSpent(
            **{_FIELDS[term]: spent / _PS for term, spent in found.terms.items()},
            open_s=still_open / _PS,
            progress_rank_s=found.progress_ranks / _PS,
            held_rank_s=found.held_ranks / _PS,
            wanted_rank_s=found.wanted_ranks / _PS,
        )

    def _with_earlier(self, own: "_Sums", earlier: TimeSpent, first: int) -> "_Sums":
        """Return the sums with those of the coordinator before, without what both have.

        What lies between its report and the first that is known here was a suspension, as far as the operator says so,
        or the job waited for its pods.
        """
        before = {term: _ps(getattr(earlier, field)) for term, field in _FIELDS.items()}
        entered, until, taken = self._taken or (first, first, first)
        at = min(self._reported, taken)
        whole = sum(before.values())
        if entered <= at - whole:
            # It was there all along. How many ranks were held and wanted meanwhile, that report alone knows.
            size = whole * self._taken_size
            # It alone knows as well how long that iteration stood still for checkpoints.
            stalled = min(before[Spent.CHECKPOINT], until - entered)
            terms = dict(own.terms)
            terms[Spent.PROGRESS] -= stalled
            terms[Spent.CHECKPOINT] += stalled
            return _Sums(
                terms,
                max(own.progress_ranks - stalled * self._taken_size, 0),
                own.held_ranks - whole * self._taken_held + max(_ps(earlier.held_rank_s), size),
                own.wanted_ranks - whole * self._taken_wanted + max(_ps(earlier.wanted_rank_s), size),
            )
        twice = max(min(until, at) - entered, 0)
        late = max(at - max(until, entered), 0)
        gap = max(entered - at, 0)
        suspended = min(self._suspended, gap)
        terms = {term: spent + before[term] for term, spent in own.terms.items()}
        terms[Spent.PROGRESS] -= twice
        terms[Spent.DETECT] -= late
        terms[Spent.SUSPENDED] += suspended
        terms[Spent.WAITING] += gap - suspended
        cut = twice + late
        return _Sums(
            terms,
            max(own.progress_ranks - twice * self._taken_size, 0) + _ps(earlier.progress_rank_s),
            max(own.held_ranks - cut * self._taken_held, 0) + _ps(earlier.held_rank_s),
            max(own.wanted_ranks - cut * self._taken_wanted, 0)
            + _ps(earlier.wanted_rank_s)
            + (gap - suspended) * self._wanted,
        )


class _Sums(NamedTuple):
    """Picoseconds by term, and times ranks."""

    terms: dict[Spent, int]
    progress_ranks: int
    held_ranks: int
    wanted_ranks: int


def ratios(spent: TimeSpent) -> dict[str, float]:
    """Return the three ratios, 0 to 1; docs/cost.md has their formulas. A ratio of nothing is 1."""
    wall_s = wall_of(spent) - spent.suspended_s
    pairs = {
        "ettr": (spent.progress_s, wall_s),
        "ettr_capacity": (spent.progress_rank_s, spent.wanted_rank_s),
        "goodput_allocated": (spent.progress_rank_s, spent.held_rank_s),
    }
    return {name: min(part / whole, 1.0) if whole > 0 else 1.0 for name, (part, whole) in pairs.items()}


def terms(spent: TimeSpent) -> dict[str, float]:
    """Return seconds by word of Spent, and those that are not judged yet as `open`."""
    return {term.value: getattr(spent, field) for term, field in _FIELDS.items()} | {"open": spent.open_s}


def shares_text(spent: Mapping[str, float]) -> str:
    """Return the share of each term in words, of seconds by `terms`; what took less than a two-thousandth is left out.

    "" where no time has passed.
    """
    wall_s = math.fsum(spent.values())
    if wall_s <= 0:
        return ""
    shares = ", ".join(f"{word} {part / wall_s:.1%}" for word, part in spent.items() if part / wall_s >= 0.0005)
    return f"{shares} of {wall_s / 3600:.1f} h" if wall_s >= 3600 else f"{shares} of {wall_s:.0f} s"


def ratios_text(found: Mapping[str, float]) -> str:
    """Return ratios, 0 to 1, by name in words."""
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())


def wall_of(spent: TimeSpent) -> float:
    """Return the seconds since the job first ran, or until it was over."""
    return math.fsum([*(getattr(spent, field) for field in _FIELDS.values()), spent.open_s])
