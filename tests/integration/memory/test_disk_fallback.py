"""Checkpoints on the disk that cannot be read: all ranks take an older one, in memory or on the disk, or fail."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ports import free_port
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from unbroken.memory import Checkpointer, checkpointer
from unbroken.memory.arena import WorkerSlots
from unbroken.memory.background.epochs import MARK, WORK, Epoch
from unbroken.memory.disk import DcpFolder
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Candidate, Load, LoadSource, Restore

from .conftest import LivePod

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("own_writer"),
]
LIMIT_S = 280.0
RANK = """
import sys
import torch, torch.distributed as dist
from unbroken.memory import Checkpointer
torch.set_num_threads(1)
dist.init_process_group("gloo")
state = {"w": torch.zeros(100)}
try:
    done = Checkpointer(disk=sys.argv[1]).load(state)
except BaseException as error:
    done = error
print("\\n", done, state["w"].sum().item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def cut(checkpoint: Path) -> None:
    """Cut off the end of what says what is in a checkpoint."""
    file = checkpoint / ".metadata"
    file.write_bytes(file.read_bytes()[:100])


def lose(checkpoint: Path) -> None:
    """Remove a file with tensors."""
    next(checkpoint.glob("*.distcp")).unlink()


def fill(checkpoint: Path) -> None:
    """Put garbage in the place of a checkpoint."""
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(b"garbage")


def flip(checkpoint: Path) -> None:
    """Flip a bit of a tensor. Before, it was restored: torch does not look at the checksums that it writes."""
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((4,), 30.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)


def saved(folder: Path, *steps: int) -> Path:
    """Save these steps in a folder; the values are the step."""
    for step in steps:
        save({"w": torch.full((100,), float(step))}, checkpoint_id=folder / f"step-{step}")
    return folder


@pytest.mark.parametrize("spoil", [cut, lose, fill, flip])
def test_an_older_one_is_taken_where_the_newest_cannot_be_read(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, 10, 20, 30)
    spoil(folder / "step-30")
    state = {"w": torch.zeros(100)}
    assert Checkpointer(disk=folder).load(state) == 20
    assert state["w"].tolist() == [20.0] * 100
    assert "cannot be read: step=30" in caplog.text
    assert "restored from the disk: step=20" in caplog.text
    assert "restored from the disk: step=30" not in caplog.text


def test_a_newer_one_without_its_end_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path, 10, 20)
    (folder / "step-20" / ".metadata").unlink()
    assert Checkpointer(disk=folder).load({"w": torch.zeros(100)}) == 10
    assert "not used: step=20: it has no .metadata" in caplog.text


def test_a_checkpoint_without_checksums_is_read_as_it_is(tmp_path: Path) -> None:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        folder = saved(tmp_path, 10)
    finally:
        set_crc32_options(before)
    state = {"w": torch.zeros(100)}
    assert Checkpointer(disk=folder).load(state) == 10
    assert state["w"].tolist() == [10.0] * 100


def test_a_folder_that_cannot_be_listed_lets_nobody_begin_anew(pod: LivePod, tmp_path: Path) -> None:
    """Before, that was a folder with nothing in it."""
    folder = tmp_path / "folder"
    folder.symlink_to(folder)
    with pytest.raises(CheckpointException, match=r"cannot be listed.*begin anew would lose"):
        Checkpointer(disk=folder).load({"w": torch.zeros(100)})
    # With something to go back to the training goes on.
    pod.start()
    Checkpointer().save({"w": torch.full((100,), 15.0)}, 15)
    pod.be(iteration=1)
    state = {"w": torch.zeros(100)}
    assert Checkpointer(disk=folder).load(state) == 15


