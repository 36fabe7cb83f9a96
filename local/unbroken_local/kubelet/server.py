"""A node's HTTP server: container logs, on the path and with the query of the real kubelet."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Protocol

from aiohttp import web

from unbroken_local.kubelet.logs import read_log
from unbroken_local.kubelet.pod import PodRunner

log = logging.getLogger(__name__)


class PodDirectory(Protocol):
    """The pods of a node."""

    is_down: bool

    def find_pod(self, namespace: str, name: str) -> PodRunner | None:
        """Return the newest pod of a name."""
        ...


class LogServer:
    """Serves `/containerLogs/NAMESPACE/POD/CONTAINER` and `/healthz` on one address. An async context manager."""

    def __init__(self, address: str, port: int, pods: PodDirectory) -> None:
        self._address = address
        self._port = port
        self._pods = pods
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def __aenter__(self) -> "LogServer":
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, self._port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        if self._pods.is_down:
            raise web.HTTPServiceUnavailable(text="the node is down\n")
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        if self._pods.is_down:
            raise web.HTTPServiceUnavailable(text="the node is down\n")
        runner = self._pods.find_pod(request.match_info["namespace"], request.match_info["pod"])
        name = request.match_info["container"]
        if runner is None or name not in runner.states:
            raise web.HTTPNotFound(text=f'container "{name}" of pod "{request.match_info["pod"]}" not found\n')
        path, restarts = _log_file(runner, name, _is_set(request, "previous"))
        follow = (lambda: runner.is_live(name, restarts)) if _is_set(request, "follow") else None
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        blocks = read_log(
            path, tail_lines=_number(request, "tailLines"), limit_bytes=_number(request, "limitBytes"), is_live=follow
        )
        try:
            first = await anext(blocks, b"") if follow is None else b""
            await response.prepare(request)
            await response.write(first)
            async for block in blocks:
                await response.write(block)
            await response.write_eof()
        except (ConnectionResetError, ConnectionAbortedError):
            return response  # The reader went away.
        except OSError as error:
            raise web.HTTPNotFound(text=f"no log: {error}\n") from error
        return response


def _log_file(runner: PodRunner, name: str, is_previous: bool) -> tuple[Path, int]:
    state = runner.states[name]
    has_run = state.last is not None or state.termination is not None or state.started_at is not None
    if not has_run:
        reason = state.reason or "ContainerCreating"
        raise web.HTTPBadRequest(text=f'container "{name}" in pod "{runner.spec.name}" is waiting to start: {reason}\n')
    newest = state.restarts
    if is_previous:
        newest = state.restarts if state.started_at is None and state.termination is None else state.restarts - 1
        if newest < 0:
            raise web.HTTPBadRequest(
                text=f'previous terminated container "{name}" in pod "{runner.spec.name}" not found\n'
            )
    return runner.log_file(name, newest), newest


def _is_set(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() in {"1", "true"}


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise web.HTTPBadRequest(text=f"{name}: want a number of at least 0, got {text!r}\n")
    return int(text)
