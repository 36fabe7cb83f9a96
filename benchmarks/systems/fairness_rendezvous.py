"""Rendezvous that mean harm, in a process of their own: one address for each kind. `fairness.py` starts it.

    python benchmarks/systems/fairness_rendezvous.py NETWORK

NETWORK is the first three bytes of their addresses, such as 127.77.78.

Prints "ready" once all listen, and runs until it is ended.
"""

import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from unbroken_core.protocol.messages import PROTOCOL, JobStatus, Recovery
from unbroken_core.protocol.wire import encode
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung
from unbroken_operator.api import layout

PAUSE_S = 1.0
MAX_REQUESTS_S = 0.0005
"""Between two answers of the hasty ones: they would have all of this machine for themselves."""
_numbers = itertools.count(1)

REPORT = JobStatus(
    protocol=PROTOCOL,
    job="any",
    term=1,
    revision=1,
    phase=JobPhase.RUNNING,
    reason=Reason.TRAINING,
    message="2 ranks train",
    iteration=0,
    world_size=2,
    spare_ranks=0,
    lost_ranks=0,
    pods=(),
    restarts_by_rung={},
    restarts_by_cause={},
    recoveries=(),
    max_step=-1,
    ettr=0.9,
)
RECOVERY = Recovery(
    number=1,
    cause=Cause.EXCEPTION,
    rung=Rung.IN_PROCESS,
    rank=0,
    pod="pod",
    node="",
    domain="",
    detail="ValueError: boom",
    iteration_before=0,
    iteration_after=1,
    replaced_by=(),
    phase_s={"stop": 0.01},
    started_at="2026-01-01T00:00:00Z",
    ended_at="2026-01-01T00:00:01Z",
)


def _ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(REPORT)), **fields}).encode()


def _large(num_bytes: int) -> bytes:
    part = json.loads(encode(dataclasses.replace(REPORT, recoveries=(RECOVERY,))))["recoveries"]
    return _changed(recoveries=part * (num_bytes // len(json.dumps(part))))


async def instant() -> AsyncIterator[bytes]:
    """Answer at once, with news."""
    number = next(_numbers)
    phase = JobPhase.RUNNING if number % 2 else JobPhase.INTERRUPTED
    yield _ok(encode(dataclasses.replace(REPORT, revision=number, iteration=number, phase=phase)).encode())


async def events() -> AsyncIterator[bytes]:
    """Report twenty other recoveries each time."""
    first = 20 * next(_numbers)
    recoveries = tuple(dataclasses.replace(RECOVERY, number=first + index) for index in range(20))
    yield _ok(encode(dataclasses.replace(REPORT, revision=first, recoveries=recoveries)).encode())


async def many_events() -> AsyncIterator[bytes]:
    """Report 11,000 recoveries."""
    yield MANY


async def four_megabytes() -> AsyncIterator[bytes]:
    """Send the longest report that a large job could have."""
    yield FOUR


async def one_megabyte() -> AsyncIterator[bytes]:
    """Send as much as is read for a small job."""
    yield ONE


async def garbage() -> AsyncIterator[bytes]:
    """Send what is no report."""
    yield _ok(b"[" * 500_000)


async def huge_numbers() -> AsyncIterator[bytes]:
    """Report numbers that are not in any database."""
    yield _ok(_changed(iteration=1 << 70, world_size=10**9, term=10**4000, restarts_by_rung={"pod": 1 << 80}))


async def slow() -> AsyncIterator[bytes]:
    """Send a byte now and then."""
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    for _ in range(1000):
        yield b" "
        await asyncio.sleep(PAUSE_S)


async def chunks() -> AsyncIterator[bytes]:
    """Send a byte in each chunk."""
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100_000


async def interim() -> AsyncIterator[bytes]:
    """Say that the answer is to come, without end."""
    while True:
        yield INTERIM


async def drip() -> AsyncIterator[bytes]:
    """Send a byte as often as can be, for which somebody has to wake up."""
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    while True:
        yield b" "
        await asyncio.sleep(MAX_REQUESTS_S)


async def redirects() -> AsyncIterator[bytes]:
    """Send the operator elsewhere."""
    yield b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"


MANY, FOUR, ONE = _ok(_large(11_000 * 400)), _ok(_large((4 << 20) - 1000)), _ok(_large(1 << 20))
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n" * 1000
KINDS: tuple[Callable[[], AsyncIterator[bytes]], ...] = (
    instant,
    events,
    many_events,
    four_megabytes,
    one_megabyte,
    garbage,
    huge_numbers,
    slow,
    chunks,
    redirects,
    interim,
    drip,
)


def address_of(network: str, kind: int) -> str:
    """Return where a kind is served."""
    return f"{network}.{kind + 1}"


async def _serve(answer: Callable[[], AsyncIterator[bytes]], address: str) -> asyncio.Server:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                async for part in answer():
                    writer.write(part)
                    await writer.drain()
                await asyncio.sleep(MAX_REQUESTS_S)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(take, address, layout.API_PORT, backlog=1024)


async def _main(network: str) -> None:
    servers = [await _serve(answer, address_of(network, kind)) for kind, answer in enumerate(KINDS)]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
