"""Which save may overwrite the newest one, while the one before it has to stay."""

import pytest

from unbroken.memory.pacing import LONGEST, may_replace


@pytest.mark.parametrize(
    ("present", "step", "distance", "may"),
    [
        pytest.param(5, 6, 1, True, id="a rounder number"),
        pytest.param(6, 7, 1, False, id="a less round one"),
        pytest.param(6, 10, 1, True, id="one as round"),
        pytest.param(64, 71, 1, False, id="the roundest stays"),
        pytest.param(64, 72, 1, True, id="but not for ever"),
        pytest.param(0, 7, 1, True, id="no step is rounder than 0, and none waits for it"),
        pytest.param(60, 130, 10, False, id="in steps of ten"),
        pytest.param(60, 140, 10, True, id="eight saves of ten steps"),
        pytest.param(40, 30, 10, True, id="the script went back"),
    ],
)
def test_round_numbers_stay_for_longer(present: int, step: int, distance: int, may: bool) -> None:
    assert may_replace(present, step, distance) is may


@pytest.mark.parametrize("every", [1, 2, 5, 10, 1000])
def test_ranks_that_begin_at_other_saves_soon_hold_the_same_one_for_a_while(every: int) -> None:
    for first in range(40):
        for second in range(first, first + LONGEST):
            held = [first * every, second * every]
            same = []
            for number in range(second + 1, second + 3 * LONGEST):
                step = number * every
                held = [step if may_replace(one, step, every) else one for one in held]
                same.append(held[0] == held[1])
            runs = "".join("x" if one else " " for one in same).split()
            assert max(map(len, runs)) >= LONGEST, (first, second)
