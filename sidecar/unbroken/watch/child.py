"""A child that may hang: its answer is bounded, its time as well, and one that cannot be killed is left alone."""

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_OUTPUT_BYTES = 4096
_LOOK_S = 0.04


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
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                dict(environment),
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
        try:
            return self._follow(pid, reader, time.monotonic() + timeout_s)
        finally:
            os.close(reader)

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
                return CommandResult(ended[0], _text(output), ended[1])
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


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
