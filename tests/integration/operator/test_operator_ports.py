"""The operator's own ports, over real sockets: what strangers send starves neither the port nor the operator."""

import asyncio
import contextlib
import datetime
import functools
import gzip
import json
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp.web import Application, Request
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry
from tests.unit.unbroken_operator.decisions.test_operator_review import a_review, write
from tests.unit.unbroken_operator.operator_world import a_job
from tests.waiting import eventually

from unbroken_operator.adapters import webhook
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.adapters.endpoints import serving
from unbroken_operator.adapters.listening import Address, ListenLimits, listening
from unbroken_operator.decisions.review import ReviewAnswer, answer

ANYWHERE = Address("127.0.0.1", 0)
PATIENT = ListenLimits(connections=8, of_one_address=8, handshake_s=600.0, connection_s=600.0)
"""Nothing is closed because this machine is slow."""


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, for a bounded time."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 85.0))

    return run


def make_client_certificate(folder: Path) -> Path:
    """Write the files of a new authority, and of a client that it vouches for; return the folder."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "API server")])
    own = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc))
        .not_valid_after(datetime.datetime(9999, 1, 1, tzinfo=datetime.timezone.utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = own.public_bytes(serialization.Encoding.PEM)
    text_format, secrecy = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "ca.crt").write_bytes(pem)
    (folder / "tls.crt").write_bytes(pem)
    (folder / "tls.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, text_format, secrecy))
    return folder


async def ask(
    port: int,
    body: bytes = b"",
    headers: str = "",
    context: ssl.SSLContext | None = None,
    *,
    method: str = "POST",
    path: str = webhook.PATH,
) -> tuple[int, bytes]:
    """Send one request on a connection of its own; return status and body, or 0 if it is closed without an answer."""
    name = None if context is None else "localhost"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except (OSError, ssl.SSLError):
        return 0, b""
    try:
        is_told = "Content-Length" in headers or "Transfer-Encoding" in headers
        length = "" if is_told else f"Content-Length: {len(body)}\r\n"
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{length}{headers}\r\n".encode() + body)
        answer = await reader.read()
    except (OSError, ssl.SSLError):
        return 0, b""
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), rest


@contextlib.asynccontextmanager
async def reviews(limits: ListenLimits = PATIENT) -> AsyncIterator[tuple[int, Counter[str]]]:
    """Serve reviews without TLS; yield the port and the counted outcomes."""
    counted: Counter[str] = Counter()

    def count(outcome: str) -> None:
        counted[outcome] += 1

    async with listening(webhook.make_application((), count), ANYWHERE, limits=limits, on_refused=count) as port:
        yield port, counted


@in_loop
async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with reviews() as (port, counted):
        status, text = await ask(port, headers="Content-Length: 50000000\r\n")
        assert (status, text) == (413, b"body: must have at most 1000000 bytes, got 50000000\n")
        assert counted == {"too-large": 1}


@in_loop
async def test_a_body_in_chunks_is_not_read() -> None:
    """Before, eight of them, of 990,000 chunks each, kept the loop busy for seconds."""
    async with reviews() as (port, counted):
        status, text = await ask(port, b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n", "Transfer-Encoding: chunked\r\n")
        assert (status, text) == (411, b"")
        assert counted == {"in-pieces": 1}


@in_loop
async def test_a_request_that_comes_in_many_small_pieces_is_cut_off() -> None:
    async with reviews() as (port, counted):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /review HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n")
        num_sent = 0

        async def is_cut_off() -> bool:
            nonlocal num_sent
            num_sent += 1
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
                await writer.drain()
            return reader.at_eof() or reader.exception() is not None

        await eventually(is_cut_off, "the end of the connection", pause_s=0.001)
        writer.close()

        async def is_counted() -> bool:
            return counted["in-pieces"] == 1

        await eventually(is_counted, "the reason")
        assert num_sent >= 64


@in_loop
async def test_a_packed_body_is_not_unpacked() -> None:
    async with reviews() as (port, counted):
        body = gzip.compress(json.dumps(a_review(a_job())).encode())
        assert (await ask(port, body, "Content-Encoding: gzip\r\n"))[0] == 400
        assert counted == {"unreadable": 1}


@in_loop
async def test_each_connection_serves_one_request() -> None:
    async with reviews() as (port, _):
        # The answer is read until the server closes: with keep-alive this would not end.
        status, text = await ask(port, json.dumps(a_review(a_job())).encode(), "Connection: keep-alive\r\n")
        assert (status, json.loads(text)["response"]["allowed"]) == (200, True)


@in_loop
async def test_all_addresses_of_both_families_are_served_at_one_port() -> None:
    """`[::]`, as the chart says: the kubelet of an IPv6-only cluster comes over IPv6, all others over IPv4."""
    async with listening(Application(), Address("::", 0)) as port:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404"), host
            writer.close()


@in_loop
async def test_halves_of_characters_in_a_review_are_answered() -> None:
    body = json.dumps(a_review(a_job(), resource={"resource": "\ud800"})).encode()
    async with reviews() as (port, counted):
        assert (await ask(port, body))[0] == 400
        assert counted == {"unreadable": 1}


@in_loop
async def test_a_review_that_takes_long_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(review: Any, *_: tuple[str, ...]) -> ReviewAnswer:
        assert go_on.wait(80.0), "the loop stood still while a review was judged"
        return ReviewAnswer(review["request"]["uid"], "ml/digits")

    monkeypatch.setattr(webhook, "answer", slow)
    async with reviews() as (port, counted):
        first = asyncio.create_task(ask(port, json.dumps(a_review(a_job())).encode()))
        assert (await ask(port, headers="Content-Length: 50000000\r\n"))[0] == 413
        go_on.set()
        assert (await first)[0] == 200
        assert counted == {"too-large": 1, "allowed": 1}


@in_loop
async def test_more_reviews_than_may_wait_are_refused_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(review: Any, *_: tuple[str, ...]) -> ReviewAnswer:
        go_on.wait(80.0)
        return ReviewAnswer(review["request"]["uid"], "ml/digits")

    monkeypatch.setattr(webhook, "answer", slow)
    monkeypatch.setattr(webhook, "MAX_WAITING", 3)
    body = json.dumps(a_review(a_job())).encode()
    async with reviews() as (port, counted):
        asked = [asyncio.create_task(ask(port, body)) for _ in range(5)]

        async def are_two_refused() -> bool:
            return counted["busy"] == 2

        await eventually(are_two_refused, "two refusals")
        go_on.set()
        assert sorted([(await one)[0] for one in asked]) == [200, 200, 200, 503, 503]


@in_loop
async def test_long_reviews_hold_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before: thirty of 920 KB made an honest one wait for 2 s, since all stood in one line."""
    go_on = threading.Event()

    def slow(review: Any, *known: tuple[str, ...]) -> ReviewAnswer:
        if review["padding"]:
            assert go_on.wait(80.0), "a short review waited for long ones"
        return answer(review, *known)

    monkeypatch.setattr(webhook, "answer", slow)
    monkeypatch.setattr(webhook, "MAX_WAITING", 4)
    short, long = (json.dumps({**a_review(a_job()), "padding": "x" * size}).encode() for size in (0, 200_000))
    async with reviews() as (port, counted):
        asked = [asyncio.create_task(ask(port, long)) for _ in range(5)]

        async def are_three_refused() -> bool:
            return counted["busy"] == 3

        await eventually(are_three_refused, "three refusals")
        assert (await ask(port, short))[0] == 200
        go_on.set()
        assert sorted([(await one)[0] for one in asked]) == [200, 200, 503, 503, 503]


