"""Lets a pod test itself before its first process: a child that is read, bounded and killed, whatever it does.

    start ──> running ──ended, killed at its time, or not to be believed──> over: `health` says what it has found

Meanwhile the agent is told of no places, so it orders no process, and the pod is not ready. Nothing ends the pod.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace

from unbroken.launch.config import LaunchConfig
from unbroken.launch.process_tree import die_with_parent, signal_group
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import PREFLIGHT, Finding, Health, Verdict, bounded

MAX_OUTPUT_BYTES = 256 << 10
_GRACE_S = 5.0
"""Beyond its limit, which it keeps itself where it can."""
_NO_ANSWER = "no-answer"
_MAX_MESSAGE = 300


class PodPreflight:
    """One pod's. Not thread-safe; `now_s` is monotonic seconds of one clock."""

    def __init__(self, config: LaunchConfig, limit_s: float) -> None:
        self._config, self._limit_s = config, limit_s
        self._tie = die_with_parent()
        self._pid: int | None = None
        self._reader: int | None = None
        self._num_read = 0
        self._unread = b""
        self._told: Health | None = None
        """What it has said last."""
        self.due_s: float | None = None
        """When `check` has something to do."""
        self.health: Health | None = None
        """What was found; None until it is over."""

    @property
    def descriptor(self) -> int | None:
        """What to wait for until `pump` has something to do."""
        return self._reader

    @property
    def complaints(self) -> list[str]:
        """What was found that is not well, for people."""
        found = () if self.health is None else self.health.findings
        return [
            f"{each.check}{f' on {each.entity}' if each.entity else ''} is {each.verdict}: {each.message}"
            for each in found
            if each.verdict is not Verdict.OK
        ]

    def start(self, now_s: float) -> None:
        """Start it; where that is not possible it is over."""
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        command = [sys.executable, *safe, "-m", "unbroken.preflight.in_pod", "--limit", f"{self._limit_s:g}"]
        if self._config.preflight_devices is not None:
            command += ["--devices", str(self._config.preflight_devices)]
        try:
            process = subprocess.Popen(
                command,
                env=dict(self._config.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                # No other thread can hold a lock across the fork: this process has only one.
                preexec_fn=self._tie,  # noqa: PLW1509 - see above
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._finish(f"it cannot be started: {error}")
            return
        # Reaped with all other children; this keeps Popen from waiting for it.
        process.returncode = 0
        if process.stdout is not None:
            self._reader = os.dup(process.stdout.fileno())
            os.set_blocking(self._reader, False)
            process.stdout.close()
        self._pid, self.due_s = process.pid, now_s + self._limit_s + _GRACE_S

    def pump(self) -> None:
        """Read what it says."""
        while self._reader is not None:
            try:
                data = os.read(self._reader, 64 << 10)
            except BlockingIOError:
                return
            if not data:
                # It ends, or is killed at its time.
                self._close_reader()
                return
            self._num_read += len(data)
            if self._num_read > MAX_OUTPUT_BYTES:
                self._distrust(f"it says more than {MAX_OUTPUT_BYTES} bytes")
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(line)

    def check(self, now_s: float) -> None:
        """Kill it when its time is over."""
        if self.due_s is not None and now_s >= self.due_s:
            self.pump()
            self._finish(f"no end within {self._limit_s:g} s")

    def note_end(self, pid: int) -> None:
        """Note that a child has ended, before it is reaped."""
        if pid == self._pid:
            self.pump()
            self._finish("its process ended before")

    def close(self) -> None:
        """End it; nothing is known of what it has not said."""
        self._finish("the pod ends")

    def _take(self, line: bytes) -> None:
        if self.health is not None:
            return
        try:
            health: Health = wire.decode(line, Health)
        except WireError:
            self._distrust("what it says cannot be read")
            return
        if any(each.check not in PREFLIGHT for each in health.findings):
            self._distrust("it tells of checks that are not its own")
            return
        self._told = health

    def _distrust(self, why: str) -> None:
        """Forget what it has said, and end it."""
        self._told = None
        self._finish(why)

    def _finish(self, why: str) -> None:
        """End it, with all that it has started. What has no answer gets this reason."""
        self._close_reader()
        if self.health is not None:
            return
        if self._pid is not None:
            # Its group cannot be another's: it is not reaped yet.
            signal_group(self._pid, signal.SIGKILL)
            self._pid = None
        self.due_s = None
        self.health = _answered(self._told, why)

    def _close_reader(self) -> None:
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None


def _answered(told: Health | None, why: str) -> Health:
    """Return what was told, with the reason where it has no answer."""
    if told is None:
        return bounded(tuple(Finding(check, "", Verdict.UNKNOWN, _NO_ANSWER, message=why) for check in PREFLIGHT))
    findings = tuple(
        replace(each, message=why[:_MAX_MESSAGE]) if each.code == _NO_ANSWER and not each.message else each
        for each in told.findings
    )
    return replace(told, findings=findings)
