"""Trainings with options and faults that are drawn from a seed end as those without faults, bit for bit.

UNBROKEN_RANDOM_TRAININGS is the number of seeds of each framework, or two numbers `first:last`.
"""

import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.integrations import random_huggingface, random_lightning
from tests.integrations.random_faults import MAX_DRAWS, Fault, differences, draw, train
from tests.integrations.test_resumed_trainers import KeptOrOnDisk
from tests.integrations.test_trainers import Kept

from unbroken import memory

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

FAULTY = 3
"""Trainings with faults that are compared with one without."""


def seeds() -> range:
    """Return those to try."""
    first, _, last = os.environ.get("UNBROKEN_RANDOM_TRAININGS", "6").rpartition(":")
    return range(int(first or 0), int(last))


def calm_training(framework: ModuleType, chance: random.Random, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """Return options that the framework takes, what has come out of a training with them, and its calls of hooks."""
    refused: list[str] = []
    for number in range(MAX_DRAWS):
        chosen = framework.options(chance)
        try:
            calm, calls = train(framework.training(folder / f"calm-{number}", chosen), [])
        except framework.REFUSALS as error:
            refused.append(str(error)[:200])
            continue
        return chosen, calm, calls
    raise AssertionError(f"no options of {MAX_DRAWS} can be trained with: {refused[-1]}")


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Checkpointer", KeptOrOnDisk)
    monkeypatch.setattr(Kept, "kept", None)


@pytest.mark.parametrize("framework", [random_huggingface, random_lightning], ids=["huggingface", "lightning"])
@pytest.mark.parametrize("seed", seeds())
def test_a_training_with_faults_ends_as_one_without(framework: ModuleType, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    chosen, calm, calls = calm_training(framework, chance, tmp_path)
    for number in range(FAULTY):
        faults = draw(chance, calls, may_lose=framework.HAS_WHOLE_FILES)
        broken, _calls = train(framework.training(tmp_path / f"broken-{number}", chosen), faults)
        assert not differences(calm, broken), (seed, chosen, faults)


OF_LIGHTNING: dict[str, Any] = {
    "steps_by_hand": False,
    "accumulates": 1,
    "schedule": None,
    "is_schedule_of_steps": True,
    "batch": 4,
    "steps": None,
    "validates": True,
    "breaks_first": False,
    "accumulation": None,
    "stops_early": False,
    "files": {"every_n_train_steps": 3, "save_last": True},
    "from_files": False,
    "trainer": {"max_epochs": 2, "num_sanity_val_steps": 0},
}
FOUND: dict[str, tuple[dict[str, Any], Fault]] = {
    "a file that is newer than the memory": (
        {"from_files": True, "validates": False, "breaks_first": True},
        Fault("on_train_batch_start", 7, loses_memory=False),
    ),
    "a file of an epoch's end, and gradients that were added up by hand": (
        {"steps_by_hand": True, "accumulates": 2, "batch": 5, "from_files": True, "files": {"save_last": True}},
        Fault("on_train_epoch_start", 2, loses_memory=False),
    ),
    "a file in mid-validation, and accumulation": (
        {
            "from_files": True,
            "files": {"save_last": True},
            "trainer": {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 2},
        },
        Fault("on_validation_batch_end", 12, loses_memory=False),
    ),
    "a file that waits for a validation": (
        {
            "steps": 7,
            "trainer": {
                "max_epochs": 2,
                "num_sanity_val_steps": 2,
                "check_val_every_n_epoch": 2,
                "accumulate_grad_batches": 2,
            },
        },
        Fault("on_validation_end", 2, loses_memory=False),
    ),
    "no file after the fault": (
        {
            "steps_by_hand": True,
            "files": {"save_last": True},
            "trainer": {"max_epochs": 3, "val_check_interval": 3},
        },
        Fault("on_validation_start", 7, loses_memory=False),
    ),
    "a schedule that takes its state to pieces": (
        {"schedule": "cyclic", "is_schedule_of_steps": False, "from_files": True},
        Fault("on_train_end", 1, loses_memory=False),
    ),
}
"""What was drawn once, and was not equal."""


@pytest.mark.parametrize("found", FOUND)
def test_lightning_ends_as_without_the_fault_also_with(found: str, tmp_path: Path) -> None:
    chosen, fault = FOUND[found]
    options = {**OF_LIGHTNING, **chosen}
    calm, calls = train(random_lightning.training(tmp_path / "calm", options), [])
    assert calls[fault.hook] >= fault.call
    broken, _calls = train(random_lightning.training(tmp_path / "broken", options), [fault])
    assert not differences(calm, broken)


class Skipping(KeptOrOnDisk):
    """Leaves one checkpoint out, as memory that is still being copied does."""

    def save(self, state: dict[str, Any], step: int) -> Any:
        """Keep it, or not."""
        return memory.Skipped(step, "still being copied") if step == 6 else super().save(state, step)


def test_lightning_takes_the_memory_also_where_it_left_out_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was written meanwhile is newer, but has no random numbers."""
    monkeypatch.setattr(memory, "Checkpointer", Skipping)
    files = {"every_n_train_steps": 1, "save_last": True}
    options = {**OF_LIGHTNING, "from_files": True, "validates": False, "breaks_first": True, "files": files}
    calm, _calls = train(random_lightning.training(tmp_path / "calm", options), [])
    fault = Fault("on_train_batch_start", 8, loses_memory=False)
    broken, _calls = train(random_lightning.training(tmp_path / "broken", options), [fault])
    assert not differences(calm, broken)


def test_huggingface_tells_the_whole_loss_also_where_no_epoch_is_left(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "logging_steps": 7,
    }
    options |= {"save_strategy": "steps", "save_steps": 5, "stops_early": False, "breaks_last": False}
    calm, _calls = train(random_huggingface.training(tmp_path / "calm", options), [])
    fault = Fault("on_train_end", 1, loses_memory=True)
    broken, _calls = train(random_huggingface.training(tmp_path / "broken", options), [fault])
    assert not differences(calm, broken)
