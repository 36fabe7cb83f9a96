"""Cluster, API server, operators, rendezvous, agents and workers survive random faults together.

UNBROKEN_LOOPS=1000 runs so many schedules, UNBROKEN_FIRST_LOOP=N begins at another one.
"""

import os

import pytest
from tests.simulation.control_loop.loop_runner import LoopResult, run_loop_seed

USUAL_SCHEDULES = 80
NUM_SCHEDULES = int(os.environ.get("UNBROKEN_LOOPS", USUAL_SCHEDULES))
FIRST_SEED = int(os.environ.get("UNBROKEN_FIRST_LOOP", "0"))
SEEDS_PER_TEST = 10
STORY_LINES = 60
FAILED_BEFORE = (
    41,
    130,
    204,
    238,
    406,
    419,
    426,
    508,
    559,
    659,
    697,
    711,
    1150,
    3063,
    100184,
    100277,
    101481,
    101525,
    200232,
    200405,
    240729,
    240756,
    301795,
    306616,
    308055,
    320328,
    320387,
    330202,
    334108,
    336278,
    356372,
    356784,
    361800,
    362236,
)
"""Seeds that have shown a fault of the product or of the simulation once, and are run every time."""


def check(results: list[LoopResult]) -> None:
    """Fail with the story of the first that has failed."""
    failed = [result for result in results if result.failure]
    if failed:
        worst = failed[0]
        story = "\n".join(worst.story[-STORY_LINES:])
        again = f"PYTHONPATH=. python -m tests.simulation --control-loop --seed {worst.seed}"
        numbers = [result.seed for result in failed]
        pytest.fail(f"seed {worst.seed}: {worst.failure}\n{story}\nrun it again: {again}\nfailing seeds: {numbers}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES, SEEDS_PER_TEST))
def test_what_must_hold_of_the_control_loop_holds_whatever_strikes(first: int) -> None:
    last = min(first + SEEDS_PER_TEST, FIRST_SEED + NUM_SCHEDULES)
    check([run_loop_seed(seed) for seed in range(first, last)])


@pytest.mark.timeout(600)
def test_seeds_that_failed_before_do_not_fail_again() -> None:
    check([run_loop_seed(seed) for seed in FAILED_BEFORE])


def test_a_seed_of_the_control_loop_tells_the_same_story_twice() -> None:
    first, second = run_loop_seed(9), run_loop_seed(9)
    assert first == second
    assert first.story
    assert first.strikes.total() > 10
