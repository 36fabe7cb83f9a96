"""What a worker notes is bounded, and who reads it trusts none of it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from unbroken import checkpoint_records
from unbroken.checkpoint_records import FULL, FaultAtStep, LoadedStep, SavedPart, Struck, read_strike
from unbroken.comparing import records
from unbroken.comparing.records import Record, read_record
from unbroken.memory.place import WorkerInfo
from unbroken.memory.recording import recorder as recorder_of_process
from unbroken.memory.recording.recorder import ComparedFault, Recorder
from unbroken.memory.shard import ShardReader

PLACE = WorkerInfo(None, 0, 1, 0, 1, 2)


def note(recorder: Recorder, step: int, **values: object) -> None:
    """Note a part with a tensor."""
    shard = ShardReader().read({"weight": torch.full((3,), float(step)), **values})
    recorder.saved(PLACE, step, shard, "")


def test_what_was_noted_is_what_is_read_also_where_names_change_and_the_last_line_is_torn(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "")
    recorder.loaded(PLACE, "nothing", None)
    note(recorder, 0)
    note(recorder, 1)
    note(recorder, 2, more=[1])
    recorder.saved(PLACE, 3, ShardReader().read({"weight": torch.zeros(1)}), "no room")
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().count(b'"names"') == 3
    with file.open("ab") as lines:
        lines.write(b'{"saved":{"iterat')
    found = read_record(tmp_path)
    assert found.problem == ""
    assert found.loads == (LoadedStep(0, 1, "nothing", -1),)
    assert [(one.step, one.rank, one.world_size, one.num_tensors) for one in found.saves] == [
        (step, 1, 2, 1) for step in range(4)
    ]
    assert [len(one.names) for one in found.saves] == [1, 1, 3, 1]
    assert [one.skipped for one in found.saves] == ["", "", "", "no room"]
    assert len({one.digests for one in found.saves}) == 4


def test_a_fault_strikes_once_in_a_run_whichever_process_is_there(tmp_path: Path) -> None:
    strike = FaultAtStep("exception", 1, 5)
    assert read_strike(strike.text()) == strike
    first, second = (Recorder(tmp_path, strike.text()) for _ in range(2))
    first.before(PLACE, 4)
    first.before(WorkerInfo(None, 0, 1, 0, 0, 2), 5)
    with pytest.raises(ComparedFault, match="before step 6 was saved"):
        first.before(PLACE, 6)
    first.before(PLACE, 7)
    second.before(PLACE, 7)
    assert read_record(tmp_path).struck == Struck(0, 1, 6)


@pytest.mark.parametrize("text", ["", "exception", "exception:1", "shout:1:2", "kill:-1:2", "kill:1:2:3", "kill:x:2"])
def test_a_fault_that_nobody_means_is_none(tmp_path: Path, text: str) -> None:
    Recorder(tmp_path, text).before(PLACE, 100)
    assert read_record(tmp_path) == Record()


def test_a_file_ends_at_its_bound_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.memory.recording.recorder.MAX_FILE_BYTES", 1000)
    recorder = Recorder(tmp_path, "")
    for step in range(100):
        note(recorder, step)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size <= 1000 + len(FULL)
    found = read_record(tmp_path)
    assert 0 < len(found.saves) < 100
    assert "more than 256 MiB of one process" in found.problem


PART = SavedPart(0, 0, 1, 5, ("a", "b"), 1, 1, "0" * 32)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("garbage", id="no JSON"),
        pytest.param("[" * 100_000, id="nested"),
        pytest.param("[]", id="a list"),
        pytest.param("{}", id="nothing"),
        pytest.param('{"other": {}}', id="unknown"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "step": -1}}), id="a step below 0"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "step": True}}), id="no number"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "rank": 1}}), id="a rank beyond the world"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "world_size": 1 << 60}}), id="a world without an end"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "num_tensors": 3}}), id="more tensors than names"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "num_floats": 2}}), id="more floats than tensors"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "digests": "00"}}), id="too few digests"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "names": [1, 2]}}), id="names that are none"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "names": 5}}), id="no names"),
        pytest.param(json.dumps({"saved": {**asdict(PART), "more": 5}}), id="a field too many"),
        pytest.param(json.dumps({"saved": [1]}), id="no fields"),
        pytest.param(json.dumps({"loaded": {"iteration": 0, "rank": 0, "source": 1, "step": 1}}), id="no source"),
        pytest.param("x" * 2000, id="too long"),
    ],
)
def test_what_no_worker_writes_makes_the_record_worth_nothing(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    note(Recorder(tmp_path, ""), 1)
    (tmp_path / "other.lines").write_text(line + "\n")
    found = read_record(tmp_path)
    assert "what a worker has recorded cannot be read, other.lines" in found.problem
    assert len(found.saves) == 1


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.lines")
    assert "it is no file" in read_record(tmp_path).problem
    (tmp_path / "pipe.lines").unlink()
    (tmp_path / "link.lines").symlink_to("/dev/zero")
    assert "link.lines" in read_record(tmp_path).problem


def test_more_than_can_be_compared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(Recorder(tmp_path, ""), 1)
    note(Recorder(tmp_path, ""), 2)
    monkeypatch.setattr(records, "_MAX_TOTAL_CHARACTERS", 20)
    assert "more was recorded than can be compared" in read_record(tmp_path).problem
    monkeypatch.setattr(records, "_MAX_FILES", 1)
    assert "2 processes have recorded something" in read_record(tmp_path).problem


def test_a_worker_that_is_not_compared_imports_nothing_and_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checkpoint_records.FOLDER, raising=False)
    assert recorder_of_process() is None
    code = "import sys, unbroken.memory; print('unbroken.memory.recording.recorder' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
