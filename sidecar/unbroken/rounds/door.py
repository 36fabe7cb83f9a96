"""Lets in whoever shows the token, and nobody else."""

import asyncio
import hmac
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web

from unbroken.rendezvous.limits import FailureRate, Strangers
from unbroken.rendezvous.refusals import Refusal, Refusals
from unbroken_core.errors import InputError

_SWEEP_S = 1.0


_MIN_CHARACTERS = 16


class FixedToken:
    """A token that no file has; checks as `TokenFile` does."""

    def __init__(self, token: str) -> None:
        """Raises InputError when it is too short to be one."""
        if len(token) < _MIN_CHARACTERS:
            raise InputError(f"token: want at least {_MIN_CHARACTERS} characters, got {len(token)}")
        self._token = token.encode()

    def accepts(self, authorization: str) -> bool:
        """Return whether a header's value is `Bearer <token>`; takes the same time wherever it differs."""
        scheme, _, presented = authorization.partition(" ")
        is_same = hmac.compare_digest(presented.strip().encode(errors="replace"), self._token)
        return scheme.lower() == "bearer" and is_same


class Door:
    """Guards an application, as that of a job's rendezvous is guarded."""

    def __init__(self, accepts: Callable[[str], bool], refusals: Refusals) -> None:
        self._accepts = accepts
        self._refusals = refusals
        self._failures = FailureRate()
        self._strangers: Strangers | None = None
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    def watch(self, server: web.Server) -> None:
        """Close connections of this server that show no token; half of all that the process can hold may be open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._strangers = Strangers(lambda: server.connections, self._refusals, limit)
        self._sweep(self._strangers)

    def close(self) -> None:
        """Stop watching."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _sweep(self, strangers: Strangers) -> None:
        strangers.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep, strangers)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse whoever lacks the token, before anything else is looked at."""
        if not self._accepts(request.headers.get("Authorization", "")):
            return self._turn_away(request)
        if self._strangers is not None:
            self._strangers.admit(request.protocol)
        response: web.StreamResponse = await handler(request)
        return response

    def _turn_away(self, request: web.Request) -> web.Response:
        peer, now_s = request.remote or "unknown", self._loop.time()
        self._refusals.note(Refusal.UNAUTHORIZED, peer, "want the token as Authorization: Bearer", now_s)
        response = web.Response(status=401, text="want Authorization: Bearer <token>\n")
        response.force_close()
        if not self._failures.may_answer(peer, now_s):
            request.protocol.force_close()
        return response
