"""Where torchrun's workers write with `--logs-specs=unbroken`."""

import errno
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from unbroken.torchrun_plugin import logs as module
from unbroken.torchrun_plugin.log_plan import read_streams
from unbroken.torchrun_plugin.logs import UnbrokenLogsSpecs
from unbroken_core.vocabulary.errors import InputError

RUN_ID, COUNT, ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"


def _envs(num_ranks: int, count: int = 0) -> dict[int, dict[str, str]]:
    return {rank: {RUN_ID: "a/run", COUNT: str(count)} for rank in range(num_ranks)}


def _names(paths: dict[int, str], folder: Path) -> dict[int, str]:
    """Return what is below the run's folder, whose name ends with something random."""
    return {rank: "/".join(Path(path).relative_to(folder).parts[1:]) for rank, path in paths.items()}


def test_each_rank_has_a_folder_and_torch_is_told_the_error_file(tmp_path: Path) -> None:
    """4.8, 4.9, 4.10, 4.14; local ranks of two digits, too (4.24)."""
    specs, envs = UnbrokenLogsSpecs(str(tmp_path / "new"), Std.ALL), _envs(12)
    destination = specs.reify(envs)
    assert _names(destination.stdouts, tmp_path / "new")[11] == "attempt_0/11/stdout.log"
    assert _names(destination.error_files, tmp_path / "new")[10] == "attempt_0/10/error.json"
    assert {rank: env[ERROR_FILE] for rank, env in envs.items()} == destination.error_files
    assert Path(destination.stderrs[11]).parent.is_dir()
    assert specs.root_log_dir == str(tmp_path / "new")


def test_attempt_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    """4.10 and 4.29: torch removes it, and with it what tells why a node was lost."""
    specs = UnbrokenLogsSpecs(str(tmp_path), Std.OUT)
    first = specs.reify(_envs(1)).stdouts[0]
    Path(first).write_text("why")
    again = specs.reify(_envs(1)).stdouts
    assert Path(first).read_text() == "why"
    assert _names(again, tmp_path) == {0: "attempt_0.1/0/stdout.log"}
    assert _names(specs.reify(_envs(1, count=1)).stdouts, tmp_path) == {0: "attempt_1/0/stdout.log"}


def test_rank_that_is_filtered_out_writes_files_and_is_not_seen(tmp_path: Path) -> None:
    """4.11, 4.13: teed streams go to their file but are not tailed, others go nowhere; redirected ones stay so."""
    specs = UnbrokenLogsSpecs(str(tmp_path), redirects={1: Std.ERR}, tee=Std.OUT, local_ranks_filter={0})
    destination = specs.reify(_envs(2))
    assert destination.tee_stdouts == {0: destination.stdouts[0]}
    assert destination.tee_stderrs == {}
    assert _names({1: destination.stdouts[1]}, tmp_path) == {1: "attempt_0/1/stdout.log"}
    assert _names({1: destination.stderrs[1]}, tmp_path) == {1: "attempt_0/1/stderr.log"}
    assert destination.stderrs[0] == "", "the console"
    plain = UnbrokenLogsSpecs(str(tmp_path), local_ranks_filter={0}).reify(_envs(2))
    assert (plain.stdouts, plain.stderrs) == ({0: "", 1: os.devnull}, {0: "", 1: os.devnull})


@pytest.mark.parametrize("redirects", [Std.NONE, Std.ALL, {0: Std.OUT}])
@pytest.mark.parametrize("tee", [Std.NONE, Std.ERR, {1: Std.ALL}])
@pytest.mark.parametrize("shown", [None, {1}])
def test_streams_are_those_of_torch(
    tmp_path: Path, redirects: Std | dict[int, Std], tee: Std | dict[int, Std], shown: set[int] | None
) -> None:
    """4.5, 4.11, 4.12, 4.13: whatever is asked for, the same streams go to files, the console, and nowhere."""

    def shape(specs: LogsSpecs) -> object:
        found = specs.reify(_envs(2) | {0: {RUN_ID: "run", COUNT: "0"}})
        maps = (found.stdouts, found.stderrs, found.tee_stdouts, found.tee_stderrs, found.error_files)
        return [{rank: Path(path).name if "attempt" in path else path for rank, path in one.items()} for one in maps]

    ours = UnbrokenLogsSpecs(str(tmp_path / "a"), redirects, tee, shown)
    assert shape(ours) == shape(DefaultLogsSpecs(str(tmp_path / "b"), redirects, tee, shown))


def test_log_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    """4.8."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="log-dir: want a folder, got"):
            UnbrokenLogsSpecs(str(path))


def test_nothing_is_written_where_the_folder_is_devnull() -> None:
    """4.8 and 4.14."""
    envs = _envs(1)
    destination = UnbrokenLogsSpecs(os.devnull).reify(envs)
    assert destination.error_files == {0: os.devnull}
    assert envs[0][ERROR_FILE] == ""
    assert destination.stdouts == {0: ""}


def test_training_goes_on_without_files_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    specs = UnbrokenLogsSpecs(str(tmp_path), Std.ALL, Std.ALL)

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "make_attempt_folder", full)
    envs = _envs(1)
    destination = specs.reify(envs)
    assert (destination.stdouts, destination.tee_stdouts, envs[0][ERROR_FILE]) == ({0: ""}, {}, "")
    assert "No space left on device" in caplog.text


def test_streams_of_ranks_above_nine_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.4, 4.24."""
    monkeypatch.setenv("UNBROKEN_REDIRECTS", "10:1")
    destination = UnbrokenLogsSpecs(str(tmp_path), Std.ALL).reify(_envs(11))
    assert {rank for rank, path in destination.stdouts.items() if path} == {10}
    assert (read_streams("3"), read_streams("0:3,12:2")) == (3, {0: 3, 12: 2})
    with pytest.raises(InputError, match="streams: want 0 to 3"):
        read_streams("4")


def test_specs_that_do_the_same_are_equal(tmp_path: Path) -> None:
    """4.15."""
    one, other = (UnbrokenLogsSpecs(str(tmp_path), Std.OUT, Std.ERR, {0}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != UnbrokenLogsSpecs(str(tmp_path), Std.OUT, Std.NONE, {0})
    assert repr(one).startswith(f"UnbrokenLogsSpecs(root_log_dir={tmp_path}")
