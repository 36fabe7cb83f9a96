"""HTTP client of a job's rendezvous, whose image is the user's: what it answers is bounded, and read in a thread.

Connections, bodies and messages are handled in an event loop of their own. The main loop, on which all jobs act, gets
nothing but a report that is sound and of bounded size.
"""

import os
import ssl
from dataclasses import dataclass
from types import TracebackType

import aiohttp

from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import OUTGOING, OUTGOING_HEADER
from unbroken_core.protocol.messages import PROTOCOL, Earlier, JobStatus, Observation
from unbroken_core.protocol.wire import encode
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_operator.adapters.bounded_answer import bounded_connector
from unbroken_operator.adapters.errors import RendezvousUnreachable, ReportRefused
from unbroken_operator.adapters.tasks.loop_thread import LoopThread
from unbroken_operator.api import layout
from unbroken_operator.decisions.limits.report import ABSOLUTE, ReportLimits, read_report

POLL_S = 8
"""Longest wait of one status request at the rendezvous."""
HANGING_S = 4.0
"""One that says nothing for so long after that wait hangs, or its node does: nobody is told more than 15 s too long
that its job trains."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
MAX_OUTDATED = 4096
MAX_TRUSTED = 4096
CHUNK_BYTES = 64 << 10
MAX_ERROR_BYTES = 4096
MAX_SHOWN = 200
"""Characters of an error's body that are shown."""


