"""Over TLS: each caller is who its token says, may do that much, and no more; a replaced key ends its connections."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from tests.waiting import eventually

from unbroken.network.certificate import ServerCertificate
from unbroken.network.pod_certificates import PodAuthority, make_pod_key
from unbroken.network.pod_names import uri_of
from unbroken.network.refusals import Refusal, Refusals
from unbroken.network.token import GRACE_S, JobKeyFile, TokenFile, Verifier
from unbroken.network.token_guard import MOST_OF_ONE_POD
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import Service
from unbroken.run.certificates import CertificateFiles, write_certificates
from unbroken.run.loopback_block import LoopbackBlock
from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Certificate,
    CertificateRequest,
    Heartbeat,
    Hello,
    JobStatus,
    Observation,
    PodObservation,
    RendezvousMessage,
    Welcome,
)
from unbroken_core.protocol.settings import JobSettings

KEY, UID = "k" * 64, "uid-of-the-job"
SETTINGS = JobSettings("digits", uid=UID, replicas=2)
LIMIT_S = 60.0


def hello(pod: str) -> str:
    """Return the first message of a pod's agent."""
    return wire.encode(Hello(PROTOCOL, "digits", pod, f"uid-of-{pod}", "s", "node-0", 1))


def bearer(kind: Kind, pod: str = "", key: str = KEY, uid: str = UID) -> dict[str, str]:
    """Return the header with a token."""
    return {"Authorization": f"Bearer {derive_token(key, kind, uid, pod)}"}


AGENT_A, OPERATOR, READER = bearer(Kind.AGENT, "digits-0"), bearer(Kind.OPERATOR), bearer(Kind.READER)


@dataclass
class Reached:
    """A rendezvous that listens with TLS."""

    url: str
    session: aiohttp.ClientSession

    async def ask(self, headers: dict[str, str], path: str = "/v1/status", method: str = "GET") -> int:
        """Return the status of an answer."""
        data = wire.encode(Observation({})) if method == "PUT" else None
        async with self.session.request(method, self.url + path, headers=headers, data=data) as response:
            await response.read()
            return response.status

    async def enter(self, headers: dict[str, str], pod: str) -> RendezvousMessage:
        """Say Hello as this pod, and return the answer. Raises WSServerHandshakeError."""
        async with self.session.ws_connect(f"{self.url}/v1/agents", headers=headers) as connection:
            await connection.send_str(hello(pod))
            answer: RendezvousMessage = wire.decode(await connection.receive_str(timeout=LIMIT_S), RendezvousMessage)
            return answer

    async def status(self) -> JobStatus:
        """Return the job's status."""
        async with self.session.get(f"{self.url}/v1/status", headers=READER) as response:
            status: JobStatus = wire.decode(await response.read(), JobStatus)
            return status

    async def upgrade_status(self, headers: dict[str, str]) -> int:
        """Return how an agent's connection is answered that is not accepted."""
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await self.enter(headers, "digits-0")
        return caught.value.status


@pytest.fixture
def certificates(tmp_path: Path) -> CertificateFiles:
    """Of the rendezvous of the job, at 127.0.0.1 as well."""
    return write_certificates(tmp_path, "127.0.0.1", "digits", "default")


@contextlib.asynccontextmanager
async def rendezvous(
    verifier: Verifier, certificates: CertificateFiles, refusals: Refusals
) -> AsyncIterator[tuple[Reached, Service]]:
    """Serve in this process."""
    service = Service(Coordinator(SETTINGS, asyncio.get_running_loop().time()), refusals)
    server = Server(service, verifier, refusals)
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    context = ServerCertificate(certificates.certificate, certificates.key).context
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust(certificates))) as session:
            yield Reached(f"https://127.0.0.1:{port}", session), service
    finally:
        service.close()
        await runner.cleanup()


def trust(certificates: CertificateFiles) -> ssl.SSLContext:
    """Return what a client of this rendezvous trusts."""
    return client_context(certificates.authority.read_text())


