"""The command: runs the script calmly twice and then with each fault, compares the records, says what was seen."""

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from unbroken.checkpoint_records import FaultAtStep
from unbroken.comparing.comparison import Sameness, compare_broken, compare_calm, problem_of_calm, step_to_strike
from unbroken.comparing.options import CompareOptions, of_run, read_compare_options
from unbroken.comparing.records import Record, read_record
from unbroken.comparing.text import RunReport, lines_of, outcome_of, value_of
from unbroken.run.command import EndedRun, run_job
from unbroken.run.flags import in_flags
from unbroken.run.supervisor import ENDING_SIGNALS
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError

_BAD_INPUT = 2
_SIGNALS = 128


class _InterruptedError(BaseException):
    """A signal has ended a run, or came between two of them."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line; return 0 equal, 1 different, 2 bad input or not comparable, 128 + N after signal N."""
    try:
        return _run(arguments)
    except InputError as error:
        _complain(in_flags(str(error)))
        return _BAD_INPUT
    except _InterruptedError as error:
        _complain(f"ended by {signal.Signals(error.number).name}: nothing is proved")
        return _SIGNALS + error.number
    except Exception:  # Python's own exit code for it is 1, which would mean a difference.
        traceback.print_exc()
        _complain("it has failed itself: nothing is proved")
        return _BAD_INPUT


def _run(arguments: Sequence[str] | None) -> int:
    options = read_compare_options(arguments)
    with _ended_by_signals():
        folder = Path(tempfile.mkdtemp(prefix="unbroken-compare-"))
        try:
            with _output_to_errors():
                reports, problem = _Comparison(options, folder).run()
        finally:
            _ignore_signals()
            shutil.rmtree(folder, ignore_errors=True)
    text = (
        json.dumps(value_of(reports, problem), indent=2)
        if options.is_json
        else "\n".join(printable(line) for line in lines_of(reports, problem))
    )
    return outcome_of(reports, problem).value if _is_printed(text) else _BAD_INPUT


def _is_printed(text: str) -> bool:
    """Print the result; return whether it was: whoever sees the exit code alone must not take 1 for a difference."""
    try:
        print(text, flush=True)
    except OSError as error:
        _complain(f"the result cannot be written: {error.strerror}")
        # Python writes what is left at its end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


class _Comparison:
    """All runs of one command, one after the other."""

    def __init__(self, options: CompareOptions, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._num_runs = 0

    def run(self) -> tuple[list[RunReport], str]:
        """Return how each run compares with the first, and why there are no more of them. Raises InputError."""
        ended, calm = self._run("calm", None)
        problem = f"it ended with exit code {ended.code}" if ended.code else problem_of_calm(calm)
        if problem:
            return [], f"run 1, calm: {problem}{self._hint() if ended.code else ''}"
        strikes = [FaultAtStep(kind, *self._aim(calm)) for kind in self._options.faults]
        ended, again = self._run("calm again", None)
        if ended.code:
            return [], f"run 2, calm again: it ended with exit code {ended.code}, and the first one with 0"
        compared = compare_calm(calm, again)
        reports = [RunReport("run 2, calm again", compared)]
        if compared.outcome is not Sameness.EQUAL:
            return reports, "no run with a fault was made"
        for strike in strikes:
            ended, broken = self._run(strike.kind, strike)
            recoveries = () if ended.status is None else ended.status.recoveries
            seen = compare_broken(calm, broken, compared.noise, ended.code)
            reports.append(RunReport(f"run {self._num_runs}, {strike.kind}", seen, recoveries))
        return reports, ""

    def _aim(self, calm: Record) -> tuple[int, int]:
        """Return whom to hit, and from which step on. Raises InputError."""
        size, saving = max(one.world_size for one in calm.saves), {one.rank for one in calm.saves}
        rank = max(saving) if self._options.at_rank is None else self._options.at_rank
        if rank >= size:
            raise InputError(f"--at-rank: want one of 0 to {size - 1}, got {rank}")
        if rank not in saving:
            raise InputError(f"--at-rank: want a rank that saves, which {rank} did not in run 1")
        step = step_to_strike(calm, rank) if self._options.at_step is None else self._options.at_step
        if step is None:
            raise InputError(
                f"run 1, calm: want at least 3 checkpoints of rank {rank} in memory, so that there are some before "
                "and after a fault: train longer, or save more often"
            )
        return rank, step

    def _run(self, name: str, strike: FaultAtStep | None) -> tuple[EndedRun, Record]:
        self._num_runs += 1
        total = 2 + len(self._options.faults)
        _complain(f"run {self._num_runs} of {total}, {name}")
        # The same path in each run: scripts keep paths in what they save.
        base = self._folder / "run"
        if base.exists():
            raise InputError(f"{base}: want a folder that can be removed after each run, and it was not")
        work, record = base / "work", base / "record"
        for each in (base, work, record):
            each.mkdir(mode=0o700)
        slug = f"{self._num_runs}-{name.replace(' ', '-')}"
        ended = run_job(of_run(self._options, slug, work, record, strike))
        if ended.signal is not None:
            raise _InterruptedError(ended.signal)
        found = read_record(record)
        # A script may write much: it has been compared in what it saves in memory.
        shutil.rmtree(base, ignore_errors=True)
        return ended, found

    def _hint(self) -> str:
        if self._options.is_here:
            return ""
        return "; each run begins in an empty folder: give files with their whole paths, or take --here"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a signal also end this command between two runs, and only once its folder is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        raise _InterruptedError(number)

    before = {number: signal.signal(number, end) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Let what the workers print go where this command's own lines go: its output is the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _complain(text: str) -> None:
    print(printable(f"unbroken compare: {text}"), file=sys.stderr, flush=True)
