"""Which pods test with which others, as the coordinator knows it: what they say, and the flight that is under way.

A flight is the tests of some pods with each other, round by round: before the first plan those of all that are ready,
later those of a pod that has joined, with others that have no ranks. There is one at a time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from unbroken_core.preflight.trials import HostState, Pair, Trial
from unbroken_core.protocol.messages import PairState


class PairAnswer(NamedTuple):
    """What one pod says of its test in this round."""

    has_passed: bool | None
    why: str


@dataclass
class Flight:
    """Tests of pods, which have numbers here: neighbours in the topology have neighbouring ones."""

    uids: tuple[str, ...]
    names: tuple[str, ...]
    """Of the pods, some of which may be gone when they are named."""
    newcomers: frozenset[str]
    """Those for whom it is flown; the others are there to test with them."""
    states: list[HostState]
    until_s: float
    seeds: tuple[Trial, ...] = ()
    """What is known of earlier flights: who has passed with others."""
    trials: list[Trial] = field(default_factory=list)
    reasons: dict[Pair, str] = field(default_factory=dict)
    """Why a pair has failed last."""
    round: int = 0
    """Number of the last one."""
    numbers: dict[Pair, int] = field(default_factory=dict)
    """Of the orders of this round."""
    awaited: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Term and number of the order that a pod has yet to answer, by uid."""
    answers: dict[str, PairAnswer] = field(default_factory=dict)
    """Those of this round, by uid."""
    due_s: float = -math.inf
    """Who has not answered by then does not in this round."""

    def expect(self, pair: Pair, term: int, number: int) -> None:
        """Note that both pods of a pair were given this order."""
        self.numbers[pair] = number
        for host in pair:
            self.awaited[self.uids[host]] = term, number

    def receive(self, uid: str, said: PairState) -> None:
        """Take the answer of a pod to the order of this round; any other is passed over."""
        if self.awaited.get(uid) == (said.term, said.number):
            del self.awaited[uid]
            self.answers[uid] = PairAnswer(said.has_passed, said.why)

    def close_round(self, *, is_cut: bool = False) -> None:
        """Make trials of the answers. Who has none, or cannot say, is silent; the trial tells nothing of the other.

        `is_cut`: it is ended before its time, so that who has no answer could not have one.
        """
        for pair in self.numbers:
            if is_cut and any(self.uids[host] in self.awaited for host in pair):
                continue
            found = [self.answers.get(self.uids[host]) for host in pair]
            silent = tuple(
                host for host, each in zip(pair, found, strict=True) if each is None or each.has_passed is None
            )
            failed = [each.why for each in found if each is not None and each.has_passed is False]
            if failed and not silent:
                self.reasons[pair] = failed[0]
            self.trials.append(Trial(pair, not failed, silent))
        self.numbers, self.answers = {}, {}
        self.awaited.clear()


@dataclass
class PairTable:
    """One job's. Changed by verbs only, but for the flight."""

    said: dict[str, PairState] = field(default_factory=dict)
    """What pods say, by uid; those that know of no tests are not in it."""
    fresh: dict[str, None] = field(default_factory=dict)
    """Pods that take tests, and have not been in any."""
    tested: dict[str, None] = field(default_factory=dict)
    """Pods that have had their turn, however it went."""
    proven: dict[str, None] = field(default_factory=dict)
    """Pods that have passed with others."""
    bad: dict[str, None] = field(default_factory=dict)
    """Pods that are named: nobody tests with them any more."""
    flight: Flight | None = None
    number: int = 0
    """Of the last order."""
    is_open: bool = False
    """Whether the tests before the first plan have begun."""
    num_settled: int = 0
    """Rises when something begins or ends that the first plan waits for, and the status shows."""

    @property
    def progress(self) -> tuple[int, bool]:
        """Another value whenever the first plan may have to wait for tests, or no longer."""
        return self.num_settled, self.is_open

    def note(self, uid: str, said: PairState | None) -> bool:
        """Take what a pod says; None: it is gone. Return whether it takes tests no more, and has been in none."""
        before = self.said.get(uid)
        if said == before:
            return False
        if self.flight is not None and said is not None:
            self.flight.receive(uid, said)
        if self.flight is not None and (said is None or not said.port):
            self.flight.awaited.pop(uid, None)
        if said is None:
            for known in (self.said, self.fresh, self.tested, self.proven, self.bad):
                known.pop(uid, None)
            return False
        self.said[uid] = said
        if said.port:
            if uid not in self.tested:
                self.fresh[uid] = None
            return False
        was_fresh = uid in self.fresh
        self.fresh.pop(uid, None)
        return was_fresh

    def begin(self, flight: Flight) -> None:
        """Let pods test with each other."""
        self.flight = flight
        self.num_settled += 1
        for uid in flight.newcomers:
            del self.fresh[uid]
            self.tested[uid] = None

    def end(self) -> None:
        """The flight is over."""
        self.flight = None
        self.num_settled += 1

    def name(self, uid: str, *, is_bad: bool) -> None:
        """Note that a pod is named, or has passed with others."""
        (self.bad if is_bad else self.proven)[uid] = None
        (self.proven if is_bad else self.bad).pop(uid, None)

    def try_again(self, uids: Iterable[str]) -> None:
        """Let these have another turn, as something else has ended theirs, unless it is known what to think of them."""
        for uid in uids:
            if uid in self.tested and uid not in self.proven and uid not in self.bad:
                del self.tested[uid]
                self.fresh[uid] = None