@pytest.fixture
def process(tmp_path: Path, certificates: CertificateFiles) -> Iterator[str]:
    """Start a rendezvous as in a pod; return its URL."""
    (tmp_path / "job-key").write_text(KEY)
    block = LoopbackBlock()
    files = write_certificates(tmp_path, block.rendezvous, "digits", "default")
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": wire.settings_to_json(SETTINGS),
        "UNBROKEN_JOB_KEY_FILE": str(tmp_path / "job-key"),
        "UNBROKEN_LISTEN": f"{block.rendezvous}:29600",
        "UNBROKEN_TLS_CERTIFICATE": str(files.certificate),
        "UNBROKEN_TLS_KEY": str(files.key),
    }
    started = subprocess.Popen([sys.executable, "-m", "unbroken.rendezvous"], env=environment)
    yield f"https://{block.rendezvous}:29600"
    started.terminate()
    assert started.wait(LIMIT_S) == 0
    block.release()


def test_each_caller_does_what_its_own_token_allows_and_nothing_else(
    process: str, certificates: CertificateFiles
) -> None:
    """2.8"""
    context = client_context(certificates.authority.read_text())
    another_job = bearer(Kind.AGENT, "digits-0", uid="uid-of-another-job")
    renamed = {"Authorization": AGENT_A["Authorization"].replace("digits-0", "digits-1")}
    promoted = {"Authorization": AGENT_A["Authorization"].replace("agent/digits-0", "operator/")}
    unknown: tuple[dict[str, str], ...] = (
        another_job,
        renamed,
        promoted,
        bearer(Kind.OPERATOR, key="x" * 64),
        {},
        {"Authorization": f"Bearer {KEY}"},
    )

    async def scenario() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            reached = Reached(process, session)

            async def is_up() -> bool:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    return await reached.ask(READER) == 200
                return False

            await eventually(is_up, "a rendezvous")
            before = await reached.status()
            # An agent is its own pod, and no operator.
            refused = await reached.enter(AGENT_A, "digits-1")
            assert json.loads(wire.encode(refused)) == {
                "type": "Refused",
                "reason": "token: want that of pod 'digits-1', got that of pod 'digits-0'",
            }
            for path, method in (
                ("/v1/observation", "PUT"),
                ("/v1/status", "GET"),
                ("/v1/topology", "GET"),
                ("/page/", "GET"),
            ):
                assert await reached.ask(AGENT_A, path, method) == 403
            # Operator and reader are no agents; a reader changes nothing.
            for headers in (OPERATOR, READER):
                assert await reached.upgrade_status(headers) == 403
            assert await reached.ask(READER, "/v1/observation", "PUT") == 403
            for headers in unknown:
                assert await reached.upgrade_status(headers) == 401
                assert await reached.ask(headers, "/v1/observation", "PUT") == 401
                assert await reached.ask(headers) == 401
            assert (await reached.status()).pods == before.pods == ()
            # What each may do.
            assert isinstance(await reached.enter(AGENT_A, "digits-0"), Welcome)
            assert await reached.ask(OPERATOR, "/v1/observation", "PUT") == 204
            assert [await reached.ask(headers) for headers in (OPERATOR, READER)] == [200, 200]

    asyncio.run(scenario())


