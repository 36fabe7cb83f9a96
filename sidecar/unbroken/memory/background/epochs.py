"""The folder in which the processes of all ranks make one checkpoint out of their parts. Standard library only.

    FOLDER/step-100/                      a whole checkpoint: it appears by one rename
    FOLDER/.unbroken/EPOCH/has/3.json     what rank 3 has
    FOLDER/.unbroken/EPOCH/plan/3.json    what of it rank 3 writes
    FOLDER/.unbroken/EPOCH/step-100/      parts
    FOLDER/.unbroken/EPOCH/step-100/3.reading   rank 3 reads its slot; 3.read: no more; 0.read: no rank does
    FOLDER/.unbroken/EPOCH/failed/100-3   why rank 3 has not written its part of step 100, and never will
    FOLDER/.unbroken/void-…               what must never become whole

An epoch is one iteration of a job. It begins when the folders of all others are renamed, and only then do ranks look
for what they can restore. So what an earlier iteration has not made whole by then it never will: its last rename fails.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WORK: Final = ".unbroken"
MARK: Final = "unbroken.json"
"""In each checkpoint that was made here; no other is ever removed."""
_PART: Final = ".part"
_READING: Final = ".reading"
_READ: Final = ".read"
_VOID: Final = "void-"
_STEP: Final = "step-"
_JOB: Final = "job"
"""Says which job an epoch is of."""
_JOBS: Final = "jobs"
"""Folder with the name of each job that has begun here."""
_FAILED: Final = "failed"
_MARK_NAME = re.compile("([0-9]{1,19})-([0-9]{1,7})")
_MAX_MARKS, _MAX_SEEN = 64, 10_000
_MAX_MARK_BYTES = 8192
MAX_REASON: Final = 500


@dataclass(frozen=True)
class Failure:
    """Why a step never becomes whole."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


