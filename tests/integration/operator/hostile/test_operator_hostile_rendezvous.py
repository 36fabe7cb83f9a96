"""A rendezvous on a real socket that answers what no honest one would: it is refused, and the polling goes on."""

import asyncio
import contextlib
import dataclasses
import gzip
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.unit.unbroken_operator.operator_world import running_world
from tests.waiting import eventually

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.protocol.wire import encode
from unbroken_operator.adapters import rendezvous_client
from unbroken_operator.adapters.bounded_answer import BoundedAnswer
from unbroken_operator.adapters.errors import RendezvousUnreachable, ReportRefused
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.api import layout
from unbroken_operator.decisions.limits.report import report_limits

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
LIMITS = report_limits({"replicas": 2}, 2)
_addresses = itertools.count(2)
REPORT: JobStatus = running_world().report  # type: ignore[assignment] # it has one


def says(*parts: bytes) -> Answer:
    """Return what sends this and closes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def body(content: bytes, *headers: str, status: str = "200 OK") -> Answer:
    """Return what sends an answer of known length."""
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""))
    return says(head.encode(), content)


@asynccontextmanager
async def rendezvous(answer: Answer) -> AsyncIterator[RendezvousTarget]:
    """Serve one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    address = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.{next(_addresses)}"
    server = await asyncio.start_server(serve, address, layout.API_PORT)
    async with server:
        yield RendezvousTarget("uid", "digits-rendezvous-0", address, "token")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n"),
            ReportRefused,
            f"sent 5000000000 bytes: want at most {LIMITS.bytes} for a job of this size",
            id="gigabytes",
        ),
        pytest.param(says(CHUNKED, b"1\r\n{\r\n" * 20_000), ReportRefused, "a body in chunks", id="a byte each"),
        pytest.param(
            body(gzip.compress(b" " * 100_000_000, 1), "Content-Encoding: gzip"),
            ReportRefused,
            "Content-Encoding 'gzip'",
            id="a body that unpacks to 100 MB",
        ),
        pytest.param(body(b"{}", "Content-Encoding: no-such"), ReportRefused, "'no-such'", id="an unknown encoding"),
        pytest.param(
            body(b"{}", "Content-Type: text/x; charset=no-such"), ReportRefused, "not a status", id="unknown charset"
        ),
        pytest.param(body(b"garbage"), ReportRefused, "want JSON, got b'garbage'", id="garbage"),
        pytest.param(body(b"\x1b[31m", status="500 Oh"), RendezvousUnreachable, "500: ?[31m", id="control characters"),
        pytest.param(
            body(b"", "Location: http://127.0.0.1:1/", status="302 Go"), RendezvousUnreachable, "302", id="a redirect"
        ),
        pytest.param(says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000), RendezvousUnreachable, "", id="long headers"),
        pytest.param(
            says(b"HTTP/1.1 102 Processing\r\n\r\n" * 20_000),
            RendezvousUnreachable,
            "it sent an interim answer (102)",
            id="interim answers without end",
        ),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\n", *(b"X-%d: %b\r\n" % (number, b"x" * 4000) for number in range(40))),
            RendezvousUnreachable,
            "the head of its answer has more than 65536 bytes",
            id="many long headers",
        ),
        pytest.param(says(b"\x00\xff" * 1000), RendezvousUnreachable, "", id="no HTTP"),
        pytest.param(says(), RendezvousUnreachable, "cannot be reached", id="nothing"),
        pytest.param(body(b'{"a": 1', "X: y"), ReportRefused, "want JSON", id="half of an object"),
    ],
)
def test_what_is_no_report_is_refused_and_says_why(answer: Answer, kind: type[Exception], message: str) -> None:
    async def scenario() -> None:
        async with rendezvous(answer) as target, RendezvousApi() as client:
            with pytest.raises(kind) as refused:
                await client.status(target, None, LIMITS)
        assert message in str(refused.value)
        assert len(str(refused.value)) <= 1000

    asyncio.run(scenario())


def test_one_that_hangs_is_given_up_before_a_report_of_it_would_be_15_s_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or its node is off: nobody refuses the connection."""
    assert rendezvous_client.POLL_S + rendezvous_client.HANGING_S <= 12.0
    monkeypatch.setattr(rendezvous_client, "POLL_S", 1)
    monkeypatch.setattr(rendezvous_client, "HANGING_S", 0.2)

    async def hang(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with rendezvous(hang) as target, RendezvousApi() as client:
            with pytest.raises(RendezvousUnreachable, match="did not answer within 1 s"):
                await client.status(target, REPORT, LIMITS)

    asyncio.run(scenario())


def test_a_report_that_comes_byte_by_byte_costs_few_looks_and_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, four of them took half a core for as long as they liked, from the loop that polls all jobs."""
    content, num_reads = encode(REPORT).encode(), 0
    of_four_ranks = report_limits({"replicas": 2, "ranksPerPod": 2}, 2)
    received = BoundedAnswer.data_received

    def count(connection: BoundedAnswer, data: bytes) -> None:
        nonlocal num_reads
        num_reads += 1
        received(connection, data)

    monkeypatch.setattr(BoundedAnswer, "data_received", count)

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        for byte in content:
            writer.write(bytes((byte,)))
            await writer.drain()
            # Else the kernel hands bytes on together: nothing is waited for.
            await asyncio.sleep(0.001)

    async def scenario() -> None:
        async with rendezvous(drip) as target, RendezvousApi() as client:
            assert (await client.status(target, None, of_four_ranks)).status == REPORT

    asyncio.run(scenario())
    assert num_reads < len(content) / 4


def test_an_answer_that_nobody_has_asked_for_is_not_read() -> None:
    """One connection serves many polls: what is sent ahead would be taken for the answer to the next one."""
    sound = encode(REPORT).encode()
    answers = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(sound), sound) * 3
    num_asked = 0

    async def ahead(writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.write(answers)
        await writer.drain()

    async def scenario() -> None:
        async with rendezvous(ahead) as target, RendezvousApi() as client:
            for _ in range(3):
                with contextlib.suppress(RendezvousUnreachable):
                    await client.status(target, None, LIMITS)

    asyncio.run(scenario())
    assert num_asked == 3


def test_a_token_of_two_lines_is_a_message_and_not_the_end_of_the_polling() -> None:
    async def scenario() -> None:
        async with rendezvous(body(b"{}")) as target, RendezvousApi() as client:
            poller = Poller(client, lambda: None, "ml/digits")
            poller.follow(dataclasses.replace(target, token="two\nlines"))

            async def is_said() -> bool:
                return "cannot be asked" in poller.unreachable_because

            await eventually(is_said, "a message about the token")
            await poller.stop()

    asyncio.run(scenario())


def test_a_refused_report_is_said_at_once_and_counted() -> None:
    async def scenario() -> None:
        refusals: list[None] = []
        async with rendezvous(body(b"garbage")) as target, RendezvousApi() as client:
            poller = Poller(client, lambda: None, "ml/digits", lambda: refusals.append(None))
            poller.follow(target)

            async def is_said() -> bool:
                return poller.is_refused and len(refusals) > 1

            await eventually(is_said, "a refusal")
            assert "want JSON, got b'garbage'" in poller.unreachable_because
            await poller.stop()

    asyncio.run(scenario())
