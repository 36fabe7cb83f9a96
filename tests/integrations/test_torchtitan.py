"""torchtitan's own checkpoints, and what its integration refuses: `make test-integrations RELEASES=torchtitan`."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
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


@pytest.mark.parametrize("step", [8, NUM_STEPS])
def test_checkpoint_of_torchtitan_s_own_that_a_fault_has_cut_short_is_written_again(step: int, tmp_path: Path) -> None:
    """The memory has its step before: the last one would be missing in a job that ends as complete."""
    want = uninterrupted(FRAMEWORK)
    got = run(FRAMEWORK, tmp_path, ONE_POD, TEST_FAILS_WRITING=str(step))
    written = {path.parent.name for path in (tmp_path / "disk" / "checkpoint").glob("step-*/.metadata")}
    assert written == {"step-8", "step-16", "step-24", f"step-{NUM_STEPS}"}
    assert (got.result["iteration"], got.result["digest"]) == (1, want.result["digest"])
    assert (got.steps, got.drawn) == (want.steps, want.drawn)


def validations(folder: Path) -> dict[int, set[float]]:
    """Return what was found, by step."""
    rows = [json.loads(line) for line in (folder / "validations").read_text().splitlines()]
    return {step: {loss for at, loss in rows if at == step} for step, _ in rows}


def test_a_validation_that_a_fault_has_cut_short_is_made_again(tmp_path: Path) -> None:
    """The step before it is saved already, and would not be made again."""
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    want = run(FRAMEWORK, calm, ONE_POD)
    got = run(FRAMEWORK, broken, ONE_POD, TEST_FAILS_VALIDATING="14")
    assert got.result["iteration"] == 1
    assert set(validations(calm)) == {1, 7, 14, 21, 28}
    assert validations(broken) == validations(calm)
    assert (got.steps, got.drawn, got.result["digest"]) == (want.steps, want.drawn, want.result["digest"])


class Call:
    """Counts what is reported."""

    def __init__(self) -> None:
        self.num_pings = 0

    def ping(self) -> None:
        """Count it."""
        self.num_pings += 1


class Validating:
    """A validator of three batches."""

    def should_validate(self, step: int) -> bool:
        """As torchtitan."""
        return step % 4 == 0

    def post_dataloading_process(self, batch: int) -> int:
        """Each batch goes through it."""
        return batch

    def validate(self, parts: list[Any], step: int) -> list[int]:
        """Look at each batch."""
        return [self.post_dataloading_process(one) for one in range(3)]


@pytest.mark.parametrize("has_batches", [True, False])
def test_each_batch_of_a_validation_is_progress_once_a_step_was_made(
    has_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a long one would be taken for a hang. Before the first step nothing is, as without a validation."""
    for name, value in (("get_rank", 0), ("get_world_size", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    kind: Any = Validating
    if not has_batches:
        kind = type("Other", (Validating,), {"post_dataloading_process": None, "validate": lambda *args: None})
    validator, call = kind(), Call()
    trainer: Any = SimpleNamespace(
        **{"step": 0, "model_parts": [], "validator": validator, "checkpointer": SimpleNamespace()},
        config=SimpleNamespace(validator=SimpleNamespace(enable=True)),
    )
    trainer.checkpointer.load = lambda: setattr(trainer, "step", 4)
    any_call: Any = call
    with torchtitan._validations(trainer, any_call):
        trainer.checkpointer.load()
        assert call.num_pings == 0
        trainer.step += 4
        validator.validate([], trainer.step)
    assert call.num_pings == (3 if has_batches else 0)
    assert vars(validator) == {}


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
