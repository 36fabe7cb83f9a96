"""The root: waits until each worker of the job is on some host, assigns the pods, and is their rendezvous.

    FORMING ──all ranks present──> SERVING ──job over, all hosts have left, or no agent for LINGER_S──> end
       └──its owner has gone, or time over──> end

It accepts no host before its owner, the host that started it: so hosts of a job cannot meet at a root that an earlier
job has left behind. While it serves, it turns late hosts away. If it is killed, its owner starts another, which serves
at once.
"""

import asyncio
import functools
import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.network.addresses import address_to_listen_on, listen, listen_at, plain_address
from unbroken.network.connections import Acceptor, Connections, GuardedSite, http_runner, limits_of_api
from unbroken.network.refusals import Refusals
from unbroken.network.token import JobKeyFile, write_private
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import Service
from unbroken.standalone.lines import read_message, write_message
from unbroken.standalone.messages import (
    MAX_LINE_BYTES,
    Attendance,
    Busy,
    Challenge,
    Failed,
    PodAssignment,
    Proof,
    StandaloneConfig,
    Waiting,
    prove,
)
from unbroken.tasks import Tasks
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.settings import JobSettings, RungBudget, StragglerMode
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Rung

logger = logging.getLogger(__name__)

JOB_NAME = "inprocess"
LINGER_S = 12.0
"""How long the root waits without any agent: longer than an agent may be away before its pod is lost. It does not wait
when all hosts have said goodbye: they do not come back."""
FIRST_S = 60.0
"""How long it waits for the first agent, which connects once all workers of its host have imported torch."""
OWNER_S = 30.0
_AUTHENTICATE_TIMEOUT_S = 5.0
_SHUTDOWN_S = 1.0
_CHECK_S = 0.5
_RUNGS = (RungBudget(Rung.IN_PROCESS), RungBudget(Rung.POD), RungBudget(Rung.WORLD))
"""In standalone mode nothing can start a process or a job again."""


