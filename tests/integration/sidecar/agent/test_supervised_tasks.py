"""What fails in the background is told with a reason, through real sockets and processes."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from tests.answers import ask
from tests.waiting import LIMIT_S, eventually

from unbroken.agent.adapters.local_server import LocalServer
from unbroken.agent.adapters.termination_message import TerminationMessage
from unbroken.agent.adapters.uplink import Uplink
from unbroken.agent.config import AgentConfig
from unbroken.agent.decisions.events import Event, WorkerAttached
from unbroken.agent.shell import Agent
from unbroken.network import addresses, exposition
from unbroken.standalone import host
from unbroken.standalone.messages import StandaloneConfig
from unbroken.standalone.worker_watch import WorkerWatch
from unbroken_core.pod.pod_messages import Attach, Shutdown
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Heartbeat
from unbroken_core.protocol.settings import JobSettings, Timeouts


def test_agent_that_cannot_write_a_message_connects_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its writer it was mute on an open connection until its pod was given up."""

    async def scenario() -> None:
        (tmp_path / "token").write_text("0123456789abcdef")
        received: list[list[str]] = []

        async def agents(request: web.Request) -> web.WebSocketResponse:
            connection = web.WebSocketResponse()
            await connection.prepare(request)
            received.append([])
            mine = received[-1]
            async for frame in connection:
                mine.append(frame.data)
            return connection

        app = web.Application()
        app.add_routes([web.get("/v1/agents", agents)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, listener := socket.create_server(("127.0.0.1", 0))).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        link = Uplink(url, tmp_path / "token", Timeouts(), lambda _: None, TerminationMessage(None))
        running = asyncio.create_task(link.run())

        async def is_connected() -> bool:
            return link._socket is not None and bool(received)

        async def is_heard() -> bool:
            link.send(Heartbeat(2))
            return len(received) > 1 and bool(received[-1])

        try:
            await eventually(is_connected, "a connection")
            link._outbox.put_nowait("\ud800")
            await eventually(is_heard, "messages on another connection")
            assert not running.done()
        finally:
            running.cancel()
            await runner.cleanup()

    asyncio.run(scenario())
    (failed,) = [record for record in caplog.records if record.getMessage().startswith("task failed")]
    assert failed.exc_info
    assert "error=UnicodeEncodeError" in failed.getMessage()


def test_local_peer_that_fails_in_an_unforeseen_way_is_told_counted_and_hurts_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def emit(event: Event) -> None:
        if isinstance(event, WorkerAttached) and event.attach.local_rank == 1:
            raise OverflowError("too large")
        events.append(event)

    async def scenario() -> None:
        server = LocalServer(tmp_path / "agent.sock", 2, emit)
        await server.start()
        for local_rank in (1, 0):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "agent.sock"))
            writer.write(wire.encode(Attach(PROTOCOL, "worker", 1, local_rank, 0)).encode() + b"\n")
            if local_rank == 1:
                assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
                await _hang_up(writer)

        async def is_there() -> bool:
            return bool(events)

        await eventually(is_there, "the other worker")
        assert server.num_refused == 1
        await _hang_up(writer)
        await server.stop()

    asyncio.run(scenario())
    assert [record.getMessage().partition(": pid")[0] for record in caplog.records] == [
        "local peer failed, its connection is closed"
    ]


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_host_whose_launchers_part_fails_ends_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on as if its agent had nothing to say, and never learnt of the end."""

    def fail(_watch: WorkerWatch, _order: object) -> None:
        raise OverflowError("timestamp too large")

    monkeypatch.setattr(WorkerWatch, "_obey", fail)

    async def scenario() -> None:
        async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(wire.encode(Shutdown(0, 1.0, "over")).encode() + b"\n")
            await reader.read()
            await _hang_up(writer)
            hung_up.set()

        hung_up = asyncio.Event()
        server = await asyncio.start_unix_server(agent, str(tmp_path / "agent.sock"))
        watch = WorkerWatch(tmp_path, {}, 1)
        await watch.attach()
        await asyncio.wait_for(watch.is_over.wait(), LIMIT_S)
        await watch.close()
        await asyncio.wait_for(hung_up.wait(), LIMIT_S)
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "task failed: what=orders of the agent error=OverflowError: timestamp too large"
    ]


def test_host_whose_root_cannot_be_started_tells_its_workers_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the root until the time of the whole job was over."""

    def fail(_folder: Path) -> int:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(host, "_start_root", fail)

    async def scenario() -> None:
        config = StandaloneConfig("key", 1, "127.0.0.1", (1,), 1e6)
        found = host.Host(tmp_path, config)
        found._start_root()
        failed = await asyncio.wait_for(found._failure, LIMIT_S)
        assert failed.message.startswith("start of the root: UnicodeDecodeError: ")
        await found._tasks.stop()

    asyncio.run(scenario())


