"""Owns the coordinator: passes events in, sends its actions, and ticks at its deadlines. Runs in one event loop."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

from unbroken.network.peer import FrameWriter, text_frame
from unbroken.network.refusals import Refusal, Refusals
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import (
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Close,
    Event,
    Observed,
    Send,
    Tick,
)
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    Certificate,
    Heartbeat,
    Hello,
    JobStatus,
    Observation,
    Plan,
    Refused,
    RendezvousMessage,
    Report,
    Welcome,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree import RankTree
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.reasons import JobPhase

logger = logging.getLogger(__name__)

STATUS_GATHER_S = 0.05
"""How long a change of the status is held back: an in-process recovery is over by then, and writing and sending three
statuses during it would take as long as the rest of it."""


class Service:
    """The job's coordinator with its connections."""

    def __init__(self, coordinator: Coordinator, refusals: Refusals) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = coordinator
        self._refusals = refusals
        self.started_s = self._loop.time()
        """On the loop's clock."""
        self._peers: dict[str, FrameWriter] = {}
        self._left: set[str] = set()
        """Pods whose last report said that they leave."""
        self.empty_since_s: float | None = None
        """When, on the loop's clock, the last agent's connection was closed; None before."""
        self._num_sessions = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._notifying: asyncio.TimerHandle | None = None
        """Runs until waiting callers get the newer status."""
        self._revision = -1
        self._num_unauthorized = 0
        refusals.on_unauthorized(self._note_unauthorized)
        self._listeners: list[Callable[[], None]] = []
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Done with an exception when the coordinator has failed: the process must end and be restarted."""

    # ---------------------------------------------------------------------------------------------------------- agents

    def join(self, hello: Hello, transport: asyncio.WriteTransport, can_halt: bool = False) -> FrameWriter:
        """Accept a connection that sent Hello. `can_halt`: its agent knows that message."""
        self._num_sessions += 1
        # The agent's own session is not enough: it is the same on each of its connections.
        session = f"{hello.session[:64]}#{self._num_sessions}"
        peer = FrameWriter(session, hello.pod, transport, self._loop.time())
        self._peers[session] = peer
        self._left.discard(hello.pod)
        self._step(AgentJoined(session, hello, can_halt))
        return peer

    def receive(self, peer: FrameWriter, message: Report | Heartbeat) -> None:
        """Take a member's report or heartbeat."""
        peer.received_at_s = self._loop.time()
        if isinstance(message, Report) and message.is_leaving:
            self._left.add(peer.pod)
        self._step(AgentReported(peer.session, message))

    def is_member(self, peer: FrameWriter) -> bool:
        """Return whether this connection is the one over which its pod is in the job."""
        return peer.is_member and peer.session in self._peers

    def is_named(self, hello: Hello) -> bool:
        """Return whether the operator says the same of this pod as its agent."""
        return self._coordinator.is_named(hello.pod_uid, hello.pod)

    def certify(self, peer: FrameWriter, certificate: Certificate) -> None:
        """Answer a member's request."""
        self._perform([Send(peer.session, certificate)])

    def leave(self, peer: FrameWriter) -> None:
        """Note that a connection is closed."""
        if self._peers.pop(peer.session, None) is not None:
            self.empty_since_s = self._loop.time()
            self._step(AgentDisconnected(peer.session))

    def observe(self, observation: Observation) -> None:
        """Take the operator's observation."""
        self._step(Observed(observation))

    # ---------------------------------------------------------------------------------------------------------- status

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the status."""
        self._listeners.append(listener)

    @property
    def term(self) -> int:
        """Fencing number of the coordinator."""
        return self._coordinator.term

    @property
    def revision(self) -> int:
        """Revision of the present status."""
        return self._coordinator.revision + self._num_unauthorized

    @property
    def settings(self) -> JobSettings:
        """The job's settings."""
        return self._coordinator.settings

    @property
    def now_s(self) -> float:
        """Seconds on the coordinator's clock."""
        return self._loop.time()

    @property
    def num_agents(self) -> int:
        """Agents that are connected."""
        return len(self._peers)

    @property
    def num_left(self) -> int:
        """Number of pods that have left and did not come back."""
        return len(self._left)

    @property
    def max_heartbeat_age_s(self) -> float:
        """Seconds for which the most silent agent has sent nothing; 0 without agents."""
        now_s = self._loop.time()
        return max((now_s - peer.received_at_s for peer in self._peers.values()), default=0.0)

    def status(self) -> JobStatus:
        """Return the present status of the job."""
        now_s = self._loop.time()
        ahead_s = time.time() - now_s
        status = self._coordinator.status(now_s, lambda at_s: _wall_text(at_s + ahead_s))
        message, unauthorized_peer = status.message, self._refusals.unauthorized_peer
        if unauthorized_peer and status.phase is JobPhase.FORMING:
            # Nothing else shows a user why a running agent does not join.
            message += (
                f"; refused: {unauthorized_peer} came without this job's token, want that of UNBROKEN_TOKEN_FILE here"
            )
        return replace(status, message=message, revision=status.revision + self._num_unauthorized)

    def wall(self, at_s: float) -> str:
        """Convert seconds of the loop's clock into wall-clock time; for people only."""
        return _wall_text(at_s + time.time() - self._loop.time())

    @property
    def tree(self) -> RankTree | None:
        """The tree of ranks, valid until the next event; None before the first plan."""
        return self._coordinator.tree

    def explanation(self) -> list[str]:
        """Return what the last plan changed and why, in sentences."""
        return self._coordinator.explanation()

    def _note_unauthorized(self) -> None:
        # At any other time the status does not mention unauthorized peers: they must not be able to change it.
        if self._coordinator.phase is JobPhase.FORMING:
            self._num_unauthorized += 1
            self._notify()

    def _notify(self) -> None:
        """Answer callers that wait for a newer status: once for all changes of a moment, at once at the job's end."""
        if self._coordinator.phase in (JobPhase.COMPLETE, JobPhase.FAILED):
            self._answer_waiters()
        elif self._notifying is None:
            self._notifying = self._loop.call_later(STATUS_GATHER_S, self._answer_waiters)

    def _answer_waiters(self) -> None:
        if self._notifying is not None:
            self._notifying.cancel()
            self._notifying = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def newer_status(self, term: int, revision: int, timeout_s: float) -> JobStatus:
        """Return a status that is newer than the one named, or the same one after `timeout_s`."""
        await self.newer(term, revision, timeout_s)
        return self.status()

    async def newer(self, term: int, revision: int, timeout_s: float) -> None:
        """Wait for a status that is newer than the one named, `timeout_s` at most.

        A change during the wait is returned STATUS_GATHER_S later, together with those that follow it.
        """
        until_s = self._loop.time() + timeout_s
        while self.term == term and self.revision <= revision:
            left_s = until_s - self._loop.time()
            if left_s <= 0:
                break
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except asyncio.TimeoutError:
                break

    # ---------------------------------------------------------------------------------------------------------- engine

    def _step(self, event: Event) -> None:
        try:
            self._take(event)
        except Exception as error:
            # Its state may be inconsistent, or its next tick not set. The agents hold all that a new process needs.
            logger.exception("coordinator failed: job=%s event=%s", self.settings.job, type(event).__name__)
            if not self.failure.done():
                self.failure.set_exception(error)

    def _take(self, event: Event) -> None:
        started_s = self._loop.time()
        actions = self._coordinator.step(event, started_s)
        self._perform(actions)
        if any(isinstance(action, Send) and isinstance(action.message, Plan) for action in actions):
            self._coordinator.plan_took(self._loop.time() - started_s)
        self._set_timer()
        revision = self._coordinator.revision
        if revision != self._revision:
            self._revision = revision
            self._notify()
            for listener in self._listeners:
                listener()

    def _perform(self, actions: list[Send | Close]) -> None:
        encoded: dict[int, tuple[RendezvousMessage, bytes]] = {}
        for action in actions:
            peer = self._peers.get(action.session)
            if peer is None:
                continue
            match action:
                case Send(message=message):
                    if isinstance(message, Refused):
                        self._refusals.note(Refusal.NO_MEMBER, peer.pod, message.reason, self._loop.time())
                    # An interruption is one object for all agents: encode it once.
                    _, frame = encoded.setdefault(id(message), (message, b""))
                    if not frame:
                        frame = text_frame(wire.encode(message))
                        encoded[id(message)] = (message, frame)
                    peer.is_member = peer.is_member or isinstance(message, Welcome)
                    if not peer.send(frame):
                        self._refusals.note(Refusal.OVERFLOW, peer.pod, "does not read", self._loop.time())
                case Close(why=why):
                    if why:
                        self._refusals.note(Refusal.IMPOSSIBLE, peer.pod, why, self._loop.time())
                    peer.close()
                case _:
                    assert_never(action)

    def _set_timer(self) -> None:
        deadline_s = self._coordinator.next_deadline_s()
        wanted_s = math.inf if deadline_s is None else deadline_s
        if self._timer is not None:
            # Each heartbeat of thousands of agents moves the deadline: an occasional early Tick costs less.
            if self._timer.when() <= wanted_s:
                return
            self._timer.cancel()
            self._timer = None
        if wanted_s < math.inf:
            self._timer = self._loop.call_at(wanted_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._step(Tick())

    def close(self) -> None:
        """Close all connections; the agents reconnect by themselves."""
        for timer in (self._timer, self._notifying):
            if timer is not None:
                timer.cancel()
        for peer in list(self._peers.values()):
            peer.close()
        self._changed.set()


def _wall_text(at_s: float) -> str:
    instant = datetime.fromtimestamp(at_s, timezone.utc)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
