"""Each sample comes once in each round through the data, in worlds of any size, from any step on."""

from collections import Counter
from typing import Any

import pytest

from unbroken.integrations.samples import GlobalBatches


def trained(batches: GlobalBatches, worlds: list[int]) -> Counter[int]:
    """Return how often each sample came when step k was made by a world of this size."""
    return Counter(
        sample
        for step, world_size in enumerate(worlds)
        for rank in range(world_size)
        for sample in batches.of_step(step, rank, world_size)
    )


@pytest.mark.parametrize("num_samples", [24, 25, 7, 1])
def test_no_sample_comes_twice_and_none_is_left_out_while_the_world_shrinks_and_grows(num_samples: int) -> None:
    batches = GlobalBatches(num_samples, 12, seed=3)
    worlds = [4, 4, 4, 2, 2, 1, 3, 12, *[6] * 20]
    assert trained(batches, worlds[:num_samples]) == dict.fromkeys(range(num_samples), 12)
    if num_samples > 12:
        assert max(trained(batches, worlds[: num_samples // 12]).values()) == 1


def test_step_has_the_same_samples_in_each_world_and_each_process() -> None:
    def of_all(step: int, world_size: int) -> list[int]:
        batches = GlobalBatches(100, 12, seed=5)
        return [one for rank in range(world_size) for one in batches.of_step(step, rank, world_size)]

    for step in (0, 8, 1000):
        assert of_all(step, 1) == of_all(step, 2) == of_all(step, 3) == of_all(step, 12)
    assert of_all(0, 1) != of_all(25, 1)


def test_pass_that_begins_in_its_middle_ends_where_it_would_have_and_the_next_is_whole() -> None:
    batches = GlobalBatches(50, 10)
    whole = [list(batches) for _ in range(3)]
    assert [len(one) for one in whole] == [5, 5, 5]
    batches.start_at(7)
    assert list(batches) == whole[1][2:]
    assert list(batches) == whole[2]
    batches.set_epoch(1)
    assert (list(batches), len(batches)) == (whole[1], 5)


def test_samples_that_fill_no_batch_come_first_in_the_next_pass() -> None:
    batches = GlobalBatches(25, 10, shuffle=False)
    assert [one for _ in range(2) for batch in batches for one in batch] == [*range(25), *range(15)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "global_batch": 1}, "num_samples: want a number from 1 on, got 0"),
        ({"num_samples": 1, "global_batch": True}, "global_batch: want a number from 1 on, got True"),
        ({"num_samples": 1, "global_batch": 1, "steps": -1}, "steps: want a number from 1 on, got -1"),
    ],
)
def test_numbers_that_make_no_batches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatches(**arguments)


def test_world_that_does_not_divide_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"want a multiple of the world size, got 12 for 5 ranks.*divisibleBy"):
        GlobalBatches(100, 12).of_step(0, 0, 5)


@pytest.mark.parametrize("step", [-1, 1 << 62, "1", None])
def test_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(ValueError, match="step: want a number from 0 on"):
        GlobalBatches(1, 1).start_at(step)  # type: ignore[arg-type]  # what it refuses


def test_other_data_than_those_of_the_checkpoint_are_refused() -> None:
    saved = GlobalBatches(100, 10).describe()
    GlobalBatches(100, 10).check(saved)
    with pytest.raises(ValueError, match=r"want .*: 10\}, as in the checkpoint, got .*: 20\}"):
        GlobalBatches(100, 20).check(saved)
