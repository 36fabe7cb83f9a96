"""HTTP client of a job's rendezvous."""

import functools
import os
import ssl
from dataclasses import dataclass
from types import TracebackType

import aiohttp

from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import OUTGOING, OUTGOING_HEADER
from unbroken_core.errors import InputError, WireError
from unbroken_core.messages import PROTOCOL, JobStatus, Observation
from unbroken_core.wire import MAX_MESSAGE_BYTES, decode, encode
from unbroken_operator.adapters.errors import RendezvousUnreachable
from unbroken_operator.api import layout

POLL_S = 30
"""Longest wait of one status request at the rendezvous."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
MAX_OUTDATED = 4096


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


class RendezvousApi:
    """One session for all jobs. Use it as a context manager, in one event loop."""

    def __init__(self) -> None:
        self._outdated: dict[str, str] = {}
        """Token, by pod uid, that a rendezvous refused, or takes for a moment only since it was replaced."""
        # A long poll per job: the number of connections is the number of jobs.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )

    async def __aenter__(self) -> "RendezvousApi":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

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

    async def status(self, target: RendezvousTarget, after: JobStatus | None) -> JobStatus:
        """Return the status once it is newer than `after`, or the same after POLL_S; at once when there is none yet.

        Raises RendezvousUnreachable.
        """
        query = {}
        if after is not None:
            query = {"after": str(after.revision), "term": str(after.term), "timeout": str(POLL_S)}
        limit_s = (POLL_S if query else 0) + ANSWER_TIMEOUT_S
        text = await self._request(target, "GET", "/v1/status", limit_s, query=query)

        try:
            status: JobStatus = decode(text, JobStatus)
        except WireError as error:
            raise RendezvousUnreachable(f"rendezvous {target.pod} sent what is not a status: {error}") from error
        if status.protocol != PROTOCOL:
            raise RendezvousUnreachable(
                f"rendezvous {target.pod} speaks protocol {status.protocol}, this operator {PROTOCOL}: "
                "use an operator and a sidecar image of the same version"
            )
        return status

    async def observe(self, target: RendezvousTarget, observation: Observation) -> None:
        """Send what the API server shows. Raises RendezvousUnreachable."""
        await self._request(target, "PUT", "/v1/observation", ANSWER_TIMEOUT_S, body=encode(observation))

    async def _request(
        self,
        target: RendezvousTarget,
        method: str,
        path: str,
        limit_s: float,
        *,
        query: dict[str, str] | None = None,
        body: str | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {target.token}", "Content-Type": "application/json"}
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
                ssl=_trust(target.authority) if target.authority else True,
                server_hostname=target.name or None,
            ) as response:
                data = await response.content.read(MAX_MESSAGE_BYTES + 1)
                while not response.content.at_eof() and len(data) <= MAX_MESSAGE_BYTES:
                    data += await response.content.read(MAX_MESSAGE_BYTES + 1 - len(data))
                is_replaced = response.headers.get(OUTGOING_HEADER) == OUTGOING
                self._note_token(target, is_replaced or response.status == 401)
                if response.status == 401:
                    raise RendezvousUnreachable(f"{where} refuses the operator's token (401)")
                if response.status >= 300:
                    shown = data[:200].decode(errors="replace")
                    raise RendezvousUnreachable(f"{where} answered {method} {path} with {response.status}: {shown}")
                return data
        except InputError as error:
            raise RendezvousUnreachable(f"Secret key {layout.AUTHORITY_KEY!r}: {error}") from error
        except TimeoutError as error:
            raise RendezvousUnreachable(f"{where} did not answer within {limit_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RendezvousUnreachable(f"{where} cannot be reached: {_plain(error)}") from error


@functools.lru_cache(maxsize=4096)
def _trust(authority: str) -> ssl.SSLContext:
    # The same object each time: connections are kept open by it.
    return client_context(authority)


def _plain(error: Exception) -> str:
    """Return what went wrong without the library's own words around it."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = error.certificate_error
        shown = reason.verify_message if isinstance(reason, ssl.SSLCertVerificationError) else reason
        return f"its certificate is not the one of this job: {shown}"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    # The event loop puts the address into the text of the error, several when a name has several.
    return os.strerror(number).lower() if number else str(cause) or type(cause).__name__