def test_one_pods_token_opens_few_connections_and_other_pods_come_in(
    tmp_path: Path, certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it could hold all that the port has, and no other pod of the job came back."""
    (tmp_path / "job-key").write_text(KEY)
    refusals = Refusals()
    monkeypatch.setattr("unbroken.rendezvous.server._HELLO_TIMEOUT_S", LIMIT_S)

    async def scenario() -> None:
        async with rendezvous(JobKeyFile(tmp_path / "job-key", UID), certificates, refusals) as (reached, _service):
            agents = f"{reached.url}/v1/agents"
            # Nobody says Hello, or more than the first bytes of it.
            held = [await reached.session.ws_connect(agents, headers=AGENT_A) for _ in range(MOST_OF_ONE_POD)]
            assert await reached.upgrade_status(AGENT_A) == 429
            assert refusals.counts[Refusal.TOO_MANY] == 1
            assert isinstance(await reached.enter(bearer(Kind.AGENT, "digits-1"), "digits-1"), Welcome)
            async with reached.session.get(f"{reached.url}/v1/status", headers=AGENT_A) as response:
                assert (response.status, response.headers["Connection"]) == (403, "close")
            for connection in held:
                await connection.close()
            assert isinstance(await reached.enter(AGENT_A, "digits-0"), Welcome)

    asyncio.run(scenario())


def test_connections_of_a_replaced_key_are_closed_after_its_grace(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    now_s, new_key = [0.0], "n" * 64
    path = tmp_path / "job-key"
    path.write_text(KEY)

    async def scenario() -> None:
        verifier, refusals = JobKeyFile(path, UID, lambda: now_s[0]), Refusals()
        async with rendezvous(verifier, certificates, refusals) as (reached, service):
            url = f"{reached.url}/v1/agents"
            renewed = bearer(Kind.AGENT, "digits-1", new_key)
            async with reached.session.ws_connect(url, headers=AGENT_A) as old:
                await old.send_str(hello("digits-0"))
                assert isinstance(wire.decode(await old.receive_str(timeout=LIMIT_S), RendezvousMessage), Welcome)
                put(path, new_key)
                async with reached.session.ws_connect(url, headers=renewed) as new:
                    await new.send_str(hello("digits-1"))
                    assert isinstance(wire.decode(await new.receive_str(timeout=LIMIT_S), RendezvousMessage), Welcome)
                    # Within the grace all is as before, and whoever comes with the old key is told so.
                    async with reached.session.get(f"{reached.url}/v1/status", headers=OPERATOR) as response:
                        assert (response.status, response.headers.get("Unbroken-Token")) == (200, "replaced")
                    fresh = bearer(Kind.OPERATOR, key=new_key)
                    async with reached.session.get(f"{reached.url}/v1/status", headers=fresh) as response:
                        assert (response.status, response.headers.get("Unbroken-Token")) == (200, None)
                    now_s[0] += GRACE_S - 1.0
                    assert await reached.ask(OPERATOR) == 200
                    assert service.num_agents == 2
                    now_s[0] += 1.0
                    async for _ in old:
                        pass
                    assert await reached.upgrade_status(AGENT_A) == 401
                    assert await reached.ask(OPERATOR) == 401
                    await eventually(lambda: as_awaited(service.num_agents == 1), "the end of the old connection")
                    assert not new.closed
                    assert isinstance(await reached.enter(bearer(Kind.AGENT, "digits-0", new_key), "digits-0"), Welcome)

    asyncio.run(asyncio.wait_for(scenario(), 3 * LIMIT_S))


def test_a_job_that_an_earlier_release_has_begun_goes_on_with_its_one_token(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    """Its pods mount the old Secret; so does a rendezvous of this release."""
    path = tmp_path / "token"
    path.write_text("0" * 64)
    headers = {"Authorization": f"Bearer {'0' * 64}"}

    async def scenario() -> None:
        async with rendezvous(TokenFile(path), certificates, Refusals()) as (reached, _):
            assert isinstance(await reached.enter(headers, "digits-0"), Welcome)
            assert await reached.ask(headers, "/v1/observation", "PUT") == 204
            assert await reached.ask(headers) == 200
            assert await reached.ask(AGENT_A) == 401

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"a" * 64 + b"\n" + b"b" * 64, id="two lines"),
        pytest.param(b"a" * (1 << 20), id="1 MB"),
        pytest.param(bytes(range(256)), id="binary"),
        pytest.param(b"\xff\xfe" + "k".encode("utf-16-le") * 64, id="UTF-16"),
    ],
)
def test_a_hostile_secret_is_told_once_and_changes_nothing(
    content: bytes, tmp_path: Path, certificates: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "job-key"
    path.write_text(KEY)

    async def scenario() -> None:
        refusals = Refusals()
        async with rendezvous(JobKeyFile(path, UID), certificates, refusals) as (reached, _):
            put(path, content.decode("latin-1"))
            for _ in range(3):
                assert await reached.ask(READER) == 200
            assert isinstance(await reached.enter(AGENT_A, "digits-0"), Welcome)
            assert refusals.counts[Refusal.UNAUTHORIZED] == 0

    asyncio.run(scenario())
    (told,) = [text for record in caplog.records if (text := record.getMessage()).startswith("job key kept")]
    assert f"job key file {path}: want a token" in told
    assert len(told) < 400


def put(path: Path, text: str) -> None:
    """Replace the file as a kubelet does."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(text.encode("latin-1"))
    fresh.replace(path)


async def as_awaited(value: bool) -> bool:
    """Return the value."""
    return value


async def tell(reached: Reached, **uids: str) -> None:
    """Say as the operator which uids these pods have."""
    pods = {uid: PodObservation(pod.replace("_", "-"), "node-0", ()) for pod, uid in uids.items()}
    data = wire.encode(Observation(pods))
    async with reached.session.put(f"{reached.url}/v1/observation", headers=OPERATOR, data=data) as response:
        assert response.status == 204


async def certified(reached: Reached, pod: str, request: str) -> Certificate:
    """Say Hello as this pod, which the operator knows, and ask for a certificate."""
    headers = bearer(Kind.AGENT, pod)
    await tell(reached, **{pod: f"uid-of-{pod}"})
    async with reached.session.ws_connect(f"{reached.url}/v1/agents", headers=headers) as connection:
        await connection.send_str(hello(pod))
        await connection.send_str(wire.encode(CertificateRequest(request)))
        while True:
            answer = wire.decode(await connection.receive_str(timeout=LIMIT_S), RendezvousMessage)
            if isinstance(answer, Certificate):
                return answer


def test_a_pods_keeper_gets_a_certificate_of_its_own_pod_and_the_same_authority_after_a_restart(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    (tmp_path / "job-key").write_text(KEY)

    async def ask() -> tuple[Certificate, Certificate]:
        verifier = JobKeyFile(tmp_path / "job-key", UID)
        async with rendezvous(verifier, certificates, Refusals()) as (reached, _):
            made = make_pod_key()
            return await certified(reached, "digits-0", made.request), await certified(reached, "digits-0", "nonsense")

    sound, refused = asyncio.run(ask())
    later, _ = asyncio.run(ask())
    names = x509.load_pem_x509_certificate(sound.certificate.encode()).extensions
    name = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [one.value for one in name] == [uri_of("uid-of-digits-0")]
    assert (refused.certificate, refused.error[:8]) == ("", "request:")
    # Those who were vouched for before a restart believe those who were after it: the key is the same.
    keys = [x509.load_pem_x509_certificate(one.authority.encode()).public_key() for one in (sound, later)]
    assert keys[0] == keys[1]
    assert keys[0] == x509.load_pem_x509_certificate(PodAuthority(KEY, UID).certificate.encode()).public_key()


def test_a_job_without_a_key_has_no_certificates_and_says_why(tmp_path: Path, certificates: CertificateFiles) -> None:
    (tmp_path / "token").write_text("t" * 40)

    async def ask() -> Certificate:
        async with rendezvous(TokenFile(tmp_path / "token"), certificates, Refusals()) as (reached, service):
            headers = {"Authorization": f"Bearer {'t' * 40}"}
            service.observe(Observation({"uid-of-digits-0": PodObservation("digits-0", "node-0", ())}))
            async with reached.session.ws_connect(f"{reached.url}/v1/agents", headers=headers) as connection:
                await connection.send_str(hello("digits-0"))
                await connection.send_str(wire.encode(CertificateRequest(make_pod_key().request)))
                while True:
                    answer = wire.decode(await connection.receive_str(timeout=LIMIT_S), RendezvousMessage)
                    if isinstance(answer, Certificate):
                        return answer

    assert "without a key of its own" in asyncio.run(ask()).error


def test_who_is_not_in_the_job_gets_no_certificate(tmp_path: Path, certificates: CertificateFiles) -> None:
    """It has a token, and says Hello as a pod of another number of workers, which is refused."""
    (tmp_path / "job-key").write_text(KEY)
    refusals = Refusals()

    async def ask() -> list[RendezvousMessage]:
        async with (
            rendezvous(JobKeyFile(tmp_path / "job-key", UID), certificates, refusals) as (reached, _),
            reached.session.ws_connect(f"{reached.url}/v1/agents", headers=AGENT_A) as connection,
        ):
            other = Hello(PROTOCOL, "digits", "digits-0", "uid-of-digits-0", "s", "node-0", 7)
            await connection.send_str(wire.encode(other))
            await connection.send_str(wire.encode(CertificateRequest(make_pod_key().request)))
            return [
                wire.decode(frame.data, RendezvousMessage)
                async for frame in connection
                if frame.type is aiohttp.WSMsgType.TEXT
            ]

    assert [type(one).__name__ for one in asyncio.run(ask())] == ["Refused"]


def test_nobody_is_vouched_for_as_a_pod_that_the_operator_has_not_named(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    """Before, a pod that the operator had yet to name got the certificate of any uid that it said, good for ever."""
    (tmp_path / "job-key").write_text(KEY)
    claimed = "uid-of-digits-1"

    async def texts(connection: aiohttp.ClientWebSocketResponse, last: type) -> list[RendezvousMessage]:
        found: list[RendezvousMessage] = []
        while not found or not isinstance(found[-1], last):
            found.append(wire.decode(await connection.receive_str(timeout=LIMIT_S), RendezvousMessage))
        return found

    async def ask() -> tuple[list[RendezvousMessage], list[RendezvousMessage]]:
        async with (
            rendezvous(JobKeyFile(tmp_path / "job-key", UID), certificates, Refusals()) as (reached, service),
            reached.session.ws_connect(f"{reached.url}/v1/agents", headers=AGENT_A) as false,
        ):
            await false.send_str(wire.encode(Hello(PROTOCOL, "digits", "digits-0", claimed, "s", "node-0", 1)))
            await texts(false, Welcome)
            asked = CertificateRequest(make_pod_key().request)
            for message in (asked, Heartbeat(1), asked, Heartbeat(2)):
                await false.send_str(wire.encode(message))
            member = next(iter(service._coordinator._job.members.by_uid.values()))
            await eventually(lambda: as_awaited(member.seq == 2), "both heartbeats")
            await tell(reached, **{"digits-0": "uid-of-digits-0", "digits-1": claimed})
            closed = [frame async for frame in false if frame.type is aiohttp.WSMsgType.TEXT]
            headers = bearer(Kind.AGENT, "digits-1")
            async with reached.session.ws_connect(f"{reached.url}/v1/agents", headers=headers) as true:
                await true.send_str(hello("digits-1"))
                await true.send_str(wire.encode(asked))
                return [wire.decode(frame.data, RendezvousMessage) for frame in closed], await texts(true, Certificate)

    false, true = asyncio.run(ask())
    assert [one for one in false if isinstance(one, Certificate)] == []
    assert isinstance(true[-1], Certificate)
    assert true[-1].error == ""


def test_a_pod_that_the_operator_names_late_is_vouched_for_then(tmp_path: Path, certificates: CertificateFiles) -> None:
    (tmp_path / "job-key").write_text(KEY)

    async def ask() -> Certificate:
        async with (
            rendezvous(JobKeyFile(tmp_path / "job-key", UID), certificates, Refusals()) as (reached, _),
            reached.session.ws_connect(f"{reached.url}/v1/agents", headers=AGENT_A) as connection,
        ):
            await connection.send_str(hello("digits-0"))
            await connection.send_str(wire.encode(CertificateRequest(make_pod_key().request)))
            await tell(reached, **{"digits-0": "uid-of-digits-0"})
            await connection.send_str(wire.encode(Heartbeat(1)))
            while True:
                answer = wire.decode(await connection.receive_str(timeout=LIMIT_S), RendezvousMessage)
                if isinstance(answer, Certificate):
                    return answer

    assert asyncio.run(ask()).certificate
