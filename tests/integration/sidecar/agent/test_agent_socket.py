"""What comes to the agent's socket, over real connections: nonsense closes its own connection, and is named once.

And what a trainer may do to the socket's file, which lies in a folder of both.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually, inode_of

from unbroken.agent.adapters.local_server import LocalServer
from unbroken.agent.decisions.events import Event, WorkerAttached, WorkerReported
from unbroken_core.pod.pod_messages import Attach, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL
from unbroken_core.vocabulary.reasons import WorkerPhase

Start = Callable[..., Any]
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


def _listen_instead(path: Path) -> tuple[socket.socket, int]:
    """Return the socket, and the inode of its file: the agent may put its own there at once."""
    aside = path.with_name("other.sock")
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.bind(str(aside))
    other.listen()
    inode = aside.lstat().st_ino
    aside.replace(path)
    return other, inode


def _put_folder(path: Path) -> None:
    path.unlink()
    (path / "a" / "b").mkdir(parents=True)


def _lead_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/null")


BLOWS: dict[str, Callable[[Path], socket.socket | None]] = {
    "removed": Path.unlink,
    "another socket": lambda path: _listen_instead(path)[0],
    "a folder": _put_folder,
    "a link": _lead_elsewhere,
}


@pytest.mark.parametrize("blow", BLOWS)
def test_a_socket_whose_name_a_trainer_takes_is_made_anew_and_nobody_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, blow: str
) -> None:
    """Before, no process that started later attached, until the job had failed."""
    events: list[Event] = []
    path = tmp_path / "agent.sock"

    async def scenario() -> None:
        server = LocalServer(path, 2, events.append)
        await server.start()
        watching = asyncio.create_task(server.watch())
        first, keep = await asyncio.open_unix_connection(str(path))
        keep.write(wire.encode(ATTACH).encode() + b"\n")
        other = BLOWS[blow](path)
        await eventually(lambda: _says_no(path), "an answer of the agent itself")
        keep.write(wire.encode(READY).encode() + b"\n")
        await asyncio.wait_for(_until(lambda: WorkerReported(0, 0, READY) in events), LIMIT_S)
        assert not first.at_eof()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        keep.close()
        if other is not None:
            other.close()
        await server.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if "socket" in record.getMessage()] == [
        f"socket was replaced or removed, listens at a new one: path={path}"
    ]
    assert list(tmp_path.iterdir()) == []


async def _says_no(path: Path) -> bool:
    """Return whether the agent listens at this path: it answers a word that is no message by closing."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    try:
        writer.write(b"{}\n")
        return await asyncio.wait_for(reader.read(), 0.5) == b""
    except (asyncio.TimeoutError, ConnectionError):
        return False
    finally:
        writer.close()


def test_an_agent_ends_as_usual_whatever_lies_in_place_of_its_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = LocalServer(tmp_path / "agent.sock", 2, lambda _event: None)
        await server.start()
        _put_folder(tmp_path / "agent.sock")
        await server.stop()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_a_worker_killed_after_the_socket_was_taken_comes_back_by_the_process_rung(start_job: Start) -> None:
    """Before, its new process attached to whoever listened there, and the job failed after timeouts.startup."""
    job = start_job("--pods", "2", "--last-call", "1", "--rungs", "process", workload="wrapped")
    before = job.wait_started(0, 2)
    pod = next(pod["pod"] for pod in job.status()["pods"] if pod["ranks"] == [1])
    path = Path(job.part_of_pod("unbroken.agent", pod).environ()["UNBROKEN_DIR"]) / "agent.sock"
    other, inode = _listen_instead(path)
    with other:
        job.wait_for(lambda: inode_of(path) not in (None, inode), "a socket of the agent's own")
        os.kill(before[1], signal.SIGKILL)
        after = job.wait_started(1, 2)
        assert other.fileno() != -1
    assert after[1] != before[1]
    assert job.complete() == 0
