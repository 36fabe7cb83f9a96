"""The owner's side of the zygote: start processes, signal them, wait for them, all without blocking the event loop."""

import asyncio
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from unbroken_core.vocabulary.errors import UnbrokenError

START_LIMIT_S = 30.0
END_LIMIT_S = 30.0
_ZYGOTE = Path(__file__).with_name("zygote.py")


class StartError(UnbrokenError):
    """A process could not be started."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.errno = code


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. `argv[0]` is looked up in the PATH of `env`; output of both streams is appended to `log`."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    cwd: str
    log: str


class Process:
    """One running process and all that it started."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._exit = asyncio.create_task(self._read_exit())

    def signal(self, signum: int) -> None:
        """Send a signal to the process alone; SIGKILL goes to all descendants, too. No-op once it has ended."""
        if not self._exit.done():
            self._writer.write(bytes([signum]))

    def kill(self) -> None:
        """End the process and all descendants at once."""
        self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit code when process and descendants are gone; -N when signal N ended it."""
        return await asyncio.shield(self._exit)

    async def _read_exit(self) -> int:
        try:
            line = await self._reader.readline()
            return int(json.loads(line)["exit"])
        except (OSError, ValueError):
            return -signal.SIGKILL  # The reaper itself was killed: the zygote kills what it left.
        finally:
            self._writer.close()


class ProcessHost:
    """Starts processes that end with this object or with the process that holds it. Use as an async context manager.

    `held`: file descriptors that stay open until the last process is gone, whatever happens to the owner.
    """

    def __init__(self, held: tuple[int, ...] = ()) -> None:
        self._held = held
        self._control: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._presence = -1
        self._is_open = False

    async def __aenter__(self) -> "ProcessHost":
        self._is_open = True
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> socket.socket:
        self._discard()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._presence, presence = os.pipe2(os.O_CLOEXEC)
        descriptors = [theirs.fileno(), presence, *self._held]
        try:
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_ZYGOTE), *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(presence)
        self._control = ours
        return ours

    def _discard(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._presence >= 0:
            os.close(self._presence)
        self._control, self._presence = None, -1

    async def close(self) -> None:
        """End every process that is left; returns when all are gone, or after 30 s."""
        self._is_open = False
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            await asyncio.to_thread(_wait_for_end, self._zygote, self._presence)
        self._discard()

    async def start(self, spec: ProcessSpec) -> Process:
        """Start a process. Raises StartError when its program, folder or log cannot be used."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._hand_over(theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        request = json.dumps(
            {"argv": spec.argv, "env": spec.env, "cwd": spec.cwd, "log": spec.log}, separators=(",", ":")
        ).encode()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                writer.write(len(request).to_bytes(4, "big") + request)
                await writer.drain()
                line = await reader.readline()
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            writer.close()
            raise StartError(f"{spec.argv[0]}: the process host did not answer: {error!r}") from error
        except BaseException:
            writer.close()  # Cancelled while starting: the reaper sees the end of its channel and ends the process.
            raise
        if "pid" in answer:
            return Process(answer["pid"], reader, writer)
        writer.close()
        raise StartError(_explain(spec, answer), answer["errno"])

    def _hand_over(self, channel: socket.socket) -> None:
        if not self._is_open:
            raise StartError("the process host is closed")
        control = self._control
        if control is None or self._zygote is None or self._zygote.poll() is not None:
            control = self._open()
        try:
            socket.send_fds(control, [b"s"], [channel.fileno()])
        except OSError as error:
            raise StartError(f"the process host does not take requests: {error}") from error


def _wait_for_end(zygote: subprocess.Popen[bytes], presence: int) -> None:
    """Wait until the zygote and all reapers have closed their end of the pipe."""
    try:
        zygote.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        zygote.kill()
        zygote.wait()
    select.select([presence], [], [], END_LIMIT_S)


def _explain(spec: ProcessSpec, answer: dict[str, str | int]) -> str:
    code, file = answer["errno"], answer.get("file") or spec.argv[0]
    if code == errno.ENOENT and file == spec.argv[0]:
        where = "no such file or directory" if os.sep in spec.argv[0] else "executable file not found in $PATH"
        return f'exec: "{spec.argv[0]}": {where}'
    return f'exec: "{file}": {str(answer["error"]).lower()}'
