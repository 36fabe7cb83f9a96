"""The service proxy's sockets."""

import asyncio
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from unbroken_local.proxy import _Listener


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def _word_of(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    word = await reader.read()
    writer.close()
    return word


def test_a_listener_that_is_closed_while_it_begins_to_listen_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it left in the event loop would stand for the next socket of the same number, and nobody would hear that."""
    start_server = asyncio.start_server

    async def scenario() -> None:
        pod = await start_server(_greet, "127.0.0.1", 0)
        async with pod, asyncio.timeout(LIMIT_S):
            listener = _Listener("127.0.0.1", 0)
            listener.endpoints = [pod.sockets[0].getsockname()]
            begun = asyncio.Event()

            async def interrupted(*arguments: Any, **options: Any) -> asyncio.Server:
                begun.set()
                listener.close()
                return await start_server(*arguments, **options)

            monkeypatch.setattr(asyncio, "start_server", interrupted)
            await begun.wait()
            await asyncio.wait([listener._task])
            others = [await start_server(_greet, "127.0.0.1", 0) for _ in range(3)]
            assert [await _word_of(server.sockets[0].getsockname()) for server in others] == [b"hello"] * 3
            for server in others:
                server.close()

    asyncio.run(scenario())
