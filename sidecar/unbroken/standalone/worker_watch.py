"""Takes the launcher's part: reports to the agent which workers of this host live. It cannot start one.

A worker is gone when its process has ended or has left its wrapped call, whatever else that process does.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.launch.exit_status import exit_status
from unbroken.launch.stack_dump import request_stack
from unbroken.standalone.lines import read_message, write_message
from unbroken.tasks import Tasks
from unbroken_core.pod.pod_messages import (
    UNKNOWN_EXIT,
    Attach,
    DumpStack,
    End,
    EndPairs,
    Follow,
    Inspect,
    Processes,
    ProcessState,
    Shutdown,
    Spawn,
    ToLauncher,
)
from unbroken_core.pod.stacks import stack_path
from unbroken_core.protocol.messages import PROTOCOL, PairOrder
from unbroken_core.vocabulary.errors import WireError, assert_never

logger = logging.getLogger(__name__)

_CONNECT_RETRY_S = 0.005
_CONNECT_TIMEOUT_S = 10.0
_REAP_S = 0.3
"""If a worker's process has ended, that is seen a moment after its connection closes."""
_STATE, _EXIT_CODE = 0, -1
"""Of the fields of /proc/<pid>/stat after the name."""


@dataclass
class WatchedWorker:
    """One worker of this host."""

    local_rank: int
    pid: int
    exit_code: int | None = None
    error: str = ""
    pidfd: int = -1

    @property
    def state(self) -> ProcessState:
        """The process as it is reported to the agent."""
        return ProcessState(self.local_rank, 0, self.pid, self.exit_code, self.error)


