"""Who tests with whom in a preflight, and who is named."""

from collections.abc import Callable, Collection, Iterator

import pytest

from unbroken_core.preflight.judging import FAILURES, Diagnosis, Named, Why, judge
from unbroken_core.preflight.pairing import max_rounds, next_round, num_base_rounds
from unbroken_core.preflight.trials import HostState, Pair, Round, Trial

ABLE, BROKEN, SILENT = HostState.ABLE, HostState.BROKEN, HostState.SILENT


def fly(
    states: list[HostState], passes: Callable[[Pair], bool], mute: Collection[int] = ()
) -> tuple[Diagnosis, list[Round]]:
    """Run all rounds; who is `mute` never says how a test went."""
    trials: list[Trial] = []
    rounds: list[Round] = []
    while found := next_round(states, trials, rounds[-1].number if rounds else 0):
        rounds.append(found)
        trials += [Trial(pair, passes(pair), tuple(host for host in pair if host in mute)) for pair in found.pairs]
    return judge(states, trials), rounds


def without(*bad: int) -> Callable[[Pair], bool]:
    return lambda pair: set(bad).isdisjoint(pair)


def cut(*links: tuple[int, int]) -> Callable[[Pair], bool]:
    return lambda pair: pair not in links


def named(diagnosis: Diagnosis) -> dict[int, tuple[Named, Why]]:
    """Return what is said of hosts that are not ok."""
    return {each.host: (each.named, each.why) for each in diagnosis.hosts if each.named is not Named.OK}


def links(diagnosis: Diagnosis) -> list[Pair]:
    return [each.pair for each in diagnosis.links]


@pytest.mark.parametrize("num_hosts", range(1, 40))
def test_each_host_tests_in_ceil_log2_n_rounds_with_different_ones_and_no_host_twice_at_a_time(num_hosts: int) -> None:
    diagnosis, rounds = fly([ABLE] * num_hosts, without())
    assert named(diagnosis) == {}
    assert len(rounds) == num_base_rounds(num_hosts)
    pairs = [pair for each in rounds for pair in each.pairs]
    assert len(set(pairs)) == len(pairs)
    assert all(pair.left < pair.right < num_hosts for pair in pairs)
    for each in rounds:
        hosts = [host for pair in each.pairs for host in pair]
        assert len(set(hosts)) == len(hosts)
        assert num_hosts & (num_hosts - 1) or len(hosts) == num_hosts
    assert num_hosts == 1 or {host for pair in pairs for host in pair} == set(range(num_hosts))


def test_first_rounds_go_up_the_topology_one_layer_each() -> None:
    _, rounds = fly([ABLE] * 8, without())
    assert [{pair.right - pair.left for pair in each.pairs} for each in rounds] == [{1}, {2}, {4}]


@pytest.mark.parametrize("num_hosts", [3, 4, 5, 7, 8, 16, 17, 33])
def test_a_bad_host_is_named_wherever_it_is_and_nobody_else(num_hosts: int) -> None:
    for bad in range(num_hosts):
        diagnosis, rounds = fly([ABLE] * num_hosts, without(bad))
        assert named(diagnosis) == {bad: (Named.BAD, Why.PROVEN_PARTNERS)}
        assert links(diagnosis) == []
        assert rounds[-1].number <= max_rounds(num_hosts)
        evidence = diagnosis.hosts[bad]
        assert (len(evidence.failed) >= FAILURES, evidence.passed) == (True, ())


def test_three_bad_hosts_of_sixteen_are_named_and_their_neighbours_are_not() -> None:
    diagnosis, _ = fly([ABLE] * 16, without(1, 2, 4))
    assert sorted(named(diagnosis)) == [1, 2, 4]


