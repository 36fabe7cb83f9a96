"""The HTTP server: start and stop, authentication, discovery, health, and the task that collects garbage."""

import asyncio
import hmac
import json
import logging
import os
import secrets
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from unbroken_local.apiserver import discovery, openapi, problems, snapshot
from unbroken_local.apiserver.certificates import Identity, new_identity
from unbroken_local.apiserver.collector import Collector
from unbroken_local.apiserver.definitions import resources_of
from unbroken_local.apiserver.documents import Document, encode
from unbroken_local.apiserver.handlers import Handlers, json_response, problem_response
from unbroken_local.apiserver.kinds import Catalogue
from unbroken_local.apiserver.operations import Operations, WriteOptions
from unbroken_local.apiserver.pods import PodActions
from unbroken_local.apiserver.requests import BODY_LIMIT_BYTES, accepted_form
from unbroken_local.apiserver.store import Change, Place, Store

_LOG = logging.getLogger(__name__)
_HEALTH = ("/healthz", "/readyz", "/livez")
_DEFINITIONS: Place = ("apiextensions.k8s.io", "customresourcedefinitions")
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_SAVE_AFTER_S = 1.0
_SHUTDOWN_S = 2.0


class ApiServer:
    """A Kubernetes API on one loopback port. Made, started and stopped in one event loop.

    history_limit: changes kept for each resource; a watch from before them gets 410 Gone.
    token: what clients must present; a random one by default.
    snapshot_file: where the objects are kept between two runs; None keeps them in memory only.
    tls: HTTPS with a certificate made at start (kubectl sends tokens over nothing else); False for plain HTTP.
    """

    def __init__(
        self,
        *,
        history_limit: int = 4096,
        token: str | None = None,
        snapshot_file: Path | None = None,
        tls: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.token = token or secrets.token_hex(16)
        self.store = Store(history_limit)
        self.catalogue = Catalogue()
        self.operations = Operations(self.store, self.catalogue, now)
        self.url = ""
        self._now = now
        self._tls = tls
        self._identity: Identity | None = None
        self._snapshot_file = snapshot_file
        self._stopping = asyncio.Event()
        self._work = asyncio.Event()
        self._collector = Collector(self.operations, self._work.set)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._handlers: Handlers | None = None
        self._changed = asyncio.Event()
        self.store.on_change.append(self._follow)

    async def start(self, address: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Port 0 takes a free one; `url` says which. Raises OSError, InputError (unusable snapshot)."""
        if self._snapshot_file is not None:
            snapshot.load(self._snapshot_file, self.store)
        for _, stored in self.store.current(_DEFINITIONS):
            self._serve_definition(stored.document)
        if self._tls:
            self._identity = new_identity([address, "127.0.0.1"])
        self._collector.look_at_everything()
        self._make_namespaces()
        # Kubelets are on loopback: a proxy from the environment must not come between.
        self._session = aiohttp.ClientSession(trust_env=False)
        self._handlers = Handlers(self.operations, PodActions(self.operations, self._session), self._stopping)
        application = web.Application(client_max_size=BODY_LIMIT_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port, ssl_context=self._ssl_context(), backlog=1024)
        await site.start()
        bound = self._runner.addresses[0]
        self.url = f"{'https' if self._identity else 'http'}://{bound[0]}:{bound[1]}"
        self._tasks = [asyncio.create_task(self._collect(), name="collector")]
        if self._snapshot_file is not None:
            self._tasks.append(asyncio.create_task(self._keep(self._snapshot_file), name="snapshot"))

    async def stop(self) -> None:
        """End all watches, write the snapshot, close the port. Safe to repeat."""
        self._stopping.set()
        for place in self.store.places():
            for wake in list(self.store.collection(place).wakers):
                wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        if self._snapshot_file is not None:
            snapshot.save(self._snapshot_file, self.store)

    def kubeconfig(self, name: str = "unbroken-local") -> Document:
        """Return a kubeconfig of this server's one user."""
        cluster: Document = {"server": self.url}
        if self._identity is not None:
            cluster["certificate-authority-data"] = self._identity.authority_base64()
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self.token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
        }

    def write_kubeconfig(self, path: Path, name: str = "unbroken-local") -> None:
        """Write the kubeconfig, readable by its owner only. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self.kubeconfig(name), file, indent=1)
        Path(partial).replace(path)

    # -- the cluster's own

    def _make_namespaces(self) -> None:
        resource = self.catalogue.find("", "v1", "namespaces")
        for name in _NAMESPACES:
            if resource is not None and self.store.get(resource.place, ("", name)) is None:
                self.operations.create(resource, "", {"metadata": {"name": name}}, WriteOptions(manager="apiserver"))

    def _follow(self, place: Place, change: Change) -> None:
        self._changed.set()
        if place == _DEFINITIONS:
            self._serve_definition(change.current.document, change.type != "DELETED")
        elif place == ("", "namespaces") and change.type == "ADDED":
            accounts = self.catalogue.find("", "v1", "serviceaccounts")
            if accounts is not None:
                options = WriteOptions(manager="apiserver")
                self.operations.create(accounts, change.key[1], {"metadata": {"name": "default"}}, options)

    def _serve_definition(self, definition: Document, is_there: bool = True) -> None:
        name = definition["metadata"]["name"]
        self.catalogue.set_custom(name, resources_of(definition) if is_there else ())

    async def _collect(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._collector.step():
                # Others get their turn between two objects.
                await asyncio.sleep(0)

    async def _keep(self, path: Path) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_SAVE_AFTER_S)
            self._changed.clear()
            snapshot.save(path, self.store)

    def _ssl_context(self) -> ssl.SSLContext | None:
        return self._identity.server_context if self._identity is not None else None

    # -- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except problems.ApiProblem as problem:
            return problem_response(problem)
        except Exception:
            # The last resort: a client must get a Status, and the log the traceback.
            _LOG.exception("request failed method=%s path=%s", request.method, request.path)
            return problem_response(
                problems.ApiProblem(500, "InternalError", "Internal error occurred: see the server's log")
            )

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        if path in _HEALTH or path.startswith(tuple(f"{entry}/" for entry in _HEALTH)):
            return web.Response(text="ok")
        self._authenticate(request)
        parts = [part for part in path.split("/") if part]
        is_object_path = (parts[:1] == ["api"] and len(parts) > 2) or (parts[:1] == ["apis"] and len(parts) > 3)
        if is_object_path and self._handlers is not None:
            return await self._handlers.handle(request)
        if request.method not in ("GET", "HEAD"):
            raise problems.method_not_allowed()
        return self._describe(request, parts)

    def _authenticate(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.token.encode()):
            raise problems.unauthorized()

    def _describe(self, request: web.Request, parts: list[str]) -> web.Response:
        if parts[:2] == ["openapi", "v2"]:
            accept = request.headers.get("Accept", "*/*")
            if "json" not in accept and "*/*" not in accept:
                raise problems.not_acceptable(["application/json"])
            return json_response(encode(openapi.document_v2(self.catalogue)))
        form = accepted_form(request.headers.get("Accept", ""))
        if form.kind == "APIGroupDiscoveryList" and parts in (["api"], ["apis"]) and form.version == "v2":
            body = discovery.aggregated(self.catalogue, parts == ["api"])
            media = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
            return json_response(encode(body), media=media)
        found = self._description(parts)
        if found is None:
            raise problems.no_such_path()
        return json_response(encode(found))

    def _description(self, parts: list[str]) -> Document | None:  # noqa: C901, PLR0911 - one for each path
        match parts:
            case ["version"]:
                return discovery.VERSION
            case ["api"]:
                return discovery.api_versions(self.url.partition("://")[2])
            case ["api", version]:
                return discovery.resource_list(self.catalogue, "", version)
            case ["apis"]:
                return discovery.group_list(self.catalogue)
            case ["apis", group]:
                return discovery.group(self.catalogue, group)
            case ["apis", group, version]:
                return discovery.resource_list(self.catalogue, group, version)
            case ["openapi", "v3"]:
                return openapi.index(self.catalogue)
            case ["openapi", "v3", "api", version]:
                return openapi.document_v3(self.catalogue, "", version)
            case ["openapi", "v3", "apis", group, version]:
                return openapi.document_v3(self.catalogue, group, version)
            case []:
                groups = [f"/apis/{name}" for name in self.catalogue.groups() if name]
                return {
                    "paths": ["/api", "/api/v1", "/apis", *groups, *_HEALTH, "/openapi/v2", "/openapi/v3", "/version"]
                }
        return None
