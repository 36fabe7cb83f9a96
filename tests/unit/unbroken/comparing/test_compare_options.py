"""What the runs of one comparison are: the script as it was typed, each in a folder of its own."""

import signal
import sys
import tempfile
from pathlib import Path

import pytest

from unbroken.checkpoint_records import FaultAtStep
from unbroken.comparing import command, main
from unbroken.comparing.options import CompareOptions, of_run, read_compare_options
from unbroken.run.command import EndedRun
from unbroken.run.options import RunOptions
from unbroken_core.vocabulary.errors import InputError

WORK, RECORD = Path("/runs/3/work"), Path("/runs/3/record")


def run(options: CompareOptions, strike: FaultAtStep | None = None) -> RunOptions:
    """Return the third run."""
    return of_run(options, "3-kill", WORK, RECORD, strike)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the present folder, with a script and a tool."""
    (tmp_path / "train.py").touch()
    (tmp_path / "tool.sh").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_a_run_has_the_script_of_the_present_folder_and_begins_in_its_own(here: Path) -> None:
    options = read_compare_options(["--pods", "2", "train.py", "--output", "{run}/out", "train.py"])
    assert (options.faults, options.run.memory_bytes, options.run.is_quiet) == (("exception", "kill"), 4 << 30, True)
    made = run(options, FaultAtStep("kill", 1, 7))
    assert made.command == (sys.executable, str(here / "train.py"), "--output", str(WORK / "out"), "train.py")
    assert made.work_folder == WORK
    assert dict(made.variables) == {"UNBROKEN_RECORD": str(RECORD), "UNBROKEN_RECORD_STRIKE": "kill:1:7"}
    assert "UNBROKEN_RECORD_STRIKE" not in dict(run(options).variables)


def test_a_failure_of_its_own_is_no_difference(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's exit code for an error that nobody catches is 1, as that of a difference."""
    monkeypatch.setattr(tempfile, "tempdir", str(here / "none"))
    assert main(["train.py"]) == 2


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        pytest.param(EndedRun(0, None, signal.SIGTERM), 143, "ended by SIGTERM", id="while a job was over already"),
        pytest.param(EndedRun(137, None), 2, "run 1, calm: it ended with exit code 137", id="the script's own code"),
    ],
)
def test_a_signal_to_this_command_is_no_end_of_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: EndedRun, code: int, said: str
) -> None:
    monkeypatch.setattr(command, "run_job", lambda _: ended)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train.py"]) == code
    assert signal.getsignal(signal.SIGTERM) is before
    assert said in "".join(capsys.readouterr())


def test_a_command_is_found_where_it_was_typed(here: Path) -> None:
    assert run(read_compare_options(["./tool.sh", "x"])).command == (str(here / "tool.sh"), "x")
    assert run(read_compare_options(["python3", "train.py"])).command == ("python3", str(here / "train.py"))
    assert run(read_compare_options(["sh", "-c", "true"])).command == ("sh", "-c", "true")


def test_a_module_is_looked_for_in_the_present_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = read_compare_options(["-m", "project.train"])
    assert dict(run(options).variables)["PYTHONPATH"] == str(here)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert dict(run(options).variables)["PYTHONPATH"] == f"{here}:/mine"


def test_all_runs_may_begin_in_the_present_folder(here: Path) -> None:
    made = run(read_compare_options(["--here", "--log-dir", "logs", "train.py", "{run}"]))
    assert made.work_folder is None
    assert made.command[2:] == (str(WORK),)
    assert made.log_dir == here / "logs" / "3-kill"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-"], "script: want a file, which each run can read, got standard input"),
        (["--at-step", "-1", "train.py"], "--at-step: want a number from 0 on, got -1"),
        (["--fault", "shout", "train.py"], "invalid choice: 'shout'.*`unbroken compare --help`"),
        (["missing.py"], "script: 'missing.py' does not exist"),
        ([], "got no script"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(words: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_compare_options(words)
