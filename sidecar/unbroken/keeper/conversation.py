"""What a keeper and its agent say to each other, on the pipes between them. One thread for each thing that is told."""

import logging
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import MAX_LINE_BYTES, TELL_AGAIN_S, Counted, Holds, OfAgent, ToAgent
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import CertificateRequest
from unbroken_core.vocabulary.checkpoints import Held
from unbroken_core.vocabulary.errors import InputError, WireError

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0
_LOOK_S = 10.0
Obey = Callable[[OfAgent, Callable[[CertificateRequest], None]], None]


class Conversation:
    """Ends when the agent reads no more."""

    def __init__(self, orders: BinaryIO, news: BinaryIO) -> None:
        self._orders = orders
        self._news = news
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def start(self, count: Callable[[], Counted], telling: Telling, obey: Obey) -> None:
        """Begin, in threads of its own."""
        threading.Thread(target=self._tell_sums, args=(count,), name="sums", daemon=True).start()
        threading.Thread(target=self._tell_holdings, args=(telling,), name="holdings", daemon=True).start()
        threading.Thread(target=self._listen, args=(obey,), name="orders", daemon=True).start()

    def _tell_sums(self, count: Callable[[], Counted]) -> None:
        """Tell them when they change, and every few seconds: by that the agent knows that this keeper runs."""
        told, told_at_s = None, 0.0
        while not self._is_over.wait(_TELL_EVERY_S if told else 0.0):
            counted, now_s = count(), time.monotonic()
            if counted != told or now_s - told_at_s >= TELL_AGAIN_S:
                self._say(counted)
                told, told_at_s = counted, now_s

    def _tell_holdings(self, telling: Telling) -> None:
        version, told = 0, None
        while not self._is_over.is_set():
            version = telling.wait(version, _LOOK_S)
            held: Held = telling.held()
            if held != told:
                self._say(Holds(held))
                told = held

    def _listen(self, obey: Obey) -> None:
        """Obey, in this thread."""
        while line := self._orders.readline(MAX_LINE_BYTES):
            try:
                obey(wire.decode(line, OfAgent), self._say)
            except (InputError, WireError, OSError, ImportError) as error:
                # What is kept and restored on this host does not depend on it.
                logger.warning("checkpoints are not copied as they should be: %s", error)

    def _say(self, message: ToAgent) -> None:
        try:
            with self._lock:
                self._news.write(wire.encode(message).encode() + b"\n")
                self._news.flush()
        except (OSError, ValueError) as error:
            if not self._is_over.is_set():
                logger.warning("agent does not listen: error=%s", error)
            self._is_over.set()
