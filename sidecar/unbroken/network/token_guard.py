"""Refuses requests without the token, before anything else in them is read."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from unbroken.network.connections import Connections
from unbroken.network.limits import FailureRate
from unbroken.network.refusals import Refusal, Refusals


class TokenGuard:
    """Guards an application: use `guard` as middleware."""

    def __init__(
        self, accepts: Callable[[str], bool], refusals: Refusals, connections: Connections | None = None
    ) -> None:
        """`accepts` decides about the value of each Authorization header; `connections` learns who has shown it."""
        self._accepts = accepts
        self._refusals = refusals
        self._failures = FailureRate()
        self._connections = connections
        self._loop = asyncio.get_running_loop()

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the token."""
        if not self._accepts(request.headers.get("Authorization", "")):
            return self._refuse(request)
        if self._connections is not None:
            self._connections.admit(request.transport)
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
