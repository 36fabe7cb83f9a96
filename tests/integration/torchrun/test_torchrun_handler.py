"""torch's RendezvousHandler on our rendezvous, over a real connection: several nodes are threads of this process."""

import asyncio
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.waiting import LIMIT_S, wait_until
from torch.distributed.elastic.events import NodeState  # type: ignore[attr-defined] # not exported by name
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unbroken.network.refusals import Refusals
from unbroken.network.token import FixedToken
from unbroken.network.token_guard import TokenGuard
from unbroken.rounds.metrics import make_metrics
from unbroken.rounds.server import Rounds
from unbroken.torchrun_plugin import handler as handlers
from unbroken.torchrun_plugin.handler import UnbrokenRendezvousHandler
from unbroken_core.conventions.tls import server_context
from unbroken_core.torchrun_rounds.messages import Departure

TOKEN = "a-token-of-this-test"
RUN_ID = "run"


class Server:
    """The rendezvous, in a thread."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._is_over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._is_up.wait(LIMIT_S)

    async def _serve(self) -> None:
        refusals = Refusals()
        rounds, guard = Rounds(refusals), TokenGuard(FixedToken(TOKEN), refusals)
        app = web.Application(middlewares=[guard.guard])
        app.add_routes(rounds.routes())
        self._metrics = make_metrics(rounds, refusals)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=self._context)
        await site.start()
        self.port = runner.addresses[0][1]
        self._is_over = asyncio.Event()
        self._is_up.set()
        await self._is_over.wait()
        rounds.close()
        await runner.cleanup()

    def metrics(self) -> dict[str, float]:
        """Return what /metrics says, but for zeros: by name, and of refusals by reason."""
        text = asyncio.run_coroutine_threadsafe(self._render(), self._loop).result(LIMIT_S).decode()
        samples = [sample for family in parse(text) for sample in family.samples]
        return {sample.labels.get("reason", sample.name): sample.value for sample in samples if sample.value}

    async def _render(self) -> bytes:
        return await self._metrics()

    def close(self) -> None:
        """Close all connections, and end."""
        assert self._is_over is not None
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(LIMIT_S)
        self._loop.close()


class Clock:
    """The handlers' time, which the test moves on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        """Return the time that they see."""
        return time.monotonic() + self.ahead_s


class Nodes:
    """Handlers of one run, each with a thread of its own that asks for its next round."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = server.port
        self.scheme = "http"
        self._pool = ThreadPoolExecutor(8)
        self._made: list[UnbrokenRendezvousHandler] = []

    def make(self, nodes: str = "2:2", **config: Any) -> UnbrokenRendezvousHandler:
        """Return a new handler, made as torchrun makes it."""
        low, high = map(int, nodes.split(":"))
        config = {"last_call_timeout": 60, "join_timeout": 60, "reconnect_timeout": 1, "start": "never", **config}
        endpoint = f"{self.scheme}://127.0.0.1:{self.port}"
        made = get_rendezvous_handler(RendezvousParameters("unbroken", endpoint, RUN_ID, low, high, **config))
        assert isinstance(made, UnbrokenRendezvousHandler)
        self._made.append(made)
        return made

    def ask(self, node: UnbrokenRendezvousHandler) -> "Future[RendezvousInfo]":
        """Call next_rendezvous."""
        return self._pool.submit(node.next_rendezvous)

    def meet(self, *nodes: UnbrokenRendezvousHandler) -> list[RendezvousInfo]:
        """Let these make a round; return what each got."""
        return [future.result(LIMIT_S) for future in [self.ask(node) for node in nodes]]

    def close(self) -> None:
        """Let all leave."""
        for node in self._made:
            node._leave(Departure.GONE, "", 0.0)
        self._pool.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("UNBROKEN_TOKEN", TOKEN)
    server = Server()
    nodes = Nodes(server)
    try:
        yield nodes
    finally:
        nodes.close()
        server.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(handlers, "construct_and_record_rdzv_event", lambda **event: events.append(event))
    return events


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(handlers, "time", clock)
    return clock


def _raise(error: Exception, act: Callable[[], bool]) -> bool:
    """Do something as torchrun does it while an exception passes."""
    try:
        try:
            raise error
        finally:
            is_right = act()
    except type(error):
        return is_right


def test_nodes_share_a_store_of_their_round_and_another_one_in_the_next(nodes: Nodes) -> None:
    """3.32 and 3.33: rank, size, a store under the round's own prefix, which workers may use; no key outlives its
    round."""
    first, second = nodes.make(name="node-1"), nodes.make(name="node-2")
    infos = nodes.meet(second, first)
    assert [(info.rank, info.world_size) for info in infos] == [(1, 2), (0, 2)]
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    ports = {info.bootstrap_store_info.master_port for info in infos if info.bootstrap_store_info}
    assert len(ports) == 1
    asked = nodes.ask(first)
    wait_until(second.num_nodes_waiting, "the other node called")
    assert second.num_nodes_waiting() == 1
    again = [nodes.ask(second).result(LIMIT_S), asked.result(LIMIT_S)]
    assert [(info.rank, info.world_size) for info in again] == [(1, 2), (0, 2)]
    assert not again[0].store.check(["key"])
    assert {info.bootstrap_store_info.master_port for info in again if info.bootstrap_store_info} != ports
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (0, 0)


def test_handler_says_what_it_was_made_with(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.30, 3.31, 3.36, 3.37."""
    node = nodes.make("2:4", join_timeout="90", heartbeat_timeout=9)
    assert (node.get_backend(), node.get_run_id()) == ("unbroken", RUN_ID)
    settings = node.settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == (RUN_ID, 2, 4)
    assert (settings.timeout.join.seconds, settings.timeout.last_call.seconds) == (90, 60)
    assert (settings.keep_alive_interval.seconds, settings.keep_alive_max_attempt) == (3, 3)
    assert node.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not node.use_agent_store