@dataclass(frozen=True)
class RendezvousTarget:
    """One rendezvous pod."""

    pod_uid: str
    pod: str
    address: str
    token: str
    authority: str = ""
    """The authority that signed its certificate, in PEM; "" without encryption."""
    name: str = ""
    """The DNS name that its certificate bears."""

    @property
    def url(self) -> str:
        """Address of its API."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self.authority else 'http'}://{host}:{layout.API_PORT}"


@dataclass(frozen=True)
class SoundReport:
    """A sound report, and how long it was."""

    status: JobStatus
    num_bytes: int


class RendezvousApi:
    """One session for all jobs. Use it as a context manager."""

    def __init__(self) -> None:
        self._outdated: dict[str, str] = {}
        """Token, by pod uid, that a rendezvous refused, or takes for a moment only since it was replaced."""
        self._trusted: dict[str, tuple[str, ssl.SSLContext]] = {}
        """Authority, and what was made of it, by pod uid: a job that changes its own takes nobody else's place."""
        self._thread = LoopThread("rendezvous")

    async def __aenter__(self) -> "RendezvousApi":
        await self._thread.__aenter__()
        await self._thread.run(self._open())
        return self

    async def _open(self) -> None:
        # A long poll per job: the number of connections is the number of jobs. A few bytes may unpack to gigabytes.
        self._session = aiohttp.ClientSession(
            connector=bounded_connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread.run(self._session.close())
        await self._thread.__aexit__(kind, error, trace)

    def is_token_old(self, target: RendezvousTarget | None) -> bool:
        """Return whether this token was refused, or was replaced: the Secret has another one, or will have."""
        return target is not None and self._outdated.get(target.pod_uid) == target.token

    def _note_token(self, target: RendezvousTarget, is_old: bool) -> None:
        if not is_old:
            self._outdated.pop(target.pod_uid, None)
            return
        while len(self._outdated) >= MAX_OUTDATED:
            del self._outdated[next(iter(self._outdated))]
        self._outdated[target.pod_uid] = target.token

    def _trust(self, target: RendezvousTarget) -> ssl.SSLContext:
        """Return the same object each time: connections are kept open by it. Raises InputError."""
        authority, context = self._trusted.pop(target.pod_uid, ("", None))
        if context is None or authority != target.authority:
            context = client_context(target.authority)
        while len(self._trusted) >= MAX_TRUSTED:
            del self._trusted[next(iter(self._trusted))]
        self._trusted[target.pod_uid] = (target.authority, context)
        return context

    async def status(
        self, target: RendezvousTarget, after: JobStatus | None, limits: ReportLimits = ABSOLUTE
    ) -> SoundReport:
        """Return the status once it is newer than `after`, or the same after POLL_S; at once when there is none yet.

        Raises RendezvousUnreachable; ReportRefused for one that is not within the limits.
        """
        return await self._thread.run(self._status(target, after, limits))

    async def observe(self, target: RendezvousTarget, observation: Observation) -> None:
        """Send what the API server shows. Raises RendezvousUnreachable."""
        await self._thread.run(self._observe(target, observation))

    async def lead(self, target: RendezvousTarget, earlier: Earlier) -> None:
        """Tell a rendezvous that stands by to lead. Raises RendezvousUnreachable."""
        await self._thread.run(self._lead(target, earlier))

    async def _lead(self, target: RendezvousTarget, earlier: Earlier) -> None:
        await self._request(target, "POST", "/v1/lead", ANSWER_TIMEOUT_S, body=encode(earlier))

    async def _status(self, target: RendezvousTarget, after: JobStatus | None, limits: ReportLimits) -> SoundReport:
        query = {}
        if after is not None:
            query = {"after": str(after.revision), "term": str(after.term), "timeout": str(POLL_S)}
        silent_s = POLL_S + HANGING_S if query else ANSWER_TIMEOUT_S
        limit_s = ANSWER_TIMEOUT_S + (silent_s if query else 0.0)
        data = await self._request(target, "GET", "/v1/status", limit_s, silent_s, query=query, max_bytes=limits.bytes)
        try:
            status = read_report(data, limits)
        except Exception as error:
            # Of whatever kind: it is the report's fault, and the polling must not end with it.
            why = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"[:MAX_SHOWN]
            raise ReportRefused(f"rendezvous {target.pod} sent what is not a status: {why}", len(data)) from error
        if status.protocol != PROTOCOL:
            raise RendezvousUnreachable(
                f"rendezvous {target.pod} speaks protocol {status.protocol}, this operator {PROTOCOL}: "
                "use an operator and a sidecar image of the same version"
            )
        return SoundReport(status, len(data))

    async def _observe(self, target: RendezvousTarget, observation: Observation) -> None:
        await self._request(target, "PUT", "/v1/observation", ANSWER_TIMEOUT_S, body=encode(observation))

    async def _request(
        self,
        target: RendezvousTarget,
        method: str,
        path: str,
        limit_s: float,
        silent_s: float | None = None,
        *,
        query: dict[str, str] | None = None,
        body: str | None = None,
        max_bytes: int = 0,
    ) -> bytes:
        """Return the body, nothing unless there is a limit for it; no part of it may take longer than `silent_s`."""
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=silent_s)
        headers = {
            "Authorization": f"Bearer {target.token}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        where = f"rendezvous {target.pod} at {target.url}"
        try:
            async with self._session.request(
                method,
                target.url + path,
                params=query,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=self._trust(target) if target.authority else True,
                server_hostname=target.name or None,
            ) as response:
                is_replaced = response.headers.get(OUTGOING_HEADER) == OUTGOING
                self._note_token(target, is_replaced or response.status == 401)
                if response.status == 401:
                    raise RendezvousUnreachable(f"{where} refuses the operator's token (401)")
                if response.status >= 300:
                    shown = _printable((await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace"))
                    raise RendezvousUnreachable(f"{where} answered {method} {path} with {response.status}: {shown}")
                return await _body(response, where, max_bytes) if max_bytes else b""
        except InputError as error:
            raise RendezvousUnreachable(f"Secret key {layout.AUTHORITY_KEY!r}: {error}") from error
        except TimeoutError as error:
            raise RendezvousUnreachable(f"{where} did not answer within {silent_s or limit_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RendezvousUnreachable(f"{where} cannot be reached: {_plain(error)}") from error
        except ValueError as error:
            # A token of two lines, for example, cannot be sent.
            raise RendezvousUnreachable(f"{where} cannot be asked: {str(error)[:MAX_SHOWN]}") from error


async def _body(response: aiohttp.ClientResponse, where: str, max_bytes: int) -> bytes:
    """Return a body of a known length. Raises ReportRefused, as early as can be."""
    length, encoding = response.content_length, response.headers.get("Content-Encoding", "identity")
    if length is None or encoding != "identity":
        # In pieces of a byte each, or compressed, a short answer can be made to cost much.
        seen = "a body in chunks" if length is None else f"Content-Encoding {encoding[:MAX_SHOWN]!r}"
        raise ReportRefused(f"{where} sent {seen}: want Content-Length and no encoding")
    if length > max_bytes:
        raise ReportRefused(f"{where} sent {length} bytes: want at most {max_bytes} for a job of this size")
    data = bytearray()
    while chunk := await response.content.read(CHUNK_BYTES):
        data += chunk
    return bytes(data)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_SHOWN])


def _plain(error: Exception) -> str:
    """Return what went wrong without the library's own words around it."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = error.certificate_error
        shown = reason.verify_message if isinstance(reason, ssl.SSLCertVerificationError) else reason
        return f"its certificate is not the one of this job: {shown}"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    # The event loop puts the address into the text of the error, several when a name has several.
    return os.strerror(number).lower() if number else _printable(str(cause)) or type(cause).__name__
