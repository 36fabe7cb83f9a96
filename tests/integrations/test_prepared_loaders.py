"""A loader that Accelerate has prepared, after a fault: what docs/integrations/accelerate.md wants of it, and why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

SAMPLES = torch.arange(160.0).reshape(40, 4) / 160
EPOCHS, PER_EPOCH = 3, 10


class Broken(RuntimeError):
    """The fault."""


def train(folder: Path, seen: dict[int, list[float]], fault: int, *, is_seedable: bool) -> list[Any]:
    """Train from the newest state, break once after a batch, and return the weights."""
    for shared in (AcceleratorState, GradientState, PartialState):
        # As between two iterations.
        shared._shared_state.clear()
    set_seed(3)
    order = DataLoaderConfiguration(use_seedable_sampler=is_seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    chance = torch.Generator().manual_seed(1)
    model, optimizer, loader = accelerator.prepare(
        bare,
        torch.optim.AdamW(bare.parameters(), lr=0.01),
        DataLoader(SAMPLES, 4, shuffle=True, generator=chance),  # type: ignore[arg-type]  # a tensor is a data set
    )
    done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    if done:
        accelerator.load_state(str(folder / str(done)))
    for epoch in range(done // PER_EPOCH, EPOCHS):
        skipped = done % PER_EPOCH
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        batches.set_epoch(epoch)
        for batch in batches:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            seen[done] = batch[:, 0].tolist()
            accelerator.save_state(str(folder / str(done)))
            if done == fault:
                raise Broken
    return [one.tolist() for one in bare.parameters()]


def broken(folder: Path, fault: int, *, is_seedable: bool) -> tuple[dict[int, list[float]], list[Any]]:
    """Return the samples of each batch, and the weights, of a training with a fault."""
    seen: dict[int, list[float]] = {}
    with pytest.raises(Broken):
        train(folder, seen, fault, is_seedable=is_seedable)
    return seen, train(folder, seen, -1, is_seedable=is_seedable)


@pytest.mark.parametrize("fault", [8, 10, 17])
def test_prepared_loader_goes_on_exactly_with_a_seedable_sampler_and_a_generator(tmp_path: Path, fault: int) -> None:
    seen: dict[int, list[float]] = {}
    weights = train(tmp_path / "calm", seen, -1, is_seedable=True)
    assert broken(tmp_path / "broken", fault, is_seedable=True) == (seen, weights)


def test_prepared_loader_trains_other_samples_without_a_seedable_sampler(tmp_path: Path) -> None:
    """Why it has to be asked for: once this fails, Accelerate has learnt it, and the page can say less."""
    seen, _ = broken(tmp_path, 17, is_seedable=False)
    second_epoch = sorted(one for number in range(11, 21) for one in seen[number])
    assert second_epoch != sorted(SAMPLES[:, 0].tolist()), "samples came twice"


def loader_of_two(num_workers: int = 0, *, is_stateful: bool = False) -> Any:
    """Return what Accelerate prepares for rank 0 of 2: 38 samples in batches of 3, so 7 batches with 4 samples more."""
    Accelerator(cpu=True)
    chance = torch.Generator().manual_seed(1)
    samples: Any = SAMPLES[:38]
    bare: Any = DataLoader(samples, 3, shuffle=True, generator=chance, num_workers=num_workers)
    return prepare_data_loader(
        bare,
        num_processes=2,
        process_index=0,
        put_on_device=False,
        use_seedable_sampler=True,
        data_seed=3,
        use_stateful_dataloader=is_stateful,
    )


@pytest.mark.parametrize(
    "is_told", [True, False], ids=["as the page says", "once this fails, Accelerate has learnt it"]
)
def test_skipped_loader_knows_which_samples_are_added_if_it_is_told_the_size_of_a_step(is_told: bool) -> None:
    whole = loader_of_two()
    skipped = skip_first_batches(whole, 2)
    if is_told:
        skipped.batch_sampler.batch_size = whole.total_batch_size
    remainders = [[one.remainder for _ in one][-1] for one in (whole, skipped)]
    # With -1 `gather_for_metrics` leaves in what `even_batches` has added.
    assert remainders == [38 % 6, 38 % 6 if is_told else -1]


def read(loader: Any, epoch: int, stop: int | None = None) -> list[list[float]]:
    """Return the next batches of an epoch, `stop` of them at most."""
    loader.set_epoch(epoch)
    found: list[list[float]] = []
    for batch in loader:
        found.append(batch[:, 0].tolist())
        if len(found) == stop:
            break
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [3, None], ids=["after a fault in the first epoch", "after a fault at its end"])
def test_stateful_loader_goes_on_exactly_only_without_workers(num_workers: int, stop: int | None) -> None:
    """Why the page wants none: once this fails with one, Accelerate has learnt it, and the page can say less."""
    calm, begun, after = (loader_of_two(num_workers, is_stateful=True) for _ in range(3))
    epochs = [read(calm, 0), read(calm, 1)]
    assert read(begun, 0, stop) == epochs[0][:stop]
    after.load_state_dict(begun.state_dict())
    is_exact = read(after, 1) == epochs[1] if stop is None else read(after, 0) == epochs[0][stop:]
    assert is_exact == (num_workers == 0)