@pytest.mark.parametrize(
    ("failed", "is_bad"),
    [
        ({1: 3, 2: 1}, False),  # a broken link, and a test that ended late
        ({1: 30, 2: 1}, False),
        ({1: 2, 2: 2}, True),
        ({1: 2, 2: 1, 3: 1}, True),
    ],
)
def test_failures_with_one_partner_are_not_enough_however_many(failed: dict[int, int], is_bad: bool) -> None:
    passed = [Trial(Pair(left, right), True) for left, right in ((1, 2), (1, 3), (2, 3))]
    trials = [Trial(Pair(0, partner), False) for partner, count in failed.items() for _ in range(count)]
    assert named(judge([ABLE] * 4, [*passed, *trials])).get(0) == (
        (Named.BAD, Why.PROVEN_PARTNERS) if is_bad else (Named.UNKNOWN, Why.UNSETTLED)
    )
    assert not any(0 in pair for pair in links(judge([ABLE] * 4, [*passed, *trials])))


def test_a_host_that_is_bad_is_in_no_further_pair() -> None:
    _, rounds = fly([ABLE] * 256, without(100))
    assert sum(100 in pair for each in rounds for pair in each.pairs) == FAILURES


@pytest.mark.parametrize("num_hosts", [3, 4, 16, 21])
def test_a_link_is_named_by_its_two_ends_and_these_are_ok(num_hosts: int) -> None:
    diagnosis, _ = fly([ABLE] * num_hosts, cut((0, 1)))
    assert named(diagnosis) == {}
    assert links(diagnosis) == [(0, 1)]


def test_a_pair_that_passes_when_it_is_tried_again_is_no_link() -> None:
    seen: list[Pair] = []

    def passes(pair: Pair) -> bool:
        seen.append(pair)
        return pair != (2, 3) or seen.count(pair) > 1

    diagnosis, _ = fly([ABLE] * 8, passes)
    assert (named(diagnosis), links(diagnosis), diagnosis.unsettled) == ({}, [], ())


def test_of_two_hosts_nobody_is_named_but_the_pair() -> None:
    diagnosis, rounds = fly([ABLE] * 2, without(0))
    assert len(rounds) == FAILURES
    assert named(diagnosis) == dict.fromkeys((0, 1), (Named.UNKNOWN, Why.ONE_OF_TWO))
    assert links(diagnosis) == [(0, 1)]


def test_one_host_is_judged_by_its_own_checks() -> None:
    assert fly([ABLE], without())[1] == []
    assert judge([ABLE], []).hosts[0].named is Named.OK
    assert judge([BROKEN], []).hosts[0].named is Named.BAD
    assert judge([SILENT], []).hosts[0].named is Named.UNKNOWN
    assert judge([], []) == Diagnosis((), (), (), ())


def test_who_never_answers_is_unknown_and_in_no_pair() -> None:
    diagnosis, rounds = fly([ABLE, SILENT, ABLE, ABLE], without())
    assert named(diagnosis) == {1: (Named.UNKNOWN, Why.SILENT)}
    assert not any(1 in pair for each in rounds for pair in each.pairs)


def test_who_goes_silent_is_unknown_and_nothing_speaks_against_its_partner() -> None:
    diagnosis, rounds = fly([ABLE] * 8, without(5), mute=[5])
    assert named(diagnosis) == {5: (Named.UNKNOWN, Why.SILENT)}
    assert sum(5 in pair for each in rounds for pair in each.pairs) == 1
    assert diagnosis.untested == ((4, 5),)
    assert all(each.failed == () for each in diagnosis.hosts)


def test_who_fails_its_own_checks_is_bad_and_spares_the_others_its_pairs() -> None:
    diagnosis, rounds = fly([ABLE, BROKEN, ABLE, ABLE, ABLE], without(1))
    assert named(diagnosis) == {1: (Named.BAD, Why.OWN_CHECKS)}
    assert not any(1 in pair for each in rounds for pair in each.pairs)


def test_who_has_nobody_to_test_with_is_unknown() -> None:
    diagnosis, rounds = fly([ABLE, BROKEN], without())
    assert rounds == []
    assert named(diagnosis)[0] == (Named.UNKNOWN, Why.NO_PAIR)


