"""What the agent says when it has no token to show to the rendezvous."""

import asyncio
from pathlib import Path

import pytest

from unbroken.agent import uplink
from unbroken.agent.events import Event
from unbroken_core.settings import Timeouts


@pytest.mark.parametrize(
    ("content", "seen"),
    [pytest.param(None, "No such file", id="missing"), pytest.param(b"\xff\xfe", "can't decode", id="not UTF-8")],
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
        task = asyncio.create_task(uplink.Uplink("http://127.0.0.1:9", file, Timeouts(), events.append).run())
        while not caplog.records:
            assert not task.done(), task.exception()
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_told(), 60))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"rendezvous: token file {file}: want the job's token in UTF-8, got ")
    assert seen in message
    assert events == []
