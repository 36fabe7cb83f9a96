"""Starts, ends and reaps the worker processes of a pod, as ordered."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from unbroken.launch.config import LaunchConfig
from unbroken.launch.error_file import MAX_ERROR_CHARACTERS, read_error
from unbroken.launch.exit_status import exit_status
from unbroken.launch.forking import Forking, Started
from unbroken.launch.output import Console, Log, LogFile, Stream, complain
from unbroken.launch.ports import HeldPort
from unbroken.launch.preimport import plan_forking
from unbroken.launch.process_tree import die_with_parent, signal_group
from unbroken.launch.stack_dump import request_stack
from unbroken.launch.worker_process import (
    LocalWorker,
    WorkerProcess,
    common_environment,
    error_path,
    why_not_started,
    worker_environment,
)
from unbroken_core.pod.pod_messages import DumpStack, Inspect, ProcessState, Spawn
from unbroken_core.pod.stacks import MAX_STACK_BYTES, stack_path

if TYPE_CHECKING:
    from unbroken.launch.line_rules import LineRules

NOT_FOUND = 127
NOT_EXECUTABLE = 126
_LOG_STACK_AFTER_S = 0.3
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT))
_FORK_WORDS = "forked subprocess"
"""In torch's message about a GPU that was in use before the fork."""