@pytest.mark.parametrize("num_hosts", [3, 8, 64])
def test_nobody_is_named_where_no_pair_passes(num_hosts: int) -> None:
    diagnosis, rounds = fly([ABLE] * num_hosts, lambda pair: False)
    assert not any(each.named is Named.BAD for each in diagnosis.hosts)
    assert rounds[-1].number <= num_base_rounds(num_hosts) + 3


def test_nobody_is_named_where_more_than_half_would_be() -> None:
    sound = [Trial(Pair(left, right), True) for left in range(4) for right in range(left + 1, 4)]
    failed = [Trial(Pair(host % 4, host), False) for host in range(4, 9)] * 2
    failed += [Trial(Pair((host + 1) % 4, host), False) for host in range(4, 9)] * 2
    diagnosis = judge([ABLE] * 9, sound + failed)
    assert [each.why for each in diagnosis.hosts[4:]] == [Why.TOO_MANY] * 5
    assert next_round([ABLE] * 9, sound + failed, 4) is None
    for num_bad in range(9, 17):
        diagnosis, _ = fly([ABLE] * 16, without(*range(num_bad)))
        assert not any(each.named is Named.BAD for each in diagnosis.hosts)


@pytest.mark.parametrize("num_hosts", [4, 8, 16, 32])
def test_halves_of_a_network_that_is_cut_do_not_name_each_other(num_hosts: int) -> None:
    half = num_hosts // 2
    diagnosis, _ = fly([ABLE] * num_hosts, lambda pair: (pair.left < half) == (pair.right < half))
    assert not any(each.named is Named.BAD for each in diagnosis.hosts)
    assert all(pair.left < half <= pair.right for pair in links(diagnosis))
    assert links(diagnosis) or diagnosis.unsettled


def test_two_hosts_that_are_cut_off_together_are_named_by_the_many() -> None:
    diagnosis, _ = fly([ABLE] * 16, lambda pair: (pair.left >= 14) == (pair.right >= 14))
    assert sorted(named(diagnosis)) == [14, 15]
    assert diagnosis.hosts[14].passed == (15,)


def test_a_host_that_passes_half_of_its_tests_is_never_named_bad() -> None:
    count = [0]

    def passes(pair: Pair) -> bool:
        count[0] += 3 in pair
        return 3 not in pair or count[0] % 2 == 0

    diagnosis, _ = fly([ABLE] * 8, passes)
    assert not any(each.named is Named.BAD for each in diagnosis.hosts)


def test_rounds_end_whatever_the_results_are() -> None:
    """Each outcome by a fixed pattern: no combination makes more rounds than are promised."""
    for seed in range(300):
        num_hosts = 2 + seed % 23
        count = [seed]

        def passes(pair: Pair, count: list[int] = count) -> bool:
            count[0] = (count[0] * 1103515245 + 12345 + pair.left) % 2**31
            return (count[0] >> 16) % 5 > 1

        diagnosis, rounds = fly([ABLE] * num_hosts, passes, mute=[seed % 7] if seed % 3 else [])
        assert [each.number for each in rounds] == sorted({each.number for each in rounds})
        assert rounds[-1].number <= max_rounds(num_hosts)
        assert [each.host for each in diagnosis.hosts] == list(range(num_hosts))


class CountedTrials(list[Trial]):
    """Trials that count how often all of them are gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[Trial]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize("bad", [range(64), range(0, 64, 4)], ids=["all", "a quarter"])
def test_the_next_round_goes_through_the_trials_as_often_for_many_suspects_as_for_few(bad: Collection[int]) -> None:
    """Before, once for each suspect: 13 s for 4,000 hosts that all fail."""
    trials, number = CountedTrials(), 0
    while found := next_round([ABLE] * 64, trials, number):
        number = found.number
        trials += [Trial(pair, without(*bad)(pair)) for pair in found.pairs]
    assert number >= num_base_rounds(64)
    # Who is bad is weighed again without those that are.
    assert trials.num_passes <= 8 * (number + 1)
