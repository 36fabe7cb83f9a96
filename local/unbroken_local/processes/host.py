"""The owner's side of the zygote: start processes, signal them, wait for them, all without blocking the event loop."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from unbroken_core.errors import UnbrokenError

START_LIMIT_S = 30.0
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
    """Starts processes that end with this object or with the process that holds it. Use as an async context manager."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> "ProcessHost":
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_ZYGOTE), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = ours
        return ours

    async def close(self) -> None:
        """End every process that is left; returns when the zygote is gone."""
        control, zygote = self._control, self._zygote
        self._control = self._zygote = None
        if control is not None:
            control.close()
        if zygote is not None:
            try:
                await asyncio.wait_for(asyncio.to_thread(zygote.wait), 10.0)
            except TimeoutError:
                zygote.kill()
                await asyncio.to_thread(zygote.wait)

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
        if self._zygote is None:
            raise StartError("the process host is closed")
        control = self._control
        if control is None or self._zygote.poll() is not None:
            control = self._open()
        try:
            socket.send_fds(control, [b"s"], [channel.fileno()])
        except OSError as error:
            raise StartError(f"the process host does not take requests: {error}") from error


def _explain(spec: ProcessSpec, answer: dict[str, str | int]) -> str:
    code, file = answer["errno"], answer.get("file") or spec.argv[0]
    if code == errno.ENOENT and file == spec.argv[0]:
        where = "no such file or directory" if os.sep in spec.argv[0] else "executable file not found in $PATH"
        return f'exec: "{spec.argv[0]}": {where}'
    return f'exec: "{file}": {str(answer["error"]).lower()}'
