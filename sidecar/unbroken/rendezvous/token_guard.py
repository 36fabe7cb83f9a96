"""Lets in whoever shows the token, and nobody else: before anything else of a request is looked at."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web

from unbroken.rendezvous.limits import FailureRate, Strangers
from unbroken.rendezvous.refusals import Refusal, Refusals

_SWEEP_S = 1.0


class Door:
    """Guards an application: `guard` is its middleware, `watch` is called once it is set up, `stop` at its cleanup."""

    def __init__(self, accepts: Callable[[str], bool], refusals: Refusals) -> None:
        """`accepts` is asked about the value of each Authorization header."""
        self._accepts = accepts
        self._refusals = refusals
        self._failures = FailureRate()
        self._strangers: Strangers | None = None
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    def watch(self, server: web.Server | None, limit: int | None = None) -> None:
        """Close connections of this server that show no token; None: half of all that the process can hold may be open.

        Raises RuntimeError when the runner was not set up, and so has no server.
        """
        if server is None:
            raise RuntimeError("watch: want the server of a runner that is set up, got none")
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if limit is None else limit
        self._strangers = Strangers(lambda: server.connections, self._refusals, most)
        self._sweep(self._strangers)

    async def stop(self, _app: web.Application) -> None:
        """Watch no more."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _sweep(self, strangers: Strangers) -> None:
        strangers.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep, strangers)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse whoever lacks the token."""
        if not self._accepts(request.headers.get("Authorization", "")):
            return self._turn_away(request)
        if self._strangers is not None:
            self._strangers.admit(request.protocol)
        self._refusals.welcome(request.remote or "unknown")
        response: web.StreamResponse = await handler(request)
        return response

    def _turn_away(self, request: web.Request) -> web.Response:
        peer, now_s = request.remote or "unknown", self._loop.time()
        self._refusals.note(Refusal.UNAUTHORIZED, peer, "want the token as Authorization: Bearer", now_s)
        response = web.Response(status=401, text="want Authorization: Bearer <token>\n")
        response.force_close()
        if not self._failures.may_answer(peer, now_s):
            self._refusals.note(Refusal.TOO_FAST, peer, "more wrong tokens than are answered", now_s)
            request.protocol.force_close()
        return response
