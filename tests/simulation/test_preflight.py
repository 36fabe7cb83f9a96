"""Preflights of simulated hosts with bad ones and chance: who is named, and how long it takes in virtual time."""

import random
from dataclasses import dataclass, field

import pytest

from unbroken_core.preflight.judging import Named, judge
from unbroken_core.preflight.pairing import next_round
from unbroken_core.preflight.trials import HostState, Trial

OWN_CHECKS_S = 3.0
ROUND_S = 1.0
HANGING_S = 5.0
"""What each test with a bad host takes: the limit of a pair with `--pair-timeout 5`, a third of the usual one."""


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


def fly(num_hosts: int, num_bad: int, seeds: range, noise: float = 0.01) -> Count:
    """Run a preflight for each seed: bad hosts fail and hang, and `noise` of all tests end the other way."""
    count = Count()
    for seed in seeds:
        chance = random.Random(seed)
        bad = set(chance.sample(range(num_hosts), num_bad))
        states = [HostState.ABLE] * num_hosts
        trials: list[Trial] = []
        seconds, last = OWN_CHECKS_S, 0
        while found := next_round(states, trials, last):
            last = found.number
            seconds += ROUND_S if all(bad.isdisjoint(pair) for pair in found.pairs) else HANGING_S
            trials += [Trial(pair, bad.isdisjoint(pair) != (chance.random() < noise)) for pair in found.pairs]
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


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_innocent_is_named_in_a_thousand_preflights_of_256_hosts() -> None:
    count = fly(256, 3, range(1000))
    assert count.innocents == []
    assert count.recall > 0.99
    assert count.longest_s <= 60
