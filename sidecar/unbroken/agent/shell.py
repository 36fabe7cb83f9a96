"""The agent's process: feeds events and time to `PodMember` and carries out its actions."""

import asyncio
import logging
import secrets
import signal
from collections import deque
from typing import TYPE_CHECKING

from unbroken.agent.adapters.death_watch import DeathWatch
from unbroken.agent.adapters.local_server import LocalServer
from unbroken.agent.adapters.memory_file import MemoryFile
from unbroken.agent.adapters.stamp_page import StampPage, read_stack
from unbroken.agent.adapters.termination_message import TerminationMessage
from unbroken.agent.adapters.uplink import Uplink
from unbroken.agent.config import AgentConfig, MemoryConfig
from unbroken.agent.decisions.events import (
    Action,
    CloseConnection,
    Connected,
    Event,
    Exit,
    KeeperSeen,
    LauncherReported,
    Remember,
    RendezvousSent,
    SendToKeeper,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    Terminated,
    Ticked,
    WorkerDied,
    WorkerLost,
    WorkerReported,
)
from unbroken.agent.decisions.member import PodMember
from unbroken.network.authority import AuthorityFile
from unbroken.network.exposition import serve_exposition_when_possible
from unbroken.network.refusals import Refusals
from unbroken.tasks import Tasks
from unbroken_core.conventions.tls import server_name
from unbroken_core.pod.liveness import next_check_s
from unbroken_core.protocol.messages import PROTOCOL, Fault, Finish, Hello, Interrupt, Plan, Report, Respawn, Welcome
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.reasons import JobPhase, Reason, WorkerPhase

if TYPE_CHECKING:
    from unbroken.agent.adapters.keeper_process import KeeperProcess
    from unbroken.agent.adapters.keeper_view import KeeperView

logger = logging.getLogger(__name__)

_LAST_MESSAGES_S = 1.0
_TICKS_PER_SOFT_TIMEOUT = 10
_SHORTEST_PAUSE_S = 0.005
_NS = 1_000_000_000


