"""The agent's WebSocket to the rendezvous: one at a time, opened again for as long as the agent lives."""

import asyncio
import errno
import logging
import random
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import aiohttp

from unbroken.agent.adapters.termination_message import TerminationMessage
from unbroken.agent.decisions.events import Connected, ConnectionRefused, Disconnected, Event, RendezvousSent
from unbroken.agent.decisions.fence import longest_retry_s, ping_interval_s
from unbroken.network.authority import AuthorityFile
from unbroken.network.socket_options import give_up_silent_peer
from unbroken.network.token import read_token
from unbroken.tasks import Tasks
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import CAN_HALT, FEATURES_HEADER, AgentMessage, RendezvousMessage
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.errors import InputError, WireError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_CONNECT_TIMEOUT_S = 5.0
_SILENT_S = 2.0
_MAX_UNSENT_BYTES = 4 << 20


class Uplink:
    """Connects, reads and writes; `decisions` decides what. Runs in the agent's event loop."""

    def __init__(
        self,
        url: str,
        token_file: Path,
        timeouts: Timeouts,
        emit: Callable[[Event], None],
        termination_message: TerminationMessage,
        *,
        authority: AuthorityFile | None = None,
        server_name: str | None = None,
    ) -> None:
        """`url` is the rendezvous', without a path; `termination_message` names the present problem, if any.

        `authority` is the certificate authority of a rendezvous at https://, whose certificate names `server_name`.
        """
        self._url = f"{url}/v1/agents"
        self._token_file = token_file
        self._authority = authority
        self._server_name = server_name
        self._ping_interval_s = ping_interval_s(timeouts)
        self._longest_retry_s = longest_retry_s(timeouts)
        self._emit = emit
        self._termination_message = termination_message
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._outbox: asyncio.Queue[str] = asyncio.Queue()
        self._unsent_bytes = 0
        self._retry_s = _FIRST_RETRY_S
        self._pause_s = 0.0
        self._complaint = ""
        self._away_since_s: float | None = None
        self._is_settled = False
        self.num_unauthorized = 0
        """Connections that were refused because of the token."""

    async def run(self) -> None:
        """Connect for ever; ends by cancellation."""
        wire.prepare(RendezvousMessage)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)) as session:
            while True:
                try:
                    await self._connect_once(session)
                except Exception as error:
                    # A bug, maybe one that somebody else causes: the next connection may be another one.
                    self._complain(f"connection to {self._url} failed: {type(error).__name__}: {error}", error)
                if self._is_settled:
                    self._retry_s, self._is_settled = _FIRST_RETRY_S, False
                # Jitter: agents must not all reconnect at once after a restart of the rendezvous.
                await asyncio.sleep(max(self._retry_s * random.uniform(0.5, 1.0), self._pause_s))
                self._retry_s, self._pause_s = min(self._retry_s * 2, self._longest_retry_s), 0.0

    def send(self, message: AgentMessage) -> None:
        """Queue a message for the open connection; the connection is closed when it does not drain."""
        if self._socket is None:
            return
        text = wire.encode(message)
        self._unsent_bytes += len(text)
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self.hang_up("the rendezvous does not read", 0.0)
            return
        self._outbox.put_nowait(text)

    def settle(self) -> None:
        """Note that the rendezvous has accepted this agent: the next retry is quick again."""
        if not self._is_settled:
            self._is_settled = True
            self._complaint, self._away_since_s = "", None
            self._termination_message.put("")

    def hang_up(self, reason: str, retry_s: float) -> None:
        """Close the connection and stay away for `retry_s`."""
        self._complain(reason)
        self._pause_s = retry_s
        if self._socket is not None:
            _abort(self._socket)

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything queued is written, at most `timeout_s`."""
        try:
            await asyncio.wait_for(self._outbox.join(), timeout_s)
        except asyncio.TimeoutError:
            return

    async def _connect_once(self, session: aiohttp.ClientSession) -> None:
        try:
            token = read_token(self._token_file)
            context = True if self._authority is None else self._authority.context()
            async with session.ws_connect(
                self._url,
                headers={"Authorization": f"Bearer {token}", FEATURES_HEADER: CAN_HALT},
                compress=0,
                heartbeat=self._ping_interval_s,
                max_msg_size=wire.MAX_MESSAGE_BYTES,
                ssl=context,
                server_hostname=self._server_name,
            ) as connection:
                await self._converse(connection)
        except InputError as error:
            self._complain(str(error))
        except aiohttp.WSServerHandshakeError as error:
            self._complain(self._explain(error.status))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                self._emit(ConnectionRefused())
            self._complain(f"no connection to {self._url}: {str(error) or type(error).__name__}")

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        give_up_silent_peer(connection, probe=True)
        self._socket, self._unsent_bytes = connection, 0
        self._outbox = asyncio.Queue()
        self._emit(Connected())
        tasks = Tasks(lambda _what, _error: _abort(connection))
        tasks.start(f"messages to {self._url}", self._write(connection, self._outbox))
        try:
            async for frame in connection:
                if frame.type is aiohttp.WSMsgType.ERROR:
                    self._complain(f"connection lost: {frame.data}")
                    break
                if frame.type is not aiohttp.WSMsgType.TEXT:
                    raise WireError(f"frame: want text, got {frame.type.name}")
                self._emit(RendezvousSent(wire.decode(frame.data, RendezvousMessage)))
        except WireError as error:
            self._complain(f"unreadable message from the rendezvous: {error}")
        finally:
            self._socket = None
            await tasks.stop()
            self._emit(Disconnected())

    async def _write(self, connection: aiohttp.ClientWebSocketResponse, outbox: "asyncio.Queue[str]") -> None:
        try:
            while True:
                text = await outbox.get()
                await connection.send_str(text)
                self._unsent_bytes -= len(text)
                outbox.task_done()
        except (aiohttp.ClientError, ConnectionError):
            # The reading side sees the end of the connection as well, and reports it.
            return

    def _complain(self, complaint: str, error: Exception | None = None) -> None:
        """Log a complaint once, until it changes or a connection succeeds; `error` with its traceback."""
        if self._away_since_s is None:
            self._away_since_s = time.monotonic()
        # The rendezvous may start later than its agents, or restart: for a moment this is normal.
        if complaint != self._complaint and time.monotonic() - self._away_since_s >= _SILENT_S:
            self._complaint = complaint
            logger.warning("rendezvous: %s", complaint, exc_info=error)
            self._termination_message.put(f"not in the job: {complaint}")

    def _explain(self, status: int) -> str:
        """Return what an answer other than 101 means."""
        if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{self._url} answered {status}: want 101"
        self.num_unauthorized += 1
        whose = "job's" if status == HTTPStatus.UNAUTHORIZED else "pod's"
        return f"token file {self._token_file}: want this {whose} token, got one that {self._url} refuses ({status})"


def _abort(connection: aiohttp.ClientWebSocketResponse) -> None:
    transport = connection.get_extra_info("socket")
    if transport is not None:
        # Not an orderly close: the peer may be what does not answer.
        try:
            transport.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
