"""Who is named, from all trials so far. Pure.

    a host fails 60 % of its pairs or more                        suspect
    a host has passed with somebody, and is no suspect            proven
    a suspect has failed 4 times with proven hosts, where two
      failures with the same one count at most, and passed with
      1 of 5 of its trials with them at most                    bad: its trials say nothing of others
    two proven hosts have failed 4 times with each other,
      and never passed                                            the link between them

It is weighed again without the trials of those who are bad, until nobody else is. Nobody is named

    where a suspect has passed with another one, unless more than half of the hosts are proven: two halves of a network
      that is cut would each name the other
    where more than half of the hosts would be bad: what they have in common is to blame
    of two hosts, or where no pair has passed
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unbroken_core.preflight.trials import HostState, Pair, Trial
from unbroken_core.vocabulary.reasons import Word

FAILURES = 4
"""Of a host with proven ones, and of a pair of these, before it is named: where 1 % of all tests fail by chance, three
in a row are seen once in a thousand preflights of 256 hosts."""
_FAILURES_A_PARTNER = 2
"""So many count at most before a host is named: else a broken link and one test that ended late named a sound one."""
_SUSPECT_SHARE = 0.6


class Named(Word):
    """What is said of a host."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"
    """Not tested, or not settled. Never bad, and never well."""


class Why(Word):
    """Why it is said."""

    PASSED = "passed"
    """It has passed, and failed with few or none."""
    OWN_CHECKS = "own-checks"
    """Its own checks say it: they have failed, or it is the only host and they have passed."""
    PROVEN_PARTNERS = "proven-partners"
    """It has failed with hosts that pass with others."""
    SILENT = "silent"
    """It has not answered, or no longer."""
    NO_PAIR = "no-pair"
    """There was nobody to test with."""
    UNSETTLED = "unsettled"
    """It has failed with many, and too little speaks against it."""
    ONE_OF_TWO = "one-of-two"
    """It has failed with the only other host: it may be either, or what is between them."""
    TOO_MANY = "too-many"
    """More than half of the hosts have failed like this."""


@dataclass(frozen=True)
class Weighed:
    """What all trials say together."""

    proven: frozenset[int]
    suspects: frozenset[int]
    """Without those who are bad."""
    bad: frozenset[int]
    """By their pairs, not by their own checks."""
    is_too_many: bool = False
    """More than half would be bad: nobody is, and no further trial would tell."""


@dataclass(frozen=True)
class HostVerdict:
    """What is said of one host, and by which trials; one entry a trial."""

    host: int
    named: Named
    why: Why
    passed: tuple[int, ...] = ()
    """Partners with whom it passed."""
    failed: tuple[int, ...] = ()
    """Partners with whom it failed, each of whom had spoken."""


@dataclass(frozen=True)
class LinkVerdict:
    """Two hosts that fail with each other and, unless there are no others, not with others."""

    pair: Pair
    num_failed: int


@dataclass(frozen=True)
class Diagnosis:
    """All that a preflight has found."""

    hosts: tuple[HostVerdict, ...]
    """One for each host, in order."""
    links: tuple[LinkVerdict, ...]
    unsettled: tuple[Pair, ...]
    """Pairs of sound hosts that have failed, and neither passed nor failed often enough since."""
    untested: tuple[Pair, ...]
    """Pairs that were tried, and of which one host did not say how it went."""


def silent_hosts(states: Sequence[HostState], trials: Iterable[Trial]) -> frozenset[int]:
    """Return who has not answered, before or in a trial."""
    from_start = {host for host, state in enumerate(states) if state is HostState.SILENT}
    return frozenset(from_start.union(*(trial.silent for trial in trials)))


def weigh(states: Sequence[HostState], trials: Sequence[Trial]) -> Weighed:
    """Return who is proven, suspect and bad so far."""
    told = [trial for trial in trials if trial.is_conclusive]
    num_tested = len({host for trial in told for host in trial.pair})
    bad: frozenset[int] = frozenset()
    while True:
        scores = _scores(len(states), told, bad)
        suspects = frozenset(host for host, score in enumerate(scores) if score.is_suspect)
        proven = frozenset(host for host, score in enumerate(scores) if score.passed and host not in suspects)
        found = {host for host in suspects if _is_condemned(scores[host], proven, num_tested)}
        if not found:
            return Weighed(proven, suspects, bad)
        bad |= found
        if 2 * len(bad) > num_tested:
            return Weighed(frozenset(), frozenset(), frozenset(), is_too_many=True)


