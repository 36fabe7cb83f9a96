"""Refuses requests without the token, before anything else in them is read."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web

from unbroken.network.limits import FailureRate, UnauthenticatedConnections
from unbroken.network.refusals import Refusal, Refusals

_SWEEP_S = 1.0


class TokenGuard:
    """Guards an application: use `guard` as middleware, call `watch` once it is set up and `stop` at its cleanup."""

    def __init__(self, accepts: Callable[[str], bool], refusals: Refusals) -> None:
        """`accepts` decides about the value of each Authorization header."""
        self._accepts = accepts
        self._refusals = refusals
        self._failures = FailureRate()
        self._unauthenticated: UnauthenticatedConnections | None = None
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    def watch(self, server: web.Server | None, limit: int | None = None) -> None:
        """Close connections of this server that show no token. `limit`: how many may be open; None: half of the
        process's descriptors.

        Raises RuntimeError when the runner was not set up, and so has no server.
        """
        if server is None:
            raise RuntimeError("watch: want the server of a runner that is set up, got none")
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if limit is None else limit
        self._unauthenticated = UnauthenticatedConnections(lambda: server.connections, self._refusals, most)
        self._sweep(self._unauthenticated)

    async def stop(self, _app: web.Application) -> None:
        """Stop watching."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _sweep(self, unauthenticated: UnauthenticatedConnections) -> None:
        unauthenticated.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep, unauthenticated)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the token."""
        if not self._accepts(request.headers.get("Authorization", "")):
            return self._refuse(request)
        if self._unauthenticated is not None:
            self._unauthenticated.admit(request.protocol)
        self._refusals.note_authorized(request.remote or "unknown")
        response: web.StreamResponse = await handler(request)
        return response

    def _refuse(self, request: web.Request) -> web.Response:
        peer, now_s = request.remote or "unknown", self._loop.time()
        self._refusals.note(Refusal.UNAUTHORIZED, peer, "want the token as Authorization: Bearer", now_s)
        response = web.Response(status=401, text="want Authorization: Bearer <token>\n")
        response.force_close()
        if not self._failures.may_answer(peer, now_s):
            self._refusals.note(Refusal.TOO_FAST, peer, "more wrong tokens than are answered", now_s)
            request.protocol.force_close()
        return response
