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
from dataclasses import dataclass

MAX_OUTPUT_BYTES = 4096
_LOOK_S = 0.04
_MARK = "UNBROKEN_PROBE_RUN"
_MAX_ENVIRON_BYTES = 2 << 20
_START = 19
"""Of the fields of /proc/<pid>/stat after the name: when it began, in ticks since the machine did."""
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
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                {**environment, _MARK: mark},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writer, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        start = _start(pid)
        try:
            return self._follow(pid, reader, time.monotonic() + timeout_s)
        finally:
            os.close(reader)
            _kill_marked(f"{_MARK}={mark}".encode(), start)

    def _follow(self, pid: int, reader: int, until_s: float) -> CommandResult:
        output = b""
        is_open = True
        while (rest_s := until_s - time.monotonic()) > 0:
            if is_open and select.select([reader], [], [], min(rest_s, _LOOK_S))[0]:
                data = os.read(reader, 65_536)
                is_open = bool(data)
                output = (output + data)[:MAX_OUTPUT_BYTES]
                if is_open:
                    continue
            # Its own children may hold the pipe open for longer than it lives.
            ended = _wait(pid)
            if ended is not None:
                # It may have written its last words after the look at the pipe.
                return CommandResult(ended[0], _text(output + _rest(reader, MAX_OUTPUT_BYTES - len(output))), ended[1])
            if not is_open:
                time.sleep(min(rest_s, _LOOK_S / 4))
        return self._end(pid, output)

    def _end(self, pid: int, output: bytes) -> CommandResult:
        _kill(pid)
        for _ in range(20):
            ended = _wait(pid)
            if ended is not None:
                return CommandResult(None, _text(output), ended[1])
            time.sleep(0.05)
        self._stuck = pid
        return CommandResult(None, _text(output), 0.0)

    @staticmethod
    def _reap(pid: int) -> bool:
        return _wait(pid) is not None


def _rest(reader: int, num_bytes: int) -> bytes:
    """Return what is in a pipe, and wait for nothing: whoever holds its other end may go on."""
    os.set_blocking(reader, False)
    output = b""
    try:
        while len(output) < num_bytes and (data := os.read(reader, num_bytes - len(output))):
            output += data
    except BlockingIOError:
        pass
    return output


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


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
