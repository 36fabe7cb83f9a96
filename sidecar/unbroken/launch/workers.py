"""The worker processes of a pod: started, ended and reaped; never by a decision of this module."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.launch.config import LaunchConfig
from unbroken.launch.error_file import MAX_ERROR_CHARACTERS, read_error
from unbroken.launch.exit_status import exit_status
from unbroken.launch.forking import Forking, Started
from unbroken.launch.output import Console, Log, LogFile, Stream, complain
from unbroken.launch.ports import HeldPort
from unbroken.launch.preimport import plan_forking
from unbroken.launch.process_tree import die_with_parent, signal_group
from unbroken.launch.stack_dump import request_stack
from unbroken_core.pod.pod_messages import DumpStack, Inspect, ProcessState, Spawn
from unbroken_core.pod.stacks import MAX_STACK_BYTES, stack_path

NOT_FOUND = 127
NOT_EXECUTABLE = 126
_LOG_STACK_AFTER_S = 0.3
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT))
_FORK_WORDS = "forked subprocess"
"""What torch says of a GPU that was in use before the fork."""


@dataclass
class _Worker:
    """One place and its newest process."""

    local_rank: int
    port: HeldPort
    incarnation: int = -1
    pid: int = 0
    exit_code: int | None = None
    """Set once the process is reaped."""
    coming_exit_code: int | None = None
    """Set while it is ending already."""
    next_order: Spawn | None = None
    """What is to be started once it is reaped."""
    error: str = ""
    error_file: Path | None = None
    streams: list[Stream] = field(default_factory=list)
    kill_at_s: float | None = None
    log: Log | None = None
    log_stack_at_s: float | None = None
    ordered: Spawn | None = None
    """The process that is being forked; it is neither known nor told of before it runs."""
    is_forked: bool = False
    has_crashed: bool = False
    """Whether a forked process crashed here: the next one is started by itself, in case that the fork was to blame."""

    @property
    def is_alive(self) -> bool:
        return self.pid > 0 and self.exit_code is None

    @property
    def state(self) -> ProcessState:
        known = self.coming_exit_code if self.exit_code is None else self.exit_code
        exit_code = known if self.incarnation >= 0 else None
        return ProcessState(self.local_rank, self.incarnation, self.pid, exit_code, self.error, self.port.number)


class Workers:
    """All places of the pod. Not thread-safe; `now_s` is monotonic seconds of one clock."""

    def __init__(self, config: LaunchConfig, stdout: Console, stderr: Console) -> None:
        self._config = config
        self._stdout, self._stderr = stdout, stderr
        self._tie = die_with_parent()
        self._workers = [_Worker(rank, HeldPort()) for rank in range(config.ranks_per_pod)]
        self._is_log_refused = False
        self._new_streams: list[Stream] = []
        self._forking: Forking | None = None

    def prepare(self, now_s: float) -> None:
        """Start what workers are forked from, where that serves the command."""
        self._forking = plan_forking(self._config, self._common_environment(), self._tie, self._complain)
        if self._forking is not None:
            self._forking.start_server(now_s)
            self._show_server()

    def close(self) -> None:
        """End the fork server; called when no worker is alive."""
        if self._forking is not None:
            self._forking.close()

    @property
    def states(self) -> tuple[ProcessState, ...]:
        """All places in local order; incarnation -1 where nothing was started."""
        return tuple(worker.state for worker in self._workers)

    @property
    def is_any_alive(self) -> bool:
        """Whether a worker process runs."""
        return any(worker.is_alive for worker in self._workers)

    @property
    def next_deadline_s(self) -> float | None:
        """When `kill_overdue`, `log_stacks` or `advance_starts` has something to do."""
        due = [at_s for worker in self._workers for at_s in (worker.kill_at_s, worker.log_stack_at_s)]
        if self._forking is not None:
            due.append(self._forking.next_deadline_s)
        return min((at_s for at_s in due if at_s is not None), default=None)

    @property
    def descriptors(self) -> list[int]:
        """What to wait for until `advance_starts` has something to do."""
        return [] if self._forking is None else self._forking.descriptors

    def take_new_streams(self) -> list[Stream]:
        """Return the streams opened since the last call, for the event loop to read."""
        streams, self._new_streams = self._new_streams, []
        return [stream for stream in streams if stream.is_open]

    # ----------------------------------------------------------------------------------------------------------- start

    def spawn(self, order: Spawn, now_s: float) -> None:
        """Start a process, unless this or a newer incarnation was started, or an older one still runs."""
        if not 0 <= order.local_rank < len(self._workers):
            complain(self._stderr, f"spawn: want local rank 0 to {len(self._workers) - 1}, got {order.local_rank}")
            return
        worker = self._workers[order.local_rank]
        newest = worker.incarnation if worker.ordered is None else worker.ordered.incarnation
        if order.incarnation <= newest:
            return
        if worker.is_alive:
            # Only after its end: the memory, ports and devices that it still holds may be all that there is.
            worker.next_order = None if worker.coming_exit_code is None else order
            return
        self._cancel_start(worker)
        environment = self._environment(worker, order)
        if self._forking is None or worker.has_crashed or not self._forking.ask(order.local_rank, environment, now_s):
            self._start(worker, order)
        else:
            worker.ordered = order
        self._show_server()

    def start_waiting(self, now_s: float) -> None:
        """Start what was ordered while the process before it was ending."""
        for worker in self._workers:
            if worker.next_order is not None and not worker.is_alive:
                self.spawn(worker.next_order, now_s)

    def advance_starts(self, now_s: float) -> None:
        """Go on with the processes that are being forked."""
        if self._forking is None:
            return
        for outcome in self._forking.advance(now_s):
            worker = self._workers[outcome.local_rank]
            order, worker.ordered = worker.ordered, None
            if order is not None and isinstance(outcome, Started):
                self._renew(worker, order)
                self._adopt(worker, outcome.pid, (outcome.stdout, outcome.stderr))
                worker.is_forked = True
            elif order is not None:
                self._start(worker, order)
        self._show_server()

    def cancel_starts(self) -> None:
        """Forget the processes that do not run yet."""
        for worker in self._workers:
            self._cancel_start(worker)

    def _cancel_start(self, worker: _Worker) -> None:
        if worker.ordered is not None and self._forking is not None:
            self._forking.cancel(worker.local_rank)
        worker.ordered = worker.next_order = None

    @staticmethod
    def _renew(worker: _Worker, order: Spawn) -> None:
        """Forget the process before."""
        for stream in worker.streams:
            stream.drain()
        worker.incarnation, worker.exit_code, worker.error = order.incarnation, None, ""
        worker.pid, worker.streams, worker.kill_at_s = 0, [], None
        worker.coming_exit_code, worker.is_forked, worker.has_crashed = None, False, False

    def _start(self, worker: _Worker, order: Spawn) -> None:
        """Start a process by itself; a failure becomes its exit code."""
        self._renew(worker, order)
        environment = self._environment(worker, order)
        try:
            self._popen(worker, environment)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            worker.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            worker.error = self._cannot_start(error, environment)
            complain(self._stderr, worker.error)

    def _popen(self, worker: _Worker, environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            self._config.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A session, and with it a process group, of its own: a signal to it reaches grandchildren, too.
            start_new_session=True,
            # No thread of this process can hold a lock across the fork: it has one thread only.
            preexec_fn=self._tie,  # noqa: PLW1509 - see above
        )
        # Reaped by `reap`; this keeps Popen from waiting for it.
        process.returncode = 0
        output: list[int] = []
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                output.append(os.dup(pipe.fileno()))
                pipe.close()
        self._adopt(worker, process.pid, output)

    def _adopt(self, worker: _Worker, pid: int, output: Sequence[int]) -> None:
        """Take a process that runs, and the ends of its stdout and stderr."""
        worker.pid = pid
        log = worker.log = Log(self._open_log(worker), self._stderr)
        prefix = f"[{self._config.pod}/{worker.local_rank}] ".encode()
        for descriptor, console in zip(output, (self._stdout, self._stderr), strict=True):
            worker.streams.append(Stream(descriptor, prefix, console, log))
        self._new_streams += worker.streams

    def _show_server(self) -> None:
        """Read what a fork server prints: warnings of imports, which are its own and no worker's."""
        if self._forking is None:
            return
        prefix = f"[{self._config.pod}/fork server] ".encode()
        for descriptor, console in zip(self._forking.take_output(), (self._stdout, self._stderr), strict=False):
            self._new_streams.append(Stream(descriptor, prefix, console, Log(None, self._stderr)))

    def _complain(self, message: str) -> None:
        complain(self._stderr, message)

    def _common_environment(self) -> dict[str, str]:
        """Return what all workers have in common."""
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return {**defaults, **self._config.environment, "LOCAL_WORLD_SIZE": str(self._config.ranks_per_pod)}

    def _environment(self, worker: _Worker, order: Spawn) -> dict[str, str]:
        errors = self._config.directory / "errors"
        with contextlib.suppress(OSError):
            errors.mkdir(parents=True, exist_ok=True)
        worker.error_file = errors / f"rank-{worker.local_rank}-{order.incarnation}.json"
        with contextlib.suppress(OSError):
            worker.error_file.unlink(missing_ok=True)
        return {
            **self._common_environment(),
            "LOCAL_RANK": str(worker.local_rank),
            "TORCHELASTIC_ERROR_FILE": str(worker.error_file),
            **order.environment,
            "UNBROKEN_LOCAL_RANK": str(worker.local_rank),
            "UNBROKEN_INCARNATION": str(order.incarnation),
        }

    def _cannot_start(self, error: Exception, environment: Mapping[str, str]) -> str:
        command = self._config.command[0]
        if isinstance(error, FileNotFoundError):
            path = environment.get("PATH", os.defpath)
            where = "no such file" if "/" in command else f"not found in PATH ({path})"
            if "/" in command and Path(command).exists():
                where = "the interpreter named in its first line does not exist"
            return f"command {command!r}: {where}"[:MAX_ERROR_CHARACTERS]
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"command {command!r}: cannot be started: {reason}"[:MAX_ERROR_CHARACTERS]

    def _open_log(self, worker: _Worker) -> LogFile | None:
        if self._config.log_dir is None:
            return None
        folder = self._config.log_dir / self._config.pod
        try:
            return LogFile(folder, worker.local_rank, worker.incarnation)
        except OSError as error:
            if not self._is_log_refused:
                self._is_log_refused = True
                reason = f"want a folder for logs, got: {error.strerror} ({error.filename})"
                complain(self._stderr, f"UNBROKEN_LOG_DIR={self._config.log_dir}: {reason}; the console goes on")
            return None

    # ------------------------------------------------------------------------------------------------------------- end

    def end(self, local_rank: int, incarnation: int, grace_s: float, now_s: float) -> None:
        """Tell a process and its group to end; `kill_overdue` ends them for good after the grace."""
        if not 0 <= local_rank < len(self._workers):
            return
        worker = self._workers[local_rank]
        if worker.incarnation == incarnation and worker.is_alive:
            self._end(worker, signal.SIGTERM, grace_s, now_s)

    def end_all(self, grace_s: float, now_s: float, number: int = signal.SIGTERM) -> None:
        """Tell all processes to end, and start no more."""
        self.cancel_starts()
        for worker in self._workers:
            if worker.is_alive:
                self._end(worker, number, grace_s, now_s)

    @staticmethod
    def _end(worker: _Worker, number: int, grace_s: float, now_s: float) -> None:
        # A process that is stopped takes no signal but SIGKILL until it is continued; it must do nothing else then.
        signal_group(worker.pid, number)
        signal_group(worker.pid, signal.SIGCONT)
        due_s = now_s + max(grace_s, 0.0)
        worker.kill_at_s = due_s if worker.kill_at_s is None else min(worker.kill_at_s, due_s)

    def kill_overdue(self, now_s: float) -> None:
        """Kill the groups whose grace is over."""
        for worker in self._workers:
            if worker.kill_at_s is not None and now_s >= worker.kill_at_s:
                worker.kill_at_s = None
                if worker.is_alive:
                    signal_group(worker.pid, signal.SIGKILL)

    def forward(self, number: int) -> None:
        """Pass a signal on to the processes themselves; their children were not asked."""
        for worker in self._workers:
            if worker.is_alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def dump_stack(self, order: DumpStack, now_s: float) -> None:
        """Make a process write its stack, if it can; `log_stacks` copies it a moment later."""
        if not 0 <= order.local_rank < len(self._workers):
            return
        worker = self._workers[order.local_rank]
        if worker.incarnation != order.incarnation or not worker.is_alive:
            return
        if request_stack(worker.pid, order.signal, stack_path(self._config.directory, order.local_rank)):
            worker.log_stack_at_s = now_s + _LOG_STACK_AFTER_S

    def log_stacks(self, now_s: float) -> None:
        """Copy the stacks that were written into the logs of their processes."""
        for worker in self._workers:
            if worker.log_stack_at_s is not None and now_s >= worker.log_stack_at_s:
                # One that got no processor has not written yet: it is looked at again until it has, or ends.
                worker.log_stack_at_s = None if self._log_stack(worker) else now_s + _LOG_STACK_AFTER_S

    def _log_stack(self, worker: _Worker) -> bool:
        """Copy what was written; return whether there was anything, or never will be."""
        try:
            text = stack_path(self._config.directory, worker.local_rank).read_bytes()[:MAX_STACK_BYTES]
        except OSError:
            return True
        if text and worker.log is not None:
            worker.log.write(b"[unbroken.launch] no progress; the main thread stands at\n" + text)
        return bool(text)

    def inspect(self, order: Inspect) -> None:
        """Look whether a process is ending, which takes as long as freeing its memory does, and how."""
        if not 0 <= order.local_rank < len(self._workers):
            return
        worker = self._workers[order.local_rank]
        if worker.incarnation != order.incarnation or not worker.is_alive:
            return
        status = exit_status(worker.pid)
        if status is not None:
            worker.coming_exit_code = os.waitstatus_to_exitcode(status)
            self._note_last_words(worker, worker.coming_exit_code)

    def reap(self) -> bool:
        """Collect all processes that have ended, adopted orphans too; return whether a worker was among them."""
        has_ended = False
        while (pid := _ended_child()) is not None:
            worker = next((worker for worker in self._workers if worker.is_alive and worker.pid == pid), None)
            if worker is not None:
                # Before it is reaped: until then nobody else can get the number of its group.
                signal_group(pid, signal.SIGKILL)
            elif self._forking is not None:
                self._forking.note_end(pid)
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                self._note_exit(worker, os.waitstatus_to_exitcode(status))
                has_ended = True
        return has_ended

    def _note_exit(self, worker: _Worker, exit_code: int) -> None:
        if worker.log_stack_at_s is not None:
            worker.log_stack_at_s = None
            self._log_stack(worker)
        worker.exit_code, worker.kill_at_s = exit_code, None
        self._note_last_words(worker, exit_code)
        self._doubt_fork(worker, exit_code)
        # Another port for the next process: a worker of the old world that still tries must not meet the new store.
        fresh = HeldPort()
        worker.port.release()
        worker.port = fresh

    @staticmethod
    def _note_last_words(worker: _Worker, exit_code: int) -> None:
        for stream in worker.streams:
            stream.drain()
        worker.error = "" if worker.error_file is None else read_error(worker.error_file)
        if not worker.error and exit_code > 0:
            # Most scripts write no error file; the last line of a traceback says it as well.
            worker.error = worker.streams[-1].last_line.decode(errors="replace").strip()[:MAX_ERROR_CHARACTERS]

    def _doubt_fork(self, worker: _Worker, exit_code: int) -> None:
        """A fork that may be why a process failed must not be why the next one fails, too."""
        if not worker.is_forked or self._forking is None:
            return
        worker.has_crashed = -exit_code in _CRASHES
        if _FORK_WORDS in worker.error:
            self._forking.switch_off(f"does not suit the script: {worker.error}")


def _ended_child() -> int | None:
    """Return the pid of a child that has ended and is not reaped yet."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid
