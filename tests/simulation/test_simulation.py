"""The coordinator survives random faults at random moments.

UNBROKEN_SCHEDULES=1000 runs so many schedules, UNBROKEN_FIRST_SEED=N begins at another one.
"""

import os

import pytest
from tests.simulation.runner import run_seed
from tests.simulation.schedule import make_schedule

USUAL_SCHEDULES = 1600
LEAST_FAULTS = 12_000
"""Four in five of them strike; of the others the job is over before. So 9,600 do; `make soak` has a million."""
NUM_SCHEDULES = int(os.environ.get("UNBROKEN_SCHEDULES", USUAL_SCHEDULES))
FIRST_SEED = int(os.environ.get("UNBROKEN_FIRST_SEED", "0"))
SEEDS_PER_TEST = 50
STORY_LINES = 60
MEMORY_SEEDS = (
    # Called protected, and two of its holders were gone, one of them not yet given up.
    1006141,
    1018203,
    1056170,
    # A later iteration had begun without the step that was complete, and saved since.
    1052541,
    # All copies lay with a pod that was cut off before it told of them.
    1062951,
)
"""Seeds in which the checks of checkpoints in memory asked for more than can be."""


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES, SEEDS_PER_TEST))
def test_what_must_hold_holds_after_every_step_of_random_faults(first: int) -> None:
    last = min(first + SEEDS_PER_TEST, FIRST_SEED + NUM_SCHEDULES)
    failed = [result for result in map(run_seed, range(first, last)) if result.failure]
    if failed:
        worst = failed[0]
        story = "\n".join(worst.story[-STORY_LINES:])
        again = f"PYTHONPATH=. python -m tests.simulation --seed {worst.seed}"
        numbers = [result.seed for result in failed]
        pytest.fail(f"seed {worst.seed}: {worst.failure}\n{story}\nrun it again: {again}\nfailing seeds: {numbers}")


@pytest.mark.parametrize("seed", MEMORY_SEEDS)
def test_what_is_known_of_checkpoints_in_memory_decides(seed: int) -> None:
    assert run_seed(seed).failure == ""


def test_the_usual_schedules_hold_as_many_faults_as_they_should() -> None:
    schedules = map(make_schedule, range(USUAL_SCHEDULES))
    assert sum(len(schedule.faults) + len(schedule.ambushes) for schedule in schedules) >= LEAST_FAULTS


def test_a_seed_tells_the_same_story_twice() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first == second
    assert first.story