class Workers:
    """All places of the pod. Not thread-safe; `now_s` is monotonic seconds of one clock."""

    def __init__(self, config: LaunchConfig, stdout: Console, stderr: Console) -> None:
        self._config = config
        self._stdout, self._stderr = stdout, stderr
        self._tie = die_with_parent()
        self._workers = [LocalWorker(rank, HeldPort()) for rank in range(config.ranks_per_pod)]
        self._is_log_refused = False
        self._new_streams: list[Stream] = []
        self._forking: Forking | None = None
        self.note_other_end: Callable[[int], None] = lambda _pid: None
        """Called with the number of each reaped process that was no worker."""
        self.line_rules: LineRules | None = None
        """What is looked for in the output of the next processes; None: nothing."""
        self._expected: dict[int, int] = {}
        """Incarnations that are to end by themselves, and well, by local rank: the training is over."""

    def prepare(self, now_s: float) -> None:
        """Start the fork server, if it suits the command."""
        self._forking = plan_forking(self._config, common_environment(self._config), self._tie, self._complain)
        if self._forking is not None:
            self._forking.start_server(now_s)
            self._show_server()

    def close(self) -> None:
        """End the fork server; called when no worker is alive."""
        if self._forking is not None:
            self._forking.close()

    @property
    def states(self) -> tuple[ProcessState, ...]:
        """All places in local order; incarnation -1 before the first process."""
        return tuple(worker.state for worker in self._workers)

    @property
    def is_any_alive(self) -> bool:
        """Whether a worker process runs."""
        return any(worker.is_alive for worker in self._workers)

    @property
    def next_deadline_s(self) -> float | None:
        """When `kill_overdue`, `log_stacks` or `advance_starts` has something to do."""
        processes = [worker.process for worker in self._workers]
        due = [at_s for process in processes for at_s in (process.kill_at_s, process.log_stack_at_s)]
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
        newest = worker.process.incarnation if worker.ordered is None else worker.ordered.incarnation
        if order.incarnation <= newest:
            return
        if worker.is_alive:
            # Only after its end: it may still hold all memory, ports or devices.
            worker.next_order = None if worker.process.coming_exit_code is None else order
            return
        self._cancel_start(worker)
        environment = worker_environment(self._config, order)
        if (
            self._forking is None
            or worker.process.has_crashed
            or not self._forking.ask(order.local_rank, environment, now_s)
        ):
            self._start(worker, order)
        else:
            worker.ordered = order
        self._show_server()

    def start_waiting(self, now_s: float) -> None:
        """Start processes that were ordered while the one before was still ending."""
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
                worker.renew(order.incarnation)
                worker.process.is_forked = True
                self._adopt(worker, outcome.pid, (outcome.stdout, outcome.stderr))
            elif order is not None:
                self._start(worker, order)
        self._show_server()

    def cancel_starts(self) -> None:
        """Forget processes that do not run yet."""
        for worker in self._workers:
            self._cancel_start(worker)

    def _cancel_start(self, worker: LocalWorker) -> None:
        if worker.ordered is not None and self._forking is not None:
            self._forking.cancel(worker.local_rank)
        worker.ordered = worker.next_order = None

    def _start(self, worker: LocalWorker, order: Spawn) -> None:
        """Start a process by Popen; a failure becomes its exit code."""
        worker.renew(order.incarnation)
        environment = worker_environment(self._config, order)
        try:
            self._popen(worker, environment)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            worker.process.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            worker.process.error = why_not_started(self._config.command[0], error, environment)
            complain(self._stderr, worker.process.error)

    def _popen(self, worker: LocalWorker, environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            self._config.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A session, and so a process group, of its own: a signal to the group reaches grandchildren as well.
            start_new_session=True,
            # No other thread can hold a lock across the fork: this process has only one.
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

    def _adopt(self, worker: LocalWorker, pid: int, output: Sequence[int]) -> None:
        """Take over a running process, with the read ends of its stdout and stderr."""
        process = worker.process
        process.pid = pid
        log = process.log = Log(self._open_log(worker), self._stderr)
        prefix = f"[{self._config.pod}/{worker.local_rank}] ".encode()
        if self._config.does_name_processes:
            self._stderr.put(prefix + f"process {pid}\n".encode())
        rules = self.line_rules
        make_tap = None if rules is None else rules.tap(worker.local_rank, process.incarnation)
        for descriptor, console in zip(output, (self._stdout, self._stderr), strict=True):
            tap = None if make_tap is None else make_tap()
            process.streams.append(Stream(descriptor, prefix, console, log, tap))
        self._new_streams += process.streams

    def _show_server(self) -> None:
        """Read the fork server's output: warnings of imports, which belong to no worker."""
        if self._forking is None:
            return
        prefix = f"[{self._config.pod}/fork server] ".encode()
        for descriptor, console in zip(self._forking.take_output(), (self._stdout, self._stderr), strict=False):
            self._new_streams.append(Stream(descriptor, prefix, console, Log(None, self._stderr)))

    def _complain(self, message: str) -> None:
        complain(self._stderr, message)

    def _open_log(self, worker: LocalWorker) -> LogFile | None:
        if self._config.log_dir is None:
            return None
        folder = self._config.log_dir / self._config.pod
        try:
            return LogFile(folder, worker.local_rank, worker.process.incarnation)
        except OSError as error:
            if not self._is_log_refused:
                self._is_log_refused = True
                reason = f"want a folder for logs, got: {error.strerror} ({error.filename})"
                complain(self._stderr, f"UNBROKEN_LOG_DIR={self._config.log_dir}: {reason}; the console goes on")
            return None

    # ------------------------------------------------------------------------------------------------------------- end

    def end(self, local_rank: int, incarnation: int, grace_s: float, now_s: float) -> None:
        """Ask a process and its group to end; `kill_overdue` kills them after the grace."""
        if not 0 <= local_rank < len(self._workers):
            return
        worker = self._workers[local_rank]
        if worker.process.incarnation == incarnation and worker.is_alive:
            self._expected.pop(local_rank, None)
            self._end(worker.process, signal.SIGTERM, grace_s, now_s)

    def end_all(self, grace_s: float, now_s: float, number: int = signal.SIGTERM) -> None:
        """Ask all processes to end, and start no more."""
        self.cancel_starts()
        for worker in self._workers:
            if worker.is_alive:
                self._end(worker.process, number, grace_s, now_s)

    @staticmethod
    def _end(process: WorkerProcess, number: int, grace_s: float, now_s: float) -> None:
        # A stopped process takes no signal but SIGKILL until it is continued; it must do nothing else then.
        process.is_told_to_end = True
        signal_group(process.pid, number)
        signal_group(process.pid, signal.SIGCONT)
        due_s = now_s + max(grace_s, 0.0)
        process.kill_at_s = due_s if process.kill_at_s is None else min(process.kill_at_s, due_s)

    def expect_ends(self, released: Collection[int]) -> None:
        """From now on processes are to end by themselves, and well; those that were told to end are not among them.

        Those of these local ranks were told that the job is over: they may have ended before this launcher heard of it.
        """
        own = (worker for worker in self._workers if worker.is_alive or worker.local_rank in released)
        self._expected = {
            worker.local_rank: worker.process.incarnation for worker in own if not worker.process.is_told_to_end
        }

    @property
    def failed_end(self) -> int:
        """Exit code, as a shell shows it, of the first process that did not end as expected; 0 without one."""
        for worker in self._workers:
            code = worker.process.exit_code or 0
            if code and self._expected.get(worker.local_rank) == worker.process.incarnation:
                return code if code > 0 else 128 - code
        return 0

    def kill_overdue(self, now_s: float) -> None:
        """Kill the groups whose grace is over."""
        for process in (worker.process for worker in self._workers):
            if process.kill_at_s is not None and now_s >= process.kill_at_s:
                process.kill_at_s = None
                if process.is_alive:
                    signal_group(process.pid, signal.SIGKILL)

    def forward(self, number: int) -> None:
        """Pass a signal on to the processes alone, not to their children."""
        for worker in self._workers:
            if worker.is_alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)

    def dump_stack(self, order: DumpStack, now_s: float) -> None:
        """Make a process write its stack, if it can; `log_stacks` copies it a moment later."""
        if not 0 <= order.local_rank < len(self._workers):
            return
        process = self._workers[order.local_rank].process
        if process.incarnation != order.incarnation or not process.is_alive:
            return
        if request_stack(process.pid, order.signal, stack_path(self._config.directory, order.local_rank)):
            process.log_stack_at_s = now_s + _LOG_STACK_AFTER_S

    def log_stacks(self, now_s: float) -> None:
        """Copy written stacks into the logs of their processes."""
        for worker in self._workers:
            due_s = worker.process.log_stack_at_s
            if due_s is not None and now_s >= due_s:
                # A process that got no processor has not written yet: look again until it has, or ends.
                worker.process.log_stack_at_s = None if self._log_stack(worker) else now_s + _LOG_STACK_AFTER_S

    def _log_stack(self, worker: LocalWorker) -> bool:
        """Copy a written stack; return False to try again later."""
        try:
            text = stack_path(self._config.directory, worker.local_rank).read_bytes()[:MAX_STACK_BYTES]
        except OSError:
            return True
        log = worker.process.log
        if text and log is not None:
            log.write(b"[unbroken.launch] no progress; the main thread stands at\n" + text)
        return bool(text)

    def inspect(self, order: Inspect) -> None:
        """Note the exit code of a process that is still ending: freeing its memory may take long."""
        if not 0 <= order.local_rank < len(self._workers):
            return
        worker = self._workers[order.local_rank]
        if worker.process.incarnation != order.incarnation or not worker.is_alive:
            return
        status = exit_status(worker.process.pid)
        if status is not None:
            worker.process.coming_exit_code = os.waitstatus_to_exitcode(status)
            self._note_error(worker, worker.process.coming_exit_code)

    def reap(self) -> bool:
        """Reap all processes that have ended, adopted orphans as well; return whether a worker was among them."""
        has_ended = False
        while (pid := _ended_child()) is not None:
            worker = next((worker for worker in self._workers if worker.is_alive and worker.process.pid == pid), None)
            if worker is not None:
                # Before it is reaped: until then its group's number cannot be reused.
                signal_group(pid, signal.SIGKILL)
            else:
                if self._forking is not None:
                    self._forking.note_end(pid)
                self.note_other_end(pid)
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                self._note_exit(worker, os.waitstatus_to_exitcode(status))
                has_ended = True
        return has_ended

    def _note_exit(self, worker: LocalWorker, exit_code: int) -> None:
        if worker.process.log_stack_at_s is not None:
            worker.process.log_stack_at_s = None
            self._log_stack(worker)
        worker.process.exit_code, worker.process.kill_at_s = exit_code, None
        self._note_error(worker, exit_code)
        self._doubt_fork(worker, exit_code)
        # Another port for the next process: a worker of the previous world must not reach its store.
        fresh = HeldPort()
        worker.port.release()
        worker.port = fresh

    def _note_error(self, worker: LocalWorker, exit_code: int) -> None:
        process = worker.process
        for stream in process.streams:
            stream.drain()
        process.error = read_error(error_path(self._config, worker.local_rank, process.incarnation))
        if not process.error and exit_code > 0:
            # Most scripts write no error file; their traceback says it as well.
            process.error = process.streams[-1].last_words.decode(errors="replace")[:MAX_ERROR_CHARACTERS]

    def _doubt_fork(self, worker: LocalWorker, exit_code: int) -> None:
        """If the fork may be why a process failed, do not fork the next one."""
        process = worker.process
        if not process.is_forked or self._forking is None:
            return
        process.has_crashed = -exit_code in _CRASHES
        if _FORK_WORDS in process.error:
            self._forking.switch_off(f"does not suit the script: {process.error}")


def _ended_child() -> int | None:
    """Return the pid of a child that has ended and is not reaped yet."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid
