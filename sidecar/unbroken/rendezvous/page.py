"""The job's status for the live page, whose files `unbroken page` has. Read-only, and with the token like all else."""

import asyncio
import json
from typing import Any

from aiohttp import web

from unbroken.rendezvous.service import Service
from unbroken_core.conventions.page_headers import PAGE_HEADERS
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import JobStatus

MAX_VIEWERS = 32
"""Status requests that may wait at the same time."""
MAX_WAIT_S = 20.0
_MIN_PAUSE_S = 0.1
_COST_RATIO = 0.05
"""Share of the rendezvous' time that writing the status may take, for any number of viewers: 4,096 pods take 60 ms."""
_MAX_AGE_S = 1.0
"""Age limit of values that depend on the clock alone (ETTR)."""
_MAX_WHY_LINES = 50


class Page:
    """The handler of /page/status."""

    def __init__(self, service: Service) -> None:
        self._snapshots = Snapshots(service)
        self._num_viewers = 0

    def routes(self) -> list[web.RouteDef]:
        """Return what to add to the application."""
        return [web.get("/page/status", self._status)]

    async def _status(self, request: web.Request) -> web.StreamResponse:
        try:
            query = [_number(request, name, usual) for name, usual in (("term", -1), ("after", -1))]
            wait_s = min(max(_number(request, "timeout", 0), 0), MAX_WAIT_S)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n", headers=PAGE_HEADERS)
        if self._num_viewers >= MAX_VIEWERS:
            text = f"/page/status: want at most {MAX_VIEWERS} requests at once\n"
            return web.Response(status=503, text=text, headers={**PAGE_HEADERS, "Retry-After": "5"})
        self._num_viewers += 1
        try:
            body = await self._snapshots.newer(query[0], query[1], wait_s)
        finally:
            self._num_viewers -= 1
        return web.Response(body=body, content_type="application/json", headers=PAGE_HEADERS)


def _number(request: web.Request, name: str, usual: int) -> int:
    text = request.query.get(name)
    if text is None:
        return usual
    if len(text) > 18 or not text.removeprefix("-").isdecimal():
        raise ValueError(f"{name}: want an integer, got {text[:40]!r}")
    return int(text)


class Snapshots:
    """The status for the page: written once for all viewers, and only as often as its share of time allows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._body = b""
        self._of = (-1, -1)
        self._taken_s = self._next_s = self._loop.time() - _MAX_AGE_S

    async def newer(self, term: int, revision: int, timeout_s: float) -> bytes:
        """Return a status newer than the one named, or the newest after `timeout_s`, as JSON."""
        await self._service.newer(term, revision, timeout_s)
        since_s = self._loop.time()
        async with self._lock:
            # A status written while this viewer waited for the lock is new enough.
            if self._taken_s < since_s and not self._is_good():
                await asyncio.sleep(self._next_s - self._loop.time())
                await self._write()
            return self._body

    def _is_good(self) -> bool:
        """Whether the last one is still current."""
        is_young = self._loop.time() - self._taken_s < _MAX_AGE_S
        return is_young and self._of == (self._service.term, self._service.revision)

    async def _write(self) -> None:
        taken_s = self._loop.time()
        service = self._service
        status = service.status()
        beside = {
            "now": service.wall(taken_s),
            "since": service.wall(service.started_s),
            "layers": [layer.name for layer in service.settings.layers],
            "why": service.explanation()[:_MAX_WHY_LINES],
        }
        # In a thread: half of the work, for which the agents need not wait.
        body = await asyncio.to_thread(_encode, beside, status)
        self._body, self._of, self._taken_s = body, (status.term, status.revision), taken_s
        ended_s = self._loop.time()
        self._next_s = ended_s + max(_MIN_PAUSE_S, (ended_s - taken_s) / _COST_RATIO)


def _encode(beside: dict[str, Any], status: JobStatus) -> bytes:
    return f'{json.dumps(beside)[:-1]},"status":{wire.encode(status)}}}'.encode()
