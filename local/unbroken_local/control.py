"""How the commands talk to a running cluster: HTTP on a Unix socket in the cluster's folder, for its owner only."""

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.cluster import LocalCluster

SOCKET_NAME = "control.sock"
ANSWER_LIMIT_S = 30.0


class ControlServer:
    """Serves /status, /nodes/NAME/fail (silence, recover) and /shutdown. An async context manager."""

    def __init__(
        self, short: Path, cluster: LocalCluster, shut_down: Callable[[], None], facts: dict[str, str]
    ) -> None:
        self._path = short / SOCKET_NAME
        self._cluster = cluster
        self._shut_down = shut_down
        self._facts = facts
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_post("/nodes/{name}/{action:fail|silence|recover}", self._node)
        app.router.add_post("/shutdown", self._shutdown)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> "ControlServer":
        self._path.unlink(missing_ok=True)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()
        self._path.chmod(0o600)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await asyncio.to_thread(self._path.unlink, missing_ok=True)

    async def _status(self, _: web.Request) -> web.Response:
        nodes = [
            {
                "name": name,
                "isDown": node.is_down,
                "isSilent": node.is_silent,
                "pods": sorted(r.spec.name for r in node.pods.values()),
            }
            for name, node in self._cluster.nodes.items()
        ]
        return web.json_response({**self._facts, "nodes": nodes})

    async def _node(self, request: web.Request) -> web.Response:
        node = self._cluster.nodes.get(request.match_info["name"])
        if node is None:
            names = ", ".join(self._cluster.nodes)
            return web.json_response(
                {"error": f"node: want one of {names}, got {request.match_info['name']!r}"}, status=404
            )
        if request.match_info["action"] == "fail":
            node.fail()
        elif request.match_info["action"] == "silence":
            node.fall_silent()
        else:
            node.recover()
        return web.json_response({"name": node.spec.name, "isDown": node.is_down, "isSilent": node.is_silent})

    async def _shutdown(self, _: web.Request) -> web.Response:
        self._shut_down()
        return web.json_response({})


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_LIMIT_S)
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._socket_path))


def ask(short: Path, method: str, path: str) -> dict[str, Any]:
    """Ask a running cluster. Raises OSError when none answers, InputError when it refuses."""
    connection = _UnixConnection(short / SOCKET_NAME)
    try:
        connection.request(method, path)
        answer = json.loads(connection.getresponse().read())
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"the cluster's answer is not understood: {error!r}") from error
    finally:
        connection.close()
    if "error" in answer:
        raise InputError(answer["error"])
    return dict(answer)
