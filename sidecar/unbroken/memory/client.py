"""A worker's connection to its pod's keeper. Every wait has an end, and a keeper that is away is no error."""

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import TypeVar

from unbroken_core.pod.memory_messages import (
    KEEPER_SOCKET,
    MAX_LINE_BYTES,
    FromKeeper,
    Measured,
    Sealed,
    ToKeeper,
    Written,
)
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
_MOST_RETRY_S = 1.0
_MOST_BROKEN = 8
"""A request under which the keeper has ended so often will not be answered: it refuses it, or does not survive it."""
AWAY_S = 30.0
"""How long a keeper may be away while it is started again."""
_SEND_S = 1.0
_LOOK_S = 1.0
T = TypeVar("T")


def shortened(text: str, most_bytes: int) -> str:
    """Return as much of a text as takes so many bytes of a line to the keeper; some characters need twelve."""
    while len(json.dumps(text)) > most_bytes:
        text = text[: len(text) * 3 // 4]
    return text


class KeeperClient:
    """Belongs to one thread at a time. Connects when it is asked, and again after the keeper was started again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / KEEPER_SOCKET
        self._connection: socket.socket | None = None
        self._pid = os.getpid()

    def ask(self, message: ToKeeper, expected: type[T], limit_s: float) -> T | None:
        """Return the answer; None when there is none in time. A request may be repeated: a keeper may die under it."""
        num_broken, retry_s = 0, _RETRY_S
        until_s = time.monotonic() + limit_s
        give_up_s = time.monotonic() + min(AWAY_S, limit_s)
        while True:
            num_asked = num_broken
            try:
                connection = self._connect(_left(until_s))
                num_broken += 1
                answer = self._ask_once(connection, message, until_s)
            except (OSError, WireError) as error:
                logger.debug("keeper has not answered: error=%s", error)
                if num_broken > num_asked:
                    # It is away since now, however long it had the request.
                    give_up_s = time.monotonic() + min(AWAY_S, limit_s)
            else:
                if not isinstance(answer, expected):
                    # It has answered something else: the caller must say why it goes on without.
                    logger.warning("keeper refuses: %s", answer)
                    return None
                return answer
            if num_broken > _MOST_BROKEN:
                logger.warning(
                    "keeper does not answer: %s: given up after %d times", type(message).__name__, num_broken
                )
                return None
            if time.monotonic() >= min(until_s, give_up_s):
                return None
            # One that is away is started again within a moment; one that goes under the request costs it each time.
            retry_s = min(2 * retry_s, _MOST_RETRY_S) if num_broken > 1 else _RETRY_S
            time.sleep(retry_s)

    def ask_any(self, message: ToKeeper, limit_s: float) -> FromKeeper | None:
        """Return whatever the keeper answers."""
        return self.ask(message, object, limit_s)  # type: ignore[return-value]  # the union is what is decoded

    def tell(self, message: Sealed | Measured | Written) -> None:
        """Send without an answer, if there is a keeper: one that is started later finds out by itself."""
        line = wire.encode(message).encode() + b"\n"
        if not self._send(line):
            # The connection was to an earlier keeper: the one that listens by now would not find out.
            self._send(line)

    def _send(self, line: bytes) -> bool:
        """Send a line; return False if that is worth another attempt."""
        was_connected = self._connection is not None
        try:
            self._connect(_SEND_S).sendall(line)
        except OSError as error:
            logger.debug("keeper is away: error=%s", error)
            self.close()
            return not (was_connected and isinstance(error, ConnectionError))
        return True

    def close(self) -> None:
        """Close the connection; harmless when repeated."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask_once(self, connection: socket.socket, message: ToKeeper, until_s: float) -> FromKeeper:
        try:
            connection.sendall(wire.encode(message).encode() + b"\n")
            buffer = b""
            while not buffer.endswith(b"\n"):
                data = _received(connection, until_s)
                if not data:
                    raise ConnectionResetError("the keeper has ended")
                buffer += data
                if len(buffer) > MAX_LINE_BYTES:
                    raise WireError(f"answer: want at most {MAX_LINE_BYTES} bytes, got more")
            answer: FromKeeper = wire.decode(buffer, FromKeeper)
            return answer
        except BaseException:
            # An interruption, too: the rest of the answer must not be taken for the next one.
            self.close()
            raise

    def _connect(self, limit_s: float) -> socket.socket:
        if self._pid != os.getpid():
            # Forked: the connection is the parent's.
            self._connection, self._pid = None, os.getpid()
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(limit_s)
                connection.connect(str(self._path))
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        self._connection.settimeout(limit_s)
        return self._connection


def _received(connection: socket.socket, until_s: float) -> bytes:
    """Return what comes next. Looks around meanwhile: a thread that stood still for long would be taken for hanging."""
    while True:
        connection.settimeout(min(_left(until_s), _LOOK_S))
        try:
            return connection.recv(1 << 20)
        except TimeoutError:
            if time.monotonic() >= until_s:
                raise


def _left(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.01)
