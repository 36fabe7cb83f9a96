"""Keeps the pod's watch on devices and links running: a process of its own, since what it asks may never answer."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from unbroken.launch.config import LaunchConfig
from unbroken.launch.process_tree import die_with_parent

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_CALM_S = 60.0


class WatchProcess:
    """One pod's watch. It is started a while after the first worker: a start needs all cores."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._tie = die_with_parent()
        self._pid: int | None = None
        self._started_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.due_s: float | None = None
        """When `settle` has something to do; None: nothing until a worker or the watch starts or ends."""
        self.complaint = ""
        """Why there is none, until somebody has said so."""

    def settle(self, now_s: float, *, has_workers: bool) -> None:
        """Start it when it is time."""
        if self._config.watch_delay_s is None or self._pid is not None:
            return
        if self.due_s is None and has_workers and not self._started_s:
            self.due_s = now_s + self._config.watch_delay_s
        if self.due_s is not None and now_s >= self.due_s:
            self.due_s = None
            self._start(now_s)

    def note_end(self, pid: int) -> None:
        """Note that a child has ended."""
        if pid != self._pid:
            return
        now_s = time.monotonic()
        self._pid = None
        if now_s - self._started_s <= _CALM_S and self._pause_s < _LONGEST_PAUSE_S:
            # Once a minute for good would be too often: by then it was said seven times.
            self.complaint = f"the watch on devices and links has ended; the next one starts in {self._pause_s:g} s"
        self._retry(now_s)

    def close(self) -> None:
        """End it."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _start(self, now_s: float) -> None:
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        command = [sys.executable, *safe, "-m", "unbroken.watch", "--parent", str(os.getpid())]
        self._started_s = now_s
        try:
            process = subprocess.Popen(
                command,
                env=dict(self._config.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # No other thread can hold a lock across the fork: this process has only one.
                preexec_fn=self._tie,  # noqa: PLW1509 - see above
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.complaint = f"the watch on devices and links cannot be started: {error}"
            self._retry(now_s)
            return
        # Reaped with all other children; this keeps Popen from waiting for it.
        process.returncode = 0
        self._pid = process.pid

    def _retry(self, now_s: float) -> None:
        self._pause_s = _FIRST_PAUSE_S if now_s - self._started_s > _CALM_S else self._pause_s
        self.due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
