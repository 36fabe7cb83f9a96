"""Pods that test with each other while faults strike: nobody sound is named, nobody waits without an end.

The usual schedules have such jobs as well; here there are no others.
"""

import pytest
from tests.simulation.runner import run_seed
from tests.simulation.schedule import make_schedule

NUM_SEEDS = 40
SEEDS_PER_TEST = 20
_FIRST = 2_000_000


def seeds_with_pairs(num: int) -> list[int]:
    """Return the first seeds of the third million whose job wants such tests."""
    found: list[int] = []
    seed = _FIRST
    while len(found) < num:
        if make_schedule(seed).settings.preflight_pairs:
            found.append(seed)
        seed += 1
    return found


@pytest.mark.parametrize("part", range(NUM_SEEDS // SEEDS_PER_TEST))
def test_nobody_sound_is_named_and_nobody_waits_for_ever(part: int) -> None:
    seeds = seeds_with_pairs(NUM_SEEDS)[part * SEEDS_PER_TEST : (part + 1) * SEEDS_PER_TEST]
    results = [run_seed(seed) for seed in seeds]
    failed = {result.seed: (result.failure, result.story[-20:]) for result in results if result.failure}
    assert failed == {}
    # Else it would show nothing.
    assert sum(result.num_pair_orders for result in results) > 5 * SEEDS_PER_TEST
    assert sum(result.num_pairs_named for result in results) > 0


def test_schedules_that_are_kept_have_none() -> None:
    assert not any(make_schedule(seed).settings.preflight_pairs for seed in range(1_000_000, 1_000_300))
