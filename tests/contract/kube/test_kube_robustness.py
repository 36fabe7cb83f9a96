"""Bad requests: each is refused with a Status, none does harm."""

import asyncio
import contextlib
import socket
from typing import Any

import aiohttp
import pytest

from .kube_target import Target, config_map, needs


def maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.mark.parametrize(
    "raw",
    [b"{", b"", b"[]", b'"text"', b"null", b'{"metadata": []}', b'{"metadata":{"name":1}}', b"\xff\xfe", b"{" * 2000],
    ids=["cut", "empty", "list", "text", "null", "metadata-list", "name-number", "no-utf8", "deep"],
)
def test_malformed_bodies_are_refused(target: Target, namespace: str, raw: bytes) -> None:
    refused = target.call("POST", maps(namespace), raw=raw)
    assert refused.code in (400, 422)
    assert refused.body["kind"] == "Status"


def test_wrong_content_type_is_refused(target: Target, namespace: str) -> None:
    refused = target.call("POST", maps(namespace), raw=b"a", media="text/csv")
    assert refused.status == (415, "UnsupportedMediaType")


def test_oversized_body_is_refused(target: Target, namespace: str) -> None:
    # No more than is needed: of what is far beyond its limit a real server reads nothing, and cuts a slow sender off.
    refused = target.post(maps(namespace), config_map("a", x="y" * (3 * 1024 * 1024)))
    assert refused.status == (413, "RequestEntityTooLarge")


def test_kind_of_the_body_must_be_that_of_the_path(target: Target, namespace: str) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}
    assert target.post(maps(namespace), body).status == (400, "BadRequest")
    assert target.post(maps(namespace), {**config_map("a"), "apiVersion": "v2"}).status == (400, "BadRequest")


def test_form_that_nobody_serves_is_not_acceptable(target: Target, namespace: str) -> None:
    refused = target.call("GET", maps(namespace), headers={"Accept": "application/x-unicorn"})
    assert refused.status == (406, "NotAcceptable")


@needs("short-history")
def test_client_that_does_not_read_loses_its_watch_and_nothing_else(target: Target, namespace: str) -> None:
    """A watch that falls behind the history is ended: what it missed is not kept for it."""

    def narrow(info: Any) -> socket.socket:
        made = socket.socket(info[0], info[1], info[2])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return made

    async def lag() -> tuple[str, int]:
        headers = {"Authorization": f"Bearer {target.token}"}
        connector = aiohttp.TCPConnector(socket_factory=narrow, ssl=target.ssl_context)
        async with aiohttp.ClientSession(headers=headers, read_bufsize=1024, connector=connector) as session:
            url = f"{target.url}{maps(namespace)}"
            async with session.get(f"{url}?watch=1&timeoutSeconds=60") as watch:
                await asyncio.to_thread(write)
                seen = b""
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    async for chunk in watch.content.iter_any():
                        seen = (seen + chunk)[-4096:]
                return seen.decode(errors="replace"), watch.status

    def write() -> None:
        target.post(maps(namespace), config_map("a")).ok(201)
        for number in range(320):
            target.merge(f"{maps(namespace)}/a", {"data": {"x": str(number), "big": "y" * 60_000}}).ok()

    tail, code = asyncio.run(asyncio.wait_for(lag(), 60))
    assert code == 200
    assert '"type":"ERROR"' in tail
    assert '"code":410' in tail
    assert target.get(f"{maps(namespace)}/a").ok()["data"]["x"] == "319"