def test_what_ends_a_process_or_a_thread_is_logged_in_lines_that_do_nothing() -> None:
    script = (
        "import threading\n"
        "from unbroken.logs import start_log\n"
        "start_log('unbroken.test', 'INFO', with_time=False)\n"
        "def fail(): raise ValueError('\\x1b[2J\\nI unbroken.test: forged')\n"
        "thread = threading.Thread(target=fail, name='reader')\n"
        "thread.start(); thread.join()\n"
        "fail()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert all(line.isprintable() for line in lines), lines
    events = [line for line in lines if not line.startswith("  | ")]
    assert events == [
        "E unbroken.test: thread failed: name=reader error=ValueError",
        "C unbroken.test: process ended by ValueError",
    ], json.dumps(lines)


def test_lines_say_of_which_pod_they_are() -> None:
    """Under `unbroken run` those of all pods go to one console."""
    script = (
        "import logging\n"
        "from unbroken.logs import start_log\n"
        "start_log('unbroken.test', 'INFO', with_time=False, pod='digits-1%s\\n')\n"
        "logging.warning('ended: code=%s', -9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=LIMIT_S)
    assert done.stderr.decode().splitlines() == ["W unbroken.test of digits-1%s\\n: ended: code=-9"]


def test_an_agent_whose_metrics_port_is_taken_goes_on_says_so_once_and_serves_them_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With hostNetwork any process of the node may have it. Seen before: the agent ended, and its pod with it."""
    monkeypatch.setattr(exposition, "_FIRST_RETRY_S", 0.01)
    attempts: list[int] = []

    def listen(host: str, port: int) -> socket.socket:
        attempts.append(port)
        return addresses.listen(host, port)

    monkeypatch.setattr(exposition, "listen", listen)

    async def scenario(taken: socket.socket) -> None:
        port = taken.getsockname()[1]
        agent = Agent(_agent_config(tmp_path, ("127.0.0.1", port)))
        running = asyncio.create_task(agent.run())

        async def tried_often() -> bool:
            return running.done() or len(attempts) > 2

        async def is_served() -> bool:
            return (await asyncio.to_thread(ask, f"http://127.0.0.1:{port}/metrics"))[0] == 200

        try:
            await eventually(tried_often, "a few attempts")
            assert not running.done()
            await _hang_up((await asyncio.open_unix_connection(str(tmp_path / "agent.sock")))[1])
            taken.close()
            await eventually(is_served, "metrics at the port that is free")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

    caplog.set_level("INFO", exposition.__name__)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asyncio.run(scenario(taken))
    refused, served = [record.getMessage() for record in caplog.records if record.name == exposition.__name__]
    assert refused.startswith(
        "metrics are not served until this is possible, all else goes on: UNBROKEN_METRICS_LISTEN: cannot listen on "
        f"127.0.0.1:{port}: Address already in use"
    )
    assert served == f"metrics are served now: listen=127.0.0.1:{port}"


def _agent_config(folder: Path, metrics_listen: tuple[str, int]) -> AgentConfig:
    (folder / "token").write_text("0123456789abcdef")
    return AgentConfig(
        settings=JobSettings("digits"),
        token_file=folder / "token",
        # Nobody is there: the agent tries again.
        rendezvous_url="http://127.0.0.1:1",
        authority_file=None,
        metrics_listen=metrics_listen,
        pod="digits-0",
        pod_uid="uid-0",
        node="",
        pod_ip="127.0.0.1",
        domains=(),
        directory=folder,
        private_directory=folder,
    )
