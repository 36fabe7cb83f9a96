"""A node's link to the rendezvous: a thread with a connection that is opened again for as long as the node lives.

    caller's thread ──say──> report ──> the thread ──NodeReport──> rendezvous
                    <─wait── standing <──           <──Standing───

Both sides only ever hold the newest state, so a connection that breaks loses nothing.
"""

import asyncio
import contextlib
import errno
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp

from unbroken.network.authority import AuthorityFile
from unbroken.network.socket_options import give_up_silent_peer
from unbroken_core.conventions.tokens import checked_secret
from unbroken_core.protocol import wire
from unbroken_core.torchrun_rounds.messages import NodeReport, Rejected, Stage, Standing, ToNode
from unbroken_core.vocabulary.errors import InputError, WireError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
_START_EVERY_S = 2.0
_SILENT_S = 3.0
"""How long an absent rendezvous is not reported: it may be restarting."""
_JOIN_THREAD_S = 3.0


@dataclass(frozen=True)
class RoundsServer:
    """Address and credentials of the rendezvous."""

    host: str
    port: int
    token: Callable[[], str]
    """Returns the present token; raises InputError."""
    authority: AuthorityFile | None = None
    """Certificate authority of the rendezvous; None for plain http."""
    server_name: str = ""
    """Name in its certificate; "": `host`."""
    start: Callable[[str], str] | None = None
    """Starts the rendezvous if nothing listens, with what is known of earlier rounds; returns the error, "" for none.
    None: this node does not start it."""

    @property
    def url(self) -> str:
        """URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.authority is None else 'https'}://{host}:{self.port}"


class RoundsLink:
    """Thread-safe."""

    def __init__(self, endpoint: RoundsServer, run_id: str, report: NodeReport) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._url = f"{endpoint.url}/v1/rounds/{quote(run_id, safe='')}"
        self._changed = threading.Condition()
        self._report = report
        self._standing: Standing | None = None
        self._rejected = ""
        self._complaint = "no connection yet"
        self._was_connected = False
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poked: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._started_at_s = -_START_EVERY_S
        self._away_since_s = time.monotonic()
        self._logged = ""

    @property
    def report(self) -> NodeReport:
        """This node's report to the rendezvous."""
        return self._report

    @property
    def standing(self) -> Standing | None:
        """The newest answer; None before the first."""
        return self._standing

    @property
    def rejected(self) -> str:
        """Why this node can never take part; "" if it may."""
        return self._rejected

    @property
    def complaint(self) -> str:
        """Why there is no connection; "" if there is one."""
        return self._complaint

    @property
    def was_connected(self) -> bool:
        """Whether there has been a connection."""
        return self._was_connected

    def say(self, **changes: Any) -> None:
        """Change the report; it is sent at once, or as soon as there is a connection."""
        with self._changed:
            self._report = replace(self._report, **changes)
            if self._thread is None and not self._is_stopping:
                self._thread = threading.Thread(target=self._run, name="unbroken-rounds", daemon=True)
                self._thread.start()
            if self._loop is not None and self._poked is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._poked.set)

    def wait(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_enough`, checked after each change; return whether it is. Waits in slices, for signals."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not is_enough():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 1.0))
            return True

    def stop(self) -> None:
        """Close the connection, and end the thread."""
        with self._changed:
            self._is_stopping = True
            if self._loop is not None and self._poked is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._poked.set)
        if self._thread is not None:
            self._thread.join(_JOIN_THREAD_S)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._stay_connected())
        except Exception:
            logger.exception("link failed: url=%s", self._url)
            self._note(rejected="the link to the rendezvous has failed: see above")

    async def _stay_connected(self) -> None:
        with self._changed:
            self._loop, self._poked = asyncio.get_running_loop(), asyncio.Event()
        wire.prepare(ToNode)
        retry_s = _FIRST_RETRY_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)) as session:
            while not self._is_over():
                if await self._connect_once(session):
                    retry_s = _FIRST_RETRY_S
                if self._is_over():
                    return
                # Jitter: not all nodes at once.
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(retry_s * 2, _LAST_RETRY_S)

    def _is_over(self) -> bool:
        return self._is_stopping or bool(self._rejected)

    async def _connect_once(self, session: aiohttp.ClientSession) -> bool:
        """Return whether there was a connection, once it has ended."""
        try:
            headers = {"Authorization": f"Bearer {checked_secret(self._endpoint.token(), 'token')}"}
            authority = self._endpoint.authority
            context: ssl.SSLContext | bool = True if authority is None else authority.context()
            async with session.ws_connect(
                self._url,
                headers=headers,
                compress=0,
                max_msg_size=wire.MAX_MESSAGE_BYTES,
                ssl=context,
                server_hostname=self._endpoint.server_name or None,
            ) as connection:
                await self._converse(connection)
                return True
        except InputError as error:
            self._complain(str(error), is_final=True)
        except aiohttp.WSServerHandshakeError as error:
            self._complain(self._explain(error.status), is_final=True)
        except aiohttp.ClientConnectorCertificateError as error:
            self._complain(f"{self._endpoint.url}: {error.certificate_error}", is_final=True)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self._complain(f"no connection to {self._endpoint.url}: {str(error) or type(error).__name__}")
            if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                await self._start_other()
        return False

    async def _start_other(self) -> None:
        """Start the rendezvous if nothing listens."""
        start, now_s = self._endpoint.start, time.monotonic()
        if start is None or now_s < self._started_at_s + _START_EVERY_S:
            return
        self._started_at_s = now_s
        report = self._report
        known = json.dumps({self._run_id: (report.known_round, report.known_size)}) if report.known_size else ""
        error = await asyncio.to_thread(start, known)
        if error:
            self._complain(f"no rendezvous at {self._endpoint.url}, and none can be started: {error}")

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        give_up_silent_peer(connection, probe=True)
        writer = asyncio.create_task(self._write(connection))
        try:
            while not self._is_over():
                frame = await connection.receive(self._report.limits.heartbeat_s * 2 / 3)
                if frame.type is not aiohttp.WSMsgType.TEXT:
                    self._complain(f"{self._endpoint.url} has closed the connection")
                    return
                self._take(wire.decode(frame.data, ToNode))
        except asyncio.TimeoutError:
            self._complain(f"{self._endpoint.url} does not answer")
        except WireError as error:
            self._complain(f"unreadable message of {self._endpoint.url}: {error}")
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    def _take(self, message: Standing | Rejected) -> None:
        if isinstance(message, Rejected):
            self._note(rejected=message.message)
            return
        with self._changed:
            report = replace(self._report, seen_round=max(self._report.seen_round, message.round))
            if message.stage is not Stage.STARTING and message.round > report.known_round:
                report = replace(report, known_round=message.round, known_size=message.size)
            self._report = report
        if self._logged:
            logger.info("rendezvous is back: url=%s", self._endpoint.url)
            self._logged = ""
        self._note(standing=message)

    async def _write(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        poked = self._poked
        if poked is None:
            return
        try:
            while not self._is_stopping:
                poked.clear()
                await connection.send_str(wire.encode(self._report))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(poked.wait(), self._report.limits.heartbeat_s / 3)
            await connection.close()
        except (aiohttp.ClientError, ConnectionError):
            # The reading side sees the end of the connection as well.
            return

    def _note(self, standing: Standing | None = None, rejected: str = "") -> None:
        with self._changed:
            if standing is not None:
                self._standing, self._complaint, self._was_connected = standing, "", True
            self._rejected = self._rejected or rejected
            self._changed.notify_all()

    def _complain(self, complaint: str, *, is_final: bool = False) -> None:
        """Note what is wrong; final if the node has never been connected and cannot be."""
        now_s = time.monotonic()
        with self._changed:
            if not self._complaint:
                self._away_since_s = now_s
            self._complaint = complaint
            if is_final and not self._was_connected:
                self._rejected = complaint
            self._changed.notify_all()
        if complaint != self._logged and now_s >= self._away_since_s + _SILENT_S and not self._is_stopping:
            self._logged = complaint
            logger.warning("rendezvous: %s", complaint)

    def _explain(self, status: int) -> str:
        if status == HTTPStatus.UNAUTHORIZED:
            return f"{self._endpoint.url}: want the token of this run, it refuses ours (401)"
        return f"{self._endpoint.url}: want a rendezvous of Unbroken, got something that answers {status}"
