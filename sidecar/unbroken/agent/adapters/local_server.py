"""The Unix socket of a pod: launcher and workers attach here, one JSON message a line."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Union

from unbroken.agent.adapters.access import shared_mode
from unbroken.agent.adapters.clearing import clear
from unbroken.agent.decisions.events import (
    Event,
    LauncherAttached,
    LauncherLost,
    LauncherReported,
    LinesReported,
    PairsReported,
    PreflightReported,
    WatchLost,
    WatchReported,
    WorkerAttached,
    WorkerLost,
    WorkerReported,
)
from unbroken_core.pod.pod_messages import Attach, Lines, Processes, ToLauncher, ToWorker, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, PairState
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_core.vocabulary.findings import Health

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
_MAX_PATH_BYTES = 107
_MAX_UNSENT_BYTES = 4 << 20
_ATTACH_TIMEOUT_S = 10.0
_MAX_WORKER_CONNECTIONS = 256
_LOG_EVERY_S = 60.0
_MAX_LOGGED = 64
_WATCH_PAUSE_S = 0.1
"""Between two messages of the watch that are read."""
WATCH_S = 1.0
"""How often the socket's file is looked at: a trainer may have taken its name away."""


class LocalServer:
    """Turns connections into events, and sends to who is attached. Runs in the agent's event loop."""

    def __init__(
        self,
        path: Path,
        ranks_per_pod: int,
        emit: Callable[[Event], None],
        check: Callable[[WorkerReport], str | None] = lambda _: None,
    ) -> None:
        """`check` returns what a worker's report says that cannot be, or None."""
        self._path = path
        self._ranks_per_pod = ranks_per_pod
        self._emit = emit
        self._check = check
        self._launcher: asyncio.StreamWriter | None = None
        self._watch: asyncio.StreamWriter | None = None
        self._workers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._bound: tuple[int, int] | None = None
        """Device and inode of the socket's file."""
        self.num_refused = 0
        self._logged_at_s: dict[str, float] = {}
        """When each kind of refusal was logged last."""

    async def start(self) -> None:
        """Listen, replacing the socket file of an earlier agent. Raises InputError when the path is too long."""
        length = len(os.fsencode(self._path))
        if length > _MAX_PATH_BYTES:
            raise InputError(
                f"UNBROKEN_DIR: want a path with {_MAX_PATH_BYTES} bytes at most, got {length}: {self._path}"
            )
        await self._listen()

    async def watch(self) -> None:
        """Listen anew, for as long as the agent lives, whenever the socket's file is gone or another one.

        Its folder is the trainer's as well. Who is attached stays so; without this, no later process would attach.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if _file_of(self._path) == self._bound:
                continue
            try:
                await self._listen()
                self._warn("socket was replaced or removed, listens at a new one", f"path={self._path}")
            except OSError as error:
                self._warn("socket is gone and cannot be created again", f"path={self._path} error={error}")

    async def _listen(self) -> None:
        # In a thread: what a trainer has put there may be a folder that takes long to remove.
        await asyncio.to_thread(clear, self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mask = os.umask(0o777 & ~shared_mode(self._path.parent))
            try:
                listener.bind(str(self._path))
            finally:
                os.umask(mask)
            bound = _file_of(self._path)
            listener.listen(_MAX_WORKER_CONNECTIONS)
            listener.setblocking(False)
            server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE_BYTES)
        except BaseException:
            listener.close()
            raise
        earlier, self._server, self._bound = self._server, server, bound
        if earlier is not None:
            earlier.close()

    async def stop(self) -> None:
        """Close all connections and remove the socket."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What a trainer has put in its place, or made of the folder, must not be how a job ends.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(clear, self._path)

    def send_to_launcher(self, message: ToLauncher) -> None:
        """Send to the launcher; does nothing without one, which gets its orders when it attaches."""
        self._send(self._launcher, message)

    def send_to_worker(self, local_rank: int, message: ToWorker) -> None:
        """Send to the worker that is attached at this place; does nothing without one."""
        self._send(self._workers.get(local_rank), message)

    @staticmethod
    def _send(writer: asyncio.StreamWriter | None, message: ToLauncher | ToWorker) -> None:
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.warning("peer does not read, connection closed: unsent_bytes=%d", _MAX_UNSENT_BYTES)
            writer.transport.abort()
            return
        writer.write(wire.encode(message).encode() + b"\n")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= _MAX_WORKER_CONNECTIONS:
            self._note_refused(writer, f"connections: want at most {_MAX_WORKER_CONNECTIONS}, got one more")
            writer.transport.abort()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            attach = await asyncio.wait_for(self._attach(reader), _ATTACH_TIMEOUT_S)
            if attach.role == "launcher":
                await self._serve_launcher(reader, writer)
            elif attach.role == "watch":
                await self._serve_watch(reader, writer)
            else:
                await self._serve_worker(attach, reader, writer)
        except (WireError, asyncio.TimeoutError) as error:
            self._note_refused(writer, str(error) or "said nothing")
        except (ConnectionError, asyncio.CancelledError):
            pass
        except Exception:
            self.num_refused += 1
            logger.exception("local peer failed, its connection is closed: pid=%s", _peer_pid(writer))
        finally:
            writer.transport.abort()

    def _note_refused(self, writer: asyncio.StreamWriter, error: str) -> None:
        """Count a refusal, and log it: a worker that repeats itself is named once a minute."""
        self.num_refused += 1
        if self._is_news(error.partition(", got ")[0]):
            logger.warning("local peer refused: pid=%s error=%s", _peer_pid(writer), error)

    def _warn(self, event: str, details: str) -> None:
        if self._is_news(event):
            logger.warning("%s: %s", event, details)

    def _is_news(self, kind: str) -> bool:
        """Return whether to log something of this kind: once a minute."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_at_s.get(kind, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        if len(self._logged_at_s) >= _MAX_LOGGED:
            self._logged_at_s.clear()
        self._logged_at_s[kind] = now_s
        return True

    async def _attach(self, reader: asyncio.StreamReader) -> Attach:
        line = await _read_line(reader)
        if line is None:
            raise ConnectionResetError
        attach: Attach = wire.decode(line, Attach)
        if attach.protocol != PROTOCOL:
            raise WireError(f"Attach.protocol: want {PROTOCOL}, got {attach.protocol}")
        if attach.role not in ("launcher", "worker", "watch"):
            raise WireError(f"Attach.role: want launcher, worker or watch, got {attach.role!r}")
        if attach.role == "worker" and not 0 <= attach.local_rank < self._ranks_per_pod:
            raise WireError(f"Attach.local_rank: want 0 to {self._ranks_per_pod - 1}, got {attach.local_rank}")
        return attach

    async def _serve_launcher(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._launcher is not None and not self._launcher.is_closing():
            raise WireError("Attach.role: want one launcher a pod, got a second")
        self._launcher = writer
        self._emit(LauncherAttached())
        try:
            while (line := await _read_line(reader)) is not None:
                self._emit(_launchers_event(wire.decode(line, Union[Processes, Lines, Health, PairState])))
        finally:
            self._launcher = None
            self._emit(LauncherLost())

    async def _serve_watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._watch is not None:
            # The launcher has started another one before the end of this one was seen.
            self._watch.transport.abort()
        self._watch = writer
        try:
            while (line := await _read_line(reader)) is not None:
                health = wire.decode(line, Health)
                if self._watch is writer:
                    self._emit(WatchReported(health))
                # It may say as much as it likes, and nothing waits for it meanwhile.
                await asyncio.sleep(_WATCH_PAUSE_S)
        finally:
            if self._watch is writer:
                self._watch = None
                self._emit(WatchLost())

    async def _serve_worker(self, attach: Attach, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, incarnation = attach.local_rank, attach.incarnation
        earlier = self._workers.get(rank)
        if earlier is not None:
            # The same worker came back before its old connection was seen to end.
            earlier.transport.abort()
        self._workers[rank] = writer
        self._emit(WorkerAttached(attach))
        try:
            while (line := await _read_line(reader)) is not None:
                report = wire.decode(line, WorkerReport)
                impossible = self._check(report)
                if impossible is not None:
                    raise WireError(impossible)
                if self._workers.get(rank) is writer:
                    self._emit(WorkerReported(rank, incarnation, report))
        finally:
            if self._workers.get(rank) is writer:
                del self._workers[rank]
                self._emit(WorkerLost(rank, incarnation))


def _launchers_event(message: Processes | Lines | Health | PairState) -> Event:
    if isinstance(message, PairState):
        return PairsReported(message)
    if isinstance(message, Health):
        return PreflightReported(message)
    return LinesReported(message) if isinstance(message, Lines) else LauncherReported(message)


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    """Return one line without its end, or None at the end of the stream. Raises WireError when it is too long."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise WireError(f"line: want at most {MAX_LINE_BYTES} bytes, got more") from error
    return line[:-1]


def _file_of(path: Path) -> tuple[int, int] | None:
    """Return which file has this name; None for none. A bound socket's inode is not used again while it is open."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    if peer is None:
        return -1
    try:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return -1
    return int(struct.unpack("3i", credentials)[0])
