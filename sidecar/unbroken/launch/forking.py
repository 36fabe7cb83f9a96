"""Starts workers by forking a process that has imported torch once; see fork_server.py and design/0006.

 Fork server:  IMPORTING ──ready──> READY ──ended, or silent──> GONE ──next start──> IMPORTING, at most 3 times
                   └──refused, or not ready in time──> OFF
 One start:    asked ──READY──> ordered ──pid──> told to go: Started
                 └──────────────────┴──anything else──> NotStarted: the worker is started by itself

Nothing here blocks, and a worker runs the user's code only after `Started` was returned for it.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from unbroken.launch.fork_server import GO, PACKET_BYTES, PADDING
from unbroken.launch.python_command import PythonCommand, differing_variable

IMPORT_LIMIT_S = 120.0
"""How long workers wait for the imports, from the fork server's start: their own would not be faster."""
ORDER_LIMIT_S = 5.0
_MAX_SERVERS = 3
_PADDING_BYTES = 80
_SCRIPT = Path(__file__).with_name("fork_server.py")


class ServerPhase(Enum):
    """State of the fork server."""

    IMPORTING = "importing"
    READY = "ready"
    GONE = "gone"
    OFF = "off"


@dataclass(frozen=True)
class Started:
    """A worker that was forked and runs; the descriptors are the caller's."""

    local_rank: int
    pid: int
    stdout: int
    stderr: int


@dataclass(frozen=True)
class NotStarted:
    """A worker that will not be forked; it has run nothing."""

    local_rank: int


Outcome = Started | NotStarted


@dataclass
class _Start:
    """One worker that is being forked."""

    local_rank: int
    environment: Mapping[str, str]
    talk: socket.socket | None = None
    """None until the order was given."""
    stdout: int = -1
    stderr: int = -1
    overdue_at_s: float = 0.0

    def close(self) -> None:
        """Hang up: a worker that got no "go" ends."""
        if self.talk is not None:
            self.talk.close()
            self.talk = None
        for descriptor in (self.stdout, self.stderr):
            if descriptor >= 0:
                os.close(descriptor)
        self.stdout = self.stderr = -1


