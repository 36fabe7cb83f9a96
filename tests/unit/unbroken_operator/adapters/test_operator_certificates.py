"""The certificates that the operator makes for a job."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.handshake import shakes_hands

from unbroken_core.conventions.tls import client_context, server_context
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.adapters.job_secret import JobSecret
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.objects.credentials import (
    MAX_AUTHORITIES,
    MAX_PEM_BYTES,
    Certificates,
    TokenKeys,
    certificates_of,
    refused_certificates,
    with_credentials,
)

NAME = "digits-rendezvous.ml.svc"


def written(folder: Path, certificates: Certificates) -> tuple[Path, Path]:
    """Return the files with the certificate and its key."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_text(certificates.certificate)
    key.write_text(certificates.key)
    return certificate, key


@pytest.mark.parametrize(("name", "is_good"), [(NAME, True), ("localhost", True), ("other-rendezvous.ml.svc", False)])
def test_a_rendezvous_is_known_by_its_names_alone(tmp_path: Path, name: str, is_good: bool) -> None:
    made = make_certificates([NAME, "localhost"])
    context = server_context(*written(tmp_path, made))
    assert shakes_hands(context, made.authority, name) is is_good


def test_the_authority_of_one_job_vouches_for_no_other(tmp_path: Path) -> None:
    """5: each job has its own."""
    made, other = make_certificates([NAME]), make_certificates([NAME])
    context = server_context(*written(tmp_path, made))
    assert not shakes_hands(context, other.authority, NAME)
    assert shakes_hands(context, f"{other.authority}\n{made.authority}", NAME)


def test_no_clock_however_wrong_shuts_a_host_out() -> None:
    """A job may run for years, and hosts boot with the clock at 1970."""
    for text in (make_certificates([NAME]).authority, make_certificates([NAME]).certificate):
        certificate = x509.load_pem_x509_certificate(text.encode())
        assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (1970, 9999)


def test_the_certificate_of_a_rendezvous_signs_no_other() -> None:
    made = make_certificates([NAME])
    leaf, authority = (x509.load_pem_x509_certificate(text.encode()) for text in (made.certificate, made.authority))
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    leaf.verify_directly_issued_by(authority)
    number = client_context(made.authority).get_ca_certs()[0]["serialNumber"]
    assert int(str(number), 16) == authority.serial_number


def _secret(certificates: Certificates) -> dict[str, Any]:
    owner = {"controller": True, "uid": "uid-of-digits", "kind": "ResilientTrainingJob", "name": "digits"}
    metadata = {"name": "digits-rendezvous", "uid": "s", "resourceVersion": "1", "ownerReferences": [owner]}
    return with_credentials({"metadata": metadata}, TokenKeys("ab" * 32), "uid-of-digits", certificates)


@pytest.mark.parametrize(
    ("authority", "wanted"),
    [
        ("x" * (MAX_PEM_BYTES + 2), "ca.crt: want at most 16384 bytes, got about 16386"),
        ("-----BEGIN CERTIFICATE-----\n" * (MAX_AUTHORITIES + 1), "ca.crt: want at most 8 certificates, got 9"),
        ("-----BEGIN CERTIFICATE-----\n" * MAX_AUTHORITIES, ""),
    ],
)
def test_more_certificates_than_a_rotation_needs_are_not_read(authority: str, wanted: str) -> None:
    """A thousand of them held the GIL, and so the loop of all jobs, for seconds."""
    item = _secret(Certificates(authority, "certificate", "key"))
    assert refused_certificates(item) == wanted
    assert (certificates_of(item) is None) is bool(wanted)


class _Stored:
    """An API server with this Secret alone."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item

    async def get(self, path: str) -> dict[str, Any]:
        return self.item


@pytest.mark.parametrize("is_known", [True, False])
def test_a_flood_of_authorities_is_told_once_and_neither_read_nor_taken_for_no_encryption(is_known: bool) -> None:
    made, counted = make_certificates([NAME]), list[OperatorRefusal]()
    flood = _secret(Certificates(made.authority * 1150, made.certificate, made.key))
    server: Any = _Stored(_secret(made) if is_known else flood)
    secret = JobSecret(server, ("ml", "digits"), "uid-of-digits", True, counted.append)
    asyncio.run(secret.refresh(-1.0))
    server.item = flood
    for _ in range(3):
        asyncio.run(secret.refresh(-1.0))
    assert counted == [OperatorRefusal.CERTIFICATES]
    assert secret.view is not None
    assert secret.view.refused.startswith("ca.crt: want at most 16384 bytes")
    assert (secret.view.has_certificates, secret.view.lacks) == (True, ())
    # Without an authority the operator would show its token to whoever answers, in the clear.
    assert (secret.authority, bool(secret.token)) == ((made.authority, True) if is_known else ("", False))
    server.item = _secret(made)
    asyncio.run(secret.refresh(-1.0))
    assert (secret.view.refused, secret.authority, bool(secret.token)) == ("", made.authority, True)


def test_a_job_that_changes_its_authority_without_end_keeps_one() -> None:
    api, first, second = RendezvousApi(), *(make_certificates([NAME]).authority for _ in range(2))
    honest = RendezvousTarget("honest", "h", "10.0.0.1", "token", first, NAME)
    kept = api._trust(honest)
    for authority in (first, second) * 5:
        api._trust(RendezvousTarget("evil", "e", "10.0.0.2", "token", authority, NAME))
    assert api._trust(honest) is kept
    assert set(api._trusted) == {"honest", "evil"}
    asyncio.run(_close(api))


async def _close(api: RendezvousApi) -> None:
    async with api:
        pass
