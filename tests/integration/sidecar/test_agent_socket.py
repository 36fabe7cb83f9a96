"""What comes to the agent's socket, over real connections: nonsense closes its own connection, and is named once."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.agent.adapters.local_server import LocalServer
from unbroken.agent.decisions.events import Event, WorkerAttached, WorkerReported
from unbroken_core import wire
from unbroken_core.messages import PROTOCOL
from unbroken_core.pod.pod_messages import Attach, WorkerReport
from unbroken_core.reasons import WorkerPhase

LIMIT_S = 60.0
ATTACH = Attach(PROTOCOL, "worker", 7, 0, 0)
READY = WorkerReport(WorkerPhase.READY, 0, "127.0.0.1", 5000)


async def talk(path: Path, *messages: object) -> bytes:
    """Send messages; return what comes back until the other side closes."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    for message in messages:
        writer.write(wire.encode(message).encode() + b"\n")
    try:
        return await asyncio.wait_for(reader.read(), LIMIT_S)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def check(report: WorkerReport) -> str | None:
    return f"WorkerReport.iteration: want -1 to 0, got {report.iteration}" if report.iteration > 0 else None


def test_a_report_that_cannot_be_closes_its_connection_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    async def scenario() -> int:
        server = LocalServer(tmp_path / "agent.sock", 2, events.append, check)
        await server.start()
        try:
            for iteration in range(1, 6):
                assert (
                    await talk(tmp_path / "agent.sock", ATTACH, READY, WorkerReport(WorkerPhase.READY, iteration))
                    == b""
                )
            return server.num_refused
        finally:
            await server.stop()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scenario()) == 5
    assert [record.getMessage().partition(" error=")[2] for record in caplog.records] == [
        "WorkerReport.iteration: want -1 to 0, got 1"
    ]
    reports = [event.message for event in events if isinstance(event, WorkerReported)]
    assert reports == [READY] * 5


def test_a_worker_with_hundreds_of_connections_gets_no_more(tmp_path: Path) -> None:
    events: list[Event] = []

    async def scenario() -> int:
        path = tmp_path / "agent.sock"
        server = LocalServer(path, 2, events.append)
        await server.start()
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(256)]
        try:
            await asyncio.wait_for(_until(lambda: len(server._tasks) == 256), LIMIT_S)
            assert await talk(path, ATTACH) == b""
            for _reader, writer in silent:
                writer.close()
            await asyncio.wait_for(_until(lambda: not server._tasks), LIMIT_S)
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(wire.encode(ATTACH).encode() + b"\n")
            await asyncio.wait_for(_until(lambda: bool(events)), LIMIT_S)
            writer.close()
            assert not reader.at_eof()
            return server.num_refused
        finally:
            await server.stop()

    assert asyncio.run(scenario()) == 1
    assert WorkerAttached(ATTACH) in events


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)
