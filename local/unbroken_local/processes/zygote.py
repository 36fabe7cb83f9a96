"""Forks one reaper a process, and the reaper forks the process. Run as a script: `python -I -S zygote.py FD [FD...]`.

    owner (asyncio) ──socket: one file descriptor a message──> zygote
       └───────────channel, one a process───────────────────> reaper ──fork, exec──> the process ──> its descendants

The owner passes one end of a stream socket, the channel, to the zygote, which forks a reaper that keeps it. On it the
owner sends a frame (4 bytes big-endian length, then JSON: argv, env, cwd, log) and afterwards single bytes, each a
signal number; SIGKILL is for all descendants, every other signal for the process alone. The reaper answers with lines
of JSON: {"pid": N} or {"error": text, "errno": N}, then {"exit": code}, where -N means ended by signal N.

A reaper is a child subreaper: whatever the process leaves behind, in whatever session, becomes the reaper's child.
When the process ends, the owner's end of the channel closes or the zygote dies, the reaper kills all of it and exits:
a process that is killed cannot leave anything running, and neither can an owner. Linux only.

Further descriptors in the arguments are only held open, by zygote and reapers: when they are closed everywhere (the end
of a pipe, a lock that is free again), nothing is left.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 20.0
"""A process in uninterruptible sleep does not die at once; after this it is given up."""

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process; empty when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib would triple a reaper's memory
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123 - likewise
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all descendants, parents before children."""
    found = children_of(pid)
    for child in found:  # grows while it is walked
        found += children_of(child)
    return found


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


class Reaper:
    """Runs one process, between its owner's channel and SIGCHLD."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.pid = 0
        self.exit_code: int | None = None
        self.is_owner_gone = False

    def run(self) -> None:
        """Start the process, obey the owner, and end all descendants. Returns when nothing of it is left."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_parent_death)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if self._start():
            while self.exit_code is None and not self.is_owner_gone:
                ready = select.select([self.channel.fileno(), wake_read], [], [])[0]
                if wake_read in ready:
                    os.read(wake_read, 512)
                    self._reap()
                if self.channel.fileno() in ready:
                    self._obey()
            self._end_descendants()
            self._say({"exit": -signal.SIGKILL if self.exit_code is None else self.exit_code})

    def _on_parent_death(self, *_: object) -> None:
        self.is_owner_gone = True

    def _start(self) -> bool:
        try:
            length = int.from_bytes(self._read(4), "big")
            request = json.loads(self._read(length))
        except (OSError, ValueError):
            return False
        try:
            self.pid = start(request)
        except OSError as error:
            self._say({"error": error.strerror, "errno": error.errno, "file": error.filename})
            return False
        self._say({"pid": self.pid})
        return True

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.channel.recv(size - len(data))
            if not part:
                raise OSError(errno.EPIPE, "the owner closed the channel")
            data += part
        return data

    def _obey(self) -> None:
        try:
            orders = self.channel.recv(64)
        except InterruptedError:
            return
        except OSError:
            orders = b""
        if not orders:
            self.is_owner_gone = True
        for signum in orders:
            if signum == signal.SIGKILL:
                kill_all(descendants_of(os.getpid()))
            elif self.exit_code is None:
                try:
                    os.kill(self.pid, signum)
                except ProcessLookupError:
                    pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def _end_descendants(self) -> None:
        deadline = time.monotonic() + KILL_LIMIT_S
        while time.monotonic() < deadline:
            left = descendants_of(os.getpid())
            if not left:
                self._reap()
                return
            kill_all(left)
            self._reap()
            time.sleep(0.002)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_owner_gone = True


def start(request: dict[str, Any]) -> int:
    """Fork and exec; return the pid. Raises OSError with the reason of the exec (or of its folder or log)."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _exec(request, null, log, failure_write)
    for descriptor in (failure_write, log, null):
        os.close(descriptor)
    with open(failure_read, "rb") as pipe:  # noqa: PTH123 - a descriptor, not a path
        failure = pipe.read()
    if failure:
        os.waitpid(pid, 0)
        code, _, file = failure.decode().partition(" ")
        raise OSError(int(code), os.strerror(int(code)), file)
    return pid


def _exec(request: dict[str, Any], null: int, log: int, failure_write: int) -> NoReturn:
    file = request["cwd"]
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(file)
        file = request["argv"][0]
        os.execvpe(file, request["argv"], request["env"])
    except OSError as error:
        os.write(failure_write, f"{error.errno or errno.EINVAL} {file}".encode())
    except BaseException as error:
        os.write(failure_write, f"{errno.EINVAL} {file}: {error}".encode())
    finally:
        os._exit(127)


def _become_reaper(control: socket.socket, channel: socket.socket) -> NoReturn:
    code = 1
    try:
        control.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Reaper(channel).run()
        code = 0
    finally:
        os._exit(code)


def _collect(reapers: set[int]) -> None:
    """Reap ended reapers, and kill what a reaper left that was itself killed."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        reapers.discard(pid)
    kill_all(
        pid for child in children_of(os.getpid()) if child not in reapers for pid in [child, *descendants_of(child)]
    )


def serve(control: socket.socket) -> None:
    """Fork a reaper for each channel that comes, until the owner closes `control`."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reapers: set[int] = set()
    while True:
        ready = select.select([control.fileno(), wake_read], [], [])[0]
        if wake_read in ready:
            os.read(wake_read, 512)
            _collect(reapers)
        if control.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            channel = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                os.close(wake_read)
                os.close(wake_write)
                _become_reaper(control, channel)
            reapers.add(pid)
            channel.close()


if __name__ == "__main__":
    for inherited in sys.argv[1:]:
        os.set_inheritable(int(inherited), False)
    serve(socket.socket(fileno=int(sys.argv[1])))
