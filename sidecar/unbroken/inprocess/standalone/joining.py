"""How a worker joins a standalone job: it finds this machine's host process, or starts it, and registers.

folder of the job on this machine       <temporary>/unbroken-<uid>/<job and host>
  locked by the host process for as long as it lives; the worker that finds it unlocked starts one
  workers.sock                          workers register here; the connection stays open until the call is over
  agent.sock, stamps                    as in a pod
"""

import builtins
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.folders import lock_folder, user_folder
from unbroken.inprocess.exception import NoAgentError, RestartError, TimeoutError  # noqa: A004 - the reference's name
from unbroken.inprocess.pod.environment import PodContext
from unbroken.inprocess.standalone.launched import Launched
from unbroken.standalone.messages import (
    CONFIG_NAME,
    MAX_LINE_BYTES,
    SOCKET_NAME,
    Busy,
    Failed,
    Placement,
    Register,
    StandaloneConfig,
    ToRegistered,
    Waiting,
    make_key,
)
from unbroken_core.protocol import wire
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_core.vocabulary.plurals import counted

RETRY_S = 0.05
BUSY_RETRY_S = 0.1
START_TIMEOUT_S = 60.0
LAST_MESSAGE_S = 5.0
"""When time is up, the host process gives the job up and says why: a worker waits this long for the reason."""
NOTICE_S = 10.0
"""How often a worker that waits says what for."""
_LOOK_S = 1.0

logger = logging.getLogger(__name__)

_open: "weakref.WeakSet[Registration]" = weakref.WeakSet()


def _close_all() -> None:
    for home in list(_open):
        home.close()


# If a forked child kept the socket, the host process would take the worker for alive.
os.register_at_fork(after_in_child=_close_all)


class Registration:
    """A worker's place in a standalone job, held by an open connection until `close`."""

    def __init__(self, place: PodContext, is_first: bool, connection: socket.socket) -> None:
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
class JoinRequest:
    """What this worker knows of the job that it wants to join."""

    launched: Launched
    call: int
    """Number of the wrapped call in this process, from 0: each is a job of its own."""
    world_size: int
    """Number of workers that are expected."""
    timeouts: Timeouts
    limit_s: float
    secret: str = ""
    address: str = ""
    is_first: bool | None = None
    """Whether the root runs on this host, if an earlier call has shown it."""
    log_folder: str = ""
    no_progress_limit: int | None = None

    @property
    def key(self) -> str:
        """Key of the job, the same on all hosts."""
        return make_key(str(self.world_size), str(self.call), *self.launched.run, self.secret)

    @property
    def folder_name(self) -> str:
        """Name of the job's folder on this machine."""
        return make_key(self.key, socket.gethostname(), self.launched.host)[:16]


class WaitNotice:
    """Says every NOTICE_S what a job waits for, and how long: on the first worker of each host."""

    def __init__(self, request: JoinRequest) -> None:
        self._is_speaker = request.launched.local_rank in (None, 0)
        self._limit_s = request.limit_s
        self._since_s = self._said_s = time.monotonic()

    def say(self, waiting_for: str) -> None:
        """Say it, if it is time."""
        now_s = time.monotonic()
        if self._is_speaker and now_s >= self._said_s + NOTICE_S:
            self._said_s = now_s
            text = "the wrapped call waits for the job to form, for %.0f s of at most %.0f s (barrier_timeout): %s"
            logger.warning(text, now_s - self._since_s, self._limit_s, waiting_for)


def join(request: JoinRequest) -> Registration:
    """Wait until the job has formed.

    Raises TimeoutError that says who is missing, NoAgentError when there is nothing to start, RestartError with the
    reason when the job cannot form.
    """
    deadline_s = time.monotonic() + request.limit_s
    folder = base_folder() / request.folder_name
    waiting_for = "nobody has answered"
    notice = WaitNotice(request)
    while time.monotonic() < deadline_s:
        notice.say(waiting_for)
        connection = _connect(folder)
        if connection is None:
            if not _start_host(folder, request, deadline_s):
                time.sleep(RETRY_S)
            continue
        is_kept = False
        try:
            # All workers wait for the same event: the one that came last must learn of the failure as well.
            placement, waiting_for = _register(connection, request, deadline_s + LAST_MESSAGE_S, notice)
            if placement is not None:
                is_kept = True
                return Registration(_place(folder, placement), placement.is_first, connection)
        finally:
            if not is_kept:
                connection.close()
        time.sleep(BUSY_RETRY_S)
    raise TimeoutError(
        f"job of {counted(request.world_size, 'worker')}: not all of them called the wrapped function within "
        f"{request.limit_s:g} s (barrier_timeout): {waiting_for}"
    )


