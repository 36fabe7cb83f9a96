"""Parts of the rendezvous that need no socket."""

import asyncio
import logging
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from unbroken.network.peer import FrameWriter, text_frame
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.token import GRACE_S, FixedToken, TokenFile
from unbroken.rendezvous.config import loopback_beside
from unbroken.rendezvous.pictures import NoPictureError, tree_drawing, tree_text
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import STATUS_GATHER_S, Service
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.messages import PROTOCOL, Hello, Report
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree import Place, RankTree
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer

TOKEN = "0123456789abcdef0123456789abcdef"


def test_token_is_accepted_as_bearer_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    shown = (f"Bearer {TOKEN}", f"Basic {TOKEN}", TOKEN, "", "Bearer ", "Bearer é", f"Bearer {TOKEN[:-1]}0")
    for token in (TokenFile(path), FixedToken(TOKEN)):
        assert [text for text in shown if token.accepts(text)] == [f"Bearer {TOKEN}"]


def test_changed_token_file_is_read_again_and_a_missing_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    token = TokenFile(path)
    path.unlink()
    assert token.accepts(f"Bearer {TOKEN}")
    path.write_text(TOKEN[::-1] + "0")
    assert token.accepts(f"Bearer {TOKEN[::-1]}0")


def put(path: Path, text: str) -> None:
    """Replace the file as a kubelet does: one that is written again in the same tick may look as before."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def test_replaced_token_is_good_until_every_kubelet_has_brought_the_new_one(tmp_path: Path) -> None:
    path, now_s = tmp_path / "token", [1000.0]
    path.write_text(TOKEN)
    token = TokenFile(path, lambda: now_s[0])
    tokens = [TOKEN, "1" * 32, "2" * 33]

    def accepted() -> list[str]:
        return [text for text in tokens if token.accepts(f"Bearer {text}")]

    assert accepted() == tokens[:1]
    put(path, tokens[1])
    assert token.accepts(f"Bearer {TOKEN}")
    now_s[0] += GRACE_S - 1.0
    assert accepted() == tokens[:2]
    now_s[0] += 1.0
    assert accepted() == tokens[1:2]
    put(path, tokens[2])
    assert accepted() == tokens[1:]
    assert not token.accepts("Bearer ")


@pytest.mark.parametrize(("text", "wanted"), [("short", "want a token of at least 16"), (None, "No such file")])
def test_unusable_token_file_is_named_at_the_start(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=wanted):
        TokenFile(path)


def test_token_without_a_file_must_be_long_enough_as_well() -> None:
    with pytest.raises(InputError, match="want a token of at least 16 characters, got 5"):
        FixedToken("short")


def test_requests_of_the_api_are_those_that_the_architecture_lists(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)

    async def served() -> set[str]:
        service = Service(Coordinator(JobSettings("digits"), asyncio.get_running_loop().time()), Refusals())
        app = Server(service, TokenFile(tmp_path / "token"), Refusals()).application()
        service.close()
        return {f"{route.method} {route.resource.canonical}" for route in app.router.routes() if route.resource}

    text = (Path(__file__).parents[4] / "docs" / "architecture.md").read_text()
    table = text.partition("\n## Rendezvous API\n")[2].partition("\nPort 29601")[0]
    listed = set(re.findall(r"`((?:GET|POST|PUT) [^?`]+)", table))
    assert {line for line in asyncio.run(served()) if not line.startswith("HEAD ")} == listed


def test_refusals_are_all_counted_and_logged_once_a_peer_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 1.0, 59.0, 61.0):
            refusals.note(Refusal.MALFORMED, "127.0.0.2", "want JSON", now_s)
        refusals.note(Refusal.MALFORMED, "127.0.0.3", "want JSON", 61.0)
    assert refusals.counts[Refusal.MALFORMED] == 5
    assert len(caplog.records) == 3


def test_refusals_of_many_peers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """52,400 lines in 18 s, from one process."""
    refusals = Refusals()
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            refusals.note(Refusal.TOO_MANY, f"10.0.{number // 256}.{number % 256}", "full", number / 1000)
        assert len(caplog.records) == 21
        assert "only counted for a minute" in caplog.records[-1].getMessage()
        refusals.note(Refusal.MALFORMED, "10.0.0.1", "want JSON", 10.0)
        refusals.note(Refusal.TOO_MANY, "10.1.0.1", "full", 70.0)
    assert len(caplog.records) == 23
    assert refusals.counts[Refusal.TOO_MANY] == 10_001


@pytest.mark.parametrize(
    ("length", "header"),
    [
        (125, b"\x81\x7d"),
        (126, b"\x81\x7e\x00\x7e"),
        (65_536, b"\x81\x7f" + struct.pack(">Q", 65_536)),
    ],
)
def test_frame_has_the_length_that_rfc_6455_wants(length: int, header: bytes) -> None:
    assert text_frame("x" * length) == header + b"x" * length


class SlowTransport:
    """A transport whose peer does not read."""

    def __init__(self) -> None:
        self.unsent = 0
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes) -> None:
        self.unsent += len(data)

    def abort(self) -> None:
        self.is_aborted = True


def test_agent_that_does_not_read_is_cut_off_when_its_queue_is_full() -> None:
    transport = SlowTransport()
    peer = FrameWriter("s", "pod", transport, 0.0)  # type: ignore[arg-type] # has what a FrameWriter uses of a transport
    answers = [peer.send(b"x" * (300 << 10)) for _ in range(4)]
    assert (answers, transport.is_aborted) == ([True, True, True, False], True)
    assert peer.send(b"x")


def test_one_message_that_is_larger_than_the_queue_gets_through() -> None:
    """Keys of 131,072 workers in one question: cut off, the agent came back, was sent the same, and so for ever."""
    transport = SlowTransport()
    peer = FrameWriter("s", "pod", transport, 0.0)  # type: ignore[arg-type] # has what a FrameWriter uses of a transport
    sizes = (200, 1_340_000, 200, 1_300_000, 200)
    assert ([peer.send(b"x" * size) for size in sizes], transport.is_aborted) == ([True, True, True, True, True], False)
    assert (peer.send(b"x" * (300 << 10)), transport.is_aborted) == (False, True)


def test_pods_that_have_taken_leave_are_counted_until_they_come_back() -> None:
    async def run() -> list[int]:
        service = Service(Coordinator(JobSettings("digits", replicas=2), 0.0), Refusals())
        seen = []
        for pod in ("digits-0", "digits-1", "digits-1"):
            hello = Hello(PROTOCOL, "digits", pod, f"uid of {pod}", "s", "node", 1)
            transport: Any = SlowTransport()
            peer = service.join(hello, transport)
            seen.append(service.num_left)
            service.receive(peer, Report(1, (), is_leaving=True))
            service.leave(peer)
            seen.append(service.num_left)
        service.close()
        return seen

    assert asyncio.run(run()) == [0, 1, 1, 2, 1, 2]


def test_changes_of_one_moment_are_told_to_a_waiting_reader_at_once() -> None:
    async def run() -> tuple[int, bool, int, int]:
        loop: Any = asyncio.get_running_loop()
        service = Service(Coordinator(JobSettings("digits", replicas=4), loop.time()), Refusals())
        set_timer, due = loop.call_later, []

        def note_timer(delay_s: float, callback: Any, *arguments: Any) -> Any:
            if delay_s != STATUS_GATHER_S:
                return set_timer(delay_s, callback, *arguments)
            due.append(callback)
            return set_timer(60.0, callback)

        loop.call_later = note_timer
        before = service.status()
        reader = asyncio.create_task(service.newer_status(before.term, before.revision, 60.0))
        transport: Any = SlowTransport()
        for pod in ("digits-0", "digits-1"):
            await asyncio.sleep(0)
            service.leave(service.join(Hello(PROTOCOL, "digits", pod, f"uid of {pod}", "s", "node", 1), transport))
        await asyncio.sleep(0)
        was_told_early = reader.done()
        for callback in due:
            callback()
        told = await reader
        service.close()
        return len(due), was_told_early, told.revision, service.status().revision

    num_timers, was_told_early, told, newest = asyncio.run(run())
    assert num_timers == 1
    assert not was_told_early
    assert told == newest


def a_tree(num_pods: int) -> RankTree:
    """Return the tree of a job with pods of eight workers."""
    places = [Place(f"uid-{pod}", (f"digits-{pod}#uid-{pod}",), 8) for pod in range(num_pods)]
    tree = RankTree([Layer("job", replace_from=False), Layer("pod", replace_from=False)], places)
    tree.start()
    return tree


def test_a_large_tree_is_shown_as_text_of_bounded_length_and_not_drawn() -> None:
    job = Coordinator(JobSettings("digits"), 0.0).status(0.0, str)
    assert tree_drawing(a_tree(128), job).count("<rect") > 1024
    with pytest.raises(NoPictureError, match=r"want at most 1024 workers in a drawing, got 1032; /v1/topology has the"):
        tree_drawing(a_tree(129), job)
    lines = tree_text(a_tree(400), job).splitlines()
    assert lines[:3] == ["digits: waits for the first pod", "", "job  3200 active, 0 spare, 0 lost"]
    assert (lines[3], lines[-1]) == ("├─ digits-0  [0 1 2 3 4 5 6 7]", "... 201 more lines")
    assert len(lines) == 203


@pytest.mark.parametrize(
    ("host", "beside"),
    [("10.2.3.4", "127.0.0.1"), ("fd00::7", "::1"), ("127.0.3.4", None), ("::1", None), ("0.0.0.0", None)],
)
def test_forwarded_ports_come_to_the_loopback_beside_a_pods_own_address(host: str, beside: str | None) -> None:
    assert loopback_beside(host) == beside
