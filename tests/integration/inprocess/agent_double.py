"""A stand-in for launcher, agent and coordinator of one job on this machine: one folder, N workers, real sockets.

The decisions are the simplest that are right: a fault or a lost worker interrupts, all living workers READY make a
plan, all active COMPLETED release. It runs in a thread of the test process.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import wait_until

from unbroken_core.pod import stamps
from unbroken_core.pod.pod_messages import Attach, Enter, FromWorker, Leave, Release, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

from .forked import ZYGOTE, Zygote, request

T = TypeVar("T")
WORKLOADS = "tests.integration.inprocess.workloads"
LIMIT_S = 100.0
STOP_S = 5.0


@dataclass
class Worker:
    """One place."""

    local_rank: int
    incarnation: int = 0
    pid: int = 0
    exit_code: int | None = None
    report: WorkerReport | None = None
    writer: asyncio.StreamWriter | None = None
    rank: int | None = None

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def phase(self) -> WorkerPhase:
        if not self.is_alive:
            return WorkerPhase.GONE
        return WorkerPhase.STARTING if self.report is None else self.report.phase


@dataclass
class Policy:
    """What the double does on its own."""

    num_active: int
    num_workers: int
    does_respawn: bool = False
    num_passed_over: int = 0
    """So many of the first iterations are interrupted together with their plan."""
    does_interrupt: bool = True
    """False: the test says leave()."""
    soft_s: float | None = None
    """Interrupt the first iteration when a worker in the function has a MAIN stamp older than this; the time before the
    event `hangs` does not count, in which a busy machine may be slow to bring the workers together."""
    alone_s: float | None = None
    """Workers leave when the double is away for so long."""
    layouts: tuple[tuple[int, ...], ...] = ()
    """Local ranks of the active workers of each iteration, in the order of their ranks; the last one stays. Empty: all
    that live, in the order of their previous ranks."""
    does_renew: bool = False
    """Whether a fault ends every process, so that each iteration runs in new ones."""
    hard_s: float | None = None
    """End a worker whose stamp is older than this once all others have left the interrupted iteration, however long a
    busy machine takes over that."""


@dataclass
class Event:
    """One line that a workload wrote."""

    name: str
    rank: int
    values: dict[str, Any] = field(default_factory=dict)


class AgentDouble:
    """Start it as a context manager; `run` starts the workers and returns when all have ended."""

    def __init__(
        self,
        folder: Path,
        function: str,
        policy: Policy,
        variables: dict[str, str] | None = None,
        forks_from: Zygote = ZYGOTE,
    ) -> None:
        self.folder = folder
        self.policy = policy
        self.function = function
        self.variables = variables or {}
        self._forks_from = forks_from
        self.workers = {rank: Worker(rank) for rank in range(policy.num_workers)}
        self.iteration = -1
        self.phase = JobPhase.FORMING
        self.reports: list[tuple[int, WorkerReport]] = []
        self.leaves: list[Leave] = []
        self.recovery_s: list[float] = []
        self._interrupted_s = 0.0
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-double", daemon=True)
        self._zygote: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._ended = threading.Event()

    def __enter__(self) -> "AgentDouble":
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.call(self._stop())
        if kind is not None:
            # For people: pytest shows it beside the failure.
            print(self.output())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    # ---------------------------------------------------------------------------------------------- for tests

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the double's loop and return its result."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(LIMIT_S)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until the condition holds."""
        wait_until(condition, what, limit_s, self.describe)

    def wait_for_end(self, limit_s: float = LIMIT_S) -> dict[int, int | None]:
        """Wait until every worker has ended; return exit codes by local rank."""
        # A copy: the double's thread changes it meanwhile.
        self.wait_for(lambda: not any(worker.is_alive for worker in list(self.workers.values())), "all ended", limit_s)
        return {rank: worker.exit_code for rank, worker in self.workers.items()}

    def wait_for_event(self, name: str, count: int = 1, limit_s: float = LIMIT_S) -> list[Event]:
        """Wait for so many events of this name."""
        self.wait_for(lambda: len(self.events(name)) >= count, f"{count} x {name}", limit_s)
        return self.events(name)

    def events(self, name: str = "") -> list[Event]:
        """Return what the workloads wrote, in order."""
        path = self.folder / "events"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [Event(line["name"], line["rank"], line) for line in lines if name in ("", line["name"])]

    def faults(self) -> list[tuple[int, Cause]]:
        """Return (local rank, cause) of every fault reported, in that order.

        Behind the first there may be consequences: what workers saw of a lost peer before the order to leave came.
        """
        return [(rank, report.fault.cause) for rank, report in self.reports if report.fault is not None]

    def leave(self, cause: Cause = Cause.SOFT_TIMEOUT, rank: int | None = None, detail: str = "test") -> None:
        """Interrupt now."""
        self.call(self._interrupt(cause, rank, detail))

    def kill(self, local_rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        os.kill(self.workers[local_rank].pid, number)

    def break_connections(self, *, does_come_back: bool = True) -> None:
        """Be away, as an agent that restarts is."""

        async def go() -> None:
            for worker in self.workers.values():
                if worker.writer is not None:
                    worker.writer.close()
                    worker.writer = None
            if self._server is not None:
                self._server.close()
            (self.folder / "agent.sock").unlink(missing_ok=True)
            if does_come_back:
                await self._listen()

        self.call(go())

    def come_back(self) -> None:
        """Listen again."""
        self.call(self._listen())

    def output(self) -> str:
        """Return what the workers have written, all together."""
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def describe(self) -> str:
        """Say what is the matter."""
        phases = {rank: (worker.phase.value, worker.exit_code) for rank, worker in list(self.workers.items())}
        return f"phase={self.phase} iteration={self.iteration} workers={phases} events={self.events()[-8:]}"

    # ---------------------------------------------------------------------------------------------- processes

    async def _start(self) -> None:
        page = stamps.pack_header(self.policy.num_workers).ljust(stamps.page_bytes(self.policy.num_workers), b"\0")
        (self.folder / "stamps").write_bytes(page)
        await self._listen()
        reader, self._zygote = await asyncio.open_unix_connection(str(self._forks_from.address))
        self._tasks.append(asyncio.create_task(self._read_zygote(reader)))
        for worker in self.workers.values():
            self._spawn(worker)
        if self.policy.soft_s is not None:
            self._tasks.append(asyncio.create_task(self._watch_stamps(self.policy.soft_s)))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for worker in self.workers.values():
            if worker.writer is not None:
                worker.writer.close()
            if worker.is_alive and worker.pid:
                _end(worker)
        if self._connections:
            await asyncio.wait(self._connections, timeout=STOP_S)
        if self._zygote is not None:
            self._zygote.close()
            await self._zygote.wait_closed()

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.folder / "agent.sock"))

    def _spawn(self, worker: Worker) -> None:
        if self._zygote is None:
            return
        environment = {
            **os.environ,
            "UNBROKEN_DIR": str(self.folder),
            "UNBROKEN_LOCAL_RANK": str(worker.local_rank),
            "UNBROKEN_INCARNATION": str(worker.incarnation),
            "UNBROKEN_POD_IP": "127.0.0.1",
            "LOCAL_RANK": str(worker.local_rank),
            "LOCAL_WORLD_SIZE": str(self.policy.num_workers),
            "TEST_EVENTS": str(self.folder / "events"),
            **self.variables,
        }
        argv = ("-m", WORKLOADS, self.function)
        self._zygote.write(request(worker.local_rank, argv, environment, self.folder / "output"))

    async def _read_zygote(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            message = json.loads(line)
            worker = self.workers.get(message["id"])
            if worker is None:
                continue
            if "pid" in message:
                worker.pid = message["pid"]
                continue
            worker.exit_code = message["exit_code"]
            await self._lose(worker)

    async def _lose(self, worker: Worker) -> None:
        code = worker.exit_code or 0
        if self.phase in (JobPhase.COMPLETE, JobPhase.FAILED):
            return
        if self.policy.does_respawn:
            self.workers[worker.local_rank] = fresh = Worker(worker.local_rank, worker.incarnation + 1)
            self._spawn(fresh)
        else:
            del self.workers[worker.local_rank]
            self.workers[worker.local_rank + 1000] = worker
        cause = Cause.PROCESS_SIGNAL if code < 0 else Cause.PROCESS_EXIT
        if self.policy.does_interrupt and self.phase in (JobPhase.RUNNING, JobPhase.PLANNED):
            await self._interrupt(cause, worker.rank, f"exit code {code}")
        else:
            self._decide()

    # ---------------------------------------------------------------------------------------------- messages

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: Worker | None = None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            async for line in reader:
                message = wire.decode(line, FromWorker)
                if isinstance(message, Attach):
                    worker = self.workers[message.local_rank]
                    assert (message.pid, message.incarnation) == (worker.pid, worker.incarnation)
                    worker.writer = writer
                    if self.phase is JobPhase.INTERRUPTED and worker.rank is not None:
                        # It was away when the others were told.
                        self._send(worker, self.leaves[-1])
                    continue
                assert worker is not None
                self.reports.append((worker.local_rank, message))
                worker.report = message
                if message.fault is not None and self.policy.does_interrupt:
                    await self._interrupt(message.fault.cause, worker.rank, message.fault.detail)
                self._decide()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if worker is not None and worker.writer is writer:
                worker.writer = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _send(self, worker: Worker, *messages: object) -> None:
        if worker.writer is not None:
            worker.writer.write(b"".join(wire.encode(message).encode() + b"\n" for message in messages))

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    async def _interrupt(self, cause: Cause, rank: int | None, detail: str) -> None:
        if self.phase not in (JobPhase.RUNNING, JobPhase.PLANNED):
            return
        self._interrupted_s = time.monotonic()
        self.phase = JobPhase.INTERRUPTED
        leave = Leave(self.iteration, cause, rank, detail)
        self.leaves.append(leave)
        for worker in self._living():
            self._send(worker, leave)
            if self.policy.does_renew:
                _end(worker)
        self._decide()

    def _decide(self) -> None:
        living = self._living()
        if self.phase in (JobPhase.FORMING, JobPhase.INTERRUPTED):
            are_there = self.iteration >= 0 or len(living) == self.policy.num_workers
            if living and are_there and all(map(self._is_ready, living)):
                self._plan(living)
        elif self.phase is JobPhase.PLANNED:
            if all(worker.phase is not WorkerPhase.READY for worker in living if worker.rank is not None):
                self.phase = JobPhase.RUNNING
                self._decide()
        elif self.phase is JobPhase.RUNNING and all(
            worker.phase is WorkerPhase.COMPLETED for worker in living if worker.rank is not None
        ):
            self.release(JobPhase.COMPLETE)

    def _is_ready(self, worker: Worker) -> bool:
        report = worker.report
        if report is None or report.phase is not WorkerPhase.READY:
            return False
        return report.iteration >= self.iteration or worker.rank is None

    def _plan(self, living: list[Worker]) -> None:
        self.phase = JobPhase.PLANNED
        self.iteration += 1
        if self.iteration:
            self.recovery_s.append(time.monotonic() - self._interrupted_s)
        active = self._choose(living)
        for worker in living:
            worker.rank = None
        for rank, worker in enumerate(active):
            worker.rank = rank
        master = active[0].report
        assert master is not None
        is_passed_over = self.iteration < self.policy.num_passed_over
        for worker in living:
            plan = Enter(
                term=1,
                iteration=self.iteration,
                rank=worker.rank,
                world_size=len(active),
                master_host=master.host,
                master_port=master.port,
                spare_ranks=len(living) - len(active),
                alone_s=self.policy.alone_s,
            )
            self._send(worker, plan, *([Leave(self.iteration, Cause.POD_LOST, None, "test")] if is_passed_over else []))
        if is_passed_over:
            self.phase = JobPhase.INTERRUPTED

    def _choose(self, living: list[Worker]) -> list[Worker]:
        """Return the active workers of the next iteration, in the order of their ranks."""
        layouts = self.policy.layouts
        if layouts:
            return [self.workers[local_rank] for local_rank in layouts[min(self.iteration, len(layouts) - 1)]]
        active = sorted(living, key=lambda worker: (worker.rank is None, worker.rank, worker.local_rank))
        return active[: self.policy.num_active]

    def release(self, outcome: JobPhase, message: str = "done") -> None:
        """Let all workers go; call it in the loop."""
        self.phase = outcome
        for worker in self._living():
            self._send(worker, Release(outcome, message))

    # ---------------------------------------------------------------------------------------------- stamps

    async def _watch_stamps(self, soft_s: float) -> None:
        # A look now and then, at a file that nobody announces; the double's end, which the test sees to, ends it.
        while not self.events("hangs"):
            await asyncio.sleep(0.05)
        began_ns = time.monotonic_ns()
        while self.iteration <= 0:
            await asyncio.sleep(0.05)
            page = (self.folder / "stamps").read_bytes()
            now_ns = time.monotonic_ns()
            for worker in self._living():
                slot = stamps.unpack_slot(page, worker.local_rank)
                if slot.pid != worker.pid:
                    continue
                if not slot.flags & stamps.FLAG_IN_FUNCTION or slot.flags & stamps.FLAG_PROTECTION_OFF:
                    continue
                age_s = (now_ns - max(min(slot.main_ns, slot.alive_ns), began_ns)) / 1e9
                if self.phase is JobPhase.RUNNING and age_s > soft_s:
                    await self._interrupt(Cause.SOFT_TIMEOUT, worker.rank, f"no progress for {age_s:.1f} s")
                elif self.policy.hard_s is not None and age_s > self.policy.hard_s and self._is_last_inside(worker):
                    _end(worker)

    def _is_last_inside(self, worker: Worker) -> bool:
        return all(self._is_ready(other) for other in self._living() if other is not worker)


def _end(worker: Worker) -> None:
    """Kill a worker, also one that is stopped; it may have ended, which is told a moment later."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGCONT)
        os.kill(worker.pid, signal.SIGKILL)
