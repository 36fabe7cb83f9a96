"""Checkpoints that a process of the worker's own writes to the disk, with a real keeper: plain torch reads them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.waiting import wait_until
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unbroken.memory import Checkpointer, Saved
from unbroken.memory.background import handover
from unbroken.memory.background.epochs import MARK, WORK, Epoch
from unbroken.memory.disk import DcpFolder, steps_on_disk
from unbroken.memory.new_state.places import PLACES

from .conftest import LivePod
from .test_checkpointer import contents, is_same, make_state, step_once

LIMIT_S = 200.0
# One process is enough to read what many have written.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("own_writer"),
]


def writer() -> psutil.Process:
    """Return the process that writes."""
    child = handover._Process.child
    assert child is not None
    return psutil.Process(child._process.pid)


def test_plain_torch_reads_what_was_written_in_the_background(pod: LivePod, tmp_path: Path) -> None:
    """Tied weights, buffers, strides, lazily made state, objects: bit for bit; also as one file of torch.save."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=2, disk_keep=1)
    assert checkpointer.load(state) is None
    wanted = {}
    for step in range(5):
        step_once(state, step)
        assert isinstance(checkpointer.save(state, step), Saved)
        wanted[step] = contents(state)
        # Each is taken, since nothing is faster than this disk: one at a time is.
        assert checkpointer.flush(timeout_s=LIMIT_S)
    wait_until(lambda: steps_on_disk(tmp_path) == [4], "older ones to be removed")
    assert json.loads((tmp_path / "step-4" / MARK).read_text())["world_size"] == 1
    files = sorted(path.name for path in (tmp_path / "step-4").iterdir())
    assert files == [".metadata", "__0_0.distcp", PLACES, MARK]
    fresh = make_state(seed=1)
    step_once(fresh, 0)
    load(fresh, checkpoint_id=tmp_path / "step-4")
    assert is_same(contents(fresh), wanted[4])
    dcp_to_torch_save(tmp_path / "step-4", tmp_path / "one-file")
    assert torch.equal(torch.load(tmp_path / "one-file")["model"]["0.weight"], state["model"][0].weight)
    # Without its memory the job goes on from there.
    pod.be_outside()
    pod.be_new_process()
    fresh = make_state(seed=2)
    assert Checkpointer(disk=tmp_path).load(fresh) == 4
    assert is_same(contents(fresh), wanted[4])


def test_a_killed_writer_costs_one_checkpoint_and_leaves_no_half_one(pod: LivePod, tmp_path: Path) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1)
    checkpointer.load(state)
    checkpointer.save(state, 1)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    first = writer()
    first.send_signal(signal.SIGSTOP)
    checkpointer.save(state, 2)
    # The step before is in the other slot: memory never waits for the disk.
    assert isinstance(checkpointer.save(state, 3), Saved)
    first.kill()
    first.wait()
    checkpointer.save(state, 4)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    # Step 3 waited for its turn, and has had it if it was still in memory then.
    assert [step for step in steps_on_disk(tmp_path) if step != 3] == [4, 1]


def test_what_an_earlier_iteration_has_not_made_whole_it_never_will(pod: LivePod, tmp_path: Path) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1)
    checkpointer.load(state)
    step_once(state, 0)
    checkpointer.save(state, 1)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    late = writer()
    late.send_signal(signal.SIGSTOP)
    checkpointer.save(state, 2)
    pod.be(iteration=1)
    again = Checkpointer(disk=tmp_path, disk_every=1)
    assert again.load(state) == 2  # From memory: it was sealed there.
    late.send_signal(signal.SIGCONT)
    again.save(state, 5)
    assert again.flush(timeout_s=LIMIT_S)
    assert steps_on_disk(tmp_path) == [5, 1]
    wait_until(lambda: not list((tmp_path / WORK).glob("void-*")), "what is void to be gone")


def test_a_full_disk_is_told_in_a_line_and_gives_its_room_back(
    pod: LivePod, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1)
    checkpointer.load(state)
    (epoch,) = (tmp_path / WORK).glob("*-*-*")
    (epoch / "step-1").mkdir()
    (epoch / "step-1" / "__0_0.distcp").symlink_to("/dev/full")
    checkpointer.save(state, 1)
    assert not checkpointer.flush(timeout_s=LIMIT_S)
    wait_until(lambda: not (epoch / "step-1").exists(), "the room to be given back")
    checkpointer.save(state, 2)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    assert steps_on_disk(tmp_path) == [2]
    assert "step 1 is not on the disk: step 1 was given up by rank 0: [Errno 28] No space left" in caplog.text
    said = capfd.readouterr().err
    assert "not written to the disk: step=1 rank=0: [Errno 28] No space left on device" in said
    assert "Traceback" not in said


def test_a_writer_that_cannot_start_is_not_started_at_each_save(
    pod: LivePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.start()
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*words, **more))
        return started[-1]

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", start)
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1)
    checkpointer.load(state)
    for step in range(1, 30):
        started[-1].wait()
        assert isinstance(checkpointer.save(state, step), Saved)
    assert len(started) <= 4
    assert not checkpointer.flush(timeout_s=LIMIT_S)


