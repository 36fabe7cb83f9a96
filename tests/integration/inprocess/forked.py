"""The test's side of the zygote: one for all tests of this process, started when the first of them forks."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Zygote:
    """The process that has imported torch, and the socket at which it takes requests."""

    def __init__(self, *modules: str) -> None:
        """`modules`: what its workers find imported, beside torch."""
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def address(self) -> Path:
        """Path of its socket; starts it."""
        if self._folder is None:
            # Not below pytest's own folder: the path of a Unix socket must be short.
            self._folder = Path(tempfile.mkdtemp(prefix="ubz-", dir="/tmp"))
        path = self._folder / "z"
        if self._process is None:
            # Of this tree, whichever one is installed.
            code = os.pathsep.join((str(ROOT / "sidecar"), str(ROOT / "core"), str(ROOT)))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": code}
            command = [sys.executable, str(HERE / "zygote.py"), str(path), *self._modules]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        process = self._process
        wait_until(lambda: path.exists() or process.poll() is not None, "the zygote's socket")
        return path

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(LIMIT_S)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


ZYGOTE = Zygote()
MUCH_OF_TORCH = Zygote(
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def request(number: int, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> bytes:
    """Return the line that asks for a worker."""
    message = {"id": number, "argv": list(argv), "environment": dict(environment), "output": str(output)}
    return json.dumps(message).encode() + b"\n"


class Forks:
    """A client of a zygote that is one thread; its workers die with it."""

    def __init__(self, zygote: Zygote = ZYGOTE) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(zygote.address))
        self._buffer = b""
        self._started: list[ForkedProcess] = []

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> "ForkedProcess":
        """Fork a worker, and return it once it has a number."""
        process = ForkedProcess(self)
        self._started.append(process)
        self._connection.sendall(request(len(self._started) - 1, argv, environment, output))
        self._connection.settimeout(LIMIT_S)
        while not process.pid:
            self._take(self._connection.recv(1 << 16))
        return process

    def look(self) -> None:
        """Note what was said since."""
        self._connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self._connection.recv(1 << 16):
                self._take(data)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _take(self, data: bytes) -> None:
        if not data:
            raise EOFError("zygote: want an answer, it has ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            process = self._started[message["id"]]
            process.pid = message.get("pid", process.pid)
            process.returncode = message.get("exit_code", process.returncode)


class ForkedProcess:
    """What `subprocess.Popen` would be for it."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self.pid = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        self._forks.look()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        wait_until(lambda: self.poll() is not None, f"end of process {self.pid}")
        assert self.returncode is not None
        return self.returncode