def test_what_cannot_be_read_leaves_no_frames_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold the process group until the garbage collector comes by."""
    folder = saved(tmp_path, 10, 20)
    lose(folder / "step-20")
    # What is logged is kept by pytest.
    monkeypatch.setattr("unbroken.memory.disk.logger.disabled", True)
    gc.collect()
    gc.disable()
    try:
        assert Checkpointer(disk=folder).load({"w": torch.zeros(100)}) == 10
        kept = [one for one in gc.get_objects() if isinstance(one, CheckpointException) and one.__traceback__]
    finally:
        gc.enable()
    assert kept == []


def test_nothing_begins_anew_where_none_can_be_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10, 20)
    cut(folder / "step-10")
    lose(folder / "step-20")
    with pytest.raises(CheckpointException):
        Checkpointer(disk=folder).load({"w": torch.zeros(100)})


def test_a_step_in_memory_is_taken_where_a_newer_one_on_the_disk_cannot_be_read(
    pod: LivePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.start()
    Checkpointer().save({"w": torch.full((100,), 15.0)}, 15)
    folder = saved(tmp_path, 10, 20)
    fill(folder / "step-20")
    state = {"w": torch.zeros(100)}
    pod.be(iteration=1)
    told: list[Load] = []
    monkeypatch.setattr(checkpointer, "_tell_keeper", lambda _arena, load: told.append(load))
    assert Checkpointer(disk=folder).load(state) == 15
    assert state["w"].tolist() == [15.0] * 100
    # The status says what was lost, and why.
    (load,) = told
    ((step, why),) = load.refused
    assert (load.source, load.step, step) == (LoadSource.MEMORY, 15, 20)
    assert why.startswith("on the disk: rank 0: ")


@pytest.mark.parametrize(
    ("mark", "step"), [("", 10), ('{"iteration": 0, "term": 1}', 10), ('{"iteration": 1, "term": 1}', 20)]
)
def test_a_step_that_was_given_up_is_not_taken_from_the_disk_either(
    pod: LivePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, step: int
) -> None:
    """Before, all ranks took it from there again and again, until the job had failed as often as it may."""
    pod.start()
    for one in (10, 20):
        Checkpointer().save({"w": torch.full((100,), float(one))}, one)
    folder = saved(tmp_path, 5, 20)
    if mark:
        # Another timeline has come to the same step.
        (folder / "step-20" / MARK).write_text(mark)
    candidates = (Candidate(1, 0, 10, 1), Candidate(1, 0, 20, 1, is_given_up=True))
    restore = Restore(candidates, given_up=((0, 1, 20, 1),))
    monkeypatch.setenv("UNBROKEN_RESTORE", wire.encode(restore))
    pod.be(iteration=3)
    assert Checkpointer(disk=folder).load({"w": torch.zeros(100)}) == step


@pytest.mark.parametrize(("in_memory", "before", "step"), [((), (), None), ((), (5,), 5), ((15,), (), 15)])
def test_a_job_never_goes_on_from_what_another_one_has_written_meanwhile(
    pod: LivePod,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_memory: tuple[int, ...],
    before: tuple[int, ...],
    step: int | None,
) -> None:
    """Two jobs with one folder, by mistake. Before, it went on from the other's weights, with a line in the log."""
    pod.start()
    folder, state = saved(tmp_path / "disk", *before), {"w": torch.zeros(100)}
    checkpointer = Checkpointer(disk=folder, disk_every=100)
    assert checkpointer.load(state) == max(before, default=None)
    for one in in_memory:
        checkpointer.save({"w": torch.full((100,), float(one))}, one)
    other = Epoch(folder, "b" * 32, iteration=7, term=1, nonce=9)
    other.begin()
    saved(folder, 200)
    (folder / "step-200" / MARK).write_text(json.dumps(other.mark))
    pod.be(iteration=1)
    again = Checkpointer(disk=folder, disk_every=100)
    if step is None:
        with pytest.raises(CheckpointException, match=r"step 200 is of another job.*to begin anew would lose"):
            again.load(state)
    else:
        assert again.load(state) == step
    assert "another job has begun in this folder since this one did" in caplog.text
    assert not other.why_void(), "the other one trains on"
    # A run that begins anew goes on from the newest.
    pod.be(iteration=0)
    assert Checkpointer(disk=folder, disk_every=100).load(state) == 200


def test_what_is_no_word_of_another_job_names_none(tmp_path: Path) -> None:
    """Anybody may write into a folder that is shared; a pipe would be waited for."""
    own = Epoch(tmp_path, "a" * 32, iteration=0, term=1, nonce=9)
    own.begin()
    for number, content in enumerate((b"", b"[" * 100_000, b"7", b'"' + b"b" * (1 << 20) + b'"')):
        (tmp_path / WORK / f"7-{number}-9").mkdir()
        (tmp_path / WORK / f"7-{number}-9" / "job").write_bytes(content)
    (tmp_path / WORK / "8-1-9").mkdir()
    os.mkfifo(tmp_path / WORK / "8-1-9" / "job")
    assert own.intruder() == ""
    Epoch(tmp_path, "b" * 32, iteration=9, term=1, nonce=9).begin()
    assert own.intruder() == "b" * 32


