"""Serves rounds: one WebSocket a node at `/v1/rounds/{run_id}`, the rounds of each run. Runs in one event loop."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from unbroken.network.addresses import plain_address
from unbroken.network.frames import MessageRefused, next_text
from unbroken.network.limits import MESSAGES_AT_ONCE, MESSAGES_PER_S, TokenBucket
from unbroken.network.peer import FrameWriter, text_frame
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.socket_options import Transport, give_up_silent_peer
from unbroken.rounds.restored_state import KnownRounds
from unbroken_core.protocol import wire
from unbroken_core.torchrun_rounds.messages import NodeReport
from unbroken_core.torchrun_rounds.rounds import Action, Disconnect, Note, RunRounds, SendToNode
from unbroken_core.vocabulary.errors import WireError, assert_never

logger = logging.getLogger(__name__)

Held = Callable[[web.Request, Callable[[], None]], contextlib.AbstractContextManager[None]]
MAX_RUNS = 1000
MAX_RUN_ID = 300
MAX_REPORT_BYTES = 64 << 10
_FIRST_REPORT_S = 10.0
_GATHER_S = 50e-6
"""How long to gather reports before deciding, per node of a run: as long as deciding takes."""
_MAX_GATHER_S = 0.05


@dataclass
class _Run:
    rounds: RunRounds
    peers: dict[str, FrameWriter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    is_settling: bool = False


class Rounds:
    """All runs of one rendezvous."""

    def __init__(
        self,
        refusals: Refusals,
        past: KnownRounds | None = None,
        keep: Callable[[KnownRounds], None] | None = None,
        held: Held = lambda _request, _close: contextlib.nullcontext(),
    ) -> None:
        """`past`: the rounds of an earlier rendezvous; `keep` is called with all rounds when there is a new one.

        `held` is entered while a connection is open: it calls what it is given when the token is no longer accepted.
        """
        self._refusals = refusals
        self._held = held
        self._known_rounds: KnownRounds = dict(past or {})
        self._keep = keep
        self._runs: dict[str, _Run] = {}
        self._num_sessions = 0
        self.num_begun = 0
        """Number of rounds that have begun here."""
        self._loop = asyncio.get_running_loop()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, for an application that refuses callers without the token."""
        return [web.get("/v1/rounds/{run_id}", self._nodes)]

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are connected or may come back."""
        return sum(run.rounds.num_nodes for run in self._runs.values())

    @property
    def num_runs(self) -> int:
        """Number of known runs."""
        return len(self._runs)

    def close(self) -> None:
        """Close all connections; nodes reconnect by themselves."""
        for run_id in list(self._runs):
            self._drop(run_id)

    # ---------------------------------------------------------------------------------------------------- connections

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        run_id = request.match_info["run_id"]
        if len(run_id) > MAX_RUN_ID or (run_id not in self._runs and len(self._runs) >= MAX_RUNS):
            return web.Response(status=400, text=f"run: want at most {MAX_RUNS}, with {MAX_RUN_ID} characters\n")
        connection = web.WebSocketResponse(max_msg_size=MAX_REPORT_BYTES, compress=False, timeout=1.0)
        await connection.prepare(request)
        transport = request.transport
        if transport is None:
            return connection
        give_up_silent_peer(transport, probe=False)
        addresses = _addresses(transport)
        self._num_sessions += 1
        session = f"{run_id[:40]}#{self._num_sessions}"
        peer = FrameWriter(session, session, transport, self._loop.time())
        try:
            with self._held(request, peer.close):
                await self._converse(run_id, peer, connection, addresses)
        except WireError as error:
            reason = error.reason if isinstance(error, MessageRefused) else Refusal.MALFORMED
            self._refuse(reason, addresses[1], str(error))
            await connection.close(code=1008, message=str(error).encode()[:120])
        except asyncio.TimeoutError:
            self._refuse(Refusal.SILENT, addresses[1], f"want a report within {_FIRST_REPORT_S:g} s, got nothing")
            await connection.close(code=1008, message=b"want a report")
        finally:
            self._lose(run_id, session)
        return connection

    async def _converse(
        self, run_id: str, peer: FrameWriter, connection: web.WebSocketResponse, addresses: tuple[str, str]
    ) -> None:
        budget = TokenBucket(MESSAGES_PER_S, MESSAGES_AT_ONCE, self._loop.time())
        limit_s: float | None = _FIRST_REPORT_S
        while (text := await next_text(connection, limit_s, MAX_REPORT_BYTES)) is not None:
            report: NodeReport = wire.decode(text, NodeReport)
            limit_s = None
            run = self._run(run_id)
            run.peers[peer.session] = peer
            if run.rounds.receive(peer.session, report, addresses, self._loop.time()):
                self._settle_soon(run_id, run)
            else:
                self._perform(run, run.rounds.answers())
            wait_s = budget.take(self._loop.time())
            if wait_s > 0:
                # It is not read meanwhile, at no cost to others.
                self._refuse(Refusal.TOO_FAST, addresses[1], f"want {MESSAGES_PER_S:g} messages a second on average")
                await asyncio.sleep(wait_s)

    def _refuse(self, reason: Refusal, peer: str, detail: str) -> None:
        self._refusals.note(reason, peer, detail, self._loop.time())

    def _run(self, run_id: str) -> _Run:
        if run_id not in self._runs:
            self._runs[run_id] = _Run(RunRounds(self._known_rounds.get(run_id, (-1, 0))))
        return self._runs[run_id]

    def _lose(self, run_id: str, session: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.peers.pop(session, None) is not None:
            run.rounds.lose(session, self._loop.time())
            self._settle_soon(run_id, run)

    # ---------------------------------------------------------------------------------------------------------- engine

    def _settle_soon(self, run_id: str, run: _Run) -> None:
        """Decide once for reports that come together: answering N nodes for each of N reports would be O(n²)."""
        if not run.is_settling:
            run.is_settling = True
            self._loop.call_later(min(run.rounds.num_nodes * _GATHER_S, _MAX_GATHER_S), self._settle, run_id, run)

    def _settle(self, run_id: str, run: _Run) -> None:
        run.is_settling = False
        if self._runs.get(run_id) is not run:
            return
        try:
            self._decide(run_id, run)
        except Exception:
            # Its state may be inconsistent, or its next look not set; the nodes hold all that a new one needs.
            logger.exception("run failed, starting over: run=%s", run_id)
            if self._runs.get(run_id) is run:
                self._drop(run_id)

    def _decide(self, run_id: str, run: _Run) -> None:
        now_s, num_before = self._loop.time(), run.rounds.num_begun
        actions = run.rounds.settle(now_s)
        self.num_begun += run.rounds.num_begun - num_before
        self._perform(run, actions, run_id)
        self._note_rounds(run_id, run.rounds.newest)
        self._set_timer(run_id, run)

    def _note_rounds(self, run_id: str, newest: tuple[int, int]) -> None:
        """(-1, 0): nothing needs to be known of this run any more."""
        if newest == self._known_rounds.get(run_id, (-1, 0)):
            return
        self._known_rounds[run_id] = newest
        if newest[0] < 0:
            del self._known_rounds[run_id]
        if self._keep is not None:
            self._keep(self._known_rounds)

    def _set_timer(self, run_id: str, run: _Run) -> None:
        now_s = self._loop.time()
        if run.rounds.is_over(now_s):
            self._note_rounds(run_id, (-1, 0))
            self._drop(run_id)
            return
        if run.timer is not None:
            run.timer.cancel()
        # Rounds without nodes are looked at again, until they are over.
        wanted_s = run.rounds.deadline_s if run.rounds.num_nodes else now_s + 1.0
        run.timer = None if wanted_s == math.inf else self._loop.call_at(wanted_s, self._settle, run_id, run)

    def _drop(self, run_id: str) -> None:
        run = self._runs.pop(run_id)
        if run.timer is not None:
            run.timer.cancel()
        for peer in run.peers.values():
            peer.close()

    def _perform(self, run: _Run, actions: list[Action], run_id: str = "") -> None:
        for action in actions:
            match action:
                case SendToNode(session=session, message=message):
                    peer = run.peers.get(session)
                    if peer is not None and not peer.send(text_frame(wire.encode(message))):
                        self._refuse(Refusal.OVERFLOW, session, "does not read")
                case Disconnect(session=session):
                    peer = run.peers.get(session)
                    if peer is not None:
                        peer.close()
                case Note(text=text):
                    logger.info("%s run=%s", text, run_id)
                case _:
                    assert_never(action)


def _addresses(transport: Transport) -> tuple[str, str]:
    """Return the addresses of both ends, ours first; "" if the connection has ended."""
    near, far = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    return plain_address(near[0]) if near else "", plain_address(far[0]) if far else ""