class Agent:
    """One agent process. Everything runs in one event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._memory_file = MemoryFile(config.private_directory)
        identity = Hello(
            protocol=PROTOCOL,
            job=config.settings.job,
            pod=config.pod,
            pod_uid=config.pod_uid,
            session=secrets.token_hex(8),
            node=config.node,
            ranks_per_pod=config.settings.ranks_per_pod,
            domains=config.domains,
        )
        self._loop = asyncio.get_running_loop()
        memory = self._memory_file.read()
        self._member = PodMember(config.settings, identity, config.pod_ip, memory, self._loop.time())
        self._page = StampPage(config.directory / "stamps", config.settings.ranks_per_pod)
        self._deaths = DeathWatch(config.directory / "stamps", config.settings.ranks_per_pod, self._on_death)
        socket_path = config.directory / "agent.sock"
        check = self._member.check_report
        self._local = LocalServer(socket_path, config.settings.ranks_per_pod, self._emit, check)
        termination_message = TerminationMessage(config.termination_log)
        authority = None if config.authority_file is None else AuthorityFile(config.authority_file)
        self._uplink = Uplink(
            config.rendezvous_url,
            config.token_file,
            config.settings.timeouts,
            self._emit,
            termination_message,
            authority=authority,
            server_name=server_name(config.settings.job, config.settings.namespace),
        )
        self._keeper_view = None if config.memory is None else _view_of_keeper(config, config.memory)
        if self._keeper_view is not None:
            self._member.take(KeeperSeen(self._keeper_view.look()), self._loop.time())
        self._events: deque[Event] = deque()
        self._is_turn_due = False
        self._is_whole = asyncio.Event()
        """Set once every living worker has been READY."""
        self._logged_faults: set[tuple[int, Fault]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._keeper: KeeperProcess | None = None
        self._exit_code: asyncio.Future[int] = self._loop.create_future()

    async def run(self) -> int:
        """Run until the member says Exit; return the exit code."""
        self._loop.add_signal_handler(signal.SIGTERM, self._emit, Terminated())
        self._loop.add_signal_handler(signal.SIGINT, self._emit, Terminated())
        await self._local.start()
        tasks = Tasks(self._on_failure)
        if self._config.metrics_listen is not None:
            tasks.start("metrics", self._serve_metrics(*self._config.metrics_listen))
        tasks.start("link to the rendezvous", self._join())
        tasks.start("watch on the stamps", self._watch_page())
        tasks.start("watch on the socket", self._local.watch())
        if self._config.memory is not None and self._keeper_view is not None:
            self._keeper = self._make_keeper(self._config.memory, self._keeper_view)
            tasks.start("keeper of checkpoints", self._keeper.run())
        logger.info("agent started: job=%s pod=%s", self._config.settings.job, self._config.pod)
        try:
            code = await self._exit_code
            await self._uplink.drain(_LAST_MESSAGES_S)
            return code
        finally:
            await tasks.stop()
            await self._local.stop()
            self._deaths.close()
            self._page.close()
            self._memory_file.close()

    async def _serve_metrics(self, host: str, port: int) -> None:
        # A quarter of the start time; nothing scrapes in the first second.
        from unbroken.agent.adapters.metrics import make_metrics  # noqa: PLC0415 - after the socket is up

        refusals = Refusals()
        write = make_metrics(
            self._member,
            lambda: self._local.num_refused + sum(refusals.counts.values()),
            lambda: self._uplink.num_unauthorized,
            lambda: None if self._keeper is None else self._keeper.counted,
        )
        await serve_exposition_when_possible(host, port, write, refusals)

    def _make_keeper(self, memory: MemoryConfig, view: "KeeperView") -> "KeeperProcess":
        from unbroken.agent.adapters.keeper_process import KeeperProcess  # noqa: PLC0415 - only in jobs with memory

        environment = {
            "UNBROKEN_SETTINGS": settings_to_json(self._config.settings),
            "UNBROKEN_POD_UID": self._config.pod_uid,
            "UNBROKEN_POD_IP": self._config.pod_ip,
            "UNBROKEN_DIR": str(self._config.directory),
            "UNBROKEN_MEMORY_DIR": str(memory.root),
            "UNBROKEN_MEMORY_LIMIT": str(memory.limit_bytes),
        }
        return KeeperProcess(environment, memory.port, view, self._emit)

    @property
    def is_in_touch(self) -> bool:
        """Whether the rendezvous has accepted this agent on the connection that is open."""
        return self._member.is_accepted

    @property
    def was_in_touch(self) -> bool:
        """Whether it ever has."""
        return self._member.instructions.term > 0

    def give_up(self, message: str) -> None:
        """Release the workers as if the job had failed: the rendezvous will not come back."""
        term = self._member.instructions.term
        self._emit(RendezvousSent(Finish(term, JobPhase.FAILED, Reason.RECOVERY_TIMEOUT, message)))

    async def _join(self) -> None:
        if self._config.waits_for_workers:
            await self._is_whole.wait()
        await self._uplink.run()

    def _on_failure(self, _what: str, error: BaseException) -> None:
        if not self._exit_code.done():
            # A bug: end, and let the kubelet start this agent again.
            self._exit_code.set_exception(error)

    # ---------------------------------------------------------------------------------------------------------- events

    def _emit(self, event: Event) -> None:
        """Take an event; all events of one pass of the loop are settled together and share one Report."""
        self._events.append(event)
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _on_death(self, local_rank: int, incarnation: int) -> None:
        """In a thread of the watch."""
        self._loop.call_soon_threadsafe(self._emit, WorkerDied(local_rank, incarnation))

    def _turn(self) -> None:
        self._is_turn_due = False
        try:
            now_s = self._loop.time()
            if any(map(_has_step_news, self._events)):
                # Steps first: otherwise a fault right after a step would count as one without progress.
                self._member.take(self._look(), now_s)
            if self._keeper_view is not None and any(map(_has_left, self._events)):
                # The next plan may be made of this report: what was saved last belongs in it.
                self._member.take(KeeperSeen(self._keeper_view.look()), now_s)
            while self._events:
                event = self._events.popleft()
                _log_event(event)
                if isinstance(event, WorkerReported) and event.message.phase is WorkerPhase.RUNNING:
                    self._deaths.watch(event.local_rank, event.incarnation)
                self._member.take(event, now_s)
            for action in self._member.settle(now_s):
                self._act(action)
            self._set_timer()
        except Exception as error:
            if not self._exit_code.done():
                self._exit_code.set_exception(error)
        if self._member.is_accepted:
            self._uplink.settle()
        if not self._is_whole.is_set() and self._member.is_whole:
            self._is_whole.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._member.next_deadline_s
        if deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._emit, Ticked())

    async def _watch_page(self) -> None:
        timeouts = self._config.settings.timeouts
        interval_s = min(1.0, timeouts.soft_s / _TICKS_PER_SOFT_TIMEOUT)
        while True:
            seen = self._look()
            self._emit(seen)
            # Wake at the instant a worker becomes overdue, not up to an interval later.
            due_s = next_check_s(seen.slots or (), int(self._loop.time() * _NS), timeouts)
            await asyncio.sleep(max(min(interval_s, due_s), _SHORTEST_PAUSE_S))

    def _look(self) -> Ticked:
        """Read the stamps, and the stacks that were asked for."""
        asked = self._member.asked_for_stacks
        stacks = {rank: frames for rank in asked if (frames := read_stack(self._config.directory, rank))}
        return Ticked(self._page.read(), stacks)

    def _log_faults(self, report: Report) -> None:
        """Log each fault the first time it is reported."""
        faults = {(worker.local_rank, worker.fault) for worker in report.workers if worker.fault is not None}
        for local_rank, fault in sorted(faults - self._logged_faults, key=lambda item: item[0]):
            text = "fault: local_rank=%d cause=%s iteration=%d detail=%s"
            logger.info(text, local_rank, fault.cause, fault.iteration, fault.detail)
        self._logged_faults = faults

    # --------------------------------------------------------------------------------------------------------- actions

    def _send_inside(self, action: SendToWorker | SendToLauncher | SendToKeeper) -> None:
        match action:
            case SendToWorker(local_rank=local_rank, message=order):
                self._local.send_to_worker(local_rank, order)
            case SendToLauncher(message=command):
                self._local.send_to_launcher(command)
            case SendToKeeper(message=told):
                if self._keeper is not None:
                    self._keeper.send(told)
            case _:
                assert_never(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendToRendezvous(message=message):
                self._uplink.send(message)
                if isinstance(message, Report):
                    self._log_faults(message)
            case SendToWorker() | SendToLauncher() | SendToKeeper():
                self._send_inside(action)
            case CloseConnection(reason=reason, retry_s=retry_s):
                self._uplink.hang_up(reason, retry_s)
            case Remember(memory=memory):
                self._memory_file.write(memory)
            case Exit(code=code):
                if not self._exit_code.done():
                    self._exit_code.set_result(code)
            case _:
                assert_never(action)


def _has_step_news(event: Event) -> bool:
    """Return whether this may be the first or last event of a worker's progress in an iteration."""
    if not isinstance(event, WorkerReported):
        return isinstance(event, (WorkerLost, LauncherReported))
    report = event.message
    if report.phase is WorkerPhase.RUNNING:
        return report.has_progress
    return report.phase is not WorkerPhase.READY


