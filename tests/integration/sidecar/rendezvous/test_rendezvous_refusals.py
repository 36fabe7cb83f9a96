"""The rendezvous as a process: what strangers and broken agents send it is refused, counted, and changes nothing.

And what it shows of the job to whoever has the token."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import aiohttp
import pytest
from aiohttp import web
from tests.answers import ask
from tests.waiting import eventually, wait_until

from unbroken.network.connections import Connections, GuardedSite, limits_of_api
from unbroken.network.limits import FAILURES_AT_ONCE
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.token import TokenFile
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import Service
from unbroken.run.loopback_block import LoopbackBlock
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    JobStatus,
    Plan,
    RendezvousMessage,
    Welcome,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import WorkerPhase

TOKEN = "0123456789abcdef0123456789abcdef"
LIMIT_S = 60.0
HELLO = wire.encode(Hello(PROTOCOL, "digits", "digits-0", "uid-0", "s", "node-0", 1))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a rendezvous; return its address and its process."""
    (tmp_path / "token").write_text(TOKEN)
    block = LoopbackBlock()
    host = block.rendezvous
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": wire.settings_to_json(JobSettings("digits")),
        "UNBROKEN_TOKEN_FILE": str(tmp_path / "token"),
        "UNBROKEN_LISTEN": f"{host}:29600",
        "UNBROKEN_METRICS_LISTEN": f"{host}:29601",
    }
    process = subprocess.Popen([sys.executable, "-m", "unbroken.rendezvous"], env=environment)
    yield host, process
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    block.release()


@pytest.fixture
def address(served: tuple[str, subprocess.Popen[bytes]]) -> str:
    """Start a rendezvous; return its address."""
    return served[0]


async def is_up(session: aiohttp.ClientSession, host: str) -> bool:
    """Return whether the rendezvous answers."""
    try:
        async with session.get(f"http://{host}:29601/healthz") as response:
            return await response.text() == "ok\n"
    except aiohttp.ClientConnectionError:
        return False


async def talk(session: aiohttp.ClientSession, host: str, *frames: str | bytes) -> tuple[list[str], int | None]:
    """Send frames as one agent; return the texts that came back and the close code."""
    texts: list[str] = []
    async with session.ws_connect(f"http://{host}:29600/v1/agents") as connection:
        for frame in frames:
            # What is too large is cut off before all of it was sent.
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await (connection.send_str(frame) if isinstance(frame, str) else connection.send_bytes(frame))
        async for message in connection:
            texts.append(str(message.data))
        return texts, connection.close_code


