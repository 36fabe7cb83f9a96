"""Certificates with which the keepers of a job's pods recognise each other.

The rendezvous is the authority. Its key follows from the job key, so that it is the same after a restart: certificates
stay valid, and nobody has to store it. A pod makes its own key and asks for a certificate over the connection on which
its token has shown which pod it is. Needs the package cryptography: imported only where copies are kept elsewhere.
"""

import datetime
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from unbroken.network.pod_names import uri_of
from unbroken_core.vocabulary.errors import InputError

MAX_REQUEST_CHARACTERS = 4096
_CONTEXT = b"unbroken keeper authority 1\0"
_BEGIN = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
# As of the authority of rendezvous: it ends with the job, and a host with a wrong clock must not be shut out.
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True)
class PodKey:
    """A new key of one pod."""

    key: str
    """PEM; leaves the process never."""
    request: str
    """Certificate signing request, PEM."""


def make_pod_key() -> PodKey:
    """Return a new key."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    encoding, text_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    text = key.private_bytes(encoding, text_format, serialization.NoEncryption()).decode()
    return PodKey(text, request.public_bytes(encoding).decode())


class PodAuthority:
    """Vouches for the pods of one job."""

    def __init__(self, job_key: str, job_uid: str) -> None:
        self._key = ec.derive_private_key(_scalar(job_key, job_uid), ec.SECP256R1())
        self._name = hashlib.sha256(job_uid.encode(errors="replace")).hexdigest()[:32]
        self.certificate = self._issue_own()
        """PEM."""

    def issue(self, request: str, pod_uid: str) -> str:
        """Return a certificate that says of which pod the key is, in PEM.

        Only the key is taken from the request. Raises InputError when it is none.
        """
        key = _requested_key(request)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InputError("request: want a key on the curve P-256, got another")
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri_of(pod_uid))])
        builder = (
            self._builder(key, x509.Name([]))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usages, critical=False)
            # Critical, since the subject is empty (RFC 5280, 4.2.1.6).
            .add_extension(name, critical=True)
            .add_extension(self._issuer_key(), critical=False)
        )
        return self._signed(builder)

    def _issue_own(self) -> str:
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            self._builder(self._key.public_key(), self._issuer())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_signing_only(), critical=True)
            .add_extension(identifier, critical=False)
        )
        return self._signed(builder)

    def _issuer(self) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"unbroken keepers {self._name}")])

    def _issuer_key(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())

    def _builder(self, key: ec.EllipticCurvePublicKey, subject: x509.Name) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer())
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> str:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _scalar(job_key: str, job_uid: str) -> int:
    """Return a private key on P-256: 512 bits, so that the remainder has no bias (FIPS 186-5, A.2.1)."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    text = _CONTEXT + job_uid.encode(errors="replace")
    return int.from_bytes(hmac.new(job_key.encode(), text, hashlib.sha512).digest(), "big") % (order - 1) + 1


def _requested_key(request: str) -> Any:
    if len(request) > MAX_REQUEST_CHARACTERS:
        raise InputError(f"request: want at most {MAX_REQUEST_CHARACTERS} characters, got {len(request)}")
    try:
        found = x509.load_pem_x509_csr(request.encode(errors="replace"))
        if found.is_signature_valid:
            return found.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"request: want a certificate signing request in PEM: {error}"[:500]) from error
    raise InputError("request: want one that is signed with its own key, got another signature")


def _signing_only() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False, key_cert_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