def test_a_node_of_several_hosts_without_a_secret_tells_who_could_take_part_and_what_prevents_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with torch's own rendezvous they start: nobody can make a random secret for all of them."""
    for name in ("UNBROKEN_TOKEN", "UNBROKEN_TOKEN_FILE", "UNBROKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    told = []
    for secret in ("", "a secret that all nodes have"):
        monkeypatch.setenv("UNBROKEN_SECRET", secret)
        # An address for documentation: nobody is asked before the first round.
        node = get_rendezvous_handler(RendezvousParameters("unbroken", "192.0.2.1:4711", RUN_ID, 2, 2, start="never"))
        assert isinstance(node, UnbrokenRendezvousHandler)
        node._leave(Departure.GONE, "", 0.0)
        told.append([record.getMessage() for record in caplog.records if record.name == handlers.__name__])
        caplog.clear()
    assert told == [
        [
            "anyone who reaches 192.0.2.1:4711 and knows the name of run run can take part: set UNBROKEN_SECRET to the "
            "same random text on all nodes, or give --rdzv-conf token_file=FILE"
        ],
        [],
    ]


def test_workers_get_a_port_of_their_own_where_they_may_not_share_the_store(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.33: sharing disabled."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    node = nodes.make("1:1")
    (info,) = nodes.meet(node)
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_port != node._stores[-1].port


def test_failure_and_success_are_recorded_as_torch_wants(nodes: Nodes, recorded: list[dict[str, Any]]) -> None:
    """3.32 and 3.37."""
    with pytest.raises(ValueError, match="last_call_timeout: want whole seconds above 0, got 'soon'"):
        nodes.make("1:1", last_call_timeout="soon")
    assert recorded[-1]["node_state"] is NodeState.FAILED
    node = nodes.make("1:1")
    nodes.meet(node)
    assert (recorded[-1]["node_state"], recorded[-1]["rank"]) == (NodeState.RUNNING, 0)
    node.set_closed()
    assert str(recorded[-1]["node_state"]) == "NodeState.SUCCEEDED"
    with pytest.raises(RendezvousClosedError):
        node.next_rendezvous()
    assert recorded[-1]["node_state"] is NodeState.FAILED
    assert recorded[-1]["message"].startswith("RendezvousClosedError: there will be no further round")


def test_too_few_nodes_make_a_timeout_that_says_how_many(nodes: Nodes, clock: Clock) -> None:
    """3.24 and 3.32."""
    node = nodes.make(join_timeout=60)
    asked = nodes.ask(node)
    wait_until(lambda: node._link.standing is not None and node._link.standing.message, "the rendezvous' answer")
    clock.ahead_s = 60.0
    with pytest.raises(RendezvousTimeoutError, match=r"within 60 s \(join_timeout\): 1 node is here, want 2"):
        asked.result(LIMIT_S)


def test_closing_is_seen_by_all_and_interrupts_nobody(nodes: Nodes) -> None:
    """3.34: is_closed, set_closed."""
    first, second = nodes.make(), nodes.make()
    nodes.meet(first, second)
    assert not second.is_closed()
    first.set_closed()
    wait_until(second.is_closed, "the run closed for the other")
    assert second.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()


def test_node_that_ends_well_takes_nobody_in_and_dooms_nobody(nodes: Nodes) -> None:
    """3.35 and 3.45: shutdown returns True once it was heard; the node with the store leaves last."""
    first, second = nodes.make(name="a"), nodes.make(name="b")
    nodes.meet(first, second)
    spare = nodes.make(name="c")
    waiting = nodes.ask(spare)
    wait_until(lambda: spare._link.standing is not None and spare._link.standing.stage.value == "spare", "a spare")
    leaving = threading.Thread(target=first.shutdown)
    leaving.start()
    with pytest.raises(RendezvousGracefulExitError, match="a has finished"):
        waiting.result(LIMIT_S)
    assert leaving.is_alive()
    assert second.shutdown()
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()
    with pytest.raises(RendezvousClosedError, match="a has finished"):
        nodes.make(name="late").next_rendezvous()


def test_node_that_gives_up_leaves_enough_others_alone(nodes: Nodes) -> None:
    """1.25, 3.35, 3.45: what passes while the handler is shut down tells why."""
    first, second = nodes.make("1:2", name="a"), nodes.make("1:2", name="b")
    nodes.meet(first, second)
    assert _raise(ChildFailedError("script", {0: ProcessFailure(0, 1, 1, "")}), first.shutdown)
    wait_until(second.num_nodes_waiting, "the other node called")
    (info,) = nodes.meet(second)
    assert (info.rank, info.world_size) == (0, 1)
    with pytest.raises(RendezvousClosedError, match="this node has left"):
        first.next_rendezvous()


def test_wrong_token_and_strange_endpoints_are_told_at_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input ends in words, not in a join timeout."""
    monkeypatch.setenv("UNBROKEN_TOKEN", "another-token-of-this-test")
    with pytest.raises(RendezvousConnectionError, match=r"it refuses ours \(401\)"):
        nodes.make().next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="nnodes: want 2:2"):
        monkeypatch.setenv("UNBROKEN_TOKEN", TOKEN)
        asked = nodes.make()
        nodes.ask(asked)
        wait_until(lambda: asked._link.standing, "the first node")
        nodes.make("1:2").next_rendezvous()
    asked._link.stop()
    asked._link._note(rejected="over")


def test_nobody_there_is_an_error_after_the_join_timeout(nodes: Nodes, clock: Clock) -> None:
    """3.32: RendezvousConnectionError; nothing is started where that is not wanted."""
    nodes.port = 1
    node = nodes.make(join_timeout=60)
    asked = nodes.ask(node)
    wait_until(lambda: "no connection to" in node._link.complaint, "a first attempt")
    assert not asked.done()
    clock.ahead_s = 60.0
    with pytest.raises(RendezvousConnectionError, match=r"within 60 s .*no connection to http://127\.0\.0\.1:1"):
        asked.result(LIMIT_S)


def test_encrypted_rendezvous_is_believed_where_its_authority_vouches_for_it(nodes: Nodes, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    for name, one in {"ca": authority, "other": trustme.CA()}.items():
        one.cert_pem.write_to_path(tmp_path / name)
    server = Server(server_context(tmp_path / "server.pem", tmp_path / "server.pem"))
    try:
        nodes.port, nodes.scheme = server.port, "https"
        (info,) = nodes.meet(nodes.make("1:1", ca=tmp_path / "ca"))
        assert info.world_size == 1
        with pytest.raises(RendezvousConnectionError, match="certificate verify failed"):
            nodes.make("1:1", ca=tmp_path / "other").next_rendezvous()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param("{", "malformed", id="no JSON"),
        pytest.param('{"type":"Standing"}', "malformed", id="another message"),
        pytest.param("x" * (100 << 10), "too-large", id="too long"),
        pytest.param(b"binary", "malformed", id="binary"),
    ],
)
def test_garbage_ends_its_connection_is_counted_and_disturbs_nobody(
    nodes: Nodes, sent: str | bytes, reason: str
) -> None:
    """3.42: nothing is unpickled, nothing is believed unread."""
    node = nodes.make("1:1")
    nodes.meet(node)

    async def send() -> aiohttp.WSMsgType:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"http://127.0.0.1:{nodes.port}/v1/rounds/{RUN_ID}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers) as connection:
            await (connection.send_bytes(sent) if isinstance(sent, bytes) else connection.send_str(sent))
            return (await connection.receive(LIMIT_S)).type

    assert asyncio.run(send()) in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    assert not node.is_closed()
    assert node.num_nodes_waiting() == 0
    told = {f"unbroken_torchrun_{what}": 1 for what in ("runs", "nodes", "rounds_total")} | {reason: 1}
    # A message that is too long is counted after the connection is closed.
    wait_until(lambda: nodes.server.metrics() == told, f"{told}", describe=lambda: str(nodes.server.metrics()))


def test_plug_in_costs_a_process_nothing_before_it_is_used() -> None:
    """torch asks for the entry point in training processes, too."""
    code = (
        "import sys; from unbroken.torchrun_plugin import rendezvous_handler as make; assert make() is make();"
        "assert not {'torch', 'aiohttp', 'asyncio'} & set(sys.modules); print('well')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_store_of_the_round_listens_where_it_is_reached_and_nowhere_else(nodes: Nodes) -> None:
    (info,) = nodes.meet(nodes.make("1:1"))
    assert info.bootstrap_store_info is not None
    listening = f"0100007F:{info.bootstrap_store_info.master_port:04X} 00000000:0000 0A"
    # The kernel may leave a line out where sockets come and go while it is read.
    wait_until(lambda: listening in Path("/proc/net/tcp").read_text(), "the store among all that listens")
