"""The API server, as JSON objects by path. The only module that imports the `kubernetes` package.

Every call is bounded in time, and fails with one of the classes of `errors`. The package's typed clients and its watch
are not used: a plan reads a few fields of a pod, and to make a typed one takes a hundred times as long as to read its
JSON. The command line has a client of its own, without asyncio and with errors for people; the two share no package but
core, which does no input or output.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import (
    KubeConflict,
    KubeError,
    KubeGone,
    KubeNotFound,
    KubeNotServed,
    KubeRefused,
    KubeUnavailable,
)
from unbroken_operator.adapters.tasks.fair_gate import FairGate

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
WATCH_TIMEOUT_S = 290
WATCH_SILENCE_S = 100.0
"""The API server sends a bookmark every minute: a watch that is silent for longer is dead."""
NUM_PARALLEL, NUM_OF_ONE_NAMESPACE = 64, 32
"""Calls at once. More of them wait here, where their time-out does not run yet: slow is not absent."""
PAGE_SIZE, PAGE_BYTES = 100, 4 << 20
"""Objects and bytes that are read at once. An object may have 1.5 MB, and takes twenty times as much in memory."""
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

JsonObject = dict[str, Any]
CallObserver = Callable[[str, str, str], None]
"""Told verb, resource and outcome (HTTP status or "error") of each call."""


@dataclass(frozen=True)
class KubeConnection:
    """How to reach the API server."""

    server: str
    token: str | None
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    is_insecure: bool


@dataclass(frozen=True)
class WatchEvent:
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    item: JsonObject


def collection_path(resource: str, namespace: str | None = None, group_version: str = "v1") -> str:
    """Return the path of a collection, of all namespaces when `namespace` is None."""
    root = f"/api/{group_version}" if "/" not in group_version else f"/apis/{group_version}"
    return f"{root}/{resource}" if namespace is None else f"{root}/namespaces/{quote(namespace)}/{resource}"


class _TooLong(Exception):
    """An answer has more bytes than were wanted."""


def as_it_is(item: JsonObject) -> JsonObject:
    """Keep all of an object."""
    return item


class Kube:
    """One API server. Make it with `connect`."""

    def __init__(self, api: ApiClient, on_call: CallObserver) -> None:
        self._api = api
        self._on_call = on_call
        self._gate = FairGate(NUM_PARALLEL, NUM_OF_ONE_NAMESPACE)

    @classmethod
    async def connect(cls, kubeconfig: str | None, on_call: CallObserver = lambda *_: None) -> "Kube":
        """Read the kubeconfig, or the pod's service account when it is None. Raises InputError."""
        configuration = await load_configuration(kubeconfig)
        # Calls are bounded here. Watches, some for each namespace, must not take the connections of calls.
        configuration.connection_pool_maxsize = 0
        # Else aiohttp reads ~/.netrc at every call, in a thread.
        configuration.client_session_kwargs = {"trust_env": False}
        configuration.proxy = configuration.proxy or _proxy_of_environment(configuration.host)
        return cls(ApiClient(configuration), on_call)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def get(self, path: str) -> JsonObject:
        """Return one object."""
        return await self._call("GET", path)

    async def create(self, path: str, item: Mapping[str, Any]) -> JsonObject:
        """Create an object in the collection at `path`; return it as stored. Raises KubeConflict when it exists."""
        return await self._call("POST", path, body=item)

    async def merge(self, path: str, patch: Mapping[str, Any]) -> JsonObject:
        """Apply a JSON merge patch; return the object as stored."""
        return await self._call("PATCH", path, body=patch, content_type=MERGE_PATCH)

    async def merge_lists(self, path: str, patch: Mapping[str, Any]) -> JsonObject:
        """Apply a strategic merge patch, which leaves alone what it does not name of lists; return it as stored."""
        return await self._call("PATCH", path, body=patch, content_type=STRATEGIC_MERGE_PATCH)

    async def delete(self, path: str, uid: str, is_forced: bool = False, *, resource_version: str = "") -> JsonObject:
        """Delete an object if it has this uid and version (else KubeConflict); return it, or a Status when gone."""
        preconditions = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        options: JsonObject = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        }
        if is_forced:
            options["gracePeriodSeconds"] = 0
        return await self._call("DELETE", path, body=options)

    async def peek(self, path: str) -> str:
        """Return the resource version that a list of a collection has now. Raises KubeError if it cannot be listed."""
        page = await self._call("GET", path, query={"limit": "1"})
        return str((page.get("metadata") or {}).get("resourceVersion", ""))

    async def list(
        self,
        path: str,
        selector: str = "",
        *,
        fields: str = "",
        most: int | None = None,
        read: Callable[[JsonObject], Any] = as_it_is,
    ) -> tuple[list[Any], str]:
        """Return what `read` keeps of all objects of a collection, and the version that a watch can go on from.

        They come page by page, so that the whole of each is held for a moment only; after `most` the rest is not asked
        for. `fields` is a field selector.
        """
        items: list[Any] = []
        query = ({"labelSelector": selector} if selector else {}) | ({"fieldSelector": fields} if fields else {})
        num = PAGE_SIZE
        while True:
            try:
                max_bytes = PAGE_BYTES if num > 1 else None
                page = await self._call("GET", path, query={**query, "limit": str(num)}, max_bytes=max_bytes)
            except _TooLong:
                num = max(1, num // 4)
                continue
            items += map(read, page.get("items") or [])
            num = min(2 * num, PAGE_SIZE)
            metadata = page.get("metadata") or {}
            if not metadata.get("continue") or (most is not None and len(items) >= most):
                return items[:most], str(metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]

    async def watch(self, path: str, resource_version: str, selector: str = "") -> AsyncIterator[WatchEvent]:
        """Yield changes until the server ends the watch. Raises KubeGone when the version is too old."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=WATCH_SILENCE_S)
        response = await self._request("GET", path, query=query, timeout=timeout)
        try:
            async for line in response.content:
                yield _watch_event(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KubeUnavailable(f"watch of {path}: {_text(error)}") from error
        finally:
            response.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        max_bytes: int | None = None,
    ) -> JsonObject:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._gate.place(_namespace(path)):
            response = await self._request(
                method, path, query=query, body=body, content_type=content_type, timeout=timeout
            )
            try:
                data = await (response.read() if max_bytes is None else _read(response, max_bytes))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise KubeUnavailable(f"{method} {path}: answer broke off: {_text(error)}") from error
            finally:
                response.release()
        try:
            parsed = json.loads(data)
        except ValueError as error:
            raise KubeUnavailable(f"{method} {path}: unreadable answer: {_text(error)}") from error
        if not isinstance(parsed, dict):
            raise KubeUnavailable(f"{method} {path}: expected a JSON object, got {type(parsed).__name__}")
        return parsed

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request; return the response if it is a success, with its body unread."""
        verb = "WATCH" if query and "watch" in query else method
        resource = _resource(path)
        try:
            arguments = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                auth_settings=["BearerToken"],
            )
            url, headers = arguments[1], arguments[2]
            answer = await self._api.rest_client.request(
                method, url, headers=headers, body=dict(body) if body is not None else None, _request_timeout=timeout
            )
        except (aiohttp.ClientError, ConfigException, TimeoutError, OSError) as error:
            # ConfigException: the token is read again now and then, and may be in the middle of being replaced.
            self._on_call(verb, resource, "error")
            raise KubeUnavailable(f"{method} {path}: {_text(error)}") from error
        response: aiohttp.ClientResponse = answer.response
        self._on_call(verb, resource, str(response.status))
        if response.status >= 400:
            raise await _error(response, f"{method} {path}")
        return response


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read a body. Raises _TooLong, and leaves the rest unread, when it has more bytes."""
    pieces, num_bytes = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            response.close()
            raise _TooLong
    return b"".join(pieces)


async def load_configuration(kubeconfig: str | None) -> Configuration:
    """Read the kubeconfig, or the pod's service account when it is None. Raises InputError that says what is wrong."""
    configuration = Configuration()
    try:
        if kubeconfig is None:
            load_incluster_config(configuration)
        else:
            await load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    except (ConfigException, OSError) as error:
        where = "service account of this pod" if kubeconfig is None else f"kubeconfig {kubeconfig}"
        raise InputError(f"{where}: {error}; name a cluster with --kubeconfig") from error
    return configuration


