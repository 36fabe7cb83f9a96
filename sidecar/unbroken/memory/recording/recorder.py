"""Notes each checkpoint in a file of this process, and breaks this worker where it is told to."""

import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from unbroken.checkpoint_records import (
    FOLDER,
    FULL,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    STRIKE,
    STRUCK,
    SUFFIX,
    Line,
    LineWriter,
    LoadedStep,
    SavedPart,
    Struck,
    read_strike,
)
from unbroken.memory.place import WorkerInfo
from unbroken.memory.recording.digests import digests_of
from unbroken.memory.shard import Shard

logger = logging.getLogger(__name__)


class ComparedFault(RuntimeError):
    """Raised on purpose, by `unbroken compare --fault exception`, and by nothing else."""


class Recorder:
    """Of one process. What cannot be noted is said in the file, so that nobody takes it for equal."""

    def __init__(self, folder: Path, strike: str) -> None:
        self._folder = folder
        self._strike = read_strike(strike)
        self._writing = LineWriter()
        self._lock = threading.Lock()
        # Ends of processes come in between: one is never continued by another one.
        path = folder / f"{os.getpid()}-{os.urandom(8).hex()}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._num_bytes = 0
        self._is_full = False

    def before(self, place: WorkerInfo, step: int) -> None:
        """Break this worker before it saves, if it is its turn; once in a run, whichever process is there."""
        strike = self._strike
        if strike is None or place.rank != strike.rank or step < strike.step:
            return
        self._strike = None
        try:
            os.close(os.open(self._folder / STRUCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
        self._write(Struck(place.iteration, place.rank, step, os.environ.get("UNBROKEN_POD", "")))
        logger.warning("%s on purpose, by `unbroken compare`: rank=%d step=%d", strike.kind, place.rank, step)
        if strike.kind == "exception":
            raise ComparedFault(f"on purpose, by `unbroken compare`, before step {step} was saved")
        os.kill(_launcher() if strike.kind == "lose-pod" else os.getpid(), _SIGNALS[strike.kind])
        signal.pause()  # until this worker is ended: it saves nothing more

    def saved(self, place: WorkerInfo, step: int, shard: Shard, skipped: str) -> None:
        """Note what was saved, or was to be."""
        where = (place.iteration, place.rank, place.world_size, step)
        self._write(SavedPart(*where, *digests_of(shard), skipped[:500]))

    def loaded(self, place: WorkerInfo, source: str, step: int | None) -> None:
        """Note with what an iteration began."""
        self._write(LoadedStep(place.iteration, place.rank, source, -1 if step is None else step))

    def _write(self, one: Line) -> None:
        with self._lock:
            if self._is_full:
                return
            line = self._writing.line(one)
            self._num_bytes += len(line)
            if len(line) > MAX_LINE_BYTES or self._num_bytes > MAX_FILE_BYTES:
                self._is_full, line = True, FULL
            os.write(self._file, line)


_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "lose-pod": signal.SIGKILL}


def _launcher() -> int:
    """Return the process that all of this pod ends with."""
    pid = os.getppid()
    while pid > 1:
        if b"unbroken.launch" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise RuntimeError("this worker has no launcher")


def recorder_of(environment: Mapping[str, str]) -> Recorder:
    """Return this process' recorder: one of its own also in a process that was forked."""
    global _recorder, _owner
    if _recorder is None or _owner != os.getpid():
        _recorder, _owner = Recorder(Path(environment[FOLDER]), environment.get(STRIKE, "")), os.getpid()
    return _recorder


_recorder: Recorder | None = None
_owner = 0