def _view_of_keeper(config: AgentConfig, memory: MemoryConfig) -> "KeeperView":
    from unbroken.agent.adapters.keeper_view import KeeperView  # noqa: PLC0415 - a job without memory loads none of it

    return KeeperView(memory.root, config.pod_uid, config.settings.ranks_per_pod, config.pod_ip)


def _has_left(event: Event) -> bool:
    """Return whether a worker, or a process, is where it does not save any more."""
    if isinstance(event, WorkerReported):
        return event.message.phase is not WorkerPhase.RUNNING
    return isinstance(event, (WorkerLost, WorkerDied, LauncherReported, Connected))


def _log_event(event: Event) -> None:
    """Log what changes the pod's state; a healthy hour is silent."""
    if not isinstance(event, RendezvousSent):
        return
    match event.message:
        case Welcome(term=term):
            logger.info("accepted by the rendezvous: term=%d", term)
        case Plan(iteration=iteration, role=role, world_size=world_size):
            logger.info("plan: iteration=%d role=%s world_size=%d", iteration, role, world_size)
        case Interrupt(iteration=iteration, cause=cause, rank=rank, pod=pod, detail=detail):
            text = "interrupted: iteration=%d cause=%s rank=%s pod=%s detail=%s"
            logger.info(text, iteration, cause, rank, pod, detail)
        case Respawn(places=places):
            logger.info("respawn: places=%s", places)
        case Finish(outcome=outcome, message=message):
            logger.info("finished: outcome=%s message=%s", outcome, message)
        case _:
            return
