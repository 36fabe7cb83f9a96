"""What the agent says when it has no token to show to the rendezvous, or a wrong one."""

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from unbroken.agent.adapters import uplink
from unbroken.agent.adapters.termination_message import TerminationMessage
from unbroken.agent.config import read_config
from unbroken.agent.decisions.events import Event
from unbroken_core.protocol import wire
from unbroken_core.protocol.settings import JobSettings, Timeouts

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        pytest.param(None, "No such file or directory", id="missing"),
        pytest.param(b"", "want a token of at least 16 characters, got 0", id="empty"),
        pytest.param(b"t" * 40 + b"\n" + b"t" * 40, "want a token in one line", id="two lines"),
        pytest.param(b"t" * (1 << 20), "want a token of at most 512 characters, got more", id="1 MB"),
        pytest.param(b"\xff\xfe" * 20, "want a token in one line", id="not text"),
        pytest.param(b"t" * 20 + b"\x1b[2J", "want a token in one line", id="control characters"),
    ],
)
def test_token_file_that_cannot_be_read_is_named_and_asked_for_again(
    content: bytes | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uplink, "_SILENT_S", 0.0)
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    events: list[Event] = []

    async def until_told() -> None:
        task = asyncio.create_task(uplink.Uplink(URL, file, Timeouts(), events.append, TerminationMessage(None)).run())
        while not caplog.records:
            assert not task.done(), task.exception()
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_told(), 60))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"rendezvous: token file {file}: {seen}")
    assert len(message) < 400
    assert events == []


@pytest.mark.parametrize("content", [pytest.param("one\ntwo", id="two lines"), pytest.param("é" * 32, id="not ASCII")])
def test_token_that_no_header_can_carry_is_complained_of_and_read_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token file of two lines ended the agent; its content is told to nobody."""
    monkeypatch.setattr(uplink, "_SILENT_S", 0.0)
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")

    async def connect_twice() -> None:
        link = uplink.Uplink(URL, file, Timeouts(), lambda _: None, TerminationMessage(None))
        for _ in range(2):
            await link._connect_once(cast(aiohttp.ClientSession, None))

    asyncio.run(connect_twice())
    assert [record.getMessage() for record in caplog.records] == [
        f"rendezvous: token file {file}: want a token in one line of ASCII characters without blanks, "
        "got other characters"
    ]


def test_connection_that_fails_in_an_unforeseen_way_is_told_with_a_traceback_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uplink, "_SILENT_S", 0.0)
    tries: list[int] = []

    async def fail(_link: uplink.Uplink, _session: aiohttp.ClientSession) -> None:
        tries.append(1)
        raise (OverflowError if len(tries) < 3 else LookupError)("unknown encoding: x")

    async def until_tried() -> None:
        link = uplink.Uplink(URL, tmp_path / "token", Timeouts(), lambda _: None, TerminationMessage(None))
        task = asyncio.create_task(link.run())
        while len(tries) < 4:
            assert not task.done(), task.exception()
            await asyncio.sleep(0)
        task.cancel()

    monkeypatch.setattr(uplink.Uplink, "_connect_once", fail)
    asyncio.run(asyncio.wait_for(until_tried(), 60))
    assert [(record.getMessage(), record.exc_info is not None) for record in caplog.records] == [
        (f"rendezvous: connection to {URL}/v1/agents failed: {kind}: unknown encoding: x", True)
        for kind in ("OverflowError", "LookupError")
    ]


class Refusing:
    """A session whose every request is answered with this status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def ws_connect(self, *_: object, **__: object) -> "Refusing":
        return self

    async def __aenter__(self) -> None:
        request = cast(aiohttp.RequestInfo, None)
        raise aiohttp.WSServerHandshakeError(request, (), status=self.status, message="Invalid response status")

    async def __aexit__(self, *_: object) -> None:
        return


@pytest.mark.parametrize(
    ("status", "text", "num_unauthorized"),
    [
        pytest.param(
            HTTPStatus.UNAUTHORIZED, "token file {file}: want this job's token, got one that {url} refuses (401)", 2
        ),
        pytest.param(
            HTTPStatus.FORBIDDEN, "token file {file}: want this pod's token, got one that {url} refuses (403)", 2
        ),
        pytest.param(HTTPStatus.BAD_GATEWAY, "{url} answered 502: want 101", 0),
    ],
)
def test_refusal_is_counted_and_stands_in_the_termination_message_until_all_is_well(
    status: HTTPStatus,
    text: str,
    num_unauthorized: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uplink, "_SILENT_S", 0.0)
    file, log = tmp_path / "token", tmp_path / "termination-log"
    file.write_text("of-another-job-altogether")
    log.touch()

    async def refuse() -> uplink.Uplink:
        link = uplink.Uplink(URL, file, Timeouts(), lambda _: None, TerminationMessage(log))
        session: Any = Refusing(status)
        for _ in range(2):
            await link._connect_once(session)
        return link

    link = asyncio.run(refuse())
    complaint = text.format(file=file, url=f"{URL}/v1/agents")
    assert [record.getMessage() for record in caplog.records] == [f"rendezvous: {complaint}"]
    assert log.read_text() == f"not in the job: {complaint}"
    assert link.num_unauthorized == num_unauthorized
    link.settle()
    assert log.read_text() == ""


def test_termination_message_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    termination_message = TerminationMessage(tmp_path)
    for text in ("one", "another"):
        termination_message.put(text)
    assert [record.getMessage().partition(" error=")[0] for record in caplog.records] == [
        f"termination message cannot be written: file={tmp_path}"
    ]


def test_termination_message_is_no_longer_than_the_kubelet_reads(tmp_path: Path) -> None:
    TerminationMessage(tmp_path / "log").put("x" * 5000)
    assert (tmp_path / "log").read_text() == "x" * 4096


def test_place_of_the_termination_message_is_read_from_the_environment(tmp_path: Path) -> None:
    names = ("UNBROKEN_TOKEN_FILE", "UNBROKEN_POD", "UNBROKEN_POD_UID", "UNBROKEN_POD_IP", "UNBROKEN_DIR")
    environment = {
        **dict.fromkeys(names, "x"),
        "UNBROKEN_SETTINGS": wire.settings_to_json(JobSettings("digits")),
        "UNBROKEN_RENDEZVOUS_URL": URL,
    }
    assert read_config(environment).termination_log is None
    named = {**environment, "UNBROKEN_TERMINATION_LOG": str(tmp_path / "log")}
    assert read_config(named).termination_log == tmp_path / "log"
