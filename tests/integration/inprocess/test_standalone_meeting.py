"""Hosts and root of a standalone job, in one event loop: who is accepted, and who is not."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

from unbroken.network.connections import ConnectionLimits
from unbroken.standalone import root
from unbroken.standalone.lines import read_message, write_message
from unbroken.standalone.messages import (
    Attendance,
    Busy,
    Challenge,
    Failed,
    PodAssignment,
    Proof,
    StandaloneConfig,
    Waiting,
)
from unbroken.standalone.root import Root, bind
from unbroken.standalone.root_search import RootSearch
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.protocol.settings import Timeouts

LIMIT_S = 60.0


def config(ports: tuple[int, ...], **changes: Any) -> StandaloneConfig:
    """Return what hosts and root are told."""
    return replace(StandaloneConfig("k", 3, "127.0.0.1", ports, 60.0), **changes)


def present(uid: str, *ranks: int, is_owner: bool = False, num_places: int = 0) -> Attendance:
    """Return a host with these ranks."""
    return Attendance("", uid, "node", ranks, num_places or len(ranks), is_owner, Timeouts())


class Meeting:
    """One root, and hosts that look for it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        listener = bind("127.0.0.1", (0,))
        self.port = int(listener.getsockname()[1])
        self.config = config((self.port,), **changes)
        self.root = asyncio.ensure_future(Root(folder, self.config, listener).run())
        self.waiting_for: dict[str, list[str]] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    def host(self, who: Attendance, **changes: Any) -> "asyncio.Task[PodAssignment | Failed]":
        """Let a host look for the root."""
        search = RootSearch(config((self.port,), **changes))
        search.root_port = self.port if who.is_owner else None
        words = self.waiting_for.setdefault(who.uid, [])
        task = asyncio.ensure_future(search.run(lambda: who, words.append))
        self._tasks.append(task)
        return task

    async def until_said(self, uid: str, text: str) -> None:
        """Wait until a host was told something with this text in it."""

        async def is_said() -> bool:
            return any(text in word for word in self.waiting_for[uid])

        await eventually(is_said, f"{text!r} said to host {uid}", describe=lambda: str(self.waiting_for))

    async def close(self) -> None:
        """End everything."""
        for task in (*self._tasks, self.root):
            task.cancel()
        await asyncio.gather(*self._tasks, self.root, return_exceptions=True)


@contextlib.asynccontextmanager
async def meeting(folder: Path, **changes: Any) -> AsyncIterator[Meeting]:
    """Return a root that waits."""
    opened = Meeting(folder, **changes)
    try:
        yield opened
    finally:
        await opened.close()


def test_hosts_are_dealt_out_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    """2.5: whatever order they come in; all get one rendezvous, and each a token of its own."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            second = here.host(present("b", 1, 2))
            await here.until_said("b", "waits for rank 0")
            first = here.host(present("a", 0, is_owner=True))
            answers = [await asyncio.wait_for(task, LIMIT_S) for task in (first, second)]
            assigned = [answer for answer in answers if isinstance(answer, PodAssignment)]
            assert [answer.pod for answer in assigned] == ["host-0", "host-1"]
            assert len({(answer.port, answer.settings) for answer in assigned}) == 1
            # Only the owner may have to start another root: nobody else can make tokens.
            job_key, of_others = (answer.job_key for answer in assigned)
            assert (len(job_key), of_others) == (64, "")
            tokens = [derive_token(job_key, Kind.AGENT, assigned[0].settings.uid, answer.pod) for answer in assigned]
            assert [answer.token for answer in assigned] == tokens

    asyncio.run(run())


def test_missing_and_doubled_ranks_are_told_to_all_hosts(tmp_path: Path) -> None:
    """2.5: who is waited for is known everywhere."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            here.host(present("a", 0, is_owner=True))
            await here.until_said("a", "1 of 3 workers called the wrapped function, on 1 host; missing ranks: 1, 2")
            here.host(present("b", 0, 1))
            await here.until_said("a", "missing ranks: 2; ranks that are there twice: [0]")
            await here.until_said("b", "missing ranks: 2; ranks that are there twice: [0]")

    asyncio.run(run())


