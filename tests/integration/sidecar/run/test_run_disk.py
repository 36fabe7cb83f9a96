"""Jobs whose checkpoints reach the disk in the background: plain torch reads the bits of the step, whatever broke."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecar.memory_runs import Calm, losses, restored, train
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from unbroken.memory.disk import steps_on_disk
from unbroken.memory.new_state.lazy_state import LazyState

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def digest_of(checkpoint: Path) -> str:
    """Load a checkpoint without any part of ours; return the digest that the workload notes of such a state."""
    second, tied = nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = second.weight
    model = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Dropout(0.2), nn.Linear(17, 6), second, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    LazyState({"optimizer": optimizer}).fit([f"optimizer.state.{i}.step" for i, _ in enumerate(model.parameters())])
    load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
    digest = hashlib.sha256()
    moments = [optimizer.state[one] for one in model.parameters()]
    for value in [*model.parameters(), *(moment[name] for moment in moments for name in sorted(moment))]:
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def test_another_job_goes_on_from_the_disk_as_if_nothing_had_been(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, copies of them, and what all ranks have.

    An exception and a killed worker, each where a step is on its way to the disk; then a new job, without memory. The
    first job says where the disk is, as `spec.memory.disk` does; of the second it is the script. What the second one
    fails after again and again is given up there as in memory.
    """
    # Before anything is set for the others.
    wanted = calm("hsdp")
    disk = tmp_path / "disk"
    for name, value in (("STATE", "1"), ("STEPS", "9"), ("INSIST", "1"), ("FLUSH_AT", "6")):
        monkeypatch.setenv(f"TEST_{name}", value)
    with monkeypatch.context() as patch:
        patch.setenv("UNBROKEN_MEMORY_DISK", str(disk))
        patch.setenv("UNBROKEN_MEMORY_DISK_EVERY", "2")
        train(start_job, tmp_path / "broken", "hsdp", "raise:0:1:3", "kill:1:2:5")
    monkeypatch.setenv("TEST_DISK", str(disk))
    monkeypatch.setenv("TEST_DISK_EVERY", "2")
    lines = [line.split() for line in (tmp_path / "broken" / "states").read_text().splitlines()]
    saved = {int(step): digest for _, what, step, digest in lines if what == "saved"}
    found = steps_on_disk(disk)
    assert found[:2] == [8, 6]
    assert {step: digest_of(disk / f"step-{step}") for step in found} == {step: saved[step] for step in found}
    # Each tensor is there once, however many ranks have it: the file of each rank is a part of the whole.
    sizes = [path.stat().st_size for path in (disk / "step-8").glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 0.6 * sum(sizes)
    monkeypatch.setenv("TEST_STEPS", "12")
    job = train(start_job, tmp_path / "later", "hsdp", "raise:0:1:9", "raise:1:1:9")
    # Twice the training fails after step 8: it may be what is wrong.
    assert restored(tmp_path / "later") == {0: {"8"}, 1: {"8"}, 2: {"6"}}
    assert "not used: step=8: the training failed after it again and again" in job.text()
    assert losses(tmp_path / "broken") | losses(tmp_path / "later") == wanted


def test_faults_while_all_wait_for_the_last_step_on_the_disk_do_not_leave_it_out(
    start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: after such a fault nothing was due any more, so the job was complete, and its disk empty."""
    disk = tmp_path / "disk"
    monkeypatch.setenv("TEST_DISK", str(disk))
    for name, value in (("DISK_EVERY", "2"), ("STATE", "1"), ("STEPS", "7"), ("INSIST", "1")):
        monkeypatch.setenv(f"TEST_{name}", value)
    # The processes that write still import torch by then.
    train(start_job, tmp_path / "broken", "fsdp2", "raise:0:1:7", "kill:1:2:7")
    lines = [line.split() for line in (tmp_path / "broken" / "states").read_text().splitlines()]
    assert restored(tmp_path / "broken") == {0: {"None"}, 1: {"6"}, 2: {"6"}}
    assert steps_on_disk(disk)[0] == 6
    assert {digest for _, _, step, digest in lines if step == "6"} == {digest_of(disk / "step-6")}


def test_from_the_disk_an_optimizer_within_an_object_of_the_script_goes_on_as_well(
    start_job: Callable[..., Any], calm: Calm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: its averages began anew, and the log alone said so. Each rank has a part of each."""
    wanted = calm("fsdp2")
    disk = tmp_path / "disk"
    monkeypatch.setenv("TEST_DISK", str(disk))
    for name, value in (("DISK_EVERY", "2"), ("STATE", "1"), ("STEPS", "7"), ("INSIST", "1"), ("WRAPPED", "1")):
        monkeypatch.setenv(f"TEST_{name}", value)
    train(start_job, tmp_path / "first", "fsdp2")
    assert steps_on_disk(disk)[0] == 6
    shutil.copytree(disk, tmp_path / "same")
    monkeypatch.setenv("TEST_STEPS", "12")
    # Half as many ranks: each has other parts.
    train(start_job, tmp_path / "smaller", "fsdp2", shape=("--pods", "1", "--ranks-per-pod", "2", "--memory", "64Mi"))
    texts = {one: (tmp_path / one / "states").read_text() for one in ("first", "smaller")}
    lines = [(one, *line.split()) for one, text in texts.items() for line in text.splitlines()]
    of_step = {(one, what): digest for one, _, what, step, digest in lines if step == "6"}
    assert of_step.keys() >= {("first", "saved"), ("smaller", "loaded")}
    assert of_step["smaller", "loaded"] == of_step["first", "saved"]
    monkeypatch.setenv("TEST_DISK", str(tmp_path / "same"))
    train(start_job, tmp_path / "later", "fsdp2")
    assert restored(tmp_path / "later") == {0: {"6"}}
    assert losses(tmp_path / "first") | losses(tmp_path / "later") == wanted