async def load_connection(kubeconfig: str | None) -> KubeConnection:
    """Return how to reach the API server, with a token that is fresh now. Raises InputError."""
    configuration = await load_configuration(kubeconfig)
    token = (configuration.api_key or {}).get("BearerToken")
    return KubeConnection(
        server=configuration.host,
        token=None if token is None else token.removeprefix("Bearer ").removeprefix("bearer "),
        ca_path=configuration.ssl_ca_cert,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        is_insecure=not configuration.verify_ssl,
    )


def _proxy_of_environment(server: str) -> str | None:
    address = urlsplit(server)
    is_direct = proxy_bypass(address.netloc.rpartition("@")[2])
    return None if is_direct else getproxies().get(address.scheme)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _watch_event(line: bytes) -> WatchEvent:
    event = json.loads(line)
    item = event["object"]
    if event["type"] == "ERROR":
        if item.get("code") == 410:
            raise KubeGone(str(item.get("message", "")))
        raise KubeUnavailable(f"watch: {item.get('message', item)}")
    return WatchEvent(event["type"], item)


async def _error(response: aiohttp.ClientResponse, what: str) -> KubeError:
    status = response.status
    try:
        text = (await asyncio.wait_for(response.text(), REQUEST_TIMEOUT_S))[:4000]
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, LookupError):
        # LookupError: an encoding that Python does not know.
        text = ""
    finally:
        response.release()
    message = f"{what}: {status} {_status_message(text)}"
    if status == 404:
        # A server that has just started serves no CRDs yet: that a job is not served does not mean that it is gone.
        return KubeNotFound(message) if _is_status(text) else KubeNotServed(message)
    if status == 409:
        return KubeConflict(message)
    if status == 410:
        return KubeGone(message)
    if status == 429 or status >= 500:
        return KubeUnavailable(message, _retry_after_s(response.headers.get("Retry-After", "")))
    return KubeRefused(message)


def _is_status(text: str) -> bool:
    try:
        parsed = json.loads(text)
    except ValueError:
        return False
    return isinstance(parsed, dict) and parsed.get("kind") == "Status"


def _status_message(text: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:300]
    return str(parsed.get("message", text))[:1000] if isinstance(parsed, dict) else text[:300]


def _retry_after_s(text: str) -> float | None:
    return min(float(text), 60.0) if text.isdecimal() else None


def _namespace(path: str) -> str:
    """Return the namespace in a path; empty for what is in none."""
    return path.partition("/namespaces/")[2].partition("/")[0]


def _resource(path: str) -> str:
    """Return the resource's plural in a path, for metrics: a closed set of words."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if len(rest) >= 3 and rest[0] == "namespaces":
        rest = rest[2:]
    return "/".join(part for part in (rest[0] if rest else "version", rest[2] if len(rest) > 2 else "") if part)
