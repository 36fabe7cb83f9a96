"""Stands where a pod's launcher would: tells the agent which workers of this host live. It cannot start one.

A worker is gone when its process has ended, or when it has left its wrapped call, whatever else its process does.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.launch.exit_status import exit_status
from unbroken.launch.stack_dump import request_stack
from unbroken.standalone.lines import read_message, write_message
from unbroken_core.errors import WireError, assert_never
from unbroken_core.messages import PROTOCOL
from unbroken_core.pod.pod_messages import (
    UNKNOWN_EXIT,
    Attach,
    DumpStack,
    End,
    Inspect,
    Processes,
    ProcessState,
    Shutdown,
    Spawn,
    ToLauncher,
)
from unbroken_core.pod.stacks import stack_path

logger = logging.getLogger(__name__)

_CONNECT_RETRY_S = 0.005
_CONNECT_TIMEOUT_S = 10.0
_REAP_S = 0.3
"""A worker's connection closes a moment before its process is seen to have ended, if it has."""
_STATE, _EXIT_CODE = 0, -1
"""Of the fields of /proc/<pid>/stat after the name."""


@dataclass
class Resident:
    """One worker of this host."""

    local_rank: int
    pid: int
    exit_code: int | None = None
    error: str = ""
    pidfd: int = -1

    @property
    def state(self) -> ProcessState:
        """The process as the agent is told."""
        return ProcessState(self.local_rank, 0, self.pid, self.exit_code, self.error)


class Keeper:
    """The launcher's side of `agent.sock`. Runs in the event loop of the host process."""

    def __init__(self, folder: Path, pids: Mapping[int, int], num_places: int) -> None:
        """`pids` by local rank; a place without one has no worker from the start."""
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self.is_over = asyncio.Event()
        """Set when the agent says that the job is over."""
        self.is_empty = asyncio.Event()
        """Set when no worker is left."""
        self._residents = {rank: Resident(rank, pids.get(rank, 0)) for rank in range(num_places)}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for resident in self._residents.values():
            if resident.pid == 0:
                resident.exit_code, resident.error = UNKNOWN_EXIT, "this host has fewer workers than others"
            else:
                self._watch(resident)

    async def attach(self) -> None:
        """Connect to the agent and tell it who is here. Raises OSError when it does not come up."""
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
        self._run(self._listen(reader))

    def leave(self, local_rank: int) -> None:
        """A worker's connection has ended: its process has, or its wrapped call."""
        self._run(self._note_left(self._residents[local_rank]))

    async def close(self) -> None:
        """Hang up, and leave the processes alone."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        for resident in self._residents.values():
            self._forget(resident)

    # ------------------------------------------------------------------------------------------------------ processes

    def _watch(self, resident: Resident) -> None:
        try:
            resident.pidfd = os.pidfd_open(resident.pid)
        except ProcessLookupError:
            self._note_end(resident)
            return
        except OSError as error:
            # An old kernel: the end of its connection has to do.
            logger.debug("process cannot be watched: pid=%d error=%s", resident.pid, error)
            return
        self._loop.add_reader(resident.pidfd, self._note_end, resident)

    def _note_end(self, resident: Resident) -> None:
        exit_code = _exit_code(resident.pid)
        self._lose(resident, exit_code, "" if exit_code != UNKNOWN_EXIT else "the process ended")

    async def _note_left(self, resident: Resident) -> None:
        await asyncio.sleep(_REAP_S if resident.pidfd >= 0 else 0.0)
        self._lose(resident, UNKNOWN_EXIT, "left the wrapped function")

    def _lose(self, resident: Resident, exit_code: int, error: str) -> None:
        self._forget(resident)
        if resident.exit_code is not None:
            return
        resident.exit_code, resident.error = exit_code, error
        logger.info("worker gone: local_rank=%d pid=%d code=%d", resident.local_rank, resident.pid, exit_code)
        self._tell()
        if all(other.exit_code is not None for other in self._residents.values()):
            self.is_empty.set()

    def _forget(self, resident: Resident) -> None:
        if resident.pidfd >= 0:
            self._loop.remove_reader(resident.pidfd)
            os.close(resident.pidfd)
            resident.pidfd = -1

    def _end(self, order: End) -> None:
        """Only the process itself: its group may be that of the launcher."""
        resident = self._residents.get(order.local_rank)
        if resident is None or resident.exit_code is not None or order.incarnation != 0:
            return
        logger.warning("worker is ended: local_rank=%d pid=%d", resident.local_rank, resident.pid)
        # In this order: a process that is stopped ends as it wakes, and does not go on for a moment.
        self._signal(resident, signal.SIGTERM)
        self._signal(resident, signal.SIGCONT)
        self._run(self._kill(resident, max(order.grace_s, 0.0)))

    def _look_into(self, local_rank: int, number: int) -> None:
        resident = self._residents.get(local_rank)
        if resident is not None and resident.exit_code is None:
            request_stack(resident.pid, number, stack_path(self._folder, local_rank))

    def _inspect(self, local_rank: int) -> None:
        """Note how a process ends whose main thread has ended: before its memory is freed, and somebody reaps it."""
        resident = self._residents.get(local_rank)
        if resident is None or resident.exit_code is not None:
            return
        status = exit_status(resident.pid)
        if status is not None:
            self._lose(resident, os.waitstatus_to_exitcode(status), "")

    async def _kill(self, resident: Resident, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self._signal(resident, signal.SIGKILL)

    @staticmethod
    def _signal(resident: Resident, number: int) -> None:
        if resident.exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if resident.pidfd >= 0:
                signal.pidfd_send_signal(resident.pidfd, number)
            else:
                os.kill(resident.pid, number)

    # ---------------------------------------------------------------------------------------------------------- agent

    def _tell(self) -> None:
        if self._writer is not None:
            states = tuple(resident.state for resident in self._residents.values())
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
                # Its place stays empty: there is nobody here who could start the script again.
                logger.debug("not started again: local_rank=%d", local_rank)
            case End():
                self._end(order)
            case DumpStack(local_rank=local_rank, signal=number):
                self._look_into(local_rank, number)
            case Inspect(local_rank=local_rank):
                self._inspect(local_rank)
            case Shutdown(message=message):
                logger.info("the job is over: %s", message)
                self.is_over.set()
            case _:
                assert_never(order)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended and was not reaped yet, -N for signal N, else UNKNOWN_EXIT."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[_STATE] == "Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        pass
    return UNKNOWN_EXIT
