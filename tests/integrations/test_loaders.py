"""Loaders with processes, and loaders with a state: no sample twice, none left out, in worlds of other sizes."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from unbroken.integrations.samples import GlobalBatches

SAMPLES, GLOBAL_BATCH = 50, 12
pytestmark = [
    pytest.mark.integrations,
    # torchdata 0.11 with torch 2.13.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Numbers:
    """A data set: the samples are their own indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class World:
    """What a rank of a group sees of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: self.size)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """One rank, until it is changed."""
    return World(monkeypatch)


def trained(world: World, first: int, stop: int, loader_type: Any, **options: Any) -> list[int]:
    """Return the samples of these steps, as each rank's loader gives them; it has read ahead when it is dropped."""
    found = []
    for rank in range(world.size):
        world.rank = rank
        batches = GlobalBatches(SAMPLES, GLOBAL_BATCH, steps=100)
        batches.start_at(first)
        loader = iter(loader_type(Numbers(), batch_sampler=batches, **options))
        found += [one for _ in range(first, stop) for one in next(loader).tolist()]
    return found


@pytest.mark.parametrize(
    ("loader_type", "options"),
    [
        pytest.param(DataLoader, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}, id="processes"),
        pytest.param(DataLoader, {}, id="plain"),
        pytest.param(StatefulDataLoader, {"num_workers": 1}, id="stateful"),
    ],
)
def test_each_sample_comes_as_often_over_a_shrink_and_a_growth(
    world: World, loader_type: Any, options: dict[str, Any]
) -> None:
    seen: Counter[int] = Counter()
    made = 0
    for world.size, stop in ((2, 2), (1, 4), (3, 2 * SAMPLES // GLOBAL_BATCH)):
        seen.update(trained(world, made, stop, loader_type, **options))
        made = stop
        assert seen.total() == stop * GLOBAL_BATCH
        assert max(seen.values()) - min(seen[one] for one in range(SAMPLES)) <= 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_of_a_stateful_loader_goes_on_at_the_same_place_in_the_same_world(world: World, num_workers: int) -> None:
    world.rank, world.size = 1, 2

    def make() -> Any:
        return StatefulDataLoader(
            Numbers(), batch_sampler=GlobalBatches(SAMPLES, GLOBAL_BATCH), num_workers=num_workers
        )

    whole = [batch.tolist() for batch in make()]
    loader = make()
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == whole[:2]
    again = make()
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == whole[2:]
