"""The certificates that the operator makes for a job."""

from pathlib import Path

import pytest
from cryptography import x509
from tests.handshake import shakes_hands

from unbroken_core.conventions.tls import client_context, server_context
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.decisions.objects.credentials import Certificates

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