@pytest.mark.parametrize("size", [1000, 200_000])
@in_loop
async def test_bodies_that_do_not_come_take_no_place_of_a_review(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Before, 64 connections of one address, each of which announced a body, had every other review refused."""
    monkeypatch.setattr(webhook, "MAX_WAITING", 4)
    monkeypatch.setattr(webhook, "BODY_S", 600.0)
    begun, read = 0, Request.read

    async def counted_read(request: Request) -> bytes:
        nonlocal begun
        begun += 1
        return await read(request)

    monkeypatch.setattr(Request, "read", counted_read)
    whole = json.dumps({**a_review(a_job()), "padding": "x" * size}).encode()
    async with reviews() as (port, _):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in silent:
            writer.write(f"POST {webhook.PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())

        async def are_waited_for() -> bool:
            return begun == 6

        await eventually(are_waited_for, "six bodies that are waited for")
        assert (await ask(port, whole))[0] == 200
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["TLS", "clear"])
@in_loop
async def test_silent_connections_are_closed_and_do_not_keep_others_out(is_encrypted: bool, tmp_path: Path) -> None:
    counted: Counter[str] = Counter()

    def count(because: str) -> None:
        counted[because] += 1

    made = make_certificates(["localhost"])
    write(made, tmp_path)
    certificate = webhook.ServingCertificate(tmp_path)
    certificate.look()
    context = certificate.context if is_encrypted else None
    limits = ListenLimits(connections=4, of_one_address=4, handshake_s=2.0, connection_s=2.0)
    trusting = ssl.create_default_context(cadata=made.authority) if is_encrypted else None
    application = webhook.make_application((), count)
    async with listening(application, ANYWHERE, context, limits=limits, on_refused=count) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for reader, _ in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "closed by the operator"

        async def is_answered() -> bool:
            return (await ask(port, json.dumps(a_review(a_job())).encode(), context=trusting))[0] == 200

        await eventually(is_answered, "an answer")
        assert counted["too-many"] >= 8
        assert counted["handshake" if is_encrypted else "slow"] >= 4
        for _, writer in silent:
            writer.close()


@in_loop
async def test_one_address_cannot_take_all_connections() -> None:
    limits = ListenLimits(connections=8, of_one_address=2, handshake_s=600.0, connection_s=600.0)
    async with reviews(limits) as (port, counted):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]

        async def is_one_refused() -> bool:
            return counted["too-many"] == 1

        await eventually(is_one_refused, "a refusal")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        for one in (writer, *(other for _, other in silent)):
            one.close()


@in_loop
async def test_a_few_addresses_cannot_take_all_connections_together() -> None:
    """With as many as may be open, whoever comes from elsewhere still comes in."""
    limits = ListenLimits(connections=8, of_one_address=2, handshake_s=600.0, connection_s=600.0)
    async with reviews(limits) as (port, counted):
        silent = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.1.{host}", 0))
            for host in range(1, 7)
            for _ in range(2)
        ]
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            writer.close()
        assert counted["too-many"] >= 4
        for _, other in silent:
            other.close()


@in_loop
async def test_health_and_metrics_close_after_each_answer() -> None:
    async with serving(ANYWHERE, CollectorRegistry(), lambda: True, has_metrics=True) as port:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await ask(port, headers="Connection: keep-alive\r\n", method="GET", path=path))[0] == 200


@pytest.mark.parametrize(
    ("shown", "status"),
    [pytest.param("", 0, id="none"), pytest.param("other", 0, id="of another authority"), ("right", 200)],
)
@in_loop
async def test_with_a_client_authority_only_its_certificates_are_answered(
    shown: str, status: int, tmp_path: Path
) -> None:
    made = make_certificates(["localhost"])
    write(made, tmp_path)
    clients = {name: make_client_certificate(tmp_path / name) for name in ("right", "other")}
    certificate = webhook.ServingCertificate(tmp_path, clients["right"] / "ca.crt")
    assert certificate.look()
    trusting = ssl.create_default_context(cadata=made.authority)
    if shown:
        trusting.load_cert_chain(clients[shown] / "tls.crt", clients[shown] / "tls.key")
    counted: Counter[str] = Counter()

    def count(because: str) -> None:
        counted[because] += 1

    application = webhook.make_application((), count)
    async with listening(application, ANYWHERE, certificate.context, limits=PATIENT, on_refused=count) as port:
        body = json.dumps(a_review(a_job())).encode()
        assert (await ask(port, body, context=trusting))[0] == status
        if status:
            assert counted == {"allowed": 1}
        else:

            async def is_counted() -> bool:
                return counted == {"handshake": 1}

            await eventually(is_counted, "a refusal")


def test_without_the_file_of_the_client_authority_nobody_is_trusted(tmp_path: Path) -> None:
    write(make_certificates(["localhost"]), tmp_path)
    certificate = webhook.ServingCertificate(tmp_path, tmp_path / "missing.crt")
    assert not certificate.look()
    assert certificate.context.verify_mode is ssl.CERT_REQUIRED
