"""Keeps the pod's keeper running, in jobs that have one: a process of its own, since nothing may delay the agent.

Both talk on pipes: what lies in the pod's folder, a trainer may have put there.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable

from unbroken.agent.adapters.keeper_view import KeeperView
from unbroken.agent.decisions.events import Event, KeeperAsked, KeeperSeen, KeeperStarted
from unbroken_core.pod.memory_messages import (
    LOAD_SOURCES,
    MAX_LINE_BYTES,
    SAVE_BOUNDS_S,
    SKIP_REASONS,
    TELL_AGAIN_S,
    Counted,
    Holds,
    OfAgent,
    ToAgent,
)
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import CertificateRequest
from unbroken_core.vocabulary.errors import WireError, assert_never

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 4 << 20
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_CALM_S = 30.0
_END_S = 5.0
LOOK_S = TELL_AGAIN_S / 2
MAX_SILENT_LOOKS = 6
"""Looks and not seconds: while this agent stood still itself, it has heard nobody."""


class KeeperProcess:
    """One pod's keeper. All of it in the agent's event loop."""

    def __init__(self, environment: dict[str, str], port: int, view: KeeperView, emit: Callable[[Event], None]) -> None:
        """`port`: where other keepers shall reach it; 0: anywhere."""
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        self._command = [sys.executable, *safe, "-m", "unbroken.keeper", "--parent", str(os.getpid()), "--tell"]
        self._view = view
        self._emit = emit
        self._port = port
        self._process: asyncio.subprocess.Process | None = None
        self._num_heard = 0
        """Messages of the keeper that runs."""
        self.counted: Counted | None = None
        """What the keeper has told last; None before the first time."""
        self._environment = {**os.environ, **environment}

    async def run(self) -> None:
        """Start it again whenever it ends; end it when this task is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = loop.time()
            # From the main thread, which the keeper's life is tied to. Where others reach it, it should stay.
            port = str(self._view.port or self._port)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env={**self._environment, "UNBROKEN_MEMORY_PORT": port},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=MAX_LINE_BYTES,
                )
            except OSError as error:
                logger.warning("keeper not started: error=%s", error)
            else:
                await self._follow(process)
                logger.warning("keeper ended, started again: code=%s", process.returncode)
            pause_s = _FIRST_PAUSE_S if loop.time() - started_s > _CALM_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def send(self, message: OfAgent) -> None:
        """Send to the keeper that runs; one that does not read is ended, and the next one is told again."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        if process.stdin.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.warning("keeper does not read, it is ended: unsent_bytes=%d", _MAX_UNSENT_BYTES)
            _kill(process)
            return
        process.stdin.write(wire.encode(message).encode() + b"\n")

    async def _listen(self, pipe: asyncio.StreamReader) -> None:
        """Take what the keeper tells, until it ends. It reads what trainers write, so it is not believed either."""
        try:
            while line := await pipe.readline():
                self._num_heard += 1
                self._take(wire.decode(line, ToAgent))
        except (ValueError, WireError) as error:
            logger.warning("keeper says what it cannot: error=%s", error)
            # Nobody would empty the pipe.
            while await pipe.read(MAX_LINE_BYTES):
                pass

    def _take(self, message: ToAgent) -> None:
        match message:
            case Counted():
                if is_sound(message):
                    self.counted = message
            case Holds(held=held):
                self._view.note(held)
                self._emit(KeeperSeen(self._view.look()))
            case CertificateRequest():
                self._emit(KeeperAsked(message))
            case _:
                assert_never(message)

    async def _end_if_silent(self, process: asyncio.subprocess.Process) -> None:
        """End a keeper that has spoken and then stands still: workers wait for its answers, and all ranks for them."""
        num_heard = num_silent = 0
        while num_silent < MAX_SILENT_LOOKS:
            await asyncio.sleep(LOOK_S)
            num_silent = num_silent + 1 if 0 < self._num_heard == num_heard else 0
            num_heard = self._num_heard
        logger.warning("keeper says nothing, it is ended: silent_s=%g", LOOK_S * MAX_SILENT_LOOKS)
        _kill(process)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._num_heard = process, 0
        self._emit(KeeperStarted())
        looking = asyncio.create_task(self._end_if_silent(process))
        try:
            if process.stdout is not None:
                await self._listen(process.stdout)
            await process.wait()
        finally:
            looking.cancel()
            if process.returncode is None:
                # It has nothing to finish: all that it knows lies in its files.
                _kill(process)
                await asyncio.wait_for(process.wait(), _END_S)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def is_sound(counted: Counted) -> bool:
    """Return whether there is a number for each bucket, reason and source."""
    lengths = (len(counted.saves), len(counted.skips), len(counted.loads), len(counted.load_seconds))
    return lengths == (len(SAVE_BOUNDS_S) + 1, len(SKIP_REASONS), len(LOAD_SOURCES), len(LOAD_SOURCES))