@dataclass
class RegisteredHost:
    """One connected host."""

    present: Attendance
    writer: asyncio.StreamWriter

    @property
    def own_address(self) -> str:
        """Address of this machine at which the host reached it."""
        return str(self.writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        """Address from which the host came."""
        return str(self.writer.get_extra_info("peername")[0])


def bind(master_host: str, ports: tuple[int, ...]) -> socket.socket:
    """Return a socket that listens on the first port that is free. Raises InputError when none is."""
    address = address_to_listen_on("MASTER_ADDR", master_host)
    errors = []
    for port in ports:
        try:
            return listen(address, port)
        except OSError as error:
            errors.append(f"{port}: {error.strerror}")
    raise InputError(
        f"ports {ports[0]} to {ports[-1]} on {master_host}: none is free for the job's root: "
        f"{'; '.join(errors)}. Set UNBROKEN_PORT, or store_kwargs={{'port': ...}}, to another first port"
    )


def settings_for(hosts: list[Attendance]) -> JobSettings:
    """Return the settings of the job that these hosts form, lowest rank first. Raises InputError."""
    return JobSettings(
        job=JOB_NAME,
        uid=secrets.token_hex(8),
        replicas=len(hosts),
        min_replicas=1,
        ranks_per_pod=max(host.num_places for host in hosts),
        min_ranks_per_pod=1,
        rungs=_RUNGS,
        # A script need not ping: only the very same fault again and again ends the job.
        no_progress_limit=hosts[0].no_progress_limit,
        timeouts=hosts[0].timeouts,
        # Nobody would be told.
        stragglers=StragglerMode.OFF,
    )


class Root:
    """One root process. All in one event loop."""

    def __init__(self, folder: Path, config: StandaloneConfig, listener: socket.socket) -> None:
        """`folder` is the root's own."""
        self._folder = folder
        self._config = config
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._hosts: dict[str, RegisteredHost] = {}
        self._owner: str | None = None
        self._formed: asyncio.Future[bool] = self._loop.create_future()
        """False if the owner has gone."""
        limits = replace(limits_of_api(config.world_size), max_head_bytes=None)
        self._connections = Connections(limits, Refusals())
        """Of hosts, and of strangers that try to be one."""
        self._tasks = Tasks(lambda _what, _error: None)
        """Of hosts that talk to it, which come again."""

    async def run(self) -> None:
        """Form the job, and run until it is over or all hosts have gone."""
        await self._listen_while(self._form())

    async def resume(self, assignment: PodAssignment, listener: socket.socket) -> None:
        """Continue for a killed root: the agents know everything else."""
        self._formed.set_result(True)
        note = functools.partial(logger.info, "resumed: port=%d", assignment.port)
        await self._listen_while(self._serve(assignment.settings, assignment.job_key, listener, note, LINGER_S))

    async def _form(self) -> None:
        await asyncio.wait((self._formed,), timeout=OWNER_S)
        if self._owner is not None:
            await asyncio.wait((self._formed,), timeout=self._config.limit_s)
        if self._formed.done() and self._formed.result():
            await self._assign_pods()
        else:
            logger.error("no job: %s", self._missing())

    async def _listen_while(self, work: Coroutine[None, None, None]) -> None:
        acceptor = Acceptor(self._listener, self._connections, self._conversation)
        try:
            await work
        finally:
            acceptor.close()
            self._connections.drop_strangers()
            await self._tasks.stop()

    # -------------------------------------------------------------------------------------------------------- forming

    def _conversation(self) -> asyncio.StreamReaderProtocol:
        """Return what serves one connection."""
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=MAX_LINE_BYTES), self._accept)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.adopt(f"host at {writer.get_extra_info('peername')}", asyncio.current_task())
        try:
            await self._converse(reader, writer)
        except (WireError, OSError, asyncio.TimeoutError) as error:
            logger.info("host refused: peer=%s error=%s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = await read_message(reader, Challenge, _AUTHENTICATE_TIMEOUT_S)
        if challenge is None:
            return
        nonce, key = secrets.token_hex(16), self._config.key
        write_message(writer, Proof(prove(key, "root", nonce, challenge.nonce), nonce))
        wanted = prove(key, "host", challenge.nonce, nonce)
        first = await read_message(reader, Attendance, _AUTHENTICATE_TIMEOUT_S)
        if first is None or not hmac.compare_digest(first.proof, wanted):
            return
        self._connections.admit(writer.transport)
        refusal = self._refusal(first)
        if refusal is not None:
            write_message(writer, refusal)
            return
        uid = first.uid
        try:
            present = first
            while present is not None:
                self._take(RegisteredHost(present, writer))
                present = await read_message(reader, Attendance)
        finally:
            self._drop(uid, writer)

    def _refusal(self, present: Attendance) -> Busy | None:
        if self._formed.done():
            return Busy(f"another job with this MASTER_PORT runs on {self._config.master_host}")
        if self._owner is None and not present.is_owner:
            return Busy("waits for rank 0's host")
        return None

    def _take(self, host: RegisteredHost) -> None:
        if self._formed.done():
            return
        if host.present.is_owner:
            self._owner = host.present.uid
        self._hosts[host.present.uid] = host
        hosts = [other.present for other in self._hosts.values()]
        ranks = [rank for present in hosts for rank in present.ranks]
        if len(ranks) == len(set(ranks)) == self._config.world_size:
            self._formed.set_result(True)
            return
        waiting = Waiting(self._missing())
        for other in self._hosts.values():
            write_message(other.writer, waiting)

    def _drop(self, uid: str, writer: asyncio.StreamWriter) -> None:
        host = self._hosts.get(uid)
        if host is None or host.writer is not writer or self._formed.done():
            return
        del self._hosts[uid]
        if uid == self._owner:
            self._formed.set_result(False)

    def _missing(self) -> str:
        """Return which workers the job waits for."""
        ranks = sorted(rank for host in self._hosts.values() for rank in host.present.ranks)
        size = self._config.world_size
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(ranks) < 1000 else []
        missing = [str(rank) for rank in range(size) if rank not in set(ranks)][:8]
        hosts = counted(len(self._hosts), "host")
        text = f"{len(ranks)} of {counted(size, 'worker')} called the wrapped function, on {hosts}"
        text += f"; missing ranks: {', '.join(missing)}" if missing else ""
        return text + (f"; ranks that are there twice: {twice[:8]}" if twice else "")

    # -------------------------------------------------------------------------------------------------------- serving

    async def _assign_pods(self) -> None:
        hosts = sorted(self._hosts.values(), key=lambda host: host.present.ranks)
        try:
            settings = settings_for([host.present for host in hosts])
        except InputError as error:
            self._send_all(hosts, Failed(str(error)))
            await asyncio.sleep(_SHUTDOWN_S)
            return
        listener = listen_at("MASTER_ADDR", self._config.master_host, 0)
        port = int(listener.getsockname()[1])
        job_key = secrets.token_hex(32)

        def tell() -> None:
            addresses = addresses_of(hosts)
            for index, host in enumerate(hosts):
                pod = f"host-{index}"
                token = derive_token(job_key, Kind.AGENT, settings.uid, pod)
                owners = job_key if host.present.is_owner else ""
                write_message(host.writer, PodAssignment(pod, settings, port, token, addresses[index], owners))
            logger.info("formed: hosts=%d ranks=%d port=%d", len(hosts), self._config.world_size, port)

        await self._serve(settings, job_key, listener, tell, FIRST_S)

    async def _serve(
        self, settings: JobSettings, job_key: str, listener: socket.socket, on_up: Callable[[], None], first_s: float
    ) -> None:
        """Run the rendezvous; `on_up` is called once agents may connect, the first within `first_s`."""
        job_key_file = self._folder / "job-key"
        write_private(job_key_file, job_key)
        refusals = Refusals()
        service = Service(Coordinator(settings, self._loop.time()), refusals)
        connections = Connections(limits_of_api(settings.replicas), refusals)
        server = Server(service, JobKeyFile(job_key_file, settings.uid), refusals, connections)
        runner = http_runner(server.application(), _SHUTDOWN_S)
        await runner.setup()
        try:
            await GuardedSite(runner, listener, connections).start()
            on_up()
            await self._until_over(service, settings.replicas, first_s)
        finally:
            service.close()
            await runner.cleanup()

    def _send_all(self, hosts: list[RegisteredHost], message: Failed) -> None:
        logger.error("no job: %s", message.message)
        for host in hosts:
            write_message(host.writer, message)

    async def _until_over(self, service: Service, num_hosts: int, first_s: float) -> None:
        """Return once the job is over and all agents know, all hosts have left, or no agent came for too long."""
        first_until_s = self._loop.time() + first_s
        while not service.failure.done():
            await asyncio.wait((service.failure,), timeout=_CHECK_S)
            if service.num_agents:
                continue
            # The first agent may have come and gone since the last check.
            until_s = first_until_s if service.empty_since_s is None else service.empty_since_s + LINGER_S
            is_over = service.status().phase in (JobPhase.COMPLETE, JobPhase.FAILED)
            if is_over or service.num_left >= num_hosts or self._loop.time() >= until_s:
                return
        logger.error("the coordinator has failed: see above")


def addresses_of(hosts: list[RegisteredHost]) -> list[str]:
    """Return the address at which the other hosts reach each host.

    The address from which it connected, since that interface leads to the others. Rank 0's own host may have used
    loopback: then the address at which the others reached it.
    """
    reached = [plain_address(host.own_address) for host in hosts]
    outside = next((address for address in reached if not ipaddress.ip_address(address).is_loopback), None)
    found = []
    for host in hosts:
        address = plain_address(host.peer_address)
        is_inside = ipaddress.ip_address(address).is_loopback
        found.append(outside if is_inside and outside is not None else address)
    return found
