"""The HTTP API: parses requests, and passes what is accepted on to the service."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from unbroken.network.connections import Connections
from unbroken.network.frames import MessageRefused, next_text
from unbroken.network.limits import MESSAGES_AT_ONCE, MESSAGES_PER_S, TokenBucket
from unbroken.network.peer import FrameWriter
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.socket_options import give_up_silent_peer
from unbroken.network.token import Verifier
from unbroken.network.token_guard import TokenGuard
from unbroken.rendezvous.page import Page
from unbroken.rendezvous.pictures import NoPictureError, tree_drawing, tree_text
from unbroken.rendezvous.service import Service
from unbroken.rendezvous.vouching import Vouching
from unbroken_core.conventions.tokens import Kind
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    CAN_HALT,
    FEATURES_HEADER,
    AgentMessage,
    CertificateRequest,
    Heartbeat,
    Hello,
    JobStatus,
    Observation,
    Refused,
    Report,
)
from unbroken_core.ranks.tree import RankTree
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

MAX_AGENT_MESSAGE_BYTES = 1 << 20
"""A Report of 64 workers, each with a fault of 2,000 characters and a stack, is 0.3 MB."""
MAX_STATUS_WAIT_S = 60.0
_HELLO_TIMEOUT_S = 10.0
_BODY_TIMEOUT_S = 20.0
_ALLOWED = {"/v1/agents": (Kind.AGENT,), "/v1/observation": (Kind.OPERATOR,), "/v1/lead": (Kind.OPERATOR,)}
_OF_MEMBERS = Report | Heartbeat | CertificateRequest
_READERS = (Kind.OPERATOR, Kind.READER)
"""Who may make all other requests: they change nothing."""


class Server:
    """Handlers of the API."""

    def __init__(
        self, service: Service, verifier: Verifier, refusals: Refusals, connections: Connections | None = None
    ) -> None:
        """`connections`: those of the port; None where nobody else can reach it."""
        self._service = service
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._vouching = Vouching(verifier, service.settings.uid)
        self._token_guard = TokenGuard(verifier, refusals, connections, _allowed)

    def application(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=wire.MAX_MESSAGE_BYTES, middlewares=[self._token_guard.guard])
        app.cleanup_ctx.append(self._token_guard.sweeping)
        app.add_routes(
            [
                web.get("/v1/agents", self._agents),
                web.get("/v1/status", self._status),
                web.put("/v1/observation", self._observation),
                web.post("/v1/lead", self._lead),
                web.get("/v1/topology", self._topology_text),
                web.get("/v1/topology.svg", self._topology_drawing),
                *Page(self._service).routes(),
            ]
        )
        return app

    def _refuse(self, reason: Refusal, request: web.Request, detail: str) -> None:
        self._refusals.note(reason, request.remote or "unknown", detail, self._loop.time())

    # ---------------------------------------------------------------------------------------------------------- agents

    async def _agents(self, request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse(max_msg_size=MAX_AGENT_MESSAGE_BYTES, compress=False, timeout=1.0)
        try:
            return await self._serve_agent(connection, request)
        except ConnectionResetError as error:
            # Such as all that connected, and gave up, while this process stood still.
            logger.info("agent has gone before it was answered: address=%s error=%s", request.remote, error)
            return connection if connection.prepared else web.Response()

    async def _serve_agent(self, connection: web.WebSocketResponse, request: web.Request) -> web.StreamResponse:
        await connection.prepare(request)
        transport = request.transport
        if transport is None:
            return connection
        give_up_silent_peer(transport, probe=False)
        try:
            hello = await self._next_message(connection, Hello, _HELLO_TIMEOUT_S)
            if hello is not None and await self._is_own_pod(connection, hello, request):
                await self._converse(connection, hello, transport, request)
        except MessageRefused as error:
            self._refuse(error.reason, request, str(error))
            await connection.close(code=1008, message=str(error).encode()[:120])
        except asyncio.TimeoutError:
            self._refuse(Refusal.SILENT, request, f"want Hello within {_HELLO_TIMEOUT_S:g} s, got nothing")
            await connection.close(code=1008, message=b"want Hello")
        return connection

    async def _is_own_pod(self, connection: web.WebSocketResponse, hello: Hello, request: web.Request) -> bool:
        """Return whether the token is that of the pod in Hello; else close the connection."""
        caller = self._token_guard.caller(request)
        if caller.kind is None or caller.pod == hello.pod:
            return True
        detail = f"token: want that of pod {hello.pod[:253]!r}, got that of pod {caller.pod!r}"
        self._refuse(Refusal.FORBIDDEN, request, detail)
        await connection.send_str(wire.encode(Refused(detail)))
        await connection.close(code=1008, message=b"want the token of this pod")
        return False

    async def _converse(
        self, connection: web.WebSocketResponse, hello: Hello, transport: asyncio.WriteTransport, request: web.Request
    ) -> None:
        can_halt = CAN_HALT in request.headers.get(FEATURES_HEADER, "").split(",")
        peer = self._service.join(hello, transport, can_halt)
        budget = TokenBucket(MESSAGES_PER_S, MESSAGES_AT_ONCE, self._loop.time())
        wanted: CertificateRequest | None = None
        try:
            with self._token_guard.held(request, peer.close):
                while (message := await self._next_message(connection, _OF_MEMBERS, None)) is not None:
                    if isinstance(message, CertificateRequest):
                        wanted = self._checked(peer, message)
                    else:
                        self._service.receive(peer, message)
                    if wanted is not None and self._service.is_named(hello):
                        await self._certify(peer, hello, wanted)
                        wanted = None
                    wait_s = budget.take(self._loop.time())
                    if wait_s > 0:
                        # It is not read meanwhile: its messages wait in its own buffers, at no cost to others.
                        self._refuse(Refusal.TOO_FAST, request, f"want {MESSAGES_PER_S:g} messages a second on average")
                        await asyncio.sleep(wait_s)
        finally:
            self._service.leave(peer)

    def _checked(self, peer: FrameWriter, message: CertificateRequest) -> CertificateRequest:
        """Return the request of a member. Raises MessageRefused."""
        if not self._service.is_member(peer):
            raise MessageRefused(Refusal.OUT_OF_PLACE, "CertificateRequest: want it of a member, got it before Welcome")
        return message

    async def _certify(self, peer: FrameWriter, hello: Hello, message: CertificateRequest) -> None:
        """Vouch for the key of a keeper: for that of its own pod alone, whatever the request names.

        The token proves the name of the pod, and the operator has told the uid of that name. Until it does, the request
        waits for it, and for the next heartbeat: other pods would believe the certificate for as long as the job lives.
        """
        # In a thread: it loads a package, and signs.
        vouch = self._vouching.certificate
        self._service.certify(peer, await asyncio.to_thread(vouch, message.request, hello.pod_uid, self._service.term))

    @staticmethod
    async def _next_message(connection: web.WebSocketResponse, expected: Any, timeout_s: float | None) -> Any:
        """Return the next message, or None at the end. Raises MessageRefused, TimeoutError."""
        text = await next_text(connection, timeout_s, MAX_AGENT_MESSAGE_BYTES)
        return None if text is None else _decode(text, expected)

    # ------------------------------------------------------------------------------------------------ status, operator

    async def _status(self, request: web.Request) -> web.StreamResponse:
        try:
            query = _status_query(request)
        except WireError as error:
            self._refuse(Refusal.MALFORMED, request, str(error))
            return web.Response(status=400, text=f"{error}\n")
        if query is None:
            status = self._service.status()
        else:
            status = await self._service.newer_status(*query)
        return web.Response(text=wire.encode(status), content_type="application/json")

    async def _topology_text(self, _request: web.Request) -> web.StreamResponse:
        def show(tree: RankTree | None, status: JobStatus) -> str:
            return tree_text(tree, status, self._service.explanation())

        return self._shown(show, "text/plain")

    async def _topology_drawing(self, _request: web.Request) -> web.StreamResponse:
        return self._shown(tree_drawing, "image/svg+xml")

    def _shown(self, show: Callable[[RankTree | None, JobStatus], str], content_type: str) -> web.Response:
        try:
            text = show(self._service.tree, self._service.status())
        except NoPictureError as error:
            return web.Response(status=404, text=f"{error}\n")
        return web.Response(text=text, content_type=content_type, headers={"Cache-Control": "no-store"})

    async def _lead(self, _request: web.Request) -> web.StreamResponse:
        """Answer an operator that does not know whether the one before it has said so already."""
        return web.Response(status=204)

    async def _observation(self, request: web.Request) -> web.StreamResponse:
        try:
            observation = wire.decode(await asyncio.wait_for(request.read(), _BODY_TIMEOUT_S), Observation)
        except asyncio.TimeoutError:
            detail = f"observation: want all of it within {_BODY_TIMEOUT_S:g} s"
            self._refuse(Refusal.SILENT, request, detail)
            return web.Response(status=408, text=f"{detail}\n")
        except ConnectionError:
            # Who sent it has gone in the middle: there is nobody to answer.
            return web.Response(status=400)
        except WireError as error:
            self._refuse(Refusal.MALFORMED, request, str(error))
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPRequestEntityTooLarge:
            self._refuse(Refusal.TOO_LARGE, request, f"want at most {wire.MAX_MESSAGE_BYTES} bytes")
            raise
        self._service.observe(observation)
        return web.Response(status=204)


def _allowed(request: web.Request) -> tuple[Kind, ...]:
    resource = request.match_info.route.resource
    return _READERS if resource is None else _ALLOWED.get(resource.canonical, _READERS)


def _decode(text: str, expected: Any) -> Any:
    try:
        return wire.decode(text, expected)
    except WireError as error:
        raise MessageRefused(_reason(text), str(error)) from error


def _reason(text: str) -> Refusal:
    """Return OUT_OF_PLACE for a sound message at the wrong time, MALFORMED for any other."""
    try:
        wire.decode(text, AgentMessage)
    except WireError:
        return Refusal.MALFORMED
    return Refusal.OUT_OF_PLACE


def _status_query(request: web.Request) -> tuple[int, int, float] | None:
    """Return (term, revision, seconds), or None if the caller does not want to wait. Raises WireError."""
    after = request.query.get("after")
    if after is None:
        return None
    texts = {"after": after, "term": request.query.get("term", "-1")}
    numbers: dict[str, int] = {}
    for name, text in texts.items():
        try:
            numbers[name] = int(text)
        except ValueError:
            raise WireError(f"{name}: want an integer, got {text[:40]!r}") from None
    wait = request.query.get("timeout", str(MAX_STATUS_WAIT_S))
    try:
        wait_s = float(wait)
    except ValueError:
        raise WireError(f"timeout: want seconds, got {wait[:40]!r}") from None
    if not 0 <= wait_s <= MAX_STATUS_WAIT_S:
        raise WireError(f"timeout: want 0 to {MAX_STATUS_WAIT_S:g} seconds, got {wait_s}")
    return numbers["term"], numbers["after"], wait_s
