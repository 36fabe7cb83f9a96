"""Workers' output: lines with a prefix for the console, raw bytes for the log file of each process.

    pipe of a worker ──> Stream ──raw──> LogFile
                            ├──prefixed lines──> Console ──> the launcher's stdout or stderr
                            └──raw, in jobs with log rules──> Tap

Nothing here blocks: a console that is not read makes its buffer full, and then the workers' pipes are left alone
until there is room, so that the workers wait and the launcher does not.
"""

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken_core.conventions.printable import printable

if TYPE_CHECKING:
    from unbroken.launch.line_rules import Tap

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 16 << 10
"""A longer line is cut for the console; the log file has it whole."""
_FULL_BYTES = 1 << 20
_RESUME_BELOW_BYTES = 256 << 10
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")
_UNPRINTABLE = bytes(byte if byte in (9, 27) or byte >= 32 else ord("?") for byte in range(256))


class Console:
    """One of the launcher's own streams, written when its reader takes more."""

    def __init__(self, descriptor: int, pod: str = "") -> None:
        """`pod`: whose it is, where several share what it leads to."""
        self.pod = pod
        self._descriptor, self._chunk_bytes = _unblocked(descriptor)
        self._unsent = bytearray()
        self._is_open = True

    def fileno(self) -> int:
        """Descriptor to select on."""
        return self._descriptor

    @property
    def has_output(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._unsent)

    @property
    def is_full(self) -> bool:
        """Whether workers must wait."""
        return len(self._unsent) > _FULL_BYTES

    @property
    def has_room(self) -> bool:
        """Whether workers may go on."""
        return len(self._unsent) < _RESUME_BELOW_BYTES

    def put(self, text: bytes) -> None:
        """Append output."""
        if self._is_open:
            self._unsent += text

    def flush_some(self) -> None:
        """Write as much as the reader takes at once; output without a reader is dropped."""
        try:
            written = os.write(self._descriptor, bytes(self._unsent[: self._chunk_bytes]))
        except BlockingIOError:
            return
        except OSError:
            self._is_open = False
            self._unsent.clear()
            return
        del self._unsent[:written]


class LogFile:
    """Raw output of one process. An error (a full disk) is reported once and ends the file, not the worker."""

    def __init__(self, folder: Path, local_rank: int, incarnation: int) -> None:
        """Create `rank-<local>/<incarnation>.log`, or another name if that file exists.

        Raises OSError.
        """
        parent = folder / f"rank-{local_rank}"
        parent.mkdir(parents=True, exist_ok=True)
        self.path, self._descriptor = _create_new(parent, str(incarnation))

    def fileno(self) -> int:
        """Descriptor of the file."""
        return self._descriptor

    def write(self, data: bytes) -> None:
        """Append. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Log:
    """The log file that the two streams of a process share, or none."""

    def __init__(self, file: LogFile | None, complaints: Console) -> None:
        self._file = file
        self._complaints = complaints
        self._num_users = 0

    def open(self) -> None:
        """Count one more stream."""
        self._num_users += 1

    def write(self, data: bytes) -> None:
        """Append to the file while it can be written."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            complain(self._complaints, f"{self._file.path}: {error.strerror}; this log ends here, the console goes on")
            self._close_file()

    def close(self) -> None:
        """Count one stream less; the last one closes the file."""
        self._num_users -= 1
        if self._num_users == 0:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_CPP_LOG = re.compile(
    rb"\[(rank\d+\]:\[)?[IWE]\d{4} "
    rb"|nanobind: | - (leaked (instance|type|keep_alive|function) |\.\.\. skipped remainder)|See https://nanobind\."
)
"""Lines of torch's C++ parts, and what those that use nanobind, as triton, say of themselves after a traceback."""


_RANK = re.compile(rb"\[rank\d{1,9}\]: ?")
"""Torch's, before each line of what ends a process."""
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(:|$)")
_ESCAPE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
"""Colours, which Python 3.13 gives tracebacks where FORCE_COLOR is set."""
_GROUP_BEGIN = b"  + Exception Group Traceback (most recent call last):"
_OF_GROUP = re.compile(rb" {2,}\| ?")
"""Before each line of an exception group and of what is in it."""
_GROUP_RULE = re.compile(rb" {2,}\+[-+]+( [\d.]+ -+)?$")
_TOLD = re.compile(rb"function raised: iteration=\d")
"""Before the traceback of what the library reports itself, and goes on after: `inprocess.loop.repeated_error`."""
_CHAINED = (b"During handling of the above exception, ", b"The above exception was the direct cause ")
_MAX_BEHIND = 32
"""Lines after an exception that may be the rest of its message, or what is said while a process ends."""
_MAX_EXCEPTION_BYTES = 700


