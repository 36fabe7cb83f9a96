"""Requests to an API server. Every call ends: a time limit for each try, and a bound on the number of tries."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_local.kube import Json
from unbroken_local.kube.kubeconfig import Access

log = logging.getLogger(__name__)

MERGE_PATCH = "application/merge-patch+json"
REQUEST_LIMIT_S = 20.0
MAX_WATCH_LINE_BYTES = 8 << 20
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0

T = TypeVar("T")


class ApiError(UnbrokenError):
    """The API server refused a request, or could not be reached (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status = status
        self.reason = reason

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or self.status in RETRIED


class KubeClient:
    """One API server. Use as an async context manager."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "KubeClient":
        headers = {"Authorization": f"Bearer {self.access.token}"} if self.access.token else {}
        connector = aiohttp.TCPConnector(limit=32, ssl=self.access.ssl if self.access.ssl is not None else True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={**headers, "User-Agent": "unbroken-local"},
            timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S, connect=10.0),
            read_bufsize=MAX_WATCH_LINE_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> Json:
        """Read an object or a list. Raises ApiError."""
        return await self._request("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        """POST to a collection or subresource. Raises ApiError."""
        return await self._request("POST", path, body=body)

    async def merge_patch(self, path: str, body: Json) -> Json:
        """Change an object with a JSON merge patch. Raises ApiError."""
        return await self._request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def delete(self, path: str, body: Json | None = None) -> Json:
        """Delete an object; `body` holds DeleteOptions. Raises ApiError."""
        return await self._request("DELETE", path, body=body)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Any = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"Content-Type": content_type}
        try:
            async with self._open_session().request(
                method, f"{self.access.server}{path}", params=query or None, data=data, headers=headers
            ) as reply:
                text = await reply.read()
                status = reply.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, "Unreachable", f"{method} {path}: {error!r}") from error
        return _answer(status, text, f"{method} {path}")

    async def watch(self, path: str, resource_version: str, limit_s: int) -> AsyncIterator[Json]:
        """Yield watch events until the server ends the watch. Raises ApiError, 410 when the version is too old."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(limit_s),
        }
        timeout = aiohttp.ClientTimeout(total=limit_s + REQUEST_LIMIT_S, connect=10.0)
        try:
            async with self._open_session().get(f"{self.access.server}{path}", params=query, timeout=timeout) as reply:
                if reply.status != 200:
                    _answer(reply.status, await reply.read(), f"WATCH {path}")
                async for line in reply.content:
                    event = json.loads(line)
                    if event.get("type") == "ERROR":
                        _answer(
                            event["object"].get("code") or 500, json.dumps(event["object"]).encode(), f"WATCH {path}"
                        )
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(0, "Unreachable", f"WATCH {path}: {error!r}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("KubeClient: want `async with`, got a client that was not entered")
        return self._session


def _answer(status: int, text: bytes, what: str) -> Json:
    try:
        data = json.loads(text) if text else {}
    except ValueError:
        data = {"message": text[:200].decode(errors="replace")}
    if not isinstance(data, dict):
        data = {"message": str(data)[:200]}
    if status >= 400:
        raise ApiError(status, str(data.get("reason", "")), f"{what}: {data.get('message', '')}")
    return data


async def retry(what: str, call: Callable[[], Awaitable[T]], *, tries: int = 8) -> T:
    """Call again while the error is a passing one, with growing pauses (0.1 to 5 s). Raises the last ApiError."""
    for number in range(1, tries + 1):
        try:
            return await call()
        except ApiError as error:
            if not error.is_passing or number == tries:
                raise
            log.info("API request failed, trying again: what=%s try=%d error=%s", what, number, error)
        await asyncio.sleep(pause_s(number))
    raise AssertionError("unreachable")


def pause_s(number: int) -> float:
    """Return the pause after the n-th failure in a row (1-based), with jitter."""
    return float(min(FIRST_PAUSE_S * 2 ** min(number - 1, 10), LAST_PAUSE_S) * random.uniform(0.8, 1.2))
