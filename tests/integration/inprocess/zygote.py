"""`python` for workers, without the second that the import of torch takes: forks one a request.

    python zygote.py SOCKET [MODULE ...]   imports these, listens there; ends, with all workers, at the end of its input

Each connection is a client of its own, whose workers are killed when it hangs up. It sends lines {"id": 1, "argv":
["script.py", ...] or ["-m", "module", ...], "environment": {...}, "output": "file"}; it gets {"id": 1, "pid": 7} and
later {"id": 1, "exit_code": 0} (-N when signal N ended it). A worker has that environment and no other, and appends
standard output and error to the file.
"""

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # noqa: F401 - workers use it
import torch
import torch.distributed

import unbroken.inprocess  # noqa: F401 - workers use it

_MAX_READ_BYTES = 1 << 16


@dataclass(eq=False)
class Client:
    """One connection."""

    connection: socket.socket
    buffer: bytes = b""
    number_by_pid: dict[int, int] = field(default_factory=dict)

    def announce(self, **message: object) -> None:
        """Write one line; whoever does not listen any more is seen to have hung up in a moment."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return


class Zygote:
    """The process that forks. One thread."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        # Under its name it is there once it can be connected to.
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        Path(f"{address}.new").rename(address)
        self._wakeup, wakeup = socket.socketpair()
        for end in (self._wakeup, wakeup):
            end.setblocking(False)
        self._pipes = (self._wakeup, wakeup)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._clients: set[Client] = set()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until standard input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    for client in list(self._clients):
                        self._drop(client)
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(_MAX_READ_BYTES)
                    self._reap()
                elif key.data in self._clients:
                    self._read(key.data)

    def _accept(self) -> None:
        client = Client(self._listener.accept()[0])
        self._clients.add(client)
        self._selector.register(client.connection, selectors.EVENT_READ, client)

    def _read(self, client: Client) -> None:
        try:
            data = client.connection.recv(_MAX_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, client.buffer = (client.buffer + data).split(b"\n")
        for line in lines:
            self._fork(client, json.loads(line))

    def _drop(self, client: Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        for pid in client.number_by_pid:
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for client in self._clients:
                if pid in client.number_by_pid:
                    client.announce(id=client.number_by_pid.pop(pid), exit_code=os.waitstatus_to_exitcode(status))

    def _fork(self, client: Client, request: dict[str, Any]) -> None:
        pid = os.fork()
        if pid:
            client.number_by_pid[pid] = request["id"]
            client.announce(id=request["id"], pid=pid)
            return
        code = 1
        try:
            self._leave()
            code = run(request["argv"], request["environment"], request["output"])
        finally:
            os._exit(code)

    def _leave(self) -> None:
        """Drop what is the parent's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listener, *self._pipes, *(client.connection for client in self._clients)):
            one.close()


def run(argv: list[str], environment: dict[str, str], output: str) -> int:
    """Be this command; return its exit code."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    # The parent's may have been asked for by an import.
    tempfile.tempdir = None
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    Zygote(sys.argv[1]).run()
    # What torch does at the end of a process takes seconds.
    os._exit(0)