class _LastWords:
    """What a process said last: the exception of its traceback, and the last line.

    The message of an exception may have several lines, of which the first says what it is, as torch's of an error of
    CUDA; warnings of what is left may come behind it. Of a group of exceptions it is the group's own, and the last line
    of the last one in it. What the function raised in an iteration is told as that iteration's fault, and the process
    goes on: it is not why a later one ends it.
    """

    def __init__(self) -> None:
        self._last_line = b""
        self._exception = b""
        self._num_behind = 0
        self._is_in_traceback = False
        self._is_told = self._may_begin = False

    def feed(self, line: bytes) -> None:
        """Take a line that is not blank."""
        line = _ESCAPE.sub(b"", line)
        text = line[found.end() :] if (found := _RANK.match(line)) else line
        if _CPP_LOG.match(line) or _GROUP_RULE.match(text):
            return
        begins = text.startswith((b"Traceback (most recent call last):", _GROUP_BEGIN))
        is_of_group = _OF_GROUP.match(text)
        if is_of_group:
            text = text[is_of_group.end() :]
        if not text.strip():
            return
        if _TOLD.search(text):
            self._last_line = self._exception = b""
            self._is_told = self._may_begin = True
            self._is_in_traceback = False
            return
        is_chain = text.startswith(_CHAINED)
        of_told = self._may_begin if begins else self._is_in_traceback or is_chain
        self._is_told &= of_told or is_of_group is not None
        self._may_begin = is_chain
        is_exception = self._is_in_traceback and not begins and _EXCEPTION.match(text) is not None
        self._is_in_traceback = begins or (self._is_in_traceback and not is_exception)
        if self._is_told:
            return
        self._last_line = text.strip()
        self._num_behind += not is_of_group
        if begins:
            self._exception = b""
        elif is_exception:
            self._exception, self._num_behind = self._last_line, 0

    @property
    def words(self) -> bytes:
        """What it was; b"" where it has said nothing."""
        if self._last_line == self._exception or not self._exception or self._num_behind > _MAX_BEHIND:
            return self._last_line
        return self._exception[:_MAX_EXCEPTION_BYTES] + b" ... " + self._last_line


class Stream:
    """One pipe of one worker."""

    def __init__(self, descriptor: int, prefix: bytes, console: Console, log: Log, tap: "Tap | None" = None) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._prefix = prefix
        self._log = log
        self._tap = tap
        self._line = b""
        self._last_words = _LastWords()
        self.console = console
        self.is_open = True
        log.open()

    @property
    def last_words(self) -> bytes:
        """What may be why the process has ended; messages of C++ parts, which write at any time, are left out."""
        return self._last_words.words

    def fileno(self) -> int:
        """Descriptor to select on."""
        return self._descriptor

    def pump(self) -> bool:
        """Take what is there; return whether there may be more. Closes itself at the end."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._log.write(data)
        self._print(data)
        if self._tap is not None:
            self._tap.feed(data)
        return True

    def drain(self) -> None:
        """Take all that is in the pipe, as the process has ended; other holders of the pipe may write on."""
        for _ in range(64):
            if not self.is_open or not self.pump():
                return

    def close(self) -> None:
        """Print the unfinished line and close."""
        if not self.is_open:
            return
        self.is_open = False
        if self._line:
            self._emit([self._line.rstrip(b"\r")])
            self._line = b""
        if self._tap is not None:
            self._tap.end()
        os.close(self._descriptor)
        self._log.close()

    def _print(self, data: bytes) -> None:
        text = self._line + data
        # The end of a line may be split: "\r" waits for the next byte.
        held = text[-1:] if text.endswith(b"\r") else b""
        *lines, rest = _LINE_ENDS.split(text[: len(text) - len(held)])
        while len(rest) > _MAX_LINE_BYTES:
            lines.append(rest[:_MAX_LINE_BYTES])
            rest = rest[_MAX_LINE_BYTES:]
        self._line = rest + held
        self._emit(lines)

    def _emit(self, lines: list[bytes]) -> None:
        shown: list[bytes] = []
        for line in lines:
            for start in range(0, len(line) or 1, _MAX_LINE_BYTES):
                text = line[start : start + _MAX_LINE_BYTES].translate(_UNPRINTABLE)
                shown.append(self._prefix + text + b"\n")
                self._last_words.feed(text)
        self.console.put(b"".join(shown))


def complain(console: Console, message: str) -> None:
    """Print a message of the launcher itself."""
    who = f"{console.pod}: " if console.pod else ""
    console.put(f"[unbroken.launch] {printable(who + message)}\n".encode(errors="replace"))


def _create_new(parent: Path, stem: str) -> tuple[Path, int]:
    for attempt in range(10_000):
        path = parent / (f"{stem}.log" if attempt == 0 else f"{stem}.{attempt}.log")
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
    raise FileExistsError(17, "want an unused name, got 10,000 used ones", str(parent / f"{stem}.log"))


def _unblocked(descriptor: int) -> tuple[int, int]:
    """Return a descriptor of the same file that does not block, and how much to write at once.

    It is opened anew, because O_NONBLOCK would otherwise befall all who share the terminal.
    """
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags), 64 << 10
        except OSError:
            # A pipe that is ready takes this much without blocking.
            return descriptor, 4096
    return descriptor, 64 << 10 if stat.S_ISREG(kind) else 4096
