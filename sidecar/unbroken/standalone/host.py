"""The host process: gathers the workers of this machine, finds the root, and is their agent until they have gone.

    GATHERING ──a worker of rank 0──> starts the root
        │ tells the root at each change who is here
        └──Deal──> SERVING (agent and keeper) ──job over, or no worker left──> end
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
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from unbroken.agent.config import AgentConfig
from unbroken.agent.shell import Agent
from unbroken.standalone.keeper import Keeper
from unbroken.standalone.lines import read_message, write_message
from unbroken.standalone.places import local_places
from unbroken.standalone.search import RootSearch
from unbroken.standalone.words import (
    DEAL_NAME,
    MAX_LINE_BYTES,
    SOCKET_NAME,
    Busy,
    Deal,
    Failed,
    HomeConfig,
    Present,
    Register,
    Seat,
    Waiting,
)
from unbroken_core import wire
from unbroken_core.errors import InputError, WireError

logger = logging.getLogger(__name__)

_REGISTER_TIMEOUT_S = 10.0
_LAST_WORD_S = 2.0
_RELEASE_S = 10.0
"""So long workers may take to hear that the job is over."""
_START_TIMEOUT_S = 60.0
_CHECK_S = 0.5
_ROOT_AWAY_S = 1.5
_ROOT_RETRY_S = 5.0


@dataclass
class Guest:
    """One worker that has registered."""

    register: Register
    writer: asyncio.StreamWriter


class Host:
    """One host process."""

    def __init__(self, folder: Path, config: HomeConfig) -> None:
        self._folder = folder
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._uid = secrets.token_hex(8)
        self._guests: dict[int, Guest] = {}
        """By rank of the environment."""
        self._places: dict[int, int] = {}
        """Local rank by rank of the environment, once they are dealt out."""
        self._keeper: Keeper | None = None
        self._search = RootSearch(config)
        self._has_root = False
        self._said = Waiting("no worker has registered")
        self._failure: asyncio.Future[Failed] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until no worker of this host needs it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._folder / SOCKET_NAME))
        listener.listen(256)
        listener.setblocking(False)
        server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE_BYTES)
        try:
            deal = await self._form()
            if deal is not None:
                await self._serve(deal)
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ gathering

    async def _form(self) -> Deal | None:
        """Return what the root deals out; None after the workers were told why there is nothing."""
        searching = asyncio.create_task(self._search.run(self._present, self._say))
        done, _ = await asyncio.wait(
            (searching, self._failure), timeout=self._config.limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if searching in done and searching.exception() is None:
            answer = searching.result()
            if isinstance(answer, Deal) and self._guests:
                return answer
            failed = answer if isinstance(answer, Failed) else Failed("all workers of this host have ended")
        elif searching in done:
            error = searching.exception()
            logger.error("search for the root failed", exc_info=error)
            failed = Failed(f"{type(error).__name__}: {error}")
        elif done:
            failed = self._failure.result()
        else:
            failed = Failed(f"it has not formed within {self._config.limit_s:.0f} s: {self._said.message}", True)
        searching.cancel()
        await asyncio.gather(searching, return_exceptions=True)
        logger.error("no job: %s", failed.message)
        self._tell(failed)
        await asyncio.sleep(_LAST_WORD_S if self._guests else 0.0)
        return None

    def _present(self) -> Present | None:
        """Return who is here, for the root; None when nobody is."""
        if not self._guests:
            return None
        ranks = sorted(self._guests)
        places = local_places({rank: self._guests[rank].register.local_rank for rank in ranks})
        return Present(
            proof="",
            uid=self._uid,
            node=socket.gethostname(),
            ranks=tuple(ranks),
            num_places=max(places.values()) + 1,
            is_owner=self._has_root,
            timeouts=self._guests[ranks[0]].register.timeouts,
        )

    def _say(self, message: str) -> None:
        """Let the workers know what is waited for."""
        if message != self._said.message:
            self._said = Waiting(message)
            self._tell(self._said)

    def _tell(self, message: Waiting | Failed) -> None:
        for guest in self._guests.values():
            write_message(guest.writer, message)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            register = await read_message(reader, Register, _REGISTER_TIMEOUT_S)
            if register is not None:
                await self._host(Guest(register, writer), reader)
        except (WireError, asyncio.TimeoutError) as error:
            logger.warning("worker refused: %s", str(error) or "said nothing")
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _host(self, guest: Guest, reader: asyncio.StreamReader) -> None:
        rank = guest.register.rank
        refusal = self._refusal(rank)
        if refusal is not None:
            write_message(guest.writer, refusal)
            return
        self._guests[rank] = guest
        if self._config.is_first or (self._config.is_first is None and rank == 0):
            self._start_root()
        self._search.note_change()
        write_message(guest.writer, self._said)
        try:
            # It says nothing more: what comes is the end.
            await reader.read()
        finally:
            self._leave(guest)

    def _refusal(self, rank: int) -> Busy | None:
        if self._keeper is not None or self._failure.done():
            return Busy("another job of this name runs on this machine, or is about to end")
        if rank in self._guests:
            pid = self._guests[rank].register.pid
            return Busy(f"another worker says that it is rank {rank}: process {pid}")
        return None

    def _leave(self, guest: Guest) -> None:
        rank = guest.register.rank
        if self._guests.get(rank) is guest:
            del self._guests[rank]
        if self._keeper is not None:
            self._keeper.leave(self._places[rank])
            return
        self._search.note_change()
        if not self._guests and not self._failure.done():
            self._failure.set_result(Failed("all workers of this host have ended"))

    # ----------------------------------------------------------------------------------------------------------- root

    def _start_root(self) -> None:
        if not self._has_root:
            self._has_root = True
            self._keep(self._run_root())

    async def _run_root(self) -> None:
        """Start the root; tell the workers when it does not come up."""
        try:
            port = await asyncio.to_thread(_start_root, self._folder)
        except InputError as error:
            if not self._failure.done():
                self._failure.set_result(Failed(str(error)))
            return
        self._search.root_port = port
        self._search.note_change()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------------------------------------------------- serving

    async def _serve(self, deal: Deal) -> None:
        self._places = local_places({rank: guest.register.local_rank for rank, guest in self._guests.items()})
        num_places = deal.settings.ranks_per_pod
        pids = {self._places[rank]: guest.register.pid for rank, guest in self._guests.items()}
        keeper = self._keeper = Keeper(self._folder, pids, num_places)
        if self._has_root:
            _write_private(self._folder / DEAL_NAME, wire.encode(deal))
        pod = Agent(self._agent_config(deal))
        agent = asyncio.create_task(pod.run())
        self._keep(self._keep_in_touch(pod, deal.settings.timeouts.barrier_s))
        try:
            await keeper.attach()
            is_first = self._has_root
            for rank, guest in self._guests.items():
                write_message(guest.writer, Seat(self._places[rank], num_places, self._address(deal), is_first))
            await self._until_over(keeper, agent)
        except (InputError, OSError) as error:
            logger.error("agent not started: %s", error)
            self._tell(Failed(f"agent: {error}"))
            await asyncio.sleep(_LAST_WORD_S)
        finally:
            await keeper.close()
            if not agent.done():
                # As if the pod were told to end: its last report goes out first.
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait((agent,), timeout=_RELEASE_S)
            agent.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await agent

    async def _keep_in_touch(self, agent: Agent, limit_s: float) -> None:
        """Start the root again when it was killed; let the workers go when nobody is there for too long."""
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

    async def _until_over(self, keeper: Keeper, agent: "asyncio.Task[int]") -> None:
        over = asyncio.create_task(keeper.is_over.wait())
        empty = asyncio.create_task(keeper.is_empty.wait())
        await asyncio.wait((over, empty, agent), return_when=asyncio.FIRST_COMPLETED)
        if over.done() and not agent.done():
            # Each worker hangs up once it has heard; what it does after its call is its own affair.
            await asyncio.wait((empty, agent), timeout=_RELEASE_S, return_when=asyncio.FIRST_COMPLETED)
        for waiter in (over, empty):
            waiter.cancel()

    def _address(self, deal: Deal) -> str:
        """Return where the other hosts reach this one: what the user says counts."""
        return self._config.address or deal.address

    def _agent_config(self, deal: Deal) -> AgentConfig:
        token_file = self._folder / "token"
        _write_private(token_file, deal.token)
        host = self._config.master_host
        return AgentConfig(
            settings=deal.settings,
            token_file=token_file,
            rendezvous_url=f"http://{f'[{host}]' if ':' in host else host}:{deal.port}",
            authority_file=None,
            metrics_listen=None,
            pod=deal.pod,
            pod_uid=self._uid,
            node=os.uname().nodename,
            pod_ip=self._address(deal),
            domains=(),
            directory=self._folder,
            waits_for_workers=True,
        )


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _start_root(folder: Path) -> int:
    """Return the port that it listens on. Raises InputError with what it says when it does not start."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "unbroken.standalone", "root", str(folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"root: want it to start, got: {error}") from error
    if done.returncode != 0 or not done.stdout.strip().isdecimal():
        raise InputError(done.stderr.strip() or f"root: it ended with code {done.returncode}")
    return int(done.stdout)