def test_agents_that_have_given_up_meanwhile_are_no_errors_of_a_rendezvous_that_stood_still(
    served: tuple[str, subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    host, process = served
    request = (
        f"GET /v1/agents HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )

    async def scenario() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, host), "a rendezvous")
            process.send_signal(signal.SIGSTOP)
            for linger in (False, True):
                with socket.create_connection((host, 29600)) as connection:
                    connection.sendall(request.encode())
                    if linger:
                        # A reset instead of an end.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            process.send_signal(signal.SIGCONT)
            # Served after those: they came before.
            assert await talk(session, host, "no Hello") != ([], None)

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_an_agent_that_leaves_while_it_is_answered_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(connection: web.WebSocketResponse, request: web.BaseRequest) -> None:
        # As aiohttp says it; which of its writes is the first after the end is chance.
        raise ConnectionResetError("Cannot write to closing transport")

    async def scenario() -> None:
        (tmp_path / "token").write_text(TOKEN)
        told = Refusals()
        service = Service(Coordinator(JobSettings("digits"), asyncio.get_running_loop().time()), told)
        connections = Connections(limits_of_api(1), told)
        server = Server(service, TokenFile(tmp_path / "token"), told, connections)
        runner = web.AppRunner(server.application(), access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await GuardedSite(runner, listener, connections).start()
        monkeypatch.setattr(web.WebSocketResponse, "prepare", leave)
        try:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                host, port = listener.getsockname()
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await session.ws_connect(f"http://{host}:{port}/v1/agents")
        finally:
            service.close()
            await runner.cleanup()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert "agent has gone before it was answered" in caplog.text
    assert "Traceback" not in caplog.text


async def refusals(session: aiohttp.ClientSession, host: str) -> dict[str, str]:
    """Return the count of each reason that was counted, once there is one."""

    async def counted() -> dict[str, str]:
        async with session.get(f"http://{host}:29601/metrics") as response:
            counts = re.findall(r'unbroken_refused_total{reason="(.*?)"} (\d)', await response.text())
        return {name: count for name, count in counts if count != "0"}

    return await eventually(counted, "a refusal that is counted")


def test_an_agent_without_the_token_is_told_of_in_the_status_until_it_comes_with_it(address: str) -> None:
    """So that the job's condition says why an agent that runs does not join."""

    async def scenario() -> None:
        base = f"http://{address}:29600/v1"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")

            async def status(**query: str) -> JobStatus:
                async with session.get(f"{base}/status", params=query) as response:
                    found: JobStatus = wire.decode(await response.read(), JobStatus)
                    return found

            before = await status()
            connector = aiohttp.TCPConnector(local_addr=(stranger, 0))
            async with aiohttp.ClientSession(connector=connector) as another:
                news = asyncio.create_task(status(after=str(before.revision), term=str(before.term), timeout="60"))
                async with another.get(f"{base}/agents", headers={"Authorization": "Bearer wrong"}) as response:
                    assert response.status == 401
                told = await news
                assert told.message == (
                    f"{before.message}; refused: {stranger} came without this job's token, "
                    "want that of UNBROKEN_TOKEN_FILE here"
                )
                async with another.get(f"{base}/status", headers=dict(session.headers)) as response:
                    assert response.status == 200
            assert (await status()).message == before.message

    stranger = address.rpartition(".")[0] + ".253"
    asyncio.run(scenario())


def test_flood_of_strangers_is_cut_off_while_members_go_on(tmp_path: Path) -> None:
    """10,000 lines a second, wrong tokens and connections that say nothing: counted, and nobody else is disturbed."""

    async def scenario() -> None:
        (tmp_path / "token").write_text(TOKEN)
        refusals = Refusals()
        service = Service(Coordinator(JobSettings("digits"), asyncio.get_running_loop().time()), refusals)
        limits = replace(limits_of_api(1), max_strangers=250)
        connections = Connections(limits, refusals)
        server = Server(service, TokenFile(tmp_path / "token"), refusals, connections)
        runner = web.AppRunner(server.application(), access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
        await GuardedSite(runner, listener, connections).start()
        host, port = listener.getsockname()
        try:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                member = await session.ws_connect(f"http://{host}:{port}/v1/agents")
                await member.send_str(HELLO)
                assert isinstance(wire.decode(await member.receive_str(), RendezvousMessage), Welcome)
                answers = await asyncio.gather(*(wrong_token(host, port) for _ in range(200)))
                num_cut = answers.count(b"")
                num_told = sum(answer.startswith(b"HTTP/1.1 401") for answer in answers)
                assert num_told >= FAILURES_AT_ONCE
                assert num_cut > 0
                assert (refusals.counts[Refusal.UNAUTHORIZED], refusals.counts[Refusal.TOO_FAST]) == (200, num_cut)
                strangers = [await asyncio.open_connection(host, port) for _ in range(251)]
                ends = [asyncio.create_task(reader.read()) for reader, _ in strangers]
                await asyncio.wait(ends, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
                assert refusals.counts[Refusal.TOO_MANY] >= 1

                async def is_read_slower() -> bool:
                    if refusals.counts[Refusal.TOO_FAST] > num_cut:
                        return True
                    # Again, where this process was kept from sending for seconds: so much it may send then.
                    for number in range(2000):
                        await member.send_str(wire.encode(Heartbeat(number)))
                    return False

                await eventually(is_read_slower, "a member that is read slower")
                assert service.num_agents == 1
                for _reader, writer in strangers:
                    await hang_up(writer)
                await asyncio.gather(*ends, return_exceptions=True)
                await member.close()
        finally:
            service.close()
            await runner.cleanup()

    asyncio.run(scenario())


async def wrong_token(host: str, port: int) -> bytes:
    """Ask with a wrong token on a connection of its own; return all that comes back."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n")
    try:
        return await asyncio.wait_for(reader.read(), LIMIT_S)
    except ConnectionError:
        return b""
    finally:
        await hang_up(writer)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection, which the other side may have closed."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_agent_with_a_wrong_token_counts_its_refusals_and_leaves_a_termination_message(
    address: str, tmp_path: Path
) -> None:
    """`kubectl describe pod` shows it, and whoever looks at the agent's metrics."""
    log, token = tmp_path / "termination-log", tmp_path / "another-token"
    token.write_text("of-another-job-altogether")
    own = LoopbackBlock()
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": wire.settings_to_json(JobSettings("digits")),
        "UNBROKEN_TOKEN_FILE": str(token),
        "UNBROKEN_RENDEZVOUS_URL": f"http://{address}:29600",
        "UNBROKEN_METRICS_LISTEN": f"{own.rendezvous}:29602",
        "UNBROKEN_POD": "digits-0",
        "UNBROKEN_POD_UID": "uid-0",
        "UNBROKEN_POD_IP": own.rendezvous,
        "UNBROKEN_DIR": str(tmp_path / "run"),
        "UNBROKEN_TERMINATION_LOG": str(log),
    }
    # What an agent that comes before the rendezvous says of that is said first.
    wait_until(lambda: ask(f"http://{address}:29601/healthz")[0] == 200, "a rendezvous")
    process = subprocess.Popen([sys.executable, "-m", "unbroken.agent"], env=environment)
    try:
        text = wait_until(lambda: log.exists() and log.read_text(), "a termination message")
        assert text == (
            f"not in the job: token file {token}: want this job's token, got one that http://{address}:29600/v1/agents "
            "refuses (401)"
        )
        with urllib.request.urlopen(f"http://{own.rendezvous}:29602/metrics", timeout=LIMIT_S) as response:
            assert re.search(r"^unbroken_agent_unauthorized_total [1-9]", response.read().decode(), re.MULTILINE)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        own.release()


@pytest.mark.parametrize(
    ("frames", "reason", "code"),
    [
        pytest.param(["not json"], "malformed", 1008, id="not JSON"),
        pytest.param([b"\x00\x01"], "malformed", 1008, id="binary"),
        pytest.param(["[]"], "malformed", 1008, id="no object"),
        pytest.param([json.dumps({"type": "Hello", "protocol": 1})], "malformed", 1008, id="fields missing"),
        pytest.param(["x" * (10 << 20)], "too-large", 1009, id="10 MB"),
        pytest.param([wire.encode(Heartbeat(1))], "out-of-place", 1008, id="heartbeat before hello"),
        pytest.param([HELLO, HELLO], "out-of-place", 1008, id="second hello"),
    ],
)
def test_bad_message_closes_its_connection_and_is_counted(
    address: str, frames: list[str | bytes], reason: str, code: int
) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")
            _, close_code = await talk(session, address, *frames)
            assert close_code in (code, 1006)
            assert await refusals(session, address) == {reason: "1"}
            # Others are not disturbed.
            async with session.ws_connect(f"http://{address}:29600/v1/agents") as connection:
                await connection.send_str(HELLO)
                assert isinstance(wire.decode((await connection.receive(LIMIT_S)).data, Welcome), Welcome)

    asyncio.run(scenario())


def test_agent_of_another_job_is_refused_with_the_reason(address: str) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")
            texts, _ = await talk(session, address, HELLO.replace('"job":"digits"', '"job":"mnist"'))
            assert len(texts) == 1
            assert json.loads(texts[0])["type"] == "Refused"
            assert "digits" in json.loads(texts[0])["reason"]
            assert await refusals(session, address) == {"no-member": "1"}

    asyncio.run(scenario())


def test_pod_with_another_number_of_workers_is_refused_and_named_in_the_status(address: str) -> None:
    """1.4"""

    async def scenario() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")
            other = wire.encode(replace(wire.decode(HELLO, Hello), ranks_per_pod=2))
            texts, _ = await talk(session, address, other)
            why = "ranksPerPod: want 1 workers in each pod of the job, got 2 in pod digits-0"
            assert [json.loads(text)["reason"] for text in texts] == [why]
            async with session.get(f"http://{address}:29600/v1/status") as response:
                assert json.loads(await response.text())["refused"] == [f"digits-0: {why}"]
            assert await refusals(session, address) == {"no-member": "1"}

    asyncio.run(scenario())


def test_status_waits_for_a_change(address: str) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")
            url = f"http://{address}:29600/v1/status"
            async with session.get(url) as response:
                known = json.loads(await response.text())
            query = {"after": str(known["revision"]), "term": str(known["term"]), "timeout": "50"}
            waiting = asyncio.create_task(session.get(url, params=query))
            async with session.ws_connect(f"http://{address}:29600/v1/agents") as connection:
                await connection.send_str(HELLO)
                async with await asyncio.wait_for(waiting, 40) as response:
                    newer = json.loads(await response.text())
            assert newer["revision"] > known["revision"]

    asyncio.run(scenario())


def test_the_tree_of_ranks_is_shown_as_text_and_as_a_drawing_to_whoever_has_the_token(address: str) -> None:
    ready = WorkerState(0, 0, WorkerPhase.READY, host="127.0.0.1", port=1)
    hello = replace(wire.decode(HELLO, Hello), workers=(ready,))

    async def scenario() -> None:
        url = f"http://{address}:29600/v1/topology"
        async with aiohttp.ClientSession() as session:
            await eventually(lambda: is_up(session, address), "a rendezvous")
            for path in (url, f"{url}.svg"):
                async with session.get(path) as response:
                    assert (response.status, response.content_type) == (401, "text/plain")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            for path in (url, f"{url}.svg"):
                async with session.get(path) as response:
                    assert response.status == 404
                    assert (
                        await response.text()
                        == "/v1/topology: want a job with ranks, got one that has not started yet\n"
                    )
            async with session.ws_connect(f"http://{address}:29600/v1/agents") as connection:
                await connection.send_str(wire.encode(hello))
                while not isinstance(
                    wire.decode((await connection.receive(LIMIT_S)).data, RendezvousMessage), Plan
                ):  # Welcome comes first.
                    pass
                async with session.get(url) as response:
                    assert response.content_type == "text/plain"
                    title, why, tree = (await response.text()).split("\n\n")
                    assert title == "digits: iteration 0: waits for digits-0 to enter the training function"
                    assert why.startswith("Plan 0: 1 active, 0 spare, 0 lost ranks")
                    assert tree.splitlines() == ["job  1 active, 0 spare, 0 lost (at most 1)", "└─ digits-0  [0]"]
                async with session.get(f"{url}.svg") as response:
                    assert response.content_type == "image/svg+xml"
                    drawing = ElementTree.fromstring(await response.text())
            texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
            assert "digits-0" in texts
            assert "uid-0" not in "".join(filter(None, texts))

    asyncio.run(scenario())