def test_host_of_another_job_is_not_taken_in(tmp_path: Path) -> None:
    """2.5: the port is found, the key is another."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            stranger = here.host(present("x", 1, 2), key="another")
            here.host(present("a", 0, is_owner=True))
            await here.until_said("a", "missing ranks: 1, 2")
            await here.until_said("x", "waits for rank 0 on 127.0.0.1")
            assert not stranger.done()

    asyncio.run(run())


def test_late_host_hears_that_the_job_runs(tmp_path: Path) -> None:
    """2.5: a job with the same numbers on the same port."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            await asyncio.wait_for(here.host(present("a", 0, 1, 2, is_owner=True)), LIMIT_S)
            here.host(present("b", 0, 1, 2))
            await here.until_said("b", "another job with this MASTER_PORT runs on 127.0.0.1")

    asyncio.run(run())


def test_root_ends_with_its_owner_while_the_job_forms(tmp_path: Path) -> None:
    """2.5: a job that comes later does not meet at what this one left."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            owner = here.host(present("a", 0, is_owner=True))
            await here.until_said("a", "missing ranks: 1, 2")
            owner.cancel()
            await asyncio.wait_for(here.root, LIMIT_S)

    asyncio.run(run())


def test_job_that_cannot_be_is_refused_on_all_hosts(tmp_path: Path) -> None:
    """2.2, 2.5: the reason is that of the settings."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            first = here.host(present("a", 0, is_owner=True, num_places=65))
            second = here.host(present("b", 1, 2))
            for task in (first, second):
                answer = await asyncio.wait_for(task, LIMIT_S)
                assert isinstance(answer, Failed)
                assert "ranksPerPod: want 1 to 64, got 65" in answer.message

    asyncio.run(run())


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"\n", b'{"type":"Attendance"}\n', b"x" * 100_000 + b"\n"])
def test_nonsense_at_the_door_changes_nothing(tmp_path: Path, line: bytes) -> None:
    """2.5: whoever scans ports."""

    async def run() -> None:
        async with meeting(tmp_path) as here:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(line)
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
            writer.close()
            assignment = await asyncio.wait_for(here.host(present("a", 0, 1, 2, is_owner=True)), LIMIT_S)
            assert isinstance(assignment, PodAssignment)

    asyncio.run(run())


def test_proof_of_somebody_who_does_not_know_the_key_is_refused(tmp_path: Path) -> None:
    """2.5: the token is for the job's hosts."""

    async def run() -> None:
        async with meeting(tmp_path, world_size=1) as here:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            write_message(writer, Challenge("n"))
            assert isinstance(await read_message(reader, Proof, LIMIT_S), Proof)
            write_message(writer, present("x", 0, is_owner=True))
            assert await read_message(reader, PodAssignment | Failed | Waiting | Busy, LIMIT_S) is None
            writer.close()

    asyncio.run(run())


def test_hosts_meet_while_strangers_hold_all_connections_that_the_root_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one address lose their oldest, and others come in."""
    monkeypatch.setattr(root, "limits_of_api", lambda _: ConnectionLimits(8, 16, LIMIT_S))

    async def scenario() -> None:
        async with meeting(tmp_path) as opened:
            strangers = [
                await asyncio.open_connection("127.0.0.1", opened.port, local_addr=("127.0.0.2", 0)) for _ in range(40)
            ]
            hosts = [opened.host(present("a", 0, is_owner=True)), opened.host(present("b", 1, 2))]
            found = await asyncio.wait_for(asyncio.gather(*hosts), LIMIT_S)
            assert [isinstance(answer, PodAssignment) for answer in found] == [True, True]
            for reader, writer in strangers:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    asyncio.run(scenario())


@pytest.mark.timeout(200)
def test_wait_for_an_address_that_does_not_resolve_is_told_again_and_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from datetime import timedelta\n"
        "from unbroken import inprocess\n"
        "from unbroken.inprocess.standalone import joining\n"
        "joining.NOTICE_S = 0.5\n"
        "limits = {'soft_timeout': 2, 'hard_timeout': 4, 'heartbeat_timeout': 4, 'barrier_timeout': 8}\n"
        "limits = {name: timedelta(seconds=seconds) for name, seconds in limits.items()}\n"
        "inprocess.Wrapper(**limits)(lambda: None)()\n"
    )
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "no-such-host.invalid"}
    environment = {**os.environ, **place, "MASTER_PORT": "29500", "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    told = [line for line in ended.stderr.splitlines() if "the wrapped call waits for the job to form, for" in line]
    assert len(told) > 1, ended.stderr
    assert "waits for rank 0 on no-such-host.invalid, ports 29502 to 29509 (" in told[-1]
    assert "(barrier_timeout)" in told[-1]
