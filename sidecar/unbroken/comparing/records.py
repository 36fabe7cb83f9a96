"""Reads what the workers of one run have recorded. The script could write there as well: nothing is trusted."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.checkpoint_records import (
    FULL,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    SUFFIX,
    Line,
    LineReader,
    LoadedStep,
    SavedPart,
    Struck,
)

_MAX_FILES = 10_000
_MAX_TOTAL_CHARACTERS = 2 << 30


@dataclass(frozen=True)
class Record:
    """All of one run, in no order between processes."""

    saves: tuple[SavedPart, ...] = ()
    loads: tuple[LoadedStep, ...] = ()
    struck: Struck | None = None
    problem: str = ""
    """Why it says less than was done, so that nothing can be concluded from it."""


def read_record(folder: Path) -> Record:
    """Return what stands in the files of a folder."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > _MAX_FILES:
        return Record(problem=f"{len(files)} processes have recorded something, of which {_MAX_FILES} can be read")
    found: list[Line] = []
    problems: list[str] = []
    total, same = 0, dict[tuple[str, ...], tuple[str, ...]]()
    for file in files:
        try:
            for line in _lines_of(file):
                if isinstance(line, SavedPart):
                    total += len(line.digests)
                    # One list for all that have the same names.
                    line = replace(line, names=same.setdefault(line.names, line.names))  # noqa: PLW2901 - the same line
                if total > _MAX_TOTAL_CHARACTERS:
                    return Record(problem="more was recorded than can be compared: save less often")
                found.append(line)
        except (OSError, ValueError) as error:
            problems.append(f"what a worker has recorded cannot be read, {file.name}: {str(error)[:200]}")
    return Record(
        tuple(one for one in found if isinstance(one, SavedPart)),
        tuple(one for one in found if isinstance(one, LoadedStep)),
        next((one for one in found if isinstance(one, Struck)), None),
        problems[0] if problems else "",
    )


def _lines_of(file: Path) -> Iterator[Line]:
    """Yield what stands in a file. Raises OSError and ValueError."""
    # Nothing but a file: a pipe would never end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as lines:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        reading, left = LineReader(), MAX_FILE_BYTES + len(FULL)
        while line := lines.readline(MAX_LINE_BYTES + 1):
            left -= len(line)
            if line == FULL or left < 0:
                raise ValueError(f"more than {MAX_FILE_BYTES >> 20} MiB of one process: save less often")
            if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                return  # it was killed in the middle of it
            yield reading.read(line)
