"""torchtitan's own checkpoints, and what its integration refuses: `make test-integrations RELEASES=torchtitan`."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.jobs import titan_cpu  # noqa: F401  # before torchtitan
from tests.integrations.test_frameworks import LIMIT_S, NUM_STEPS, ONE_POD, run, uninterrupted
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from unbroken.integrations import torchtitan

FRAMEWORK = "torchtitan_job"

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(3 * LIMIT_S + 20)]


@pytest.mark.nightly
def test_torchtitan_goes_on_from_its_own_checkpoint_where_all_memory_is_gone(tmp_path: Path) -> None:
    want = uninterrupted(FRAMEWORK)
    first = run(FRAMEWORK, tmp_path, ONE_POD)
    assert first.result["digest"] == want.result["digest"]
    # The last one has the model alone, and nothing to train on with.
    assert (tmp_path / "disk" / "checkpoint" / f"step-{NUM_STEPS}" / ".metadata").exists()
    (tmp_path / "result.json").unlink()
    again = run(FRAMEWORK, tmp_path, ONE_POD)
    assert "restored from the disk: step=24" in again.text
    assert (again.result["step"], again.result["digest"]) == (NUM_STEPS, want.result["digest"])


@pytest.mark.nightly
def test_torchtitan_without_files_of_its_own_goes_on_from_memory(tmp_path: Path) -> None:
    want = uninterrupted(FRAMEWORK)
    got = run(FRAMEWORK, tmp_path, ONE_POD, TEST_WRITES="no", TEST_FAULTS='{"exception": 11}')
    assert not (tmp_path / "disk" / "checkpoint").exists()
    assert got.result["iteration"] == 1
    assert (got.steps, got.drawn, got.result["digest"]) == (want.steps, want.drawn, want.result["digest"])


def test_a_rank_that_asks_a_failed_one_for_its_part_of_the_model_is_interrupted_there(tmp_path: Path) -> None:
    """torchtitan's models have fused weights: their dictionaries are collectives."""
    want = uninterrupted(FRAMEWORK)
    got = run(FRAMEWORK, tmp_path, ONE_POD, TEST_WRITES="no", TEST_FAILS_UNSAVED="11")
    assert re.findall(r"recovered \d+: rung ([a-z-]+)", got.text) == ["in-process"]
    assert (got.steps, got.drawn, got.result["digest"]) == (want.steps, want.drawn, want.result["digest"])


@pytest.mark.nightly
def test_loader_that_does_not_say_so_is_refused_in_a_world_of_another_size(tmp_path: Path) -> None:
    """One that steps over the other ranks' samples would go on at others, in silence."""
    options = ("--pods", "2", "--min-pods", "1", "--rungs", "in-process,world", "--no-progress-limit", "3")
    said = "dataloader: want a world of 2, in which the checkpoint was taken, got 1: Samples may go on at other samples"
    with pytest.raises(AssertionError, match=said):
        run(FRAMEWORK, tmp_path, options, TEST_WRITES="no", TEST_ANY_WORLD="no", TEST_FAULTS='{"kill": 7}')
    assert not (tmp_path / "result.json").exists()


@pytest.mark.nightly
def test_files_of_a_world_of_another_size_are_refused_for_such_a_loader(tmp_path: Path) -> None:
    """torchtitan's own, in another job, whose memory has nothing."""
    run(FRAMEWORK, tmp_path, ONE_POD)
    (tmp_path / "result.json").unlink()
    options = ("--pods", "1", "--no-progress-limit", "2")
    said = "dataloader: want a world of 2, in which the checkpoint was taken, got 1: Samples may go on at other samples"
    with pytest.raises(AssertionError, match=said):
        run(FRAMEWORK, tmp_path, options, TEST_ANY_WORLD="no")
    assert not (tmp_path / "result.json").exists()
    got = run(FRAMEWORK, tmp_path, options)
    assert "restored from the disk: step=24" in got.text


class AnotherManager(CheckpointManager):  # type: ignore[misc]  # the package brings no types here
    """Of the user's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # the package brings no types here
        """Its own."""


def another_manager(config: Trainer.Config) -> Trainer.Config:
    """Checkpoints in another way."""
    return dataclasses.replace(config, checkpoint=AnotherManager.Config())


def a_seed(config: Trainer.Config) -> Trainer.Config:
    """One checkpoint for all layouts, and no training."""
    config.checkpoint.create_seed_checkpoint = True
    return config


def no_model(config: Trainer.Config) -> Trainer.Config:
    """Made by hand."""
    return dataclasses.replace(config, model_spec=None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_manager, "checkpoint: want torchtitan's CheckpointManager.Config, got .*; what another manager saves"),
        (a_seed, "checkpoint.create_seed_checkpoint: want False, got True"),
        (no_model, "model_spec: want a model, got None"),
    ],
)
def test_what_torchtitan_cannot_resume_exactly_is_refused(
    change: Callable[[Trainer.Config], Trainer.Config], said: str
) -> None:
    config = change(Trainer.Config(model_spec=model_registry("debugmodel")))
    call: Any = None
    with pytest.raises(ValueError, match=said):
        torchtitan.train(config, call)
