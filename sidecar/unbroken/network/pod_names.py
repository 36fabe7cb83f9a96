"""How a certificate names the pod whose key it vouches for."""

from typing import Any
from urllib.parse import quote, unquote

_SCHEME = "unbroken:pod:"


def uri_of(pod_uid: str) -> str:
    """Return the URI in the certificate of a pod."""
    return _SCHEME + quote(pod_uid, safe="")


def pod_of(certificate: Any) -> str:
    """Return the uid of the pod that a verified certificate names, "" for none; what `ssl.getpeercert()` returns."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    found = [value for kind, value in names if kind == "URI" and value.startswith(_SCHEME)]
    return unquote(found[0][len(_SCHEME) :]) if len(found) == 1 == len(names) else ""
