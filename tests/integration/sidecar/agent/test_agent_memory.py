"""What an agent believes after its container was restarted: its own memory, and none that its trainer wrote."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from unbroken.agent.adapters.memory_file import MemoryFile
from unbroken.agent.decisions.events import AgentMemory
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Hello, Plan, RankPlan, Welcome
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import RankReason, Role

LIMIT_S = 90.0
PLAN = Plan(3, 8, Role.ACTIVE, 1, "127.0.0.1", 5000, (RankPlan(0, 0, RankReason.FIRST),))
FORGED = AgentMemory(1 << 30, 1 << 30, Plan(1 << 30, 1 << 30, Role.ACTIVE, 1 << 20, "evil", 1, ()), (0,))


@contextlib.contextmanager
def agent(url: str, folder: Path, has_private: bool) -> "Iterator[subprocess.Popen[bytes]]":
    (folder / "token").write_text("0123456789abcdef0123456789abcdef")
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": wire.settings_to_json(JobSettings("digits")),
        "UNBROKEN_TOKEN_FILE": str(folder / "token"),
        "UNBROKEN_RENDEZVOUS_URL": url,
        "UNBROKEN_POD": "digits-0",
        "UNBROKEN_POD_UID": "uid-0",
        "UNBROKEN_POD_IP": "127.0.0.1",
        "UNBROKEN_DIR": str(folder / "run"),
    }
    if has_private:
        environment["UNBROKEN_PRIVATE_DIR"] = str(folder / "private")
    process = subprocess.Popen([sys.executable, "-m", "unbroken.agent"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def forge(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    file = MemoryFile(folder)
    for _ in range(2):
        file.write(FORGED)
    file.close()


@pytest.mark.parametrize("has_private", [True, False], ids=["private folder", "one folder, as before"])
def test_an_agent_finds_its_own_memory_again(tmp_path: Path, has_private: bool) -> None:
    """Before, the memory lay beside the socket, where the trainer writes: what it put there was obeyed."""
    hellos: asyncio.Queue[Hello]

    async def converse(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        async for frame in connection:
            message = wire.decode(frame.data, Hello) if '"type":"Hello"' in frame.data else None
            if message is not None:
                await connection.send_str(wire.encode(Welcome(PROTOCOL, 3, 5.0)))
                await connection.send_str(wire.encode(PLAN))
                await hellos.put(message)
        return connection

    async def next_hello() -> Hello:
        return await asyncio.wait_for(hellos.get(), LIMIT_S)

    def memory() -> AgentMemory:
        file = MemoryFile(tmp_path / ("private" if has_private else "run"))
        try:
            return file.read()
        finally:
            file.close()

    async def scenario() -> None:
        nonlocal hellos
        hellos = asyncio.Queue()
        app = web.Application()
        app.add_routes([web.get("/v1/agents", converse)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            if has_private:
                forge(tmp_path / "run")
            with agent(url, tmp_path, has_private) as process:
                first = await next_hello()
                assert (first.term, first.plan) == (0, None)
                async with asyncio.timeout(LIMIT_S):
                    while memory().plan != PLAN:
                        await asyncio.sleep(0.05)
                process.kill()
                process.wait(LIMIT_S)
            if has_private:
                forge(tmp_path / "run")
            with agent(url, tmp_path, has_private):
                second = await next_hello()
                assert (second.term, second.plan) == (3, PLAN)
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
