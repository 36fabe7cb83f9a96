"""Keeps the pod's keeper running, in jobs that have one: a process of its own, since nothing may delay the agent."""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from unbroken_core import wire
from unbroken_core.errors import WireError
from unbroken_core.pod.memory_messages import LOAD_SOURCES, SAVE_BOUNDS_S, SKIP_REASONS, Counted
from unbroken_core.settings import JobSettings
from unbroken_core.wire import settings_to_json

logger = logging.getLogger(__name__)

_MAX_COUNTED_BYTES = 16_384

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_CALM_S = 30.0
_END_S = 5.0


class KeeperProcess:
    """One pod's keeper. All of it in the agent's event loop."""

    def __init__(self, root: Path, limit_bytes: int, settings: JobSettings, pod_uid: str, directory: Path) -> None:
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        self._command = [sys.executable, *safe, "-m", "unbroken.keeper", "--parent", str(os.getpid()), "--tell"]
        self.counted: Counted | None = None
        """What the keeper has told last; None before the first time."""
        self._environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": settings_to_json(settings),
            "UNBROKEN_POD_UID": pod_uid,
            "UNBROKEN_DIR": str(directory),
            "UNBROKEN_MEMORY_DIR": str(root),
            "UNBROKEN_MEMORY_LIMIT": str(limit_bytes),
        }

    async def run(self) -> None:
        """Start it again whenever it ends; end it when this task is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = loop.time()
            # From the main thread, which the keeper's life is tied to.
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_MAX_COUNTED_BYTES,
                )
            except OSError as error:
                logger.warning("keeper not started: error=%s", error)
            else:
                await self._follow(process)
                logger.warning("keeper ended, started again: code=%s", process.returncode)
            pause_s = _FIRST_PAUSE_S if loop.time() - started_s > _CALM_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self, pipe: asyncio.StreamReader) -> None:
        """Take what the keeper tells, until it ends. It reads what trainers write, so it is not believed either."""
        try:
            while line := await pipe.readline():
                counted: Counted = wire.decode(line, Counted)
                if is_sound(counted):
                    self.counted = counted
        except (ValueError, WireError) as error:
            logger.warning("keeper says what it cannot: error=%s", error)
            # Nobody would empty the pipe.
            while await pipe.read(_MAX_COUNTED_BYTES):
                pass

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        try:
            if process.stdout is not None:
                await self._listen(process.stdout)
            await process.wait()
        finally:
            if process.returncode is None:
                # It has nothing to finish: all that it knows lies in its files.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.wait_for(process.wait(), _END_S)


def is_sound(counted: Counted) -> bool:
    """Return whether there is a number for each bucket, reason and source."""
    lengths = (len(counted.saves), len(counted.skips), len(counted.loads), len(counted.load_seconds))
    return lengths == (len(SAVE_BOUNDS_S) + 1, len(SKIP_REASONS), len(LOAD_SOURCES), len(LOAD_SOURCES))