class Forking:
    """The fork server of one launcher, and the workers that wait for it. `now_s` is monotonic seconds of one clock."""

    def __init__(
        self,
        command: PythonCommand,
        modules: tuple[str, ...],
        environment: Mapping[str, str],
        tie: Callable[[], None],
        complain: Callable[[str], None],
    ) -> None:
        self._command, self._modules, self._environment = command, modules, dict(environment)
        self._tie, self._complain = tie, complain
        self._phase = ServerPhase.GONE
        self._is_missed = False
        """Whether a worker was to be forked while no fork server ran."""
        self._num_servers = 0
        self._pid = 0
        self._control: socket.socket | None = None
        self._overdue_at_s = 0.0
        self._starts: dict[int, _Start] = {}
        self._output: list[int] = []
        self._said: set[str] = set()

    # ---------------------------------------------------------------------------------------------------------- server

    def start_server(self, now_s: float) -> None:
        """Start the fork server if none runs; a failure is reported and switches it off."""
        if self._phase is not ServerPhase.GONE or self._pid:
            return
        self._is_missed = False
        if self._num_servers >= _MAX_SERVERS:
            self.switch_off(f"ended {_MAX_SERVERS} times")
            return
        self._num_servers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = self._popen(theirs)
            ours.setblocking(False)
            ours.send(json.dumps(self._setup()).encode())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            ours.close()
            self.switch_off(f"cannot be started: {error}")
            return
        finally:
            theirs.close()
        self._pid, self._control = process.pid, ours
        self._phase, self._overdue_at_s = ServerPhase.IMPORTING, now_s + IMPORT_LIMIT_S
        # Reaped by the launcher with everything else.
        process.returncode = 0
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                self._output.append(os.dup(pipe.fileno()))
                pipe.close()

    def _popen(self, control: socket.socket) -> "subprocess.Popen[bytes]":
        # Spaces that the worker overwrites with its own command, for `ps`.
        padding = " " * (len(" ".join(self._command.words).encode(errors="surrogateescape")) + 2)
        number = control.fileno()
        return subprocess.Popen(
            [self._command.interpreter, *self._command.options, str(_SCRIPT), str(number), padding],
            env={**self._environment, PADDING: " " * _PADDING_BYTES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(number,),
            start_new_session=True,
            preexec_fn=self._tie,  # noqa: PLW1509 - this process has one thread only
        )

    def _setup(self) -> dict[str, object]:
        command = self._command
        return {
            "launcher": os.getpid(),
            "modules": self._modules,
            "words": command.words,
            "target": command.target,
            "is_module": command.is_module,
            "arguments": command.arguments,
        }

    def take_output(self) -> list[int]:
        """Return the output descriptors of a new fork server; they are the caller's."""
        output, self._output = self._output, []
        return output

    def switch_off(self, reason: str) -> None:
        """Fork no more workers; waiting ones are started by Popen."""
        self._complain_once(reason)
        self._phase = ServerPhase.OFF
        self._kill()

    def note_end(self, pid: int) -> bool:
        """A child of the launcher has ended and is not reaped yet; return whether it was the fork server."""
        if pid != self._pid or pid == 0:
            return False
        self._listen()
        self._pid = 0
        if self._phase in (ServerPhase.IMPORTING, ServerPhase.READY):
            self._complain_once("has ended")
            self._lose()
        return True

    def close(self) -> None:
        """End everything."""
        self._phase = ServerPhase.OFF
        for start in self._starts.values():
            start.close()
        self._starts.clear()
        self._kill()
        for descriptor in self.take_output():
            os.close(descriptor)

    def _complain_once(self, reason: str) -> None:
        """Report each reason once."""
        if reason not in self._said:
            self._said.add(reason)
            self._complain(f"fork server {reason}; workers are started without it")

    def _lose(self) -> None:
        self._phase = ServerPhase.GONE
        self._kill()

    def _kill(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._pid:
            # Not reaped yet, so the pid is still its own.
            os.kill(self._pid, 9)

    def _listen(self) -> None:
        """Take the fork server's messages about itself."""
        if self._control is None:
            return
        try:
            data = self._control.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._complain_once("has ended")
            self._lose()
        elif "refused" in (notice := json.loads(data)):
            self.switch_off(f"cannot be used: {notice['refused']}")
        else:
            self._phase = ServerPhase.READY

    # ---------------------------------------------------------------------------------------------------------- starts

    @property
    def descriptors(self) -> list[int]:
        """What to wait for until `advance` has something to do."""
        ends = [self._control, *(start.talk for start in self._starts.values())]
        return [end.fileno() for end in ends if end is not None]

    @property
    def next_deadline_s(self) -> float | None:
        """When `advance` has something to do without a descriptor that is ready."""
        due = [start.overdue_at_s for start in self._starts.values() if start.talk is not None]
        if self._phase is ServerPhase.IMPORTING:
            due.append(self._overdue_at_s)
        elif len(due) < len(self._starts):
            due.append(0.0)  # The order is still to be sent, or no server is left to take it.
        return min(due, default=None)

    def ask(self, local_rank: int, environment: Mapping[str, str], now_s: float) -> bool:
        """Fork a worker as soon as possible; return whether that is tried. `advance` returns the outcome."""
        if self._phase is ServerPhase.GONE:
            # For the next worker: this one has waited long enough. Or later, while the old server is not reaped yet.
            self._is_missed = True
            self.start_server(now_s)
            return False
        if self._phase is ServerPhase.OFF:
            return False
        if (name := differing_variable(self._environment, environment)) is not None:
            self._complain_once(f"has another {name} than the worker")
            return False
        self._starts[local_rank] = _Start(local_rank, environment)
        return True

    def cancel(self, local_rank: int) -> None:
        """Forget a worker that got no "go"."""
        start = self._starts.pop(local_rank, None)
        if start is not None:
            start.close()

    def advance(self, now_s: float) -> list[Outcome]:
        """Do what can be done now; return which workers were forked, and which must be started by Popen."""
        self._listen()
        if self._is_missed:
            self.start_server(now_s)
        if self._phase is ServerPhase.IMPORTING and now_s >= self._overdue_at_s:
            self.switch_off(f"has not imported {', '.join(self._modules)} in {IMPORT_LIMIT_S:g} s")
        outcomes = [self._advance(start, now_s) for start in list(self._starts.values())]
        found = [outcome for outcome in outcomes if outcome is not None]
        for outcome in found:
            self.cancel(outcome.local_rank)
        return found

    def _advance(self, start: _Start, now_s: float) -> Outcome | None:
        if start.talk is None:
            if self._phase is ServerPhase.IMPORTING:
                return None
            if self._phase is not ServerPhase.READY or not self._order(start, now_s):
                return NotStarted(start.local_rank)
            return None
        return self._receive_pid(start, now_s)

    def _order(self, start: _Start, now_s: float) -> bool:
        """Send everything about a worker; return whether it was taken."""
        if self._control is None:
            return False
        start.talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start.talk.setblocking(False)
        start.overdue_at_s = now_s + ORDER_LIMIT_S
        start.stdout, stdout = os.pipe()
        start.stderr, stderr = os.pipe()
        with os.fdopen(os.memfd_create("order"), "r+b") as file:
            file.write(json.dumps({"environment": start.environment}).encode())
            file.flush()
            try:
                socket.send_fds(self._control, [b"order"], [file.fileno(), stdout, stderr, theirs.fileno()])
            except OSError:
                return False
            finally:
                theirs.close()
                os.close(stdout)
                os.close(stderr)
        return True

    def _receive_pid(self, start: _Start, now_s: float) -> Outcome | None:
        """Take the pid of a worker and send "go"."""
        if start.talk is None:
            return None
        try:
            data = start.talk.recv(PACKET_BYTES)
        except BlockingIOError:
            if now_s < start.overdue_at_s:
                return None
            self._complain_once(f"did not fork in {ORDER_LIMIT_S:g} s")
            self._lose()
            return NotStarted(start.local_rank)
        except OSError:
            data = b""
        notice = json.loads(data) if data else {}
        if "refused" in notice:
            self.switch_off(f"cannot be used: {notice['refused']}")
        pid = int(notice.get("pid", 0))
        if pid <= 0 or not _is_child(pid):
            return NotStarted(start.local_rank)
        try:
            start.talk.send(GO)
        except OSError:
            return NotStarted(start.local_rank)
        started = Started(start.local_rank, pid, start.stdout, start.stderr)
        start.stdout = start.stderr = -1
        return started


def is_supported() -> bool:
    """Whether this system supports all that forking needs."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