def answers_of(folders: list[Path]) -> list[str]:
    """Return what ranks print that look into these folders."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, folder],
            env={**common, "WORLD_SIZE": str(len(folders)), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        return [one.communicate(timeout=LIMIT_S)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()


@pytest.mark.parametrize(("lag", "restored"), [(0, 20), (4, 20), (5, 15)])
def test_what_lacks_something_counts_where_it_is_newer_by_more_than_its_lag(
    pod: LivePod, tmp_path: Path, lag: int, restored: int
) -> None:
    pod.start()
    Checkpointer().save({"w": torch.full((100,), 15.0)}, 15)
    disk = DcpFolder(saved(tmp_path, 10, 20))
    vars(disk)["lag"] = lag
    state = {"w": torch.zeros(100)}
    pod.be(iteration=1)
    assert Checkpointer(disk=disk).load(state) == restored
    assert state["w"].tolist() == [float(restored)] * 100


def test_all_ranks_take_an_older_one_where_a_single_one_cannot_read_the_newest(tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(rank), 10, 20) for rank in range(3)]
    lose(folders[1] / "step-20")
    assert [answer.split()[-2:] for answer in answers_of(folders)] == [["10", "1000.0"]] * 3


def test_nobody_begins_anew_where_a_single_rank_does_not_see_what_is_there(tmp_path: Path) -> None:
    """A host on which the volume is not mounted. Before, all of them did."""
    folders = [saved(tmp_path / str(rank), 10) for rank in range(2)]
    shutil.rmtree(folders[1])
    words = "step 10 is on the disk, and rank 1 does not see it"
    assert [words in answer for answer in answers_of(folders)] == [True, True]


def test_a_training_that_begins_anew_says_so_once_and_a_first_start_says_nothing(
    pod: LivePod, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: only that a checkpoint was not used, and nothing of a beginning."""
    pod.start()
    checkpoints = Checkpointer(every=10)
    assert checkpoints.load({"w": torch.zeros(100)}) is None
    pod.be(iteration=1)
    assert checkpoints.load({"w": torch.zeros(100)}) is None
    assert "anew" not in caplog.text, "no step was made"
    for step in range(24):
        checkpoints.save({"w": torch.zeros(100)}, step)
    pod.be(iteration=2)
    loads: list[Load] = []

    def loaded(_arena: WorkerSlots, load: Load) -> bool:
        loads.append(load)
        return True

    monkeypatch.setattr(WorkerSlots, "loaded", loaded)
    assert Checkpointer().load({"w": torch.zeros(200)}) is None
    assert [one.reached for one in loads] == [23], "the status counts from it what is redone"
    told = [one for one in caplog.messages if "anew" in one]
    assert len(told) == 1
    assert told[0].startswith(
        "no checkpoint is restored, and the training begins anew at its beginning: all of its steps up to 23 are lost; "
        "in memory: Size mismatch"
    )
    assert told[0].endswith("; on the disk: the job names none, with disk=")


ADDED = """
import sys
import torch, torch.distributed as dist
from unbroken import inprocess
from unbroken.memory import Checkpointer
@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    state = {"w": torch.zeros(100), "ema": {"n_averaged": torch.zeros(1)}}
    Checkpointer(disk=sys.argv[1]).load(state)
train()
"""


def test_a_state_with_more_than_was_saved_is_a_mistake_of_the_script_that_says_what_to_do(tmp_path: Path) -> None:
    """Seen before: both processes ended and were started again, six times, with tracebacks of 1,000 characters."""
    folder = saved(tmp_path / "disk", 10, 20)
    script = tmp_path / "added.py"
    script.write_text(ADDED)
    command = [sys.executable, "-P", "-m", "unbroken", "run", "--pods", "1", "--ranks-per-pod", "2"]
    command += [str(script), str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("function raised: iteration=") in (2, 3, 4), "once more, on both ranks at most"
    assert "base-exception" not in done.stderr
    faults = re.findall(r"^unbroken +\S+ +fault \d: exception of rank .*", done.stderr, re.MULTILINE)
    assert len(faults) in (1, 2), done.stderr
    for line in faults:
        assert (
            f"UnlikeCheckpointError: the checkpoint of step 20 in {folder} is of another state: rank 0: it lacks "
            in line
        )
        assert "1 name of the state: ema.n_averaged; nor can 1 older one; want a state with the names" in line


def test_a_tensor_of_another_size_is_named_and_what_cannot_be_read_is_no_mistake(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10)
    with pytest.raises(checkpointer.UnlikeCheckpointError, match=r"is of another state: rank 0: Size mismatch.*for w"):
        Checkpointer(disk=folder).load({"w": torch.zeros(200)})
    saved(folder, 20)
    lose(folder / "step-20")
    save({"w": torch.zeros(200)}, checkpoint_id=folder / "step-5")
    shutil.rmtree(folder / "step-10")
    with pytest.raises(
        RuntimeError, match=r"step 20 in .* cannot be read: rank 0: FileNotFoundError.*1 older"
    ) as caught:
        Checkpointer(disk=folder).load({"w": torch.zeros(100)})
    assert type(caught.value) is checkpointer.NoCheckpointError
    assert isinstance(caught.value, CheckpointException)
    assert list(caught.value.failures) == [0]