def base_folder() -> Path:
    """Return this user's folder for standalone jobs, and make it if needed.

    Its path is short: that of a Unix socket has 107 bytes at most. Raises NoAgentError when others may write to it.
    """
    try:
        return user_folder()
    except InputError as error:
        raise NoAgentError(str(error)) from error


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
    connection: socket.socket, request: JoinRequest, deadline_s: float, notice: WaitNotice
) -> tuple[Placement, str] | tuple[None, str]:
    """Return the placement, or what the job waits for. Raises RestartError."""
    launched = request.launched
    local_rank = -1 if launched.local_rank is None else launched.local_rank
    waiting_for = "the host process has not answered"
    try:
        limit = request.no_progress_limit
        _send(connection, Register(launched.rank, local_rank, os.getpid(), request.timeouts, limit))
        for answer in _answers(connection, deadline_s):
            notice.say(waiting_for)
            if answer is None:
                continue
            if isinstance(answer, Placement):
                connection.settimeout(None)
                return answer, ""
            if isinstance(answer, Failed):
                kind = TimeoutError if answer.is_timeout else RestartError
                raise kind(f"job of {counted(request.world_size, 'worker')}: {answer.message}")
            waiting_for = answer.message
            if isinstance(answer, Busy):
                break
    except OSError:
        pass
    return None, waiting_for


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(wire.encode(message).encode() + b"\n")


def _answers(connection: socket.socket, deadline_s: float) -> Iterator[Placement | Waiting | Busy | Failed | None]:
    """Yield the host process's messages, and None after a second without any.

    Raises OSError at the deadline, RestartError for an unreadable message.
    """
    buffer = b""
    while True:
        connection.settimeout(max(min(deadline_s - time.monotonic(), _LOOK_S), 0.001))
        try:
            data = connection.recv(1 << 16)
        except builtins.TimeoutError:
            if time.monotonic() >= deadline_s:
                raise
            yield None
            continue
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


def _place(folder: Path, placement: Placement) -> PodContext:
    return PodContext(
        folder=folder,
        local_rank=placement.local_rank,
        incarnation=0,
        local_world_size=placement.num_places,
        pod_address=placement.address,
    )


def _start_host(folder: Path, request: JoinRequest, deadline_s: float) -> bool:
    """Start the host process unless another worker does; return whether this one did."""
    descriptor = lock_folder(folder)
    if descriptor is None:
        return False
    try:
        if importlib.util.find_spec("aiohttp") is None:
            raise NoAgentError(
                "aiohttp is not installed, but the agent that the wrapper starts needs it: "
                "`pip install 'unbroken[sidecar]'`"
            )
        _clear(folder)
        launched = request.launched
        log_file = f"standalone-{socket.gethostname()}-{launched.host or 0}-{request.call}.log"
        config = StandaloneConfig(
            # The root is this host's as well, and reads the same file: nobody else needs the key.
            key=secrets.token_hex(32) if launched.is_one_host else request.key,
            world_size=request.world_size,
            master_host=launched.master_host,
            ports=launched.ports,
            limit_s=max(deadline_s - time.monotonic(), 0.0),
            address=request.address,
            is_first=request.is_first,
            log_file=str(Path(request.log_folder).absolute() / log_file) if request.log_folder else "",
        )
        path = folder / CONFIG_NAME
        path.touch(mode=0o600)
        path.write_text(wire.encode(config))
        _spawn(folder, descriptor)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        # The host process holds it as well, and with it the lock.
        os.close(descriptor)
    return True


def _clear(folder: Path) -> None:
    """Remove what a killed host process has left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _spawn(folder: Path, lock: int) -> None:
    """Start the host process, which detaches itself. Raises NoAgentError with its error output."""
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
        raise NoAgentError(f"host process did not start: `{' '.join(command)}`: {text or 'no message'}")


def _environment() -> dict[str, str]:
    """Return this process' environment, extended so that the package is found even if only sys.path led to it."""
    found = [Path(_origin(name)).parent for name in ("unbroken", "unbroken_core")]
    # Not site-packages, which is searched anyhow: in PYTHONPATH it would come before the standard library.
    added = [str(folder) for folder in found if folder.name not in ("site-packages", "dist-packages")]
    paths = [path for path in (os.environ.get("PYTHONPATH", ""), *added) if path]
    unset = ("TORCHELASTIC_ERROR_FILE", "PYTHONINSPECT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _origin(name: str) -> str:
    module: Any = sys.modules[name]
    return str(next(iter(module.__path__)))


def next_request(request: JoinRequest, world_size: int, is_first: bool) -> JoinRequest:
    """Return the request of the next call, which expects the workers that were left at the end of this one."""
    return replace(request, call=request.call + 1, world_size=world_size, is_first=is_first)
