"""A child that may hang: its answer is bounded, its time as well, and one that cannot be killed is left alone.

What it started ends with it: its group, and whatever bears the mark of this run in its environment. Only a process that
leaves the group and clears its environment stays.
"""

import os
import secrets
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

MAX_OUTPUT_BYTES = 4096
_LOOK_S = 0.04
_MARK = "UNBROKEN_PROBE_RUN"
_MAX_ENVIRON_BYTES = 2 << 20
_START = 19
"""Of the fields of /proc/<pid>/stat after the name: when it began, in ticks since the machine did."""
_MOST_RESTS = 32
"""Reads of what is left in a pipe, which has 64 KiB as a rule."""
_ROUNDS = 10
"""What forks while it is looked for is found in the next one."""


@dataclass(frozen=True)
class CommandResult:
    """How a child has ended."""

    exit_code: int | None
    """None: it did not end in time; -N: signal N ended it."""
    output: str
    cpu_s: float
    """Of the child, as far as it is known."""
    complaint: str = ""
    """The end of its standard error: interpreters and shells say there last why they cannot go on."""


class CommandRunner:
    """Runs one command at a time. A child that hangs in the kernel is not joined by another."""

    def __init__(self) -> None:
        self._stuck: int | None = None

    def run(self, command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> CommandResult:
        """Run a command. Raises OSError where it cannot be started."""
        if self._stuck is not None and not self._reap(self._stuck):
            return CommandResult(None, "", 0.0)
        self._stuck = None
        mark = secrets.token_hex(8)
        with closing(_Output()) as said, closing(_Output(keeps_end=True)) as complaint:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                {**environment, _MARK: mark},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, said.writer, 1),
                    (os.POSIX_SPAWN_DUP2, complaint.writer, 2),
                ],
                setpgroup=0,
            )
            said.hand_over()
            complaint.hand_over()
            start = _start(pid)
            try:
                return self._follow(pid, said, complaint, time.monotonic() + timeout_s)
            finally:
                _kill_marked(f"{_MARK}={mark}".encode(), start)

    def _follow(self, pid: int, said: "_Output", complaint: "_Output", until_s: float) -> CommandResult:
        while (rest_s := until_s - time.monotonic()) > 0:
            open_ones = {each.reader: each for each in (said, complaint) if each.is_open}
            if open_ones:
                for reader in select.select(list(open_ones), [], [], min(rest_s, _LOOK_S))[0]:
                    open_ones[reader].read()
            else:
                time.sleep(min(rest_s, _LOOK_S / 4))
            # Its own children may hold the pipes open for longer than it lives, and go on writing.
            ended = _wait(pid)
            if ended is not None:
                # It may have written its last words after the look at the pipes.
                said.read_rest()
                complaint.read_rest()
                return CommandResult(ended[0], said.text, ended[1], complaint.text)
        return self._end(pid, said, complaint)

    def _end(self, pid: int, said: "_Output", complaint: "_Output") -> CommandResult:
        _kill(pid)
        for _ in range(20):
            ended = _wait(pid)
            if ended is not None:
                return CommandResult(None, said.text, ended[1], complaint.text)
            time.sleep(0.05)
        self._stuck = pid
        return CommandResult(None, said.text, 0.0, complaint.text)

    @staticmethod
    def _reap(pid: int) -> bool:
        return _wait(pid) is not None


class _Output:
    """What a child writes to one pipe: the first MAX_OUTPUT_BYTES of it, or the last."""

    def __init__(self, *, keeps_end: bool = False) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self.is_open = True
        """Whether a process holds its other end."""
        self._keeps_end = keeps_end
        self._data = b""

    def hand_over(self) -> None:
        """Close the end that the child has now."""
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        """Close what is open of it."""
        os.close(self.reader)
        if self.writer >= 0:
            self.hand_over()

    @property
    def text(self) -> str:
        """What it has said."""
        return self._data.decode(errors="replace")

    def read(self) -> None:
        """Take what is there, or wait for it."""
        data = os.read(self.reader, 65_536)
        self.is_open = bool(data)
        data = self._data + data
        self._data = data[-MAX_OUTPUT_BYTES:] if self._keeps_end else data[:MAX_OUTPUT_BYTES]

    def read_rest(self) -> None:
        """Take what is there, and wait for nothing: whoever holds the other end may go on, so it has a bound."""
        os.set_blocking(self.reader, False)
        try:
            for _ in range(_MOST_RESTS):
                if not self.is_open:
                    return
                self.read()
        except BlockingIOError:
            return


def _wait(pid: int) -> tuple[int, float] | None:
    """Return exit code and CPU seconds of a child that has ended; whoever is left of its group goes with it."""
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0, 0.0
    if seen is None:
        return None
    _kill(pid)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_marked(mark: bytes, since: int) -> None:
    """Kill what bears this mark; it may have left its group and its session."""
    for _ in range(_ROUNDS):
        if not [pid for pid in _begun(since) if _kill_if_marked(pid, mark)]:
            return


def _begun(since: int) -> list[int]:
    """Return what began then or later. Reading another's environment waits for its memory's lock, which a rank holds
    while it hangs in a driver: so older processes are left alone."""
    try:
        with os.scandir("/proc") as found:
            pids = [int(each.name) for each in found if each.name.isdigit()]
    except OSError:
        return []
    return [pid for pid in pids if _start(pid) >= since]


def _start(pid: int) -> int:
    """Return when it began; -1 once it is gone."""
    try:
        return int(_read(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()[_START])
    except (OSError, IndexError, ValueError):
        return -1


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    if not _is_marked(pid, mark):
        return False
    try:
        # A handle, so that another process that has got the number meanwhile is not taken for it.
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _is_marked(pid, mark):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _is_marked(pid: int, mark: bytes) -> bool:
    """Return whether it has this mark; False once it has ended, and for another user's."""
    try:
        return mark in _read(f"/proc/{pid}/environ", _MAX_ENVIRON_BYTES)
    except OSError:
        return False


def _read(path: str, num_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)
