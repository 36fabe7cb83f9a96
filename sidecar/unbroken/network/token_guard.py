"""Refuses requests without the token, before anything else in them is read."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any

from aiohttp import web

from unbroken.network.connections import Connections
from unbroken.network.limits import FailureRate
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.token import Caller, Verifier
from unbroken_core.conventions.tokens import OUTGOING, OUTGOING_HEADER, Kind

logger = logging.getLogger(__name__)

_SWEEP_S = 1.0
NUM_CLOSED_AT_ONCE = 64
"""Connections with a replaced key that are closed in one second: all at once, thousands would come back together."""

MOST_OF_ONE_POD = 16
"""Requests of one pod's token at once. Its agent has one, and for a moment those that a broken network has left."""


class TokenGuard:
    """Guards an application: use `guard` as middleware, and `sweeping` as one of its cleanup contexts."""

    def __init__(
        self,
        verifier: Verifier,
        refusals: Refusals,
        connections: Connections | None = None,
        allowed: Callable[[web.Request], Collection[Kind]] = lambda _request: tuple(Kind),
    ) -> None:
        """`verifier` decides about each Authorization header; `connections` learns who has shown a token.

        `allowed` returns who may make a request.
        """
        self._verifier = verifier
        self._refusals = refusals
        self._failures = FailureRate()
        self._connections = connections
        self._allowed = allowed
        self._callers: dict[int, Caller] = {}
        """By the identity of their request, for as long as it is handled."""
        self._num_open: Counter[str] = Counter()
        """Requests of each pod's token that are being handled: a WebSocket is one for as long as it is open."""
        self._held: dict[object, tuple[int, Callable[[], None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    async def sweeping(self, _app: web.Application) -> AsyncIterator[None]:
        """Close connections of replaced keys while the application runs."""
        self._sweep()
        yield
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        self._close_outdated()

    def caller(self, request: web.Request) -> Caller:
        """Return who makes this request, while it is handled."""
        return self._callers[id(request)]

    @contextlib.contextmanager
    def held(self, request: web.Request, close: Callable[[], None]) -> Iterator[None]:
        """Meanwhile, call `close` if the key or token that opened this connection is no longer accepted."""
        mark = object()
        self._held[mark] = (self.caller(request).secret_number, close)
        try:
            yield
        finally:
            self._held.pop(mark, None)

    def _close_outdated(self) -> None:
        oldest = self._verifier.oldest()
        outdated = [mark for mark, (number, _) in self._held.items() if number < oldest] if oldest > 0 else []
        for mark in outdated[:NUM_CLOSED_AT_ONCE]:
            _, close = self._held.pop(mark)
            close()
        if outdated:
            num = min(len(outdated), NUM_CLOSED_AT_ONCE)
            logger.info("closed connections of a replaced key: num=%d left=%d", num, len(outdated) - num)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without a token, and those that its bearer may not make."""
        caller = self._verifier.accepts(request.headers.get("Authorization", ""))
        if caller is None:
            return self._refuse(request)
        if self._connections is not None:
            self._connections.admit(request.transport)
        self._refusals.note_authorized(request.remote or "unknown")
        allowed = self._allowed(request)
        if caller.kind is not None and caller.kind not in allowed:
            return self._forbid(request, caller.kind, allowed)
        if caller.pod and self._num_open[caller.pod] >= MOST_OF_ONE_POD:
            return self._crowd_out(request, caller.pod)
        self._callers[id(request)] = caller
        self._num_open[caller.pod] += 1
        try:
            response: web.StreamResponse = await handler(request)
        finally:
            del self._callers[id(request)]
            self._num_open[caller.pod] -= 1
            if not self._num_open[caller.pod]:
                del self._num_open[caller.pod]
        if caller.is_outgoing and not response.prepared:
            response.headers[OUTGOING_HEADER] = OUTGOING
        return response

    def _forbid(self, request: web.Request, kind: Kind, allowed: Collection[Kind]) -> web.Response:
        detail = f"want the token of {' or '.join(sorted(allowed))}, got that of {kind}"
        self._refusals.note(Refusal.FORBIDDEN, request.remote or "unknown", detail, self._loop.time())
        return _last_answer(403, detail)

    def _crowd_out(self, request: web.Request, pod: str) -> web.Response:
        """Whoever has the token of one pod could take the connections that all others need."""
        detail = f"want {MOST_OF_ONE_POD} requests at once at most with the token of pod {pod}, got one more"
        self._refusals.note(Refusal.TOO_MANY, request.remote or "unknown", detail, self._loop.time())
        return _last_answer(429, detail)

    def _refuse(self, request: web.Request) -> web.Response:
        peer, now_s = request.remote or "unknown", self._loop.time()
        self._refusals.note(Refusal.UNAUTHORIZED, peer, "want the token as Authorization: Bearer", now_s)
        response = web.Response(status=401, text="want Authorization: Bearer <token>\n")
        response.force_close()
        if not self._failures.may_answer(peer, now_s):
            self._refusals.note(Refusal.TOO_FAST, peer, "more wrong tokens than are answered", now_s)
            request.protocol.force_close()
        return response


def _last_answer(status: int, detail: str) -> web.Response:
    """Return an answer after which the connection is closed: those that nobody limits would stay open."""
    response = web.Response(status=status, text=f"{detail}\n")
    response.force_close()
    return response
