"""The host process: gathers the workers of this machine, finds the root, and is their agent until they have gone.

    GATHERING ──a worker of rank 0──> starts the root
        │ reports its workers to the root at each change
        └──PodAssignment──> SERVING (agent and watch) ──job over, or no worker left──> end
        └──Failed, or time over──> tells the workers, end

All in one event loop. The folder's lock, which was inherited, lives as long as this process.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from unbroken.agent.config import AgentConfig, MemoryConfig
from unbroken.agent.shell import Agent
from unbroken.network.token import write_private
from unbroken.run.memory_folder import memory_folder, read_size
from unbroken.standalone.lines import read_message, write_message
from unbroken.standalone.local_ranks import local_places
from unbroken.standalone.messages import (
    ASSIGNMENT_NAME,
    MAX_LINE_BYTES,
    SOCKET_NAME,
    Attendance,
    Busy,
    Failed,
    Placement,
    PodAssignment,
    Register,
    StandaloneConfig,
    Waiting,
)
from unbroken.standalone.root_search import RootSearch
from unbroken.standalone.worker_watch import WorkerWatch
from unbroken.tasks import Tasks
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import InputError, WireError

logger = logging.getLogger(__name__)

MEMORY = "UNBROKEN_MEMORY"
"""Variable of the user: how much checkpoints in memory may take on each host, such as 2Gi."""
_REGISTER_TIMEOUT_S = 10.0
_LAST_MESSAGE_S = 2.0
_RELEASE_S = 10.0
"""How long workers may take to learn that the job is over."""
_START_TIMEOUT_S = 60.0
_CHECK_S = 0.5
_ROOT_AWAY_S = 1.5
_ROOT_RETRY_S = 5.0


@dataclass
class RegisteredWorker:
    """One worker that has registered."""

    register: Register
    writer: asyncio.StreamWriter


class Host:
    """One host process."""

    def __init__(self, folder: Path, config: StandaloneConfig, memory: str = "") -> None:
        """`memory` is the size that checkpoints in memory may take on this host; "" for none."""
        self._memory = memory
        self._folder = folder
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._uid = secrets.token_hex(8)
        self._workers: dict[int, RegisteredWorker] = {}
        """By rank in the environment."""
        self._places: dict[int, int] = {}
        """Local rank by rank in the environment, once the job has formed."""
        self._watch: WorkerWatch | None = None
        self._search = RootSearch(config)
        self._has_root = False
        self._waiting_for = Waiting("no worker has registered")
        self._failure: asyncio.Future[Failed] = self._loop.create_future()
        self._tasks = Tasks(self._on_failure)
        self._pod: Agent | None = None

    async def run(self) -> None:
        """Run until no worker of this host needs it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._folder / SOCKET_NAME))
        listener.listen(256)
        listener.setblocking(False)
        server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE_BYTES)
        try:
            assignment = await self._form()
            if assignment is not None:
                await self._serve(assignment)
        finally:
            server.close()
            await self._tasks.stop()

    # ------------------------------------------------------------------------------------------------------ gathering

    async def _form(self) -> PodAssignment | None:
        """Return the root's assignment; None after the workers were told why there is none."""
        searching = asyncio.create_task(self._search.run(self._present, self._announce))
        done, _ = await asyncio.wait(
            (searching, self._failure), timeout=self._config.limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if searching in done and searching.exception() is None:
            answer = searching.result()
            if isinstance(answer, PodAssignment) and self._workers:
                return answer
            failed = answer if isinstance(answer, Failed) else Failed("all workers of this host have ended")
        elif searching in done:
            error = searching.exception()
            logger.error("search for the root failed", exc_info=error)
            failed = Failed(f"{type(error).__name__}: {error}")
        elif done:
            failed = self._failure.result()
        else:
            failed = Failed(f"it has not formed within {self._config.limit_s:.0f} s: {self._waiting_for.message}", True)
        searching.cancel()
        await asyncio.gather(searching, return_exceptions=True)
        logger.error("no job: %s", failed.message)
        self._send_all(failed)
        await asyncio.sleep(_LAST_MESSAGE_S if self._workers else 0.0)
        return None

    def _present(self) -> Attendance | None:
        """Return the workers of this host, for the root; None while there are none."""
        if not self._workers:
            return None
        ranks = sorted(self._workers)
        first = self._workers[ranks[0]].register
        places = local_places({rank: self._workers[rank].register.local_rank for rank in ranks})
        return Attendance(
            proof="",
            uid=self._uid,
            node=socket.gethostname(),
            ranks=tuple(ranks),
            num_places=max(places.values()) + 1,
            is_owner=self._has_root,
            timeouts=first.timeouts,
            no_progress_limit=first.no_progress_limit,
        )

    def _announce(self, message: str) -> None:
        """Tell the workers what the job waits for."""
        if message != self._waiting_for.message:
            self._waiting_for = Waiting(message)
            self._send_all(self._waiting_for)

    def _send_all(self, message: Waiting | Failed) -> None:
        for worker in self._workers.values():
            write_message(worker.writer, message)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.adopt("connection of a worker", asyncio.current_task())
        try:
            register = await read_message(reader, Register, _REGISTER_TIMEOUT_S)
            if register is not None:
                await self._serve_worker(RegisteredWorker(register, writer), reader)
        except (WireError, asyncio.TimeoutError) as error:
            logger.warning("worker refused: %s", str(error) or "said nothing")
        except (ConnectionError, asyncio.CancelledError):
            pass
        except Exception:
            logger.exception("worker's connection failed")
        finally:
            writer.close()

    async def _serve_worker(self, worker: RegisteredWorker, reader: asyncio.StreamReader) -> None:
        rank = worker.register.rank
        refusal = self._refusal(rank)
        if refusal is not None:
            write_message(worker.writer, refusal)
            return
        self._workers[rank] = worker
        if self._config.is_first or (self._config.is_first is None and rank == 0):
            self._start_root()
        self._search.note_change()
        write_message(worker.writer, self._waiting_for)
        try:
            # It sends nothing more: the read returns at the end of the connection.
            await reader.read()
        finally:
            self._leave(worker)

    def _refusal(self, rank: int) -> Busy | None:
        if self._watch is not None or self._failure.done():
            return Busy("another job of this name runs on this machine, or is about to end")
        if rank in self._workers:
            pid = self._workers[rank].register.pid
            return Busy(f"another worker says that it is rank {rank}: process {pid}")
        return None

    def _leave(self, worker: RegisteredWorker) -> None:
        rank = worker.register.rank
        if self._workers.get(rank) is worker:
            del self._workers[rank]
        if self._watch is not None:
            self._watch.leave(self._places[rank])
            return
        self._search.note_change()
        if not self._workers and not self._failure.done():
            self._failure.set_result(Failed("all workers of this host have ended"))

    # ----------------------------------------------------------------------------------------------------------- root

    def _start_root(self) -> None:
        if not self._has_root:
            self._has_root = True
            self._tasks.start("start of the root", self._run_root())

    async def _run_root(self) -> None:
        """Start the root; fail the job if it does not come up."""
        try:
            port = await asyncio.to_thread(_start_root, self._folder)
        except InputError as error:
            if not self._failure.done():
                self._failure.set_result(Failed(str(error)))
            return
        self._search.root_port = port
        self._search.note_change()

    def _on_failure(self, what: str, error: BaseException) -> None:
        """End with a reason: the job before it has formed, this host's part of it later."""
        message = f"{what}: {type(error).__name__}: {error}"
        if self._pod is not None:
            self._pod.give_up(message)
        elif not self._failure.done():
            self._failure.set_result(Failed(message))

    # -------------------------------------------------------------------------------------------------------- serving

    async def _serve(self, assignment: PodAssignment) -> None:
        self._places = local_places({rank: worker.register.local_rank for rank, worker in self._workers.items()})
        num_places = assignment.settings.ranks_per_pod
        pids = {self._places[rank]: worker.register.pid for rank, worker in self._workers.items()}
        watch = self._watch = WorkerWatch(self._folder, pids, num_places)
        if self._has_root:
            write_private(self._folder / ASSIGNMENT_NAME, wire.encode(assignment))
        with contextlib.ExitStack() as stack:
            try:
                config = self._agent_config(assignment, self._memory_config(stack))
            except InputError as error:
                logger.error("job not started: %s", error)
                self._send_all(Failed(str(error)))
                await asyncio.sleep(_LAST_MESSAGE_S)
                await watch.close()
                return
            await self._serve_as(config, watch, assignment)

    async def _serve_as(self, config: AgentConfig, watch: WorkerWatch, assignment: PodAssignment) -> None:
        num_places = assignment.settings.ranks_per_pod
        pod = self._pod = Agent(config)
        agent = asyncio.create_task(pod.run())
        limit_s = assignment.settings.timeouts.barrier_s
        self._tasks.start("watch on the rendezvous", self._keep_in_touch(pod, limit_s))
        try:
            await watch.attach()
            is_first = self._has_root
            for rank, worker in self._workers.items():
                write_message(
                    worker.writer, Placement(self._places[rank], num_places, self._address(assignment), is_first)
                )
            await self._until_over(watch, agent)
        except (InputError, OSError) as error:
            logger.error("agent not started: %s", error)
            self._send_all(Failed(f"agent: {error}"))
            await asyncio.sleep(_LAST_MESSAGE_S)
        finally:
            await watch.close()
            if not agent.done():
                # As if the pod were told to end: its last report goes out first.
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait((agent,), timeout=_RELEASE_S)
            agent.cancel()
            try:
                await agent
            except asyncio.CancelledError:
                pass
            except Exception:
                logger.exception("agent failed: pod=%s", assignment.pod)

    async def _keep_in_touch(self, agent: Agent, limit_s: float) -> None:
        """Restart a killed root; release the workers when no rendezvous answers for too long."""
        seen_s, next_start_s = self._loop.time(), 0.0
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = self._loop.time()
            away_s = now_s - seen_s
            if agent.is_in_touch:
                seen_s = now_s
            elif away_s >= limit_s:
                agent.give_up(f"no rendezvous was reached for {away_s:.0f} s (barrier_timeout)")
                return
            elif self._has_root and agent.was_in_touch and away_s >= _ROOT_AWAY_S and now_s >= next_start_s:
                next_start_s = now_s + _ROOT_RETRY_S
                logger.warning("the root does not answer: started again")
                try:
                    await asyncio.to_thread(_start_root, self._folder)
                except InputError as error:
                    logger.warning("root not started: %s", error)

    async def _until_over(self, watch: WorkerWatch, agent: "asyncio.Task[int]") -> None:
        over = asyncio.create_task(watch.is_over.wait())
        empty = asyncio.create_task(watch.is_empty.wait())
        await asyncio.wait((over, empty, agent), return_when=asyncio.FIRST_COMPLETED)
        if over.done() and not agent.done():
            # Each worker hangs up once it knows; what it does after its call is its own affair.
            await asyncio.wait((empty, agent), timeout=_RELEASE_S, return_when=asyncio.FIRST_COMPLETED)
        for waiter in (over, empty):
            waiter.cancel()

    def _address(self, assignment: PodAssignment) -> str:
        """Return the address at which the other hosts reach this one; the user's setting wins."""
        return self._config.address or assignment.address

    def _memory_config(self, stack: contextlib.ExitStack) -> MemoryConfig | None:
        """Make this host's memory for checkpoints, until the stack is left. Raises InputError."""
        limit_bytes = read_size(MEMORY, self._memory) if self._memory else 0
        root = stack.enter_context(memory_folder(MEMORY, bool(self._memory)))
        return None if root is None else MemoryConfig(root, limit_bytes)

    def _agent_config(self, assignment: PodAssignment, memory: MemoryConfig | None) -> AgentConfig:
        token_file = self._folder / "token"
        write_private(token_file, assignment.token)
        host = self._config.master_host
        return AgentConfig(
            settings=assignment.settings,
            token_file=token_file,
            rendezvous_url=f"http://{f'[{host}]' if ':' in host else host}:{assignment.port}",
            authority_file=None,
            metrics_listen=None,
            pod=assignment.pod,
            pod_uid=self._uid,
            node=os.uname().nodename,
            pod_ip=self._address(assignment),
            domains=(),
            directory=self._folder,
            private_directory=self._folder,
            waits_for_workers=True,
            memory=memory,
        )


def _start_root(folder: Path) -> int:
    """Start the root and return its port. Raises InputError with the root's own message when it does not start."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "unbroken.standalone", "root", str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"root did not start: {error}") from error
    if done.returncode != 0 or not done.stdout.strip().isdecimal():
        raise InputError(done.stderr.strip() or f"root: it ended with code {done.returncode}")
    return int(done.stdout)
