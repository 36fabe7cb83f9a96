"""The worker's side of a home of its own: finds the host process of this machine, or starts it, and takes a seat.

folder of the job on this machine       <temporary>/unbroken-<uid>/<job and host>
  locked by the host process for as long as it lives; the worker that finds it unlocked starts one
  home.sock                             workers register here; the connection stays open until the call is over
  agent.sock, stamps                    as in a pod
"""

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.inprocess.exception import NoAgentError, RestartError, TimeoutError  # noqa: A004 - the reference's name
from unbroken.inprocess.pod.environment import Place
from unbroken.inprocess.standalone.launched import Launched
from unbroken.standalone.folders import lock_folder
from unbroken.standalone.words import (
    CONFIG_NAME,
    MAX_LINE_BYTES,
    SOCKET_NAME,
    Busy,
    Failed,
    HomeConfig,
    Register,
    Seat,
    ToRegistered,
    Waiting,
    make_key,
)
from unbroken_core import wire
from unbroken_core.errors import WireError
from unbroken_core.settings import Timeouts

RETRY_S = 0.05
BUSY_RETRY_S = 0.1
START_TIMEOUT_S = 60.0
LAST_WORD_S = 5.0
"""The host process gives the job up when its time is over, and says why: so long a worker waits for that."""
_MAX_FOLDER_CHARACTERS = 50

_open: "weakref.WeakSet[Home]" = weakref.WeakSet()


def _close_all() -> None:
    for home in list(_open):
        home.close()


# A child that keeps the socket would keep the worker alive in the eyes of the host process.
os.register_at_fork(after_in_child=_close_all)


class Home:
    """A seat in a job that wrappers have formed among themselves; it is this worker's until `close`."""

    def __init__(self, place: Place, is_first: bool, connection: socket.socket) -> None:
        self.place = place
        self.is_first = is_first
        """Whether the rendezvous runs on this host."""
        self._connection = connection
        _open.add(self)

    def close(self) -> None:
        """Say that the call is over."""
        _open.discard(self)
        self._connection.close()


@dataclass(frozen=True)
class Invitation:
    """What this worker knows of the job that it wants to be in."""

    launched: Launched
    call: int
    """Number of the wrapped call in this process, from 0: each one is a job of its own."""
    world_size: int
    """Workers that are expected."""
    timeouts: Timeouts
    limit_s: float
    secret: str = ""
    address: str = ""
    is_first: bool | None = None
    """Whether the root runs on this host, where that is known from a call before."""
    log_folder: str = ""

    @property
    def key(self) -> str:
        """Key of the job, the same on all hosts."""
        return make_key(str(self.world_size), str(self.call), *self.launched.run, self.secret)

    @property
    def folder_name(self) -> str:
        """Name of the job's folder on this machine."""
        return make_key(self.key, socket.gethostname(), self.launched.host)[:16]


def take_seat(invitation: Invitation) -> Home:
    """Wait until the job has formed.

    Raises TimeoutError that says who is missing, NoAgentError when there is nothing to start, RestartError with the
    reason when the job cannot form.
    """
    deadline_s = time.monotonic() + invitation.limit_s
    folder = base_folder() / invitation.folder_name
    said = "nobody has answered"
    while time.monotonic() < deadline_s:
        connection = _connect(folder)
        if connection is None:
            if not _start_host(folder, invitation, deadline_s):
                time.sleep(RETRY_S)
            continue
        is_kept = False
        try:
            # Everybody waits for the same thing: who has begun last must hear of it as well.
            seat, said = _register(connection, invitation, deadline_s + LAST_WORD_S)
            if seat is not None:
                is_kept = True
                return Home(_place(folder, seat), seat.is_first, connection)
        finally:
            if not is_kept:
                connection.close()
        time.sleep(BUSY_RETRY_S)
    raise TimeoutError(
        f"job of {invitation.world_size} workers: want all of them to call the wrapped function within "
        f"{invitation.limit_s:g} s (barrier_timeout): {said}"
    )


def base_folder() -> Path:
    """Return this user's folder for homes, made when it is not there. Raises NoAgentError when others may write to it.

    Short: the path of a Unix socket has 107 bytes at most.
    """
    chosen = tempfile.gettempdir()
    parent = Path(chosen if len(chosen) <= _MAX_FOLDER_CHARACTERS else "/tmp")
    folder = parent / f"unbroken-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NoAgentError(f"{folder}: want a folder for sockets, got: {error.strerror}; set TMPDIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoAgentError(
            f"{folder}: want a folder that user {os.getuid()} owns and nobody else can use, got owner {found.st_uid} "
            f"and mode {stat.S_IMODE(found.st_mode):o}; set TMPDIR"
        )
    return folder