@dataclass(frozen=True)
class Epoch:
    """One iteration of a job, and the folder of its checkpoints."""

    folder: Path
    job: str
    """Digest of the job's uid, hexadecimal."""
    iteration: int
    term: int
    nonce: int
    """Of this iteration alone, the same on all ranks: numbers begin anew with a job."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.iteration}-{self.term}-{self.nonce:x}"

    @property
    def work(self) -> Path:
        """Folder of its parts."""
        return self.folder / WORK / self.name

    def parts(self, step: int) -> Path:
        """Return the folder of the parts of a step."""
        return self.work / f"{_STEP}{step}"

    def whole(self, step: int) -> Path:
        """Return the folder of a step once it is whole."""
        return self.folder / f"{_STEP}{step}"

    def begin(self) -> None:
        """Void what other iterations have not made whole, and begin. Each rank may do it. Raises OSError."""
        root = self.folder / WORK
        root.mkdir(parents=True, exist_ok=True)
        for other in self._others():
            self.void(other)
        for part in ("has", "plan", _FAILED):
            (self.work / part).mkdir(parents=True, exist_ok=True)
        for path in (self.work / _JOB, root / _JOBS / self.job):
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_text(json.dumps(self.job))

    def intruder(self) -> str:
        """Return the job that has begun in this folder since this one did; "" where none is known."""
        if not (self.folder / WORK / _JOBS / self.job).exists():
            return ""
        for other in self._others():
            with contextlib.suppress(OSError, ValueError, RecursionError):
                job = _read_small(other / _JOB)
                if isinstance(job, str) and job != self.job:
                    return job
        return ""

    def _others(self) -> list[Path]:
        """Return the folders of other epochs. Raises OSError."""
        with os.scandir(self.folder / WORK) as entries:
            names = [entry.name for entry in entries]
        kept = (self.name, _JOBS)
        return [self.folder / WORK / name for name in names if name not in kept and not name.startswith(_VOID)]

    @property
    def mark(self) -> dict[str, Any]:
        """What its checkpoints say of themselves."""
        return {"job": self.job, "iteration": self.iteration, "term": self.term, "nonce": self.nonce}

    def is_whole(self, step: int) -> bool:
        """Whether this iteration has made a step whole."""
        mark = read_mark(self.whole(step))
        return mark is not None and {name: mark.get(name) for name in self.mark} == self.mark

    def why_void(self) -> str:
        """Return why nothing of this iteration becomes whole any more; "" while it may."""
        if self.work.is_dir():
            return ""
        if not self.work.parent.is_dir():
            return f"{self.folder} is gone, or was emptied"
        return "another iteration of the job, or another job, has begun in this folder"

    def part(self, step: int, rank: int) -> Path:
        """Return the file by which a rank says that its part of a step is on the disk."""
        return self.parts(step) / f"{rank}{_PART}"

    def has_part(self, step: int, rank: int) -> bool:
        """Whether a rank's part of a step is on the disk, or was until the step was made whole."""
        # In this order: the mark is there before the parts' files are removed.
        return self.part(step, rank).exists() or (self.parts(step) / MARK).exists() or self.is_whole(step)

    def begin_reading(self, step: int, rank: int) -> None:
        """Say that a rank reads its slot. Raises OSError."""
        (self.parts(step) / f"{rank}{_READING}").touch()

    def end_reading(self, step: int, rank: int) -> None:
        """Say that a rank has read its slot, rank 0 that all have. Raises OSError."""
        (self.parts(step) / f"{rank}{_READING}").rename(self.parts(step) / f"{rank}{_READ}")

    def forget_reading(self, step: int, rank: int) -> None:
        """Take back that a rank reads its slot: it has given the step up. Raises OSError."""
        (self.parts(step) / f"{rank}{_READING}").unlink(missing_ok=True)

    def is_read_elsewhere(self, step: int, rank: int, world_size: int, *, may_begin: bool) -> bool:
        """Whether another rank still reads its slot, as one that has read sees it; rank 0 looks for all others.

        `may_begin`: also where one has not begun, which may never write this step.
        """
        if not self.parts(step).is_dir() or self.failure(step) is not None:
            return False
        if rank != 0:
            is_over, is_under_way = (self.parts(step) / f"0{end}" for end in (_READ, _READING))
            return not is_over.exists() and (may_begin or is_under_way.exists())
        names = self._names_of_readers(step)
        num_reading = sum(name.endswith(_READING) for name in names) - (f"{rank}{_READING}" in names)
        num_read = sum(name.endswith(_READ) for name in names)
        return num_reading > 0 or (may_begin and num_read < world_size - 1)

    def forget_readers(self, step: int) -> None:
        """Remove what they have said: the step becomes whole. Raises OSError."""
        for name in self._names_of_readers(step):
            (self.parts(step) / name).unlink(missing_ok=True)

    def _names_of_readers(self, step: int) -> list[str]:
        try:
            with os.scandir(self.parts(step)) as entries:
                return [entry.name for entry in entries if entry.name.endswith((_READING, _READ))]
        except FileNotFoundError:
            return []

    def void(self, path: Path) -> None:
        """Take something out of the way, at once; `sweep` removes it."""
        try:
            path.rename(self._aside())
        except FileNotFoundError:
            return  # Another rank was quicker.

    def steps(self) -> list[int]:
        """Return the steps of which there are parts; none where the epoch is void."""
        return sorted(_numbers(self.work))

    def fail(self, step: int, failure: Failure) -> None:
        """Tell all ranks that a step never becomes whole, unless one has done so, or the epoch is void. Raises OSError.

        The step stays given up in this epoch.
        """
        if self.failure(step) is None:
            mark = {"rank": failure.rank, "reason": failure.reason[:MAX_REASON]}
            with contextlib.suppress(FileNotFoundError):
                write_json(self.work / _FAILED / f"{step}-{failure.rank}", mark)

    def failure(self, step: int) -> Failure | None:
        """Return why a step never becomes whole, in the words of the lowest rank; None as long as it may."""
        ranks = [rank for failed, rank in self._marks() if failed == step]
        for rank in sorted(ranks):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                reason = _read_small(self.work / _FAILED / f"{step}-{rank}")["reason"]
                return Failure(rank, " ".join(str(reason)[:MAX_REASON].split()))
        return Failure(min(ranks), "its reason cannot be read") if ranks else None

    def failed_steps(self) -> list[int]:
        """Return the steps that never become whole, as far as their marks are there."""
        return sorted({step for step, _ in self._marks()})

    def forget_failures(self) -> None:
        """Remove the marks of all but the newest steps. Raises OSError."""
        for step, rank in self._marks()[:-_MAX_MARKS]:
            (self.work / _FAILED / f"{step}-{rank}").unlink(missing_ok=True)

    def _marks(self) -> list[tuple[int, int]]:
        """Return (step, rank) of each, the oldest steps first."""
        try:
            with os.scandir(self.work / _FAILED) as entries:
                names = [entry.name for entry in itertools.islice(entries, _MAX_SEEN)]
        except OSError:
            return []
        return sorted((int(found[1]), int(found[2])) for found in map(_MARK_NAME.fullmatch, names) if found)

    def publish(self, step: int) -> None:
        """Make a step whole.

        Raises FileNotFoundError where another iteration has begun, FileExistsError where somebody else has made one.
        """
        target = self.whole(step)
        try:
            self.parts(step).rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if read_mark(target) is None:
            raise FileExistsError(errno.EEXIST, "there is another checkpoint of this step", str(target))
        # Of an iteration, or a job, that this one did not go on from.
        aside = self._aside()
        target.rename(aside)
        try:
            self.parts(step).rename(target)
        except OSError:
            aside.rename(target)
            raise

    def retain(self, num: int, newest: int) -> None:
        """Remove all but the newest whole checkpoints, up to this one, that were made here. Raises OSError.

        Later ones stay beside them: this iteration has not gone on from these, as they could not be read.
        """
        steps = sorted((step for step in _numbers(self.folder) if step <= newest), reverse=True)
        for step in [step for step in steps if read_mark(self.whole(step)) is not None][num:]:
            self.void(self.whole(step))

    def sweep(self) -> None:
        """Remove what is void. It may take long."""
        for path in (self.folder / WORK).glob(f"{_VOID}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _aside(self) -> Path:
        return self.folder / WORK / f"{_VOID}{secrets.token_hex(8)}"


def write_json(path: Path, data: Any) -> bytes:
    """Write a file whole or not at all, for good; return what was written. Raises OSError."""
    content = json.dumps(data, separators=(",", ":")).encode()
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return content


def read_mark(checkpoint: Path) -> dict[str, Any] | None:
    """Return what a checkpoint that was made here says of itself; None of any other one."""
    try:
        found = _read_small(checkpoint / MARK)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_small(path: Path) -> Any:
    """Return what a small file says; a pipe says nothing. Raises OSError, ValueError, RecursionError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return json.loads(file.read(_MAX_MARK_BYTES) or b"")


def sync(path: Path) -> None:
    """Have a file or folder on the disk for good. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbers(folder: Path) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name.removeprefix(_STEP) for entry in entries if entry.name.startswith(_STEP)]
    except FileNotFoundError:
        return []
    return [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name[:18])) == name]