@dataclass
class _Score:
    """Of one host, by partner: how many trials passed, how many failed."""

    passed: dict[int, int]
    failed: dict[int, int]

    @property
    def is_suspect(self) -> bool:
        """Whether it fails with most partners, however often each: who tests a bad host again is not worse for it."""
        num_failed = sum(count > self.passed.get(partner, 0) for partner, count in self.failed.items())
        return num_failed > 0 and num_failed >= _SUSPECT_SHARE * len({**self.passed, **self.failed})


def _scores(num_hosts: int, trials: Iterable[Trial], without: Collection[int] = ()) -> list[_Score]:
    scores = [_Score({}, {}) for _ in range(num_hosts)]
    for trial in trials:
        left, right = trial.pair
        if left in without or right in without:
            continue
        for host, partner in ((left, right), (right, left)):
            counts = scores[host].passed if trial.has_passed else scores[host].failed
            counts[partner] = counts.get(partner, 0) + 1
    return scores


def _is_condemned(score: _Score, proven: Collection[int], num_tested: int) -> bool:
    failed = {partner: count for partner, count in score.failed.items() if partner in proven}
    num_failed = sum(failed.values())
    num_passed = sum(count for partner, count in score.passed.items() if partner in proven)
    if not _is_often_enough(failed) or 4 * num_passed > num_failed:
        return False
    is_alone = num_passed == sum(score.passed.values())
    return is_alone or 2 * len(proven) > num_tested


def _is_often_enough(failed: Mapping[int, int]) -> bool:
    """Return whether so many failures, by proven partner, would name a host."""
    return sum(min(count, _FAILURES_A_PARTNER) for count in failed.values()) >= FAILURES


def settled_hosts(weighed: Weighed, trials: Iterable[Trial]) -> frozenset[int]:
    """Return the suspects that have failed often enough with proven hosts, so that more trials would say no more."""
    failed: dict[int, Counter[int]] = {}
    for trial in trials:
        if trial.is_conclusive and not trial.has_passed:
            for host, partner in (trial.pair, reversed(trial.pair)):
                if host in weighed.suspects and partner in weighed.proven:
                    failed.setdefault(host, Counter())[partner] += 1
    return frozenset(host for host, partners in failed.items() if _is_often_enough(partners))


def failed_pairs(weighed: Weighed, trials: Iterable[Trial], is_among: Collection[int]) -> dict[Pair, int]:
    """Return how often pairs of these hosts have failed that never passed, in order."""
    counts: Counter[Pair] = Counter()
    passed: set[Pair] = set()
    for trial in trials:
        if trial.is_conclusive and all(host in is_among and host not in weighed.bad for host in trial.pair):
            if trial.has_passed:
                passed.add(trial.pair)
            else:
                counts[trial.pair] += 1
    return {pair: counts[pair] for pair in sorted(counts) if pair not in passed}


def judge(states: Sequence[HostState], trials: Sequence[Trial]) -> Diagnosis:
    """Return what is said of each host and of links."""
    weighed = weigh(states, trials)
    silent = silent_hosts(states, trials)
    told = [trial for trial in trials if trial.is_conclusive]
    scores = _scores(len(states), told)
    able = [host for host, state in enumerate(states) if state is HostState.ABLE and host not in silent]
    is_pair = len(able) == 2
    hosts = []
    for host, score in enumerate(scores):
        if states[host] is HostState.BROKEN:
            named, why = Named.BAD, Why.OWN_CHECKS
        elif host in silent:
            named, why = Named.UNKNOWN, Why.SILENT
        elif len(states) == 1:
            named, why = Named.OK, Why.OWN_CHECKS
        else:
            named, why = _named(score, host, weighed, is_pair)
        hosts.append(HostVerdict(host, named, why, _partners(score.passed), _partners(score.failed)))
    open_pairs = failed_pairs(weighed, told, able if is_pair else weighed.proven)
    links = tuple(LinkVerdict(pair, count) for pair, count in open_pairs.items() if count >= FAILURES)
    return Diagnosis(
        tuple(hosts),
        links,
        tuple(pair for pair, count in open_pairs.items() if count < FAILURES),
        tuple(sorted({trial.pair for trial in trials if not trial.is_conclusive})),
    )


def _partners(counts: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(partner for partner, count in sorted(counts.items()) for _ in range(count))


def _named(score: _Score, host: int, weighed: Weighed, is_pair: bool) -> tuple[Named, Why]:
    """Return what its pairs say of a host that is able, and answers."""
    if host in weighed.bad:
        return Named.BAD, Why.PROVEN_PARTNERS
    if host in weighed.proven or (score.passed and not score.failed):
        return Named.OK, Why.PASSED
    if not score.passed and not score.failed:
        return Named.UNKNOWN, Why.NO_PAIR
    if weighed.is_too_many:
        return Named.UNKNOWN, Why.TOO_MANY
    return Named.UNKNOWN, Why.ONE_OF_TWO if is_pair else Why.UNSETTLED
