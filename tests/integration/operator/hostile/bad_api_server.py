"""A real API server behind a proxy that gives its clients trouble, as a test says."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from unbroken_operator.adapters.kube import load_connection

GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


@dataclass(frozen=True)
class Call:
    """One request, before it is passed on."""

    verb: str
    """HTTP method, or WATCH."""
    resource: str
    """Such as pods or resilienttrainingjobs/status; of what tells the kinds there are, its path."""
    number: int
    """Of this verb and resource, from 0."""


@dataclass(frozen=True)
class Status:
    """Answer with this status, without asking the API server."""

    code: int
    retry_after: str = ""


@dataclass(frozen=True)
class Lost:
    """Pass the call on, and break the connection instead of answering."""


@dataclass(frozen=True)
class Cut:
    """End a watch after so many lines, with the news that its history is gone if so."""

    num_lines: int
    is_gone: bool = False


@dataclass(frozen=True)
class Held:
    """Pass the call on if so, and never answer."""

    is_passed: bool


Trouble = Status | Lost | Cut | Held


class BadApiServer:
    """The proxy. `trouble` says for each call what goes wrong, None for nothing."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._upstream = kubeconfig
        self._folder = folder
        self._is_over = asyncio.Event()
        self._numbers: dict[tuple[str, str], int] = {}
        self.trouble: Callable[[Call], Trouble | None] = lambda _: None
        self.troubled: list[tuple[str, str, Trouble]] = []
        """What went wrong so far."""
        self.created: list[str] = []
        """Resource of each object that the API server has created, answered or not."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Path]:
        """Serve; yields the kubeconfig of the proxy."""
        connection = await load_connection(str(self._upstream))
        tls = ssl.create_default_context(cafile=connection.ca_path)
        if connection.is_insecure:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        if connection.certificate_path is not None:
            tls.load_cert_chain(connection.certificate_path, connection.private_key_path)
        headers = {"Authorization": f"Bearer {connection.token}"} if connection.token else {}
        application = web.Application(client_max_size=2**24)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, limit=0), headers=headers) as session:

            async def answer(request: web.Request) -> web.StreamResponse:
                return await self._answer(request, session, connection.server)

            application.router.add_route("*", "/{path:.*}", answer)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                yield self._kubeconfig(runner.addresses[0][1])
            finally:
                self._is_over.set()
                await runner.cleanup()

    async def _no_answer(self) -> web.Response:
        await self._is_over.wait()
        return web.Response(status=503)

    def _kubeconfig(self, port: int) -> Path:
        path = self._folder / f"proxy-{port}.json"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bad", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "any", "user": {}}],
            "contexts": [{"name": "bad", "context": {"cluster": "bad", "user": "any"}}],
            "current-context": "bad",
        }
        path.write_text(json.dumps(content))
        return path

    async def _answer(self, request: web.Request, session: aiohttp.ClientSession, server: str) -> web.StreamResponse:
        verb = "WATCH" if "watch" in request.query else request.method
        resource = _resource(request.path)
        number = self._numbers[verb, resource] = self._numbers.get((verb, resource), -1) + 1
        trouble = self.trouble(Call(verb, resource, number))
        if trouble is not None:
            self.troubled.append((verb, resource, trouble))
        if isinstance(trouble, Status):
            headers = {"Retry-After": trouble.retry_after} if trouble.retry_after else {}
            return web.Response(status=trouble.code, text="<h1>not now</h1>", headers=headers)
        if isinstance(trouble, Held) and not trouble.is_passed:
            return await self._no_answer()
        body = await request.read()
        passed = {name: ", ".join(request.headers.getall(name, [])) for name in ("Content-Type", "Accept")}
        passed = {name: text for name, text in passed.items() if text}
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{server}{request.raw_path}"
        async with session.request(request.method, url, data=body or None, headers=passed, timeout=timeout) as upstream:
            if verb == "WATCH" and upstream.status == 200:
                return await _pass_lines(request, upstream, trouble)
            data = await upstream.read()
            if upstream.status == 201:
                self.created.append(resource)
        if isinstance(trouble, Held):
            return await self._no_answer()
        if isinstance(trouble, Lost) and request.transport is not None:
            request.transport.abort()
        return web.Response(status=upstream.status, body=data, content_type=upstream.content_type)


async def _pass_lines(
    request: web.Request, upstream: aiohttp.ClientResponse, trouble: Trouble | None
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    num_lines = 0
    with contextlib.suppress(ConnectionError):
        async for line in upstream.content:
            if isinstance(trouble, Cut) and num_lines >= trouble.num_lines:
                if trouble.is_gone:
                    await response.write(json.dumps(GONE).encode() + b"\n")
                break
            await response.write(line)
            num_lines += 1
        await response.write_eof()
    return response


def _resource(path: str) -> str:
    parts = path.strip("/").split("/")
    if parts[0] == "apis" and len(parts) <= 3:
        return "/".join(parts)
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if len(rest) >= 3 and rest[0] == "namespaces":
        rest = rest[2:]
    return "/".join((rest[0] if rest else "", *rest[2:3])).strip("/")
