"""Lets a pod test itself before its first process: a child that is read, bounded and killed, whatever it does.

    start ──> running ──ended, killed at its time, or not to be believed──> over: `health` says what it has found
                 └──says where partners meet it──> over, and it lives: `pairs` says how its tests with other pods go

Meanwhile the agent is told of no places, so it orders no process, and the pod is not ready. Nothing ends the pod. Once
it tests with others, each test has a time of its own, and it is ended when the pod has ranks.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Union

from unbroken.launch.config import LaunchConfig
from unbroken.launch.process_tree import die_with_parent, signal_group
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import PREFLIGHT, Finding, Health, Verdict, bounded

MAX_OUTPUT_BYTES = 256 << 10
_GRACE_S = 5.0
"""Beyond its limit, which it keeps itself where it can."""
_MOST_PAIR_S = 120.0
"""For one test with another pod, whatever was ordered."""
_NO_ANSWER = "no-answer"
_MAX_MESSAGE = 300


class PodPreflight:
    """One pod's. Not thread-safe; `now_s` is monotonic seconds of one clock."""

    def __init__(self, config: LaunchConfig, limit_s: float) -> None:
        self._config, self._limit_s = config, limit_s
        self._tie = die_with_parent()
        self._pid: int | None = None
        self._reader: int | None = None
        self._writer: int | None = None
        """For orders, where it tests with other pods."""
        self._order: PairOrder | None = None
        """What it has yet to answer."""
        self._num_read = 0
        """Bytes, since the last order."""
        self._unread = b""
        self._told: Health | None = None
        """What it has said last."""
        self.due_s: float | None = None
        """When `check` has something to do."""
        self.health: Health | None = None
        """What was found; None until it is over."""
        self.pairs: PairState | None = None
        """Whether it tests with other pods, and how the last test went; None: it has never said so."""

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
        if self._config.preflight_pairs:
            command += ["--pairs", self._config.pod_ip, "--backend", self._config.preflight_pairs]
        try:
            process = subprocess.Popen(
                command,
                env=dict(self._config.environment),
                stdin=subprocess.PIPE if self._config.preflight_pairs else subprocess.DEVNULL,
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
        if process.stdin is not None:
            self._writer = os.dup(process.stdin.fileno())
            os.set_blocking(self._writer, False)
            process.stdin.close()
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
                self._close(keeps_writer=True)
                if self.health is not None:
                    self._finish("")
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
            if self.due_s is not None:
                self._finish(f"no end within {self._limit_s:g} s")

    def test(self, order: PairOrder, now_s: float) -> None:
        """Let it test with another pod; a test that is under way ends without an answer."""
        if self._writer is None or self.pairs is None:
            return
        line = wire.encode(order).encode() + b"\n"
        try:
            has_taken = os.write(self._writer, line) == len(line)
        except OSError:
            has_taken = False
        if not has_taken:
            # It does not read, or has ended.
            self._finish("")
            return
        self._order, self._num_read = order, 0
        self.due_s = now_s + min(max(order.within_s, 0.0), _MOST_PAIR_S) + _GRACE_S

    def end_tests(self) -> None:
        """End it, as the pod has ranks."""
        if self.health is not None:
            self._finish("")

    def note_end(self, pid: int) -> None:
        """Note that a child has ended, before it is reaped."""
        if pid == self._pid:
            self.pump()
            self._finish("its process ended before")

    def close(self) -> None:
        """End it; nothing is known of what it has not said."""
        self._finish("the pod ends")

    def _take(self, line: bytes) -> None:
        if self._pid is None:
            return
        try:
            said = wire.decode(line, Union[Health, PairState] if self._config.preflight_pairs else Health)
        except WireError:
            self._distrust("what it says cannot be read")
            return
        if isinstance(said, PairState):
            self._take_pairs(said)
        elif self.health is None:
            self._take_health(said)
        else:
            self._distrust("it tells of its own checks again")

    def _take_health(self, health: Health) -> None:
        if any(each.check not in PREFLIGHT for each in health.findings):
            self._distrust("it tells of checks that are not its own")
            return
        self._told = health

    def _take_pairs(self, said: PairState) -> None:
        """Take that it tests with other pods, once its own checks are over; then the answer to each order."""
        order = self._order
        if self.pairs is None and said.port and not said.number:
            self.pairs, self._num_read, self.due_s = PairState(said.port, gpus=said.gpus), 0, None
            self.health = _answered(self._told, "it has gone on without")
        elif self.pairs is not None and order is not None and (said.term, said.number) == (order.term, order.number):
            self.pairs = replace(
                self.pairs, term=said.term, number=said.number, has_passed=said.has_passed, why=said.why
            )
            self._order = self.due_s = None
        else:
            self._distrust("it answers what it was not asked")

    def _distrust(self, why: str) -> None:
        """Forget what it has said, and end it."""
        self._told = None
        self._finish(why)

    def _finish(self, why: str) -> None:
        """End it, with all that it has started. What has no answer gets this reason."""
        self._close()
        if self._pid is not None:
            # Its group cannot be another's: it is not reaped yet.
            signal_group(self._pid, signal.SIGKILL)
            self._pid = None
        self.due_s = self._order = None
        if self.health is None:
            self.health = _answered(self._told, why)
        if self.pairs is not None:
            self.pairs = replace(self.pairs, port=0)

    def _close(self, *, keeps_writer: bool = False) -> None:
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None
        if self._writer is not None and not keeps_writer:
            os.close(self._writer)
            self._writer = None


def _answered(told: Health | None, why: str) -> Health:
    """Return what was told, with the reason where it has no answer."""
    if told is None:
        return bounded(tuple(Finding(check, "", Verdict.UNKNOWN, _NO_ANSWER, message=why) for check in PREFLIGHT))
    findings = tuple(
        replace(each, message=why[:_MAX_MESSAGE]) if each.code == _NO_ANSWER and not each.message else each
        for each in told.findings
    )
    return replace(told, findings=findings)
