"""Preflights of simulated hosts with bad ones and chance: who is named, and how long it takes in virtual time."""

import random
from dataclasses import dataclass, field

import pytest

from unbroken.preflight.options import PAIR_S
from unbroken_core.preflight.judging import Named, judge
from unbroken_core.preflight.pairing import next_round
from unbroken_core.preflight.trials import HostState, Pair, Trial

OWN_CHECKS_S = 3.0
ROUND_S = 1.0
SHORT_S = 5.0
"""The limit of a pair with `--pair-timeout 5`, a third of the usual one: what each test with a bad host takes."""
BUSY_SHARE = 0.02


@dataclass
class Count:
    """Of many preflights."""

    innocents: list[tuple[int, int]] = field(default_factory=list)
    """Seed and host of who was named and is sound."""
    num_bad: int = 0
    num_found: int = 0
    num_wrong_links: int = 0
    longest_s: float = 0.0

    @property
    def recall(self) -> float:
        return self.num_found / self.num_bad


class Spells:
    """Hosts that are sound, and busy for a while: each of their tests takes 4 to 12 times as long then."""

    def __init__(self, seed: int, num_hosts: int, share: float) -> None:
        chance = random.Random(f"spells of {seed}")
        self._spells = {
            host: (begin_s := chance.uniform(0.0, 30.0), begin_s + chance.uniform(5.0, 40.0), chance.uniform(4.0, 12.0))
            for host in range(num_hosts)
            if chance.random() < share
        }

    def seconds(self, pair: Pair, at_s: float) -> float:
        """Return how long a test of two sound hosts takes."""
        found = [self._spells[host] for host in pair if host in self._spells]
        return ROUND_S * max((slow for begin_s, end_s, slow in found if begin_s <= at_s <= end_s), default=1.0)


def fly(
    num_hosts: int,
    num_bad: int,
    seeds: range,
    noise: float = 0.01,
    limit_s: float = SHORT_S,
    busy_share: float = 0.0,
) -> Count:
    """Run a preflight for each seed: `noise` of all tests end the other way, and what fails hangs until its limit."""
    count = Count()
    for seed in seeds:
        chance = random.Random(seed)
        bad = set(chance.sample(range(num_hosts), num_bad))
        spells = Spells(seed, num_hosts, busy_share)
        states = [HostState.ABLE] * num_hosts
        trials: list[Trial] = []
        seconds, last = OWN_CHECKS_S, 0
        while found := next_round(states, trials, last):
            last = found.number
            took_s = ROUND_S
            for pair in found.pairs:
                is_sound, pair_s = bad.isdisjoint(pair), spells.seconds(pair, seconds - OWN_CHECKS_S)
                has_passed = is_sound != (chance.random() < noise) and pair_s <= limit_s
                trials.append(Trial(pair, has_passed))
                took_s = max(took_s, pair_s if has_passed and is_sound else limit_s)
            seconds += took_s
        diagnosis = judge(states, trials)
        named = {each.host for each in diagnosis.hosts if each.named is Named.BAD}
        count.innocents += [(seed, host) for host in sorted(named - bad)]
        count.num_bad += len(bad)
        count.num_found += len(named & bad)
        count.num_wrong_links += len(diagnosis.links)
        count.longest_s = max(count.longest_s, seconds)
    return count


@pytest.mark.parametrize(
    ("num_hosts", "num_bad"), [pytest.param(16, 3, id="16 hosts, 3 bad"), pytest.param(32, 3, id="32 hosts, 3 bad")]
)
def test_no_innocent_is_named_in_a_thousand_preflights(num_hosts: int, num_bad: int) -> None:
    count = fly(num_hosts, num_bad, range(1000))
    assert count.innocents == []
    assert count.recall > 0.99


@pytest.mark.parametrize("num_bad", [3, 10])
def test_a_preflight_of_256_hosts_takes_less_than_a_minute(num_bad: int) -> None:
    count = fly(256, num_bad, range(30))
    assert (count.innocents, count.num_wrong_links) == ([], 0)
    assert count.recall > 0.99
    assert count.longest_s <= 60


def test_a_host_that_is_busy_for_a_while_is_why_the_usual_limit_is_no_shorter() -> None:
    """It costs time where bad hosts hang: 5 s would name sound hosts, as what fails four times in a row is named."""
    usual = fly(256, 3, range(8), limit_s=PAIR_S, busy_share=BUSY_SHARE)
    assert usual.innocents == []
    assert usual.recall > 0.99
    assert 60 < usual.longest_s < 180
    short = fly(256, 3, range(8), busy_share=BUSY_SHARE)
    assert short.innocents
    assert short.longest_s < usual.longest_s


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("limit_s", "busy_share"), [(SHORT_S, 0.0), (PAIR_S, 0.0), (PAIR_S, BUSY_SHARE)])
def test_no_innocent_is_named_in_a_thousand_preflights_of_256_hosts(limit_s: float, busy_share: float) -> None:
    count = fly(256, 3, range(1000), limit_s=limit_s, busy_share=busy_share)
    assert count.innocents == []
    assert count.recall > 0.99
    assert count.longest_s <= (60 if limit_s == SHORT_S else 180)
