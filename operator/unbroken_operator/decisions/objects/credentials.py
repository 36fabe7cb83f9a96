"""What the Secrets of a job hold: its key and certificates; the tokens of its pods (docs/design/0019-identity.md)."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.conventions.tokens import Kind, checked_secret, derive_token
from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.api import layout
from unbroken_operator.decisions.objects.manifests import Manifest

MAX_PEM_BYTES = 16 << 10
"""Of each key of a Secret that holds certificates: an old and a new authority are below 2 KiB, with RSA below 5."""
MAX_AUTHORITIES = 8
"""OpenSSL reads them while it holds the GIL, in time that grows with the square of their number."""
_CERTIFICATE_KEYS = (layout.AUTHORITY_KEY, layout.CERTIFICATE_KEY, layout.PRIVATE_KEY_KEY)


@dataclass(frozen=True)
class Certificates:
    """All in PEM."""

    authority: str
    certificate: str
    key: str


@dataclass(frozen=True)
class TokenKeys:
    """What the tokens of a job follow from."""

    job_key: str
    """"" in a job that an earlier release began: it has one token for all."""
    token: str = ""
    """That one; "" in other jobs."""

    def operator_token(self, uid: str) -> str:
        """Return what the operator shows to the job's rendezvous."""
        return derive_token(self.job_key, Kind.OPERATOR, uid) if self.job_key else self.token

    def reader_token(self, uid: str) -> str:
        """Return what lies in the Secret for readers."""
        return derive_token(self.job_key, Kind.READER, uid) if self.job_key else self.token


def identity_of(item: Mapping[str, Any]) -> TokenKeys | None:
    """Return what a job's Secret says; None when that cannot be read, or can be neither key nor token."""
    if layout.JOB_KEY_KEY in (item.get("data") or {}):
        job_key = _secret_text(item, layout.JOB_KEY_KEY)
        return TokenKeys(job_key) if job_key else None
    token = _secret_text(item, layout.TOKEN_KEY)
    # The token of readers has slashes: the Secret of a job has lost its key then.
    return TokenKeys("", token) if token and "/" not in token else None


def with_credentials(
    manifest: Mapping[str, Any], identity: TokenKeys, uid: str, certificates: Certificates | None
) -> Manifest:
    """Return the Secret with key and token, and with certificates unless the job's traffic is unencrypted."""
    texts = {layout.TOKEN_KEY: identity.reader_token(uid)}
    if identity.job_key:
        texts |= {layout.JOB_KEY_KEY: identity.job_key}
    if certificates is not None:
        texts |= {
            layout.AUTHORITY_KEY: certificates.authority,
            layout.CERTIFICATE_KEY: certificates.certificate,
            layout.PRIVATE_KEY_KEY: certificates.key,
        }
    return {**manifest, "data": encoded(texts)}


def encoded(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the data of a Secret."""
    return {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}


def pod_tokens(job_key: str, job: str, uid: str, block: int) -> dict[str, str]:
    """Return the token of each pod of a block by the pod's name."""
    first = block * layout.TOKENS_PER_SECRET
    names = [layout.training_pod_name(job, first + index) for index in range(layout.TOKENS_PER_SECRET)]
    return {name: derive_token(job_key, Kind.AGENT, uid, name) for name in names}


def wrong_keys(item: Mapping[str, Any], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of a Secret whose content is not what it has to be."""
    data = item.get("data") or {}
    return tuple(key for key, text in encoded(wanted).items() if data.get(key) != text)


def certificates_of(item: Mapping[str, Any]) -> Certificates | None:
    """Return the certificates in a Secret, None when not all of them are there, or one is more than may be."""
    if refused_certificates(item):
        return None
    authority, certificate, key = (_text(item, name) for name in _CERTIFICATE_KEYS)
    return Certificates(authority, certificate, key) if authority and certificate and key else None


def refused_certificates(item: Mapping[str, Any]) -> str:
    """Return which key of a job's Secret holds more than this operator reads, and what it wants; "" for none."""
    data = item.get("data") or {}
    for key in _CERTIFICATE_KEYS:
        num_bytes = len(data.get(key) or "") // 4 * 3
        if num_bytes > MAX_PEM_BYTES:
            return f"{key}: want at most {MAX_PEM_BYTES} bytes, got about {num_bytes}"
    num = _text(item, layout.AUTHORITY_KEY).count("-----BEGIN ")
    if num > MAX_AUTHORITIES:
        return f"{layout.AUTHORITY_KEY}: want at most {MAX_AUTHORITIES} certificates, got {num}"
    return ""


def missing_keys(item: Mapping[str, Any], *, is_encrypted: bool) -> tuple[str, ...]:
    """Return the keys of a job's Secret that pods read and that are not there, or cannot be read."""
    certificates = _CERTIFICATE_KEYS if is_encrypted else ()
    lost = tuple(key for key in certificates if not _text(item, key).strip())
    if identity_of(item) is not None:
        return lost
    data = item.get("data") or {}
    is_new = layout.JOB_KEY_KEY in data or "/" in _secret_text(item, layout.TOKEN_KEY)
    return (layout.JOB_KEY_KEY if is_new else layout.TOKEN_KEY, *lost)


def _secret_text(item: Mapping[str, Any], key: str) -> str:
    try:
        return checked_secret(_text(item, key), key)
    except InputError:
        return ""


def _text(item: Mapping[str, Any], key: str) -> str:
    try:
        return base64.b64decode((item.get("data") or {}).get(key, ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
