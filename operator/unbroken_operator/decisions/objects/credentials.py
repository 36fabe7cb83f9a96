"""What the Secret of a job holds: the token and the certificates."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.decisions.objects.manifests import Manifest


@dataclass(frozen=True)
class Certificates:
    """All in PEM."""

    authority: str
    certificate: str
    key: str


def with_credentials(manifest: Mapping[str, Any], token: str, certificates: Certificates | None) -> Manifest:
    """Return the Secret with this token, and with certificates unless the job's traffic is unencrypted."""
    texts = {layout.TOKEN_KEY: token}
    if certificates is not None:
        texts |= {
            layout.AUTHORITY_KEY: certificates.authority,
            layout.CERTIFICATE_KEY: certificates.certificate,
            layout.PRIVATE_KEY_KEY: certificates.key,
        }
    return {**manifest, "data": {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}}


def token_of(item: Mapping[str, Any]) -> str:
    """Return the token in a Secret, "" when it has none that can be read."""
    return _text(item, layout.TOKEN_KEY).strip()


def certificates_of(item: Mapping[str, Any]) -> Certificates | None:
    """Return the certificates in a Secret, None when not all of them are there."""
    keys = (layout.AUTHORITY_KEY, layout.CERTIFICATE_KEY, layout.PRIVATE_KEY_KEY)
    authority, certificate, key = (_text(item, name) for name in keys)
    return Certificates(authority, certificate, key) if authority and certificate and key else None


def missing_keys(item: Mapping[str, Any], *, is_encrypted: bool) -> tuple[str, ...]:
    """Return the keys of a Secret that pods read and that are not there, or cannot be read."""
    certificates = (layout.AUTHORITY_KEY, layout.CERTIFICATE_KEY, layout.PRIVATE_KEY_KEY)
    keys = (layout.TOKEN_KEY, *(certificates if is_encrypted else ()))
    return tuple(key for key in keys if not _text(item, key).strip())


def _text(item: Mapping[str, Any], key: str) -> str:
    try:
        return base64.b64decode((item.get("data") or {}).get(key, ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
