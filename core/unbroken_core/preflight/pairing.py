"""Who tests with whom next. Pure: the same results lead to the same pairs.

    round 1          0-1  2-3  4-5  6-7     neighbours
    round 2          0-2  1-3  4-6  5-7     the layer above
    ...              ceil(log2 n) rounds: in round k the host with the number that differs in bit k
    then             each suspect with a proven host, and pairs of proven hosts that have failed, once more; no more
                     than 8 rounds of this

Who has no such partner tests with another one that is left over: where the number of hosts is no power of two, or hosts
are missing. Who is bad, by its own checks or by its pairs, and who does not answer, is in no further pair.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from unbroken_core.preflight.judging import FAILURES, Weighed, failed_pairs, settled_hosts, silent_hosts, weigh
from unbroken_core.preflight.trials import HostState, Pair, Round, Trial, pair_of

MAX_RETRY_ROUNDS = 8
_MAX_BLIND_ROUNDS = 3
"""Of these, while nobody is proven: then there is nobody to retry with."""


def num_base_rounds(num_hosts: int) -> int:
    """Return ceil(log2 n)."""
    return max(num_hosts - 1, 0).bit_length()


def max_rounds(num_hosts: int) -> int:
    """Return how many rounds there are at most."""
    return num_base_rounds(num_hosts) + MAX_RETRY_ROUNDS if num_hosts > 1 else 0


def next_round(states: Sequence[HostState], trials: Sequence[Trial], last: int) -> Round | None:
    """Return the round that follows number `last` (0: none yet), or None when all has been said."""
    num_base = num_base_rounds(len(states))
    for number in range(last + 1, max_rounds(len(states)) + 1):
        weighed = weigh(states, trials)
        if weighed.is_too_many:
            return None
        silent = silent_hosts(states, trials)
        draft = _Draft(
            host
            for host, state in enumerate(states)
            if state is HostState.ABLE and host not in silent and host not in weighed.bad
        )
        if number <= num_base:
            _add_base(draft, 1 << (number - 1), trials)
        elif weighed.proven or number <= num_base + _MAX_BLIND_ROUNDS:
            _add_retries(draft, weighed, trials)
        if draft.pairs:
            return Round(number, tuple(sorted(draft.pairs)))
    return None


class _Draft:
    """The pairs of one round; who is in none yet."""

    def __init__(self, hosts: Iterable[int]) -> None:
        self.free = dict.fromkeys(hosts)
        self.pairs: list[Pair] = []

    def add(self, one: int, other: int) -> None:
        """Pair two hosts that are free."""
        del self.free[one], self.free[other]
        self.pairs.append(pair_of(one, other))

    def are_free(self, pair: Pair) -> bool:
        """Return whether both are."""
        return pair.left in self.free and pair.right in self.free


def _add_base(draft: _Draft, bit: int, trials: Sequence[Trial]) -> None:
    for host in list(draft.free):
        if not host & bit and draft.are_free(Pair(host, host | bit)):
            draft.add(host, host | bit)
    _add_untried(draft, {trial.pair for trial in trials})


def _add_untried(draft: _Draft, tried: set[Pair]) -> None:
    """Pair who is left with who is left, if they have not tested with each other."""
    for host in list(draft.free):
        if host in draft.free:
            partner = next((each for each in draft.free if each > host and Pair(host, each) not in tried), None)
            if partner is not None:
                draft.add(host, partner)


def _add_retries(draft: _Draft, weighed: Weighed, trials: Sequence[Trial]) -> None:
    counts = Counter(trial.pair for trial in trials)
    settled = settled_hosts(weighed, trials)
    for host in sorted(weighed.suspects - settled if weighed.proven else ()):
        if host not in draft.free:
            continue
        # Whom it has tested with least, and of these the nearest one: fewer links are between them.
        partners = [each for each in draft.free if each in weighed.proven]
        if partners:
            draft.add(host, min(partners, key=lambda each: (counts[pair_of(host, each)], host ^ each)))
    if not weighed.proven:
        _add_untried(draft, set(counts))
    for pair, count in failed_pairs(weighed, trials, weighed.proven or frozenset(draft.free)).items():
        if count < FAILURES and draft.are_free(pair):
            draft.add(*pair)
