"""The operator's client against the real rendezvous."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, eventually

from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.protocol.messages import Observation, PodObservation
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.reasons import JobPhase, Role
from unbroken_operator.adapters import rendezvous_client
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.adapters.errors import RendezvousUnreachable
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.objects.credentials import Certificates

TOKEN = "0123456789abcdef" * 4
HOST = "digits-rendezvous.ml.svc"
JOB = {
    "metadata": {"name": "digits", "namespace": "ml", "uid": "uid-of-digits"},
    "spec": {
        "replicas": 2,
        "topology": {"layers": [{"name": "rack", "label": "example.com/rack"}]},
        "template": {"spec": {"containers": [{"name": "t", "image": "torch:2", "command": ["python3", "t.py"]}]}},
    },
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a rendezvous on a busy machine more time than one in a cluster has."""
    for limit in ("CONNECT_TIMEOUT_S", "ANSWER_TIMEOUT_S", "HANGING_S"):
        monkeypatch.setattr(rendezvous_client, limit, LIMIT_S)


@contextlib.contextmanager
def rendezvous(
    folder: Path, certificates: Certificates | None = None, variable: str = "UNBROKEN_TOKEN_FILE"
) -> Iterator[str]:
    """Run `python -m unbroken.rendezvous` for JOB on an address of its own; yields the address."""
    verdict = admit(JOB)
    assert isinstance(verdict, ValidSpec)
    (folder / "token").write_text(TOKEN)
    address = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.254"
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": settings_to_json(verdict.settings),
        variable: str(folder / "token"),
        "UNBROKEN_LISTEN": f"{address}:{layout.API_PORT}",
        "UNBROKEN_METRICS_LISTEN": f"{address}:{layout.METRICS_PORT}",
    }
    if certificates is not None:
        for name, text in (("CERTIFICATE", certificates.certificate), ("KEY", certificates.key)):
            (folder / name).write_text(text)
            environment[f"UNBROKEN_TLS_{name}"] = str(folder / name)
    log = folder / "rendezvous.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken.rendezvous"], env=environment, stdout=output, stderr=output
        )
    try:
        yield address
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(LIMIT_S)


async def is_listening(address: str) -> bool:
    """Return whether somebody listens there."""
    with socket.socket() as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, (address, layout.API_PORT))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["encrypted", "in clear"])
def test_the_client_reads_the_status_and_brings_the_observation(tmp_path: Path, is_encrypted: bool) -> None:
    certificates = make_certificates([HOST]) if is_encrypted else None
    authority = certificates.authority if certificates is not None else ""

    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")
        target = RendezvousTarget("uid", "digits-rendezvous-0", address, TOKEN, authority, HOST)
        async with RendezvousApi() as client:
            first = (await client.status(target, None)).status
            assert (first.job, first.phase, first.pods) == ("digits", JobPhase.FORMING, ())
            await client.observe(target, Observation({"u": PodObservation("digits-0", "a", ("r1",), Role.ACTIVE)}))
            # The same revision again is an answer, too: the poll is bounded.
            again = (await client.status(target, None)).status
            assert again.term == first.term

    with rendezvous(tmp_path, certificates) as address:
        asyncio.run(scenario(address))


def test_the_client_knows_by_the_answers_that_its_token_was_replaced(tmp_path: Path) -> None:
    """So that the operator reads the Secret, and writes tokens of the new key, while the old ones are still good."""
    certificates = make_certificates([HOST])

    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")

        def target(key: str, kind: Kind = Kind.OPERATOR) -> RendezvousTarget:
            token = derive_token(key, kind, "uid-of-digits")
            return RendezvousTarget("uid", "digits-rendezvous-0", address, token, certificates.authority, HOST)

        async with RendezvousApi() as client:
            old, new = target(TOKEN), target("n" * 64)
            await client.status(old, None)
            await client.observe(old, Observation({}))
            assert not client.is_token_old(old)
            with pytest.raises(
                RendezvousUnreachable, match=r"answered PUT /v1/observation with 403: want the token of"
            ):
                await client.observe(target(TOKEN, Kind.READER), Observation({}))
            with pytest.raises(RendezvousUnreachable, match=r"refuses the operator's token \(401\)"):
                await client.status(new, None)
            assert client.is_token_old(new)
            fresh = tmp_path / "fresh"
            fresh.write_text("n" * 64)
            fresh.replace(tmp_path / "token")
            await client.status(old, None)
            assert client.is_token_old(old)
            await client.status(new, None)
            assert not client.is_token_old(new)

    with rendezvous(tmp_path, certificates, "UNBROKEN_JOB_KEY_FILE") as address:
        asyncio.run(scenario(address))


def test_a_wrong_token_is_named_as_the_reason(tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")
        async with RendezvousApi() as client:
            with pytest.raises(RendezvousUnreachable, match="refuses the operator's token"):
                await client.status(RendezvousTarget("uid", "digits-rendezvous-0", address, "wrong"), None)

    with rendezvous(tmp_path) as address:
        asyncio.run(scenario(address))


def test_whoever_has_another_certificate_is_not_the_rendezvous(tmp_path: Path) -> None:
    """The token is not shown to it."""
    certificates = make_certificates([HOST])

    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")
        another = make_certificates([HOST]).authority
        cases = ((another, HOST, "unable to get local issuer"), (certificates.authority, "other.ml.svc", "Hostname"))
        for authority, name, reason in cases:
            async with RendezvousApi() as client:
                with pytest.raises(RendezvousUnreachable, match=f"certificate is not the one of this job: {reason}"):
                    await client.status(
                        RendezvousTarget("uid", "digits-rendezvous-0", address, TOKEN, authority, name), None
                    )

    with rendezvous(tmp_path, certificates) as address:
        asyncio.run(scenario(address))


def test_a_rendezvous_that_is_down_is_told_in_one_sentence() -> None:
    async def scenario() -> None:
        async with RendezvousApi() as client:
            with pytest.raises(
                RendezvousUnreachable,
                match=r"digits-rendezvous-0 at http://127\.0\.0\.77:29600 cannot be reached: connection refused$",
            ):
                await client.status(RendezvousTarget("uid", "digits-rendezvous-0", "127.0.0.77", TOKEN), None)

    asyncio.run(scenario())
