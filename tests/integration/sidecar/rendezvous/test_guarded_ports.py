"""The ports of a rendezvous under attack by those who have no token: real sockets, real agents, few descriptors."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from tests.answers import ask
from tests.waiting import LIMIT_S, eventually, wait_until

from unbroken.network.connections import LIMITS_OF_SCRAPES, Connections, GuardedSite, http_runner
from unbroken.network.exposition import serve_exposition_on
from unbroken.network.refusals import Refusal, Refusals
from unbroken.run.certificates import write_certificates
from unbroken.run.loopback_block import LoopbackBlock
from unbroken_core.conventions.tls import client_context, server_name
from unbroken_core.protocol import wire
from unbroken_core.protocol.settings import JobSettings

TOKEN = "0123456789abcdef0123456789abcdef"
NUM_DESCRIPTORS = 256
NUM_ATTACKERS = 230
SETTINGS = JobSettings("digits", namespace="test", replicas=3)


class Guarded:
    """A rendezvous with TLS, metrics and 256 descriptors, and agents that join it."""

    def __init__(self, folder: Path, block: LoopbackBlock) -> None:
        self.host = block.rendezvous
        self.folder = folder
        self._block = block
        self.files = write_certificates(folder, self.host, "digits", "test")
        (folder / "token").write_text(TOKEN)
        self._agents: list[tuple[subprocess.Popen[bytes], str, Path]] = []
        environment = {
            "UNBROKEN_LISTEN": f"{self.host}:29600",
            "UNBROKEN_METRICS_LISTEN": f"{self.host}:29601",
            "UNBROKEN_TLS_CERTIFICATE": str(self.files.certificate),
            "UNBROKEN_TLS_KEY": str(self.files.key),
        }
        command = ["bash", "-c", f'ulimit -n {NUM_DESCRIPTORS}; exec "$@"', "bash", sys.executable, "-m"]
        self.log = folder / "rendezvous.log"
        self.process = self._start([*command, "unbroken.rendezvous"], environment, self.log)

    def _start(self, command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        known = {"UNBROKEN_SETTINGS": wire.settings_to_json(SETTINGS), "UNBROKEN_TOKEN_FILE": f"{self.folder}/token"}
        with log.open("wb") as file:
            return subprocess.Popen(command, env={**os.environ, **known, **environment}, stderr=file)

    def add_agent(self) -> None:
        """Start an agent, and wait until it has joined."""
        number = len(self._agents)
        pod_ip = self._block.next_pod()
        environment = {
            "UNBROKEN_RENDEZVOUS_URL": f"https://{self.host}:29600",
            "UNBROKEN_RENDEZVOUS_CA": str(self.files.authority),
            "UNBROKEN_METRICS_LISTEN": f"{pod_ip}:29602",
            "UNBROKEN_POD": f"digits-{number}",
            "UNBROKEN_POD_UID": f"uid-{number}",
            "UNBROKEN_POD_IP": pod_ip,
            "UNBROKEN_DIR": str(self.folder / f"run-{number}"),
        }
        log = self.folder / f"agent-{number}.log"
        process = self._start([sys.executable, "-m", "unbroken.agent"], environment, log)
        self._agents.append((process, pod_ip, log))
        wait_until(lambda: self._is_connected(pod_ip), "an agent that has joined", describe=log.read_text)

    def _is_connected(self, pod_ip: str) -> bool:
        return "\nunbroken_agent_connected 1.0\n" in ask(f"http://{pod_ip}:29602/metrics")[1]

    def joins(self) -> list[int]:
        """Return how often each agent has joined."""
        return [log.read_text().count("accepted by the rendezvous") for _, _, log in self._agents]

    def refused(self) -> dict[str, int]:
        """Return how often each reason was counted."""
        found = ask(f"http://{self.host}:29601/metrics")[1]
        counts = re.findall(r'unbroken_refused_total{reason="(.*?)"} (\d+)', found)
        return {name: int(count) for name, count in counts if count != "0"}

    def close(self) -> None:
        """End all processes."""
        for process, _, _ in self._agents:
            process.kill()
            process.wait(LIMIT_S)
        self.process.terminate()
        assert self.process.wait(LIMIT_S) == 0
        self._block.release()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """Start a rendezvous with two agents."""
    made = Guarded(tmp_path, LoopbackBlock())
    try:
        wait_until(lambda: ask(f"http://{made.host}:29601/healthz")[0] == 200, "a rendezvous")
        made.add_agent()
        made.add_agent()
        yield made
    finally:
        made.close()


def _silent(guarded: Guarded, port: int) -> socket.socket:
    return socket.create_connection((guarded.host, port), timeout=LIMIT_S)


def _silent_metrics(guarded: Guarded) -> socket.socket:
    return _silent(guarded, 29601)


def _silent_api(guarded: Guarded) -> socket.socket:
    return _silent(guarded, 29600)


def _half_handshake(guarded: Guarded) -> socket.socket:
    peer = _silent(guarded, 29600)
    # The head of a record and of a ClientHello, which never comes.
    peer.sendall(bytes.fromhex("1603010200010001fc0303"))
    return peer


def _slow_headers(guarded: Guarded) -> socket.socket:
    peer = _silent(guarded, 29601)
    peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    return peer


def _slow_reader(guarded: Guarded) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    peer.settimeout(LIMIT_S)
    peer.connect((guarded.host, 29601))
    peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    return peer


@pytest.mark.parametrize(
    ("attack", "reasons"),
    [
        pytest.param(_silent_metrics, {"silent", "too-many"}, id="silent on the port of metrics"),
        pytest.param(_silent_api, {"silent", "too-many"}, id="silent on the port of the API"),
        pytest.param(_half_handshake, {"silent", "too-many"}, id="half of a TLS handshake"),
        pytest.param(_slow_headers, {"silent", "too-many"}, id="headers without an end"),
        pytest.param(_slow_reader, {"too-many"}, id="answers that nobody reads"),
    ],
)
def test_agents_go_on_and_join_while_a_port_is_held_by_those_without_a_token(
    guarded: Guarded, attack: Callable[[Guarded], socket.socket], reasons: set[str]
) -> None:
    attackers: list[socket.socket] = []
    with contextlib.ExitStack() as ends:
        for _ in range(NUM_ATTACKERS):
            # What is cut off at once may fail in any call.
            with contextlib.suppress(ConnectionError):
                attackers.append(ends.enter_context(attack(guarded)))
        guarded.add_agent()
        # Whoever is late for lack of processor time is taken for one of those who say nothing, and asks again.
        wait_until(lambda: ask(f"http://{guarded.host}:29601/healthz") == (200, "ok\n"), "an answer about health")
        assert guarded.joins() == [1, 1, 1]
        for attacker in attackers:
            with contextlib.suppress(ConnectionError):
                while attacker.recv(1 << 16):
                    pass
        wait_until(lambda: reasons <= set(guarded.refused()), f"{reasons} counted", describe=guarded.log.read_text)
    assert guarded.joins() == [1, 1, 1]


def test_a_request_with_a_huge_head_is_cut_off_and_counted(guarded: Guarded) -> None:
    context = client_context(guarded.files.authority.read_text())

    def is_counted() -> bool:
        # Again, where either process was kept from its handshake for too long.
        with (
            contextlib.suppress(OSError),
            socket.create_connection((guarded.host, 29600), timeout=LIMIT_S) as plain,
            context.wrap_socket(plain, server_hostname=server_name("digits", "test")) as peer,
        ):
            peer.sendall(b"GET /v1/status HTTP/1.1\r\n")
            for number in range(10_000):
                peer.sendall(f"X-{number}: {'x' * 100}\r\n".encode())
        return guarded.refused().get("too-large", 0) > 0

    wait_until(is_counted, "it is cut off and counted", describe=guarded.log.read_text)
    guarded.add_agent()
    assert guarded.joins() == [1, 1, 1]


def test_reader_that_takes_nothing_is_cut_off_and_a_slow_one_gets_all() -> None:
    """The same on every port: here with an answer of 8 MB, and a tenth of the time."""

    async def scenario() -> None:
        size = 8 << 20

        async def answer(_request: web.Request) -> web.Response:
            return web.Response(body=b"x" * size)

        app = web.Application()
        app.add_routes([web.get("/", answer)])
        refusals = Refusals()
        runner = http_runner(app, 1.0)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        limits = replace(LIMITS_OF_SCRAPES, stranger_s=LIMIT_S, stall_s=2.0)
        await GuardedSite(runner, listener, Connections(limits, refusals)).start()
        try:
            idle = socket.create_connection(address)
            reader, writer = await asyncio.open_connection(*address, limit=1 << 14)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            idle.sendall(b"GET / HTTP/1.0\r\n\r\n")
            num_bytes = 0
            while data := await reader.read(1 << 18):
                num_bytes += len(data)
                await asyncio.sleep(0.05)
            assert num_bytes > size
            writer.close()

            async def is_cut() -> bool:
                return refusals.counts[Refusal.OVERFLOW] == 1

            await eventually(is_cut, "the idle reader to be cut off")
            idle.close()
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_scrapes_at_once_are_written_once() -> None:
    async def scenario() -> None:
        written = []

        async def write() -> bytes:
            written.append(True)
            await asyncio.sleep(0.5)
            return b"text\n"

        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        runner = await serve_exposition_on(listener, write, Refusals())
        try:
            many = [asyncio.to_thread(ask, f"http://{host}:{port}/metrics") for _ in range(12)]
            assert await asyncio.gather(*many) == [(200, "text\n")] * 12
            # Half a second is a twentieth of ten, for which this text is good.
            assert len(written) == 1
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