# ------------------------------------------------------------------------------------------------------------ internals


def _connect(folder: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(folder / SOCKET_NAME))
    except OSError:
        connection.close()
        return None
    return connection


def _register(
    connection: socket.socket, invitation: Invitation, deadline_s: float
) -> tuple[Seat, str] | tuple[None, str]:
    """Return the seat; without one, what there is to say about it. Raises RestartError."""
    launched = invitation.launched
    local_rank = -1 if launched.local_rank is None else launched.local_rank
    said = "the host process has not answered"
    try:
        _send(connection, Register(launched.rank, local_rank, os.getpid(), invitation.timeouts))
        for answer in _answers(connection, deadline_s):
            if isinstance(answer, Seat):
                connection.settimeout(None)
                return answer, ""
            if isinstance(answer, Failed):
                kind = TimeoutError if answer.is_timeout else RestartError
                raise kind(f"job of {invitation.world_size} workers: {answer.message}")
            said = answer.message
            if isinstance(answer, Busy):
                break
    except OSError:
        pass
    return None, said


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(wire.encode(message).encode() + b"\n")


def _answers(connection: socket.socket, deadline_s: float) -> Iterator[Seat | Waiting | Busy | Failed]:
    """Yield what the host process says until it hangs up. Raises OSError at the deadline, RestartError for nonsense."""
    buffer = b""
    while True:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        data = connection.recv(1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > MAX_LINE_BYTES:
            raise RestartError(f"host process: want lines of at most {MAX_LINE_BYTES} bytes, got more")
        for line in lines:
            try:
                yield wire.decode(line, ToRegistered)
            except WireError as error:
                raise RestartError(f"host process of another version? {error}") from error


def _place(folder: Path, seat: Seat) -> Place:
    return Place(
        folder=folder,
        local_rank=seat.local_rank,
        incarnation=0,
        local_world_size=seat.num_places,
        pod_address=seat.address,
    )


def _start_host(folder: Path, invitation: Invitation, deadline_s: float) -> bool:
    """Start the host process unless somebody else does; return whether it was this worker."""
    descriptor = lock_folder(folder)
    if descriptor is None:
        return False
    try:
        if importlib.util.find_spec("aiohttp") is None:
            raise NoAgentError(
                "aiohttp: want it installed for the agent that the wrapper starts, it is not: "
                "`pip install 'unbroken[sidecar]'`"
            )
        _clear(folder)
        launched = invitation.launched
        log_file = f"home-{socket.gethostname()}-{launched.host or 0}-{invitation.call}.log"
        config = HomeConfig(
            key=invitation.key,
            world_size=invitation.world_size,
            master_host=launched.master_host,
            ports=launched.ports,
            limit_s=max(deadline_s - time.monotonic(), 0.0),
            address=invitation.address,
            is_first=invitation.is_first,
            log_file=str(Path(invitation.log_folder).absolute() / log_file) if invitation.log_folder else "",
        )
        path = folder / CONFIG_NAME
        path.touch(mode=0o600)
        path.write_text(wire.encode(config))
        _spawn(folder, descriptor)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        # The host process has it as well, and with it the lock.
        os.close(descriptor)
    return True


def _clear(folder: Path) -> None:
    """Remove what a host process that was killed has left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _spawn(folder: Path, lock: int) -> None:
    """Start the host process, which is nobody's child. Raises NoAgentError with what it says."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "unbroken.standalone", "host", str(folder), str(lock)]
    process = subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(lock,),
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        errors += b"(still starting after %d s)" % START_TIMEOUT_S
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        text = errors.decode(errors="replace").strip()
        raise NoAgentError(f"host process: want it to start, `{' '.join(command)}` ended with {text or 'no word'}")


def _environment() -> dict[str, str]:
    """Return this process' environment, in which the package is found even if only this script knew where it is."""
    found = [Path(_origin(name)).parent for name in ("unbroken", "unbroken_core")]
    # Not where everybody looks anyhow: there it would come before the standard library.
    added = [str(folder) for folder in found if folder.name not in ("site-packages", "dist-packages")]
    paths = [path for path in (os.environ.get("PYTHONPATH", ""), *added) if path]
    unset = ("TORCHELASTIC_ERROR_FILE", "PYTHONINSPECT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _origin(name: str) -> str:
    module: Any = sys.modules[name]
    return str(next(iter(module.__path__)))


def expect(invitation: Invitation, world_size: int, is_first: bool) -> Invitation:
    """Return the invitation to the next call, of the workers that were left at the end of this one."""
    return replace(invitation, call=invitation.call + 1, world_size=world_size, is_first=is_first)
