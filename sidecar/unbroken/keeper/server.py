"""The keeper's socket: one thread a connection, and one that digests what was sealed."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.conversation import Conversation
from unbroken.keeper.counting import Counting
from unbroken.keeper.fetching import Fetcher
from unbroken.keeper.rarely import Rarely
from unbroken.keeper.replication import Replication
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import (
    KEEPER_SOCKET,
    MAX_MEASURED_S,
    MAX_REQUEST_BYTES,
    MAX_SLOTS_FOUND,
    Counted,
    Done,
    Fetched,
    FetchShard,
    Find,
    Found,
    FromKeeper,
    Loaded,
    Measured,
    NoRoom,
    NotFetched,
    Reserve,
    Reserved,
    Sealed,
    ToKeeper,
    Written,
)
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, NUM_SLOTS, slot_name
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_BLOCKS
from unbroken_core.vocabulary.errors import InputError, WireError, assert_never

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_MAX_PATH_BYTES = 107
_SEND_TIMEOUT_S = 30.0
_NICE = 19
_LOOK_S = 1.0
"""How often the socket's file is looked at."""
_CERTIFICATE_S = 20.0
"""How long a keeper that was started again may take to be known to others."""


class Keeper:
    """One keeper. `serve` runs until the process ends."""

    def __init__(self, config: KeeperConfig) -> None:
        """Take the pod's folder and listen. Raises InputError."""
        self._config = config
        self._arena = Arena(config)
        self._telling = Telling(self._arena, config.root)
        self._counting = Counting(config.limit_bytes)
        self._replication = Replication(config, self._arena, self._telling, self._counting)
        self._fetcher = Fetcher(self._arena, self._replication.pause, self._counting.bad_digest)
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._news = threading.Condition()
        self._sealed: set[Path] = set()
        self._rarely = Rarely()
        self._path = config.socket_folder / KEEPER_SOCKET
        self._listener = _listen(self._path)
        self._bound = _file_of(self._path)
        """Device and inode of the socket's file."""

    def serve(self) -> None:
        """Accept workers for ever."""
        threading.Thread(target=self._digest, name="digests", daemon=True).start()
        # What was sealed while no keeper lived.
        self._note({sealed.path for sealed in self._arena.sealed() if sealed.path.parent == self._arena.folder})
        while True:
            connection = self._accept()
            if connection is None:
                continue
            if not self._places.acquire(blocking=False):
                self._counting.refused()
                if self._rarely.may_say("many connections"):
                    logger.warning("connection refused: %d are open", _MAX_CONNECTIONS)
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve_worker, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                # The limit on processes of the pod, which its trainer may have used up.
                self._counting.refused()
                if self._rarely.may_say("no thread"):
                    logger.warning("connection refused: %s", error)
                connection.close()
                self._places.release()

    def _accept(self) -> socket.socket | None:
        """Return a connection; None after a while. Listen anew if the socket's file is gone, or another one.

        Its folder is the trainer's as well; without this, no later worker would find the keeper.
        """
        self._listener.settimeout(_LOOK_S)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            if _file_of(self._path) != self._bound:
                try:
                    self._listen()
                    logger.warning("socket was replaced or removed, listens at a new one: path=%s", self._path)
                except InputError as error:
                    if self._rarely.may_say("socket is gone"):
                        logger.warning("socket is gone and cannot be created again: %s", error)
            return None
        connection.settimeout(None)
        return connection

    def _listen(self) -> None:
        listener = _listen(self._path)
        self._listener.close()
        self._listener, self._bound = listener, _file_of(self._path)

    def _note(self, paths: set[Path]) -> None:
        with self._news:
            self._sealed |= paths
            self._news.notify()

    def converse(self, orders: BinaryIO, news: BinaryIO) -> None:
        """Obey the agent, and tell it what changes, in threads of their own."""
        Conversation(orders, news).start(self._counted, self._telling, self._replication.obey)

    def _counted(self) -> Counted:
        self._counting.uses(self._arena.used_bytes())
        return self._counting.counted()

    def _digest(self) -> None:
        """Digest what was sealed, in a thread of its own, which leaves the processors to whoever trains.

        The other threads do not: all ranks wait for their answers after a fault.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._news:
                self._news.wait_for(lambda: self._sealed)
                path = self._sealed.pop()
            try:
                if self._arena.digest(path):
                    self._counting.bad_digest()
                self._telling.changed()
                self._replication.note()
                self._arena.drop_left_folders()
            except OSError as error:
                if self._rarely.may_say("not digested"):
                    logger.warning("slot not digested: slot=%s error=%s", path, error)

    def _serve_worker(self, connection: socket.socket) -> None:
        try:
            with connection:
                for line in _lines(connection):
                    answer = self._answer(wire.decode(line, ToKeeper))
                    if answer is not None:
                        connection.settimeout(_SEND_TIMEOUT_S)
                        connection.sendall(wire.encode(answer).encode() + b"\n")
                        connection.settimeout(None)
        except WireError as error:
            self._counting.refused()
            if self._rarely.may_say("refused message"):
                logger.warning("worker refused: %s", error)
        except OSError as error:
            logger.debug("connection ended: %s", error)
        finally:
            self._places.release()

    def _answer(self, message: ToKeeper) -> FromKeeper | None:
        match message:
            case Reserve(local_rank=local_rank, num_bytes=num_bytes):
                return self._reserve(self._checked(local_rank), num_bytes)
            case Sealed(local_rank=local_rank, index=index):
                if not 0 <= index < NUM_SLOTS:
                    raise WireError(f"Sealed.index: want 0 to {NUM_SLOTS - 1}, got {index}")
                self._note({self._arena.folder / slot_name(self._checked(local_rank), index)})
            case Find():
                found = self._arena.find()
                return Found(found.slots[:MAX_SLOTS_FOUND], found.bad)
            case FetchShard():
                return self._fetch(message)
            case Loaded(load=load):
                self._telling.loaded(load)
                self._replication.note()
                self._fetcher.clear()
                self._replication.restored(load.iteration)
                return Done()
            case Measured():
                self._measured(message)
            case Written():
                self._written(message)
            case _:
                assert_never(message)
        return None

    def _fetch(self, wanted: FetchShard) -> Fetched | NotFetched:
        if not all(0 <= number <= MAX_BLOCKS for run in wanted.blocks for number in run):
            raise WireError(f"FetchShard.blocks: want numbers from 0 to {MAX_BLOCKS}")
        most = MAX_BLOCKS * BLOCK_BYTES
        if not all(0 <= start <= most and 0 < length <= most for start, length in wanted.ranges):
            raise WireError(f"FetchShard.ranges: want (start, length) from 0 to {most}, with one byte at least")
        began_s = time.monotonic()
        answer = self._fetcher.fetch(wanted, self._replication.context(_CERTIFICATE_S))
        if isinstance(answer, NotFetched):
            if self._rarely.may_say("not fetched"):
                logger.warning("shard not fetched: step=%d rank=%d: %s", wanted.step, wanted.rank, answer.reason)
        else:
            self._counting.fetched(answer.num_bytes)
            text = "shard fetched: from=%s step=%d rank=%d bytes=%d seconds=%.3f"
            seconds = time.monotonic() - began_s
            logger.info(text, wanted.peer.uid, wanted.step, wanted.rank, answer.num_bytes, seconds)
        return answer

    def _measured(self, message: Measured) -> None:
        if not 0 <= message.seconds <= MAX_MEASURED_S:
            raise WireError(f"Measured.seconds: want 0 to {MAX_MEASURED_S:.0f}, got {message.seconds}")
        self._counting.take(message)

    def _written(self, message: Written) -> None:
        age_s = message.age_s
        if not (age_s == -1 or 0 <= age_s <= MAX_MEASURED_S):
            raise WireError(f"Written.age_s: want -1, or 0 to {MAX_MEASURED_S:.0f}, got {age_s}")
        if self._telling.set_disk(message.disk):
            self._counting.on_disk(message.disk.step, -1.0 if age_s < 0 else time.monotonic() - age_s)

    def _reserve(self, local_rank: int, num_bytes: int) -> Reserved | NoRoom:
        if not CONTENT_OFFSET < num_bytes <= 1 << 50:
            raise WireError(f"Reserve.num_bytes: want {CONTENT_OFFSET + 1} to {1 << 50}, got {num_bytes}")
        answer = self._arena.reserve(local_rank, num_bytes)
        self._telling.set_room(local_rank, answer if isinstance(answer, NoRoom) else None)
        return answer

    def _checked(self, local_rank: int) -> int:
        if not 0 <= local_rank < self._config.ranks_per_pod:
            raise WireError(f"local_rank: want 0 to {self._config.ranks_per_pod - 1}, got {local_rank}")
        return local_rank


def _listen(path: Path) -> socket.socket:
    """Listen, replacing the socket file of an earlier keeper. Raises InputError."""
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise InputError(f"UNBROKEN_DIR: want a path with {_MAX_PATH_BYTES} bytes at most, got {length}: {path}")
    part = path.with_name(f"{KEEPER_SOCKET}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        may_write = path.parent.stat().st_mode & 0o022
        # Not changed afterwards: by then the name may be that of another file.
        mask = os.umask(0o777 & ~(0o600 | may_write | may_write << 1))
        try:
            listener.bind(str(part))
        finally:
            os.umask(mask)
        listener.listen(_MAX_CONNECTIONS)
        # Last: whoever finds the socket can connect.
        part.replace(path)
    except OSError as error:
        listener.close()
        raise InputError(f"UNBROKEN_DIR: cannot listen at {path}: {error.strerror}") from error
    return listener


def _file_of(path: Path) -> tuple[int, int] | None:
    """Return which file has this name; None for none. A bound socket's inode is not used again while it is open."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Yield whole lines. Raises WireError when one is too long, OSError when the connection breaks."""
    buffer = b""
    while data := connection.recv(MAX_REQUEST_BYTES):
        *lines, buffer = (buffer + data).split(b"\n")
        if max(len(line) for line in (*lines, buffer)) > MAX_REQUEST_BYTES:
            raise WireError(f"line: want at most {MAX_REQUEST_BYTES} bytes, got more")
        yield from lines