def test_flush_says_that_nothing_is_on_the_disk(pod: LivePod, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without memory, and where another job has begun in the folder."""
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1)
    checkpointer.load(state)
    assert checkpointer.flush(timeout_s=0), "nothing was due"
    writer().send_signal(signal.SIGSTOP)
    checkpointer.save(state, 1)
    Epoch(tmp_path, "other", 0, 1, 7).begin()
    writer().send_signal(signal.SIGCONT)
    assert not checkpointer.flush(timeout_s=LIMIT_S)
    assert "step 1 is not on the disk: another iteration of the job, or another job, has begun" in caplog.text
    pod.be_outside()
    pod.be_new_process()
    without = Checkpointer(disk=tmp_path, disk_every=1)
    without.load(state)
    without.save(state, 1)
    assert not without.flush(timeout_s=LIMIT_S)
    assert "step 1 is not on the disk: rank" in caplog.text


def test_what_the_user_has_written_is_neither_replaced_nor_removed(pod: LivePod, tmp_path: Path) -> None:
    pod.start()
    state, checkpointer = make_state(), Checkpointer(disk=tmp_path, disk_every=1, disk_keep=1)
    step_once(state, 0)
    checkpointer.load(state)
    save({"mine": torch.ones(3)}, checkpoint_id=tmp_path / "step-1")
    # The user's is not replaced: the writer says so, and goes on.
    for step in (1, 2):
        checkpointer.save(state, step)
    assert checkpointer.flush(timeout_s=LIMIT_S)
    assert steps_on_disk(tmp_path) == [2, 1]
    mine = {"mine": torch.zeros(3)}
    load(mine, checkpoint_id=tmp_path / "step-1")
    assert mine["mine"].tolist() == [1, 1, 1]


def test_without_a_load_or_a_folder_that_can_be_written_training_goes_on(
    pod: LivePod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pod.start()
    state = make_state()
    assert isinstance(Checkpointer(disk=tmp_path, disk_every=1).save(state, 1), Saved)
    assert "`load` was not called at the beginning of this iteration" in caplog.text
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(disk=tmp_path / "file", disk_every=1)
    assert checkpointer.load(state) == 1
    assert f"{tmp_path / 'file'}" in caplog.text
    assert isinstance(checkpointer.save(state, 2), Saved)
    assert not checkpointer.flush(timeout_s=0)
    assert handover._Process.child is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"disk_every": 1}, "disk_every: want a folder in `disk` to write to, got None"),
        ({"disk": 5}, "disk: want a folder, or an object with `steps` and `load`, got 5"),
        ({"disk": ""}, "disk: want the path of a folder that all ranks see, got ''"),
        ({"disk": "s3://bucket/run-1"}, "disk: want the path of a folder that all ranks see, got 's3://bucket/run-1'"),
        ({"disk": Path("gs://bucket")}, "disk: want the path of a folder that all ranks see, got 'gs:/bucket'"),
        ({"disk": "~/run-1"}, "disk: want the path of a folder that all ranks see, got '~/run-1'"),
        ({"disk": "run\0"}, "disk: want the path of a folder that all ranks see, got "),
        ({"disk_keep": 0}, "disk_keep: want a number of checkpoints from 1 on, got 0"),
        ({"disk_every": 0, "disk": "x"}, "disk_every: want a number of steps from 1 on, got 0"),
        ({"disk_every": True, "disk": "x"}, "disk_every: want a number of steps from 1 on, got True"),
        ({"disk_every": 1, "disk": "x", "disk_keep": 0}, "disk_keep: want a number of checkpoints from 1 on, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Checkpointer(**arguments)


def test_a_folder_stays_the_same_where_the_script_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(disk="run-1:a~", disk_every=1)
    monkeypatch.chdir("elsewhere")
    assert isinstance(checkpointer._disk, DcpFolder)
    assert checkpointer._handover is not None
    assert (checkpointer._disk.folder, checkpointer._handover._settings.folder) == (tmp_path / "run-1:a~",) * 2


def test_the_rename_that_comes_first_wins(tmp_path: Path) -> None:
    """A step becomes whole, or is void: whoever renames its folder first."""
    old, new = (Epoch(tmp_path, "job", iteration, 1, iteration) for iteration in (1, 2))
    old.begin()
    for step in (1, 2):
        old.parts(step).mkdir()
    old.publish(1)
    new.begin()
    assert old.why_void()
    with pytest.raises(FileNotFoundError):
        old.publish(2)
    new.parts(2).mkdir()
    new.publish(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [WORK, "step-1", "step-2"]


def test_the_newest_stay_whichever_job_has_made_them(tmp_path: Path) -> None:
    """A second job counts its iterations from 0 again, and goes on from the last step of the first."""
    first, second = Epoch(tmp_path, "job", 4, 2, 1), Epoch(tmp_path, "job", 0, 1, 2)
    for epoch, steps in ((first, (10, 20, 30)), (second, (40,))):
        epoch.begin()
        for step in steps:
            epoch.parts(step).mkdir()
            (epoch.parts(step) / MARK).write_text(json.dumps(epoch.mark))
            epoch.publish(step)
            epoch.retain(3, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [WORK, "step-20", "step-30", "step-40"]
    assert (first.is_whole(30), second.is_whole(30), second.is_whole(40)) == (True, False, True)
    second.sweep()
    assert sorted(path.name for path in (tmp_path / WORK).iterdir()) == [second.name, "jobs"]
    # A third one could read neither 40 nor 30: what it makes must not go for them.
    third = Epoch(tmp_path, "job", 1, 1, 3)
    third.begin()
    third.parts(25).mkdir()
    (third.parts(25) / MARK).write_text(json.dumps(third.mark))
    third.publish(25)
    third.retain(1, 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == [WORK, "step-25", "step-30", "step-40"]