class WorkerWatch:
    """The launcher's side of `agent.sock`. Runs in the event loop of the host process."""

    def __init__(self, folder: Path, pids: Mapping[int, int], num_places: int) -> None:
        """`pids` by local rank; places without one are empty from the start."""
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self.is_over = asyncio.Event()
        """Set when the agent says that the job is over."""
        self.is_empty = asyncio.Event()
        """Set when no worker is left."""
        self._workers = {rank: WatchedWorker(rank, pids.get(rank, 0)) for rank in range(num_places)}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = Tasks(self._on_failure)
        for worker in self._workers.values():
            if worker.pid == 0:
                worker.exit_code, worker.error = UNKNOWN_EXIT, "this host has fewer workers than others"
            else:
                self._watch(worker)

    async def attach(self) -> None:
        """Connect to the agent and report the workers. Raises OSError when the agent does not come up."""
        until_s = self._loop.time() + _CONNECT_TIMEOUT_S
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self._folder / "agent.sock"))
                break
            except OSError:
                if self._loop.time() > until_s:
                    raise
                await asyncio.sleep(_CONNECT_RETRY_S)
        write_message(self._writer, Attach(PROTOCOL, "launcher", os.getpid()))
        self._tell()
        self._tasks.start("orders of the agent", self._listen(reader))

    def leave(self, local_rank: int) -> None:
        """A worker's connection has ended, because its process or its wrapped call has."""
        self._tasks.start(f"end of local rank {local_rank}", self._note_left(self._workers[local_rank]))

    async def close(self) -> None:
        """Hang up, and leave the processes alone."""
        await self._tasks.stop()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        for worker in self._workers.values():
            self._forget(worker)

    # ------------------------------------------------------------------------------------------------------ processes

    def _watch(self, worker: WatchedWorker) -> None:
        try:
            worker.pidfd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            self._note_end(worker)
            return
        except OSError as error:
            # An old kernel: only the end of the connection shows the end of the worker.
            logger.debug("process cannot be watched: pid=%d error=%s", worker.pid, error)
            return
        self._loop.add_reader(worker.pidfd, self._note_end, worker)

    def _note_end(self, worker: WatchedWorker) -> None:
        exit_code = _exit_code(worker.pid)
        self._lose(worker, exit_code, "" if exit_code != UNKNOWN_EXIT else "the process ended")

    async def _note_left(self, worker: WatchedWorker) -> None:
        await asyncio.sleep(_REAP_S if worker.pidfd >= 0 else 0.0)
        self._lose(worker, UNKNOWN_EXIT, "left the wrapped function")

    def _lose(self, worker: WatchedWorker, exit_code: int, error: str) -> None:
        self._forget(worker)
        if worker.exit_code is not None:
            return
        worker.exit_code, worker.error = exit_code, error
        logger.info("worker gone: local_rank=%d pid=%d code=%d", worker.local_rank, worker.pid, exit_code)
        self._tell()
        if all(other.exit_code is not None for other in self._workers.values()):
            self.is_empty.set()

    def _forget(self, worker: WatchedWorker) -> None:
        if worker.pidfd >= 0:
            self._loop.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1

    def _end(self, order: End) -> None:
        """Signal the process alone: its group may be its launcher's."""
        worker = self._workers.get(order.local_rank)
        if worker is None or worker.exit_code is not None or order.incarnation != 0:
            return
        logger.warning("worker is ended: local_rank=%d pid=%d", worker.local_rank, worker.pid)
        # In this order a stopped process ends as it wakes, instead of running on for a moment.
        self._signal(worker, signal.SIGTERM)
        self._signal(worker, signal.SIGCONT)
        self._tasks.start(f"kill of local rank {worker.local_rank}", self._kill(worker, max(order.grace_s, 0.0)))

    def _look_into(self, local_rank: int, number: int) -> None:
        worker = self._workers.get(local_rank)
        if worker is not None and worker.exit_code is None:
            request_stack(worker.pid, number, stack_path(self._folder, local_rank))

    def _inspect(self, local_rank: int) -> None:
        """Note the exit code of a process whose main thread has ended, before its memory is freed and it is reaped."""
        worker = self._workers.get(local_rank)
        if worker is None or worker.exit_code is not None:
            return
        status = exit_status(worker.pid)
        if status is not None:
            self._lose(worker, os.waitstatus_to_exitcode(status), "")

    async def _kill(self, worker: WatchedWorker, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self._signal(worker, signal.SIGKILL)

    @staticmethod
    def _signal(worker: WatchedWorker, number: int) -> None:
        if worker.exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if worker.pidfd >= 0:
                signal.pidfd_send_signal(worker.pidfd, number)
            else:
                os.kill(worker.pid, number)

    # ---------------------------------------------------------------------------------------------------------- agent

    def _tell(self) -> None:
        if self._writer is not None:
            states = tuple(worker.state for worker in self._workers.values())
            write_message(self._writer, Processes(states))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (order := await read_message(reader, ToLauncher)) is not None:
                self._obey(order)
        except WireError as error:
            logger.warning("order of the agent refused: %s", error)
        self.is_over.set()

    def _obey(self, order: ToLauncher) -> None:
        match order:
            case Spawn(local_rank=local_rank):
                # Its place stays empty: nothing here can start the script again.
                logger.debug("not started again: local_rank=%d", local_rank)
            case End():
                self._end(order)
            case DumpStack(local_rank=local_rank, signal=number):
                self._look_into(local_rank, number)
            case Inspect(local_rank=local_rank):
                self._inspect(local_rank)
            case Follow() | PairOrder() | EndPairs():
                pass  # Output goes to torchrun, and passes by; and no pod here says that it tests with others.
            case Shutdown(message=message):
                logger.info("the job is over: %s", message)
                self.is_over.set()
            case _:
                assert_never(order)

    def _on_failure(self, _what: str, _error: BaseException) -> None:
        """Without its launcher's part a host is of no use: it ends, as if the agent had said so, and others go on."""
        self.is_over.set()


def _exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended and was not reaped yet, -N for signal N, else UNKNOWN_EXIT."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[_STATE] == "Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        pass
    return UNKNOWN_EXIT
